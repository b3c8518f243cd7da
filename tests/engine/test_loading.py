"""Loading refuses what it cannot make whole; what it brings back is in test_saving.py."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from torch import nn

import zero_trial
from zero_trial.engine.loading import COUNTERS, Loader
from zero_trial.errors import CheckpointError

CONFIG = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def test_nothing_there(tmp_path: Path) -> None:
    engine, *_ = zero_trial.initialize(model=nn.Linear(2, 2), config=CONFIG)
    assert Loader(engine).load(tmp_path / "none", None, True, True, True, True) == (None, None)
    assert all(getattr(engine, name) == 0 for name in COUNTERS)


def test_a_tag_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    engine, *_ = zero_trial.initialize(model=nn.Linear(2, 2), config=CONFIG)
    engine.save_checkpoint(tmp_path, tag="a")
    with pytest.raises(CheckpointError, match=r"no such checkpoint: got 'b', expected one of: a\."):
        engine.load_checkpoint(tmp_path, tag="b")


def test_a_damaged_newest_is_passed_over_in_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, *_ = zero_trial.initialize(model=nn.Linear(2, 2), config=CONFIG)
    engine.save_checkpoint(tmp_path, tag="a")
    engine.global_steps = 1
    engine.save_checkpoint(tmp_path, tag="b")
    shard = next((tmp_path / "b").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "zero_trial"):
        path, _ = engine.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "a")
    (line,) = [text for text in caplog.messages if "passed over" in text]
    assert shard.name in line and "cut short" in line
