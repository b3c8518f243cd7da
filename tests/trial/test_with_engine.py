"""The controller with the real engine, one rank in this process: what a resumed run must have in
common with the unbroken one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.in_memory import InMemoryPlatform
from tests.trial.harness import Points
from zero_trial.comm import destroy_distributed
from zero_trial.engine import initialize
from zero_trial.errors import ConfigError
from zero_trial.trial import Batch, Controller, DataLoader, TrainSettings, ZeroTrial, ZeroTrialContext
from zero_trial.trial.trial import seed_everything


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    destroy_distributed()


def ds_config(stage: int, accumulation: int = 1, micro: int = 4) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero_optimization": {"stage": stage},
    }


class DropoutTrial(ZeroTrial):
    """A small network with dropout, so that the random state matters."""

    def __init__(self, context: ZeroTrialContext) -> None:
        super().__init__(context)
        layers = [torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)]
        self.engine = context.initialize(model=torch.nn.Sequential(*layers))
        self.losses: list[float] = []

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(Points(50), self.context.get_train_micro_batch_size_per_gpu(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(Points(20), batch_size=4)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        _, x, y = self.context.to_device(next(dataloader_iter))
        loss = ((self.engine(x) - y) ** 2).mean()
        self.engine.backward(loss)
        self.engine.step()
        self.losses.append(loss.item())
        return loss

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        _, x, y = self.context.to_device(next(dataloader_iter))
        return {"validation_loss": ((self.engine(x) - y) ** 2).mean()}


def run(config: dict[str, Any], length: int, kind: type[DropoutTrial] = DropoutTrial, **options: Any) -> Any:
    platform = InMemoryPlatform(experiment={"data": {"ds_config": config}}, seed=5, **options)
    seed_everything(5)
    trial = kind(ZeroTrialContext(platform, initialize))
    settings = TrainSettings(Batch(length), Batch(6), Batch(7), Batch(4), checkpoint_policy="none")
    outcome = Controller(trial, trial.context, settings).run()
    return trial, platform.record, outcome


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (1, 2), (2, 1), (3, 2)])
def test_a_resumed_run_is_bit_equal_to_the_unbroken_one(tmp_path: Path, stage: int, accumulation: int) -> None:
    config = ds_config(stage, accumulation)
    whole, record, outcome = run(config, 16, storage=tmp_path)
    assert outcome.final_metrics["validation_loss"] < record.validation[0][1]["validation_loss"]
    rest, later, end = run(config, 16, storage=tmp_path, latest_checkpoint="step-000007")
    assert rest.losses == whole.losses[7 * accumulation :]
    assert later.training == [entry for entry in record.training if entry[0] > 7]
    assert end.final_metrics == outcome.final_metrics


def test_resume_with_another_stage_and_accumulation_sees_the_same_samples(tmp_path: Path) -> None:
    """The same global batch, split another way: the loader goes on at the same sample and steps
    stay whole."""
    run(ds_config(2, accumulation=1, micro=4), 7, storage=tmp_path)
    trial, _, outcome = run(
        ds_config(3, accumulation=2, micro=2), 10, storage=tmp_path, latest_checkpoint="step-000007"
    )
    assert (outcome.step, trial.engine.global_steps, len(trial.losses)) == (10, 10, 6)


def test_a_checkpoint_of_another_trial_gives_weights_only(tmp_path: Path) -> None:
    first, _, _ = run(ds_config(1), 7, storage=tmp_path)
    trial, _, outcome = run(ds_config(1), 1, storage=tmp_path, latest_checkpoint="step-000007", trial_id="2")
    assert outcome.step == 1 and trial.engine.global_steps == 1 and trial.losses[0] < first.losses[0]


@pytest.mark.parametrize("stage", [3])
def test_a_trial_trains_from_a_folder_of_weights(tmp_path: Path, stage: int) -> None:
    """Its model is on the meta device, and its losses are those of a model that has the values."""

    def layers() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    class WithValues(DropoutTrial):
        def __init__(self, context: ZeroTrialContext) -> None:
            super(DropoutTrial, self).__init__(context)
            model = layers()
            model.load_state_dict(values)
            self.engine, self.losses = context.initialize(model=model), []

    class FromFolder(DropoutTrial):
        def __init__(self, context: ZeroTrialContext) -> None:
            super(DropoutTrial, self).__init__(context)
            with torch.device("meta"):
                model = layers()
            self.engine, self.losses = context.initialize(model=model, weights=tmp_path), []

    torch.manual_seed(11)
    values = layers().state_dict()
    save_file(values, tmp_path / "model.safetensors")
    expected, found = (run(ds_config(stage), 3, kind)[0].losses for kind in (WithValues, FromFolder))
    assert found == expected and len(found) == 3


def test_an_engines_config_agrees_with_the_hyperparameters() -> None:
    """As trials written for Determined and DeepSpeed ask:
    ``context.reconcile_ds_config(model_engine._config)``."""
    config = {**ds_config(1, accumulation=2), "train_batch_size": 8}
    engine, *_ = initialize(model=torch.nn.Linear(1, 1), config=config)
    context = ZeroTrialContext(InMemoryPlatform(hparams={"global_batch_size": 8}), initialize)
    table = context.reconcile_ds_config(engine._config)
    assert (table.train_batch_size, table.micro_batch_size, table.accumulation, table.data_parallel) == (8, 4, 2, 1)
    wrong = ZeroTrialContext(InMemoryPlatform(hparams={"global_batch_size": 6}), initialize)
    with pytest.raises(ConfigError, match="global_batch_size"):
        wrong.reconcile_ds_config(engine._config)


class Watching(DropoutTrial):
    """Keeps the weights that it trains and evaluates with."""

    def __init__(self, context: ZeroTrialContext) -> None:
        super().__init__(context)
        self.trained: list[torch.Tensor] = []
        self.evaluated: list[torch.Tensor] = []

    def weights(self) -> torch.Tensor:
        values = self.engine.module_state_dict().values()
        return torch.cat([value.flatten() for value in values]).clone()

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        found = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        self.trained.append(self.weights())
        return found

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 0:
            self.evaluated.append(self.weights())
        return super().evaluate_batch(dataloader_iter, batch_idx)


@pytest.mark.parametrize("stage", [3])
def test_validation_with_the_averages_of_the_weights(stage: int) -> None:
    """ema.evaluate, and training that goes on as without it."""
    ema = {"ema": {"decay": 0.5, "evaluate": True}}
    trial, record, _ = run(ds_config(stage) | ema, 12, Watching)
    assert any("ema.evaluate" in event.get("message", "") for event in record.events)
    plain, _, _ = run(ds_config(stage), 12, Watching)
    assert trial.losses == plain.losses
    average, averages = trial.trained[0], [trial.trained[0]]
    for weights in trial.trained[1:]:
        average = average.lerp(weights, 0.5)
        averages.append(average)
    assert len(trial.evaluated) == len(plain.evaluated) == 2
    for used, without in zip(trial.evaluated, plain.evaluated, strict=True):
        (step,) = [step for step, weights in enumerate(plain.trained) if torch.equal(weights, without)]
        assert step > 0 and torch.equal(used, averages[step]) and not torch.equal(used, without)
