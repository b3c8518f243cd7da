"""The letters: their network and their samples; and the lines of the pipeline guide."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.model_defs.folder import ROOT, import_from
from zero_trial.ds_config.keys_running import ZERO_POLICIES
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError
from zero_trial.pipeline.schedule import RECIPES

model = import_from("image_pipeline", "model")
data = import_from("image_pipeline", "data")
SMALL = model.NetConfig(size=16, width=4, hidden=16)


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
