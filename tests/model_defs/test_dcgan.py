"""The DCGAN: its two engines do what two plain optimizers do, it resumes exactly, it writes
pictures; its networks alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch.nn.functional import binary_cross_entropy_with_logits as entropy

from tests.model_defs.folder import MODEL_DEFS, ROOT, forgotten, import_from
from zero_trial.cli.main import main
from zero_trial.comm import destroy_distributed
from zero_trial.engine import initialize
from zero_trial.trial import Batch, Controller, TrainSettings, ZeroTrialContext
from zero_trial.trial.runtime.local import LocalPlatform
from zero_trial.trial.trial import seed_everything

MODEL_DEF = import_from("dcgan", "model_def")
SMALL = {"size": 16, "latent": 4, "width": 8}
model, distance = import_from("dcgan", "model"), import_from("dcgan", "distance")
STEPS = 4


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    destroy_distributed()


def engine_config(accumulation: int, stage: int) -> dict[str, Any]:
    return {
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        # Adam would turn the noise of gradients that are nearly zero into steps of full size.
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}},
        "zero_optimization": {"stage": stage},
    }


def train(folder: Path, steps: int, resume: Path | None = None, kind: Any = MODEL_DEF.DCGANTrial) -> Any:
    """One rank in this process; the trial afterwards."""
    data = {"characters": "AB", "variants": 1, "discriminator": engine_config(2, 1), "generator": engine_config(1, 2)}
    searcher = {"metric": "frechet_distance", "smaller_is_better": True}
    hparams = {"global_batch_size": 4, "model": SMALL}
    platform = LocalPlatform(
        run_dir=folder,
        experiment={"data": data, "searcher": searcher, "hyperparameters": hparams},
        hparams=hparams,
        seed=5,
        latest_checkpoint=str(resume) if resume else None,
    )
    seed_everything(5)
    context = ZeroTrialContext(platform, initialize, torch.device("cpu"))
    trial = kind(context)
    Controller(
        trial, context, TrainSettings(max_length=Batch(steps), validation_period=Batch(2), checkpoint_period=Batch(2))
    ).run()
    return trial


def weights(trial: Any) -> dict[str, torch.Tensor]:
    engines = {"discriminator": trial.discriminator, "generator": trial.generator}
    states = ((name, engine.module.state_dict()) for name, engine in engines.items())
    return {f"{name}.{key}": value.clone() for name, state in states for key, value in state.items()}


def test_two_engines_do_what_two_plain_optimizers_do(tmp_path: Path) -> None:
    """The same letters and the same noise, with accumulation written out by hand: two micro-batches
    of 2 for one step."""
    seen: list[torch.Tensor] = []

    class Watched(MODEL_DEF.DCGANTrial):  # type: ignore[misc, name-defined]
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            if not seen:
                self.start = copy.deepcopy((self.discriminator.module.state_dict(), self.generator.module.state_dict()))
            batches = [next(dataloader_iter) for _ in range(2)]
            seen.extend(images.clone() for images, _ in batches)
            return super().train_batch(iter(batches), epoch_idx, batch_idx)

    trial = train(tmp_path, 2, kind=Watched)
    config = trial.config
    discriminator, generator = model.Discriminator(config), model.Generator(config)
    discriminator.load_state_dict(trial.start[0])
    generator.load_state_dict(trial.start[1])
    of_d, of_g = (torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5) for net in (discriminator, generator))
    for step in range(2):
        of_d.zero_grad()
        for micro in range(2):
            real, made = seen[2 * step + micro], generator(trial.noise(2, step, micro)).detach()
            truth = torch.tensor([0.9, 0.9, 0.0, 0.0])
            (entropy(discriminator(torch.cat([real, made])), truth) / 2).backward()
        of_d.step()
        of_g.zero_grad()
        entropy(discriminator(generator(trial.noise(4, step, 1000))), torch.ones(4)).backward()
        of_g.step()
    expected = {f"discriminator.{name}": value for name, value in discriminator.state_dict().items()}
    expected |= {f"generator.{name}": value for name, value in generator.state_dict().items()}
    found = weights(trial)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=2e-5), name
    assert (trial.discriminator.micro_steps, trial.generator.micro_steps) == (4, 2)
    assert [path.name for path in sorted((tmp_path / "samples").iterdir())] == ["step-000002.png"]
    assert list((tmp_path / "tensorboard").glob("events*"))
    summary = trial.summary()
    assert 0 < summary["train_fonts_frechet_distance"] < summary["gaussian_frechet_distance"]
    assert set(summary["train_data"]["sources"]).isdisjoint(summary["validation_data"]["sources"])


def test_the_experiment_passes_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    with forgotten():
        assert main(["check", str(ROOT / "experiments/dcgan/const.yaml"), str(MODEL_DEFS / "dcgan")]) == 0
    assert "model_def:DCGANTrial ok" in capsys.readouterr().out


def test_a_resumed_run_goes_on_as_the_unbroken_one(tmp_path: Path) -> None:
    whole = weights(train(tmp_path / "whole", STEPS))
    destroy_distributed()
    train(tmp_path / "first", 2)
    destroy_distributed()
    resumed = weights(train(tmp_path / "second", STEPS, resume=tmp_path / "first" / "checkpoints" / "step-000002"))
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_the_distance_of_two_gaussians_is_the_one_that_can_be_computed_by_hand() -> None:
    """Axis-aligned: |m1 - m2|^2 + sum (s1 - s2)^2."""
    base = torch.randn(50_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    base = (base - base.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(base.T)).T)
    one = base * torch.tensor([1.0, 2.0, 3.0])
    other = base * torch.tensor([1.0, 1.0, 5.0]) + torch.tensor([3.0, 0.0, 0.0])
    assert distance.frechet_distance(one, other) == pytest.approx(9 + 0 + 1 + 4, rel=1e-6)
    assert distance.frechet_distance(one, one) == pytest.approx(0, abs=1e-9)


def test_blots_have_the_mean_and_covariance_of_the_images() -> None:
    images = 0.1 * torch.randn(500, 1, 4, 4, generator=torch.Generator().manual_seed(2)) + 0.3
    blots = distance.gaussian_like(images, 4000, seed=1)
    assert torch.allclose(blots.mean(0), images.mean(0), atol=0.02)
    assert torch.allclose(torch.cov(blots.flatten(1).T), torch.cov(images.flatten(1).T), atol=2e-3)
    assert torch.equal(blots, distance.gaussian_like(images, 4000, seed=1))


def test_pngs_and_sheets(tmp_path: Path) -> None:
    """A PNG is read back as it was; a sheet has the images row by row and leaves the rest dark."""
    picture = torch.randint(0, 256, (1, 13, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    MODEL_DEF.write_png(tmp_path / "made" / "a.png", picture)
    with Image.open(tmp_path / "made" / "a.png") as read:
        assert read.mode == "L" and numpy.array_equal(numpy.asarray(read), picture[0].numpy())
    images = torch.arange(1, 6, dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 1, 2, 3).contiguous()
    sheet = MODEL_DEF.contact_sheet(images, columns=2)
    assert sheet.shape == (1, 6, 6)
    assert sheet[0, ::2, ::3].tolist() == [[1, 2], [3, 4], [5, 0]]
