"""The letters: their network and their samples; and the lines of the pipeline guide."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_defs.folder import ROOT, import_from
from zero_trial.ds_config.batch import reconcile
from zero_trial.ds_config.keys_running import ZERO_POLICIES
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError
from zero_trial.pipeline.module import PipelineModule
from zero_trial.pipeline.schedule import RECIPES, ChunkPlacement

model = import_from("image_pipeline", "model")
data = import_from("image_pipeline", "data")
SMALL = model.NetConfig(size=16, width=4, hidden=16)


@pytest.mark.parametrize("stages", [1, 2, 4])
@torch.no_grad()
def test_however_it_is_cut_it_is_the_same_network(stages: int) -> None:
    net = model.letter_net(SMALL, 5, seed=1).eval()
    images = torch.rand(2, 1, 16, 16)
    value = images
    for number in range(stages):
        part = PipelineModule.from_sequential(net, partition_method="type:Conv2d|Linear")
        part.build(ChunkPlacement.loop(stages), number)
        value = part.eval()(value)
    assert torch.equal(value, net(images))


def test_letters_of_fonts_that_training_never_sees_or_a_folder_of_images(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="there are no fonts to draw with")
    pil = pytest.importorskip("PIL.Image")
    for kind in ("cat", "dog"):
        (tmp_path / kind).mkdir()
        for number in range(20):
            pil.new("L", (8, 8), 10 * number).save(tmp_path / kind / f"{number}.png")
    assert data.letters({"source": str(tmp_path)}, 8, "train").classes == ("cat", "dog")
    section = {"characters": "AB", "variants": 2, "validation_variants": 1}
    train, validation = (data.letters(section, 16, split) for split in ("train", "validation"))
    assert train.classes == validation.classes == ("A", "B")
    assert not set(train.sources) & set(validation.sources)
    image, label = data.samples(train)[0]
    assert image.shape == (1, 16, 16) and image.dtype == torch.float32 and label.dtype == torch.int64
    assert (image.min().item(), image.max().item()) == (-1.0, pytest.approx(1.0, abs=0.2))


TEXT = (ROOT / "docs/guide/pipeline.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return [block.split("```", 1)[0] for block in TEXT.split(f"```{kind}\n")[1:]]


def test_its_python_runs_and_its_ds_config_is_what_it_says() -> None:
    scope: dict[str, Any] = {}
    for block in blocks("python"):
        exec(block, scope)
    scope["model"].build_whole()
    assert scope["model"](torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, 256)
    (config,) = [read_ds_config(json.loads(block)) for block in blocks("json")]
    found = reconcile(config, 4)
    assert (found.axes.data_parallel, found.batch.train_batch_size) == (2, 4 * 8 * 2)


def test_what_it_names_exists() -> None:
    for written in re.findall(r'`(?:\{)?("schedule": [^`]*)`', TEXT):
        words = json.loads("{" + written.replace(": v", ": 3") + "}")
        assert words["schedule"] in RECIPES
        try:
            read_ds_config({"pipeline": words, "zero_optimization": {"stage": 3}})
        except ConfigError as error:
            raise AssertionError(written) from error
    named = re.findall(r"^\| [0-3][^|]*\| `(\w+)`", TEXT, re.MULTILINE)
    assert set(named) == set(ZERO_POLICIES) - {"auto"}
    for path in re.findall(r"(?:experiments|model_defs)/[\w/.]+", TEXT):
        assert (ROOT / path).exists(), path
