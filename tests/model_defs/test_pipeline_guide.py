"""The guide to pipelines: its Python runs, its ds_config is one, and what it names exists."""

from __future__ import annotations

import json
import re
from typing import Any

import torch

from tests.model_defs.folder import ROOT
from zero_trial.ds_config.keys_running import ZERO_POLICIES
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.reconcile import reconcile
from zero_trial.errors import ConfigError
from zero_trial.pipeline.generators import RECIPES

TEXT = (ROOT / "docs/guide/pipeline.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return [block.split("```", 1)[0] for block in TEXT.split(f"```{kind}\n")[1:]]


def test_its_python_runs() -> None:
    scope: dict[str, Any] = {}
    for block in blocks("python"):
        exec(block, scope)
    scope["model"].build_whole()
    assert scope["model"](torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, 256)


def test_its_ds_config_is_what_it_says() -> None:
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
