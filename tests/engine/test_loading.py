"""Loading refuses what it cannot make whole; what it brings back is in test_saving.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import zero_trial
from tests.support.pool import Pools, logged_lines
from zero_trial.checkpoint.format import Slice
from zero_trial.checkpoint.writer import save_checkpoint
from zero_trial.comm import rank_and_size
from zero_trial.errors import CheckpointError

CONFIG = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def test_a_folder_of_deepspeeds_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    """Otherwise the run would begin afresh, with a warning at most."""
    engine, *_ = zero_trial.initialize(model=nn.Linear(2, 2), config=CONFIG)
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / "mp_rank_00_model_states.pt").touch()
    for tag in (None, "global_step5"):
        with pytest.raises(CheckpointError, match=r"a checkpoint of DeepSpeed\. Convert it.*zero-trial ckpt import"):
            engine.load_checkpoint(tmp_path, tag)
    engine.save_checkpoint(tmp_path, "ours")
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "ours")


def test_a_checkpoint_in_place_of_its_folder_is_refused(tmp_path: Path) -> None:
    """It holds no checkpoints, and a run that starts afresh was not meant to."""
    engine, *_ = zero_trial.initialize(model=nn.Linear(2, 2), config=CONFIG)
    engine.save_checkpoint(tmp_path, tag="a")
    with pytest.raises(
        CheckpointError,
        match=r"this is a checkpoint, not a folder of checkpoints\. Call load_checkpoint\('.*', tag='a'\)",
    ):
        engine.load_checkpoint(tmp_path / "a")
    torch.save(engine.module.state_dict(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"this is a file, not a folder of checkpoints\. Load weights before"):
        engine.load_checkpoint(tmp_path / "model.pt")


def test_where_no_checkpoint_is_whole_loading_fails(tmp_path: Path) -> None:
    engine, *_ = zero_trial.initialize(model=nn.Linear(2, 2), config=CONFIG)
    engine.save_checkpoint(tmp_path, tag="a")
    (tmp_path / "a" / "manifest.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"no checkpoint is intact: got .*a/manifest\.json: not a manifest.*move the damaged"
    ):
        engine.load_checkpoint(tmp_path)


def test_what_no_engine_wrote(tmp_path: Path) -> None:
    engine, *_ = zero_trial.initialize(model=nn.Linear(2, 2), config=CONFIG)
    for state in (None, {"counters": {}}):
        save_checkpoint(tmp_path, "other", [Slice.whole("w", torch.ones(3))], step=1, state=state)
        with pytest.raises(CheckpointError, match=r"other: this checkpoint was not written by an engine"):
            engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize("tag", [7, 0, Path("step-7")])
def test_a_tag_is_taken_as_text(tmp_path: Path, tag: Any) -> None:
    engine, *_ = zero_trial.initialize(model=nn.Linear(2, 2), config=CONFIG)
    engine.save_checkpoint(tmp_path, tag=tag)
    assert engine.load_checkpoint(tmp_path, tag=tag)[0] == str(tmp_path / str(tag))


def draws(seed: int, act: Callable[[], object] = lambda: None) -> list[float]:
    """What each generator draws from a seed and after ``act``."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    act()
    return [torch.rand(()).item(), random.random(), numpy.random.rand()]


def drawn(folder: str, load: bool) -> tuple[list[float], list[str]]:
    """What this rank draws after a save or a load, and what is logged."""
    rank, size = rank_and_size()
    engine, *_ = zero_trial.initialize(model=nn.Linear(2, 2), config=CONFIG | {"train_batch_size": size})
    lines, act = logged_lines(), engine.load_checkpoint if load else engine.save_checkpoint
    return draws((1000 if load else 100) + rank, lambda: act(folder, "a")), lines


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_random_generators_on_another_number_of_ranks(ranks: Pools, tmp_path: Path, before: int, after: int) -> None:
    """Rank r takes the state of saved rank r; where there are more ranks, none does."""
    saved = ranks(before).run(drawn, str(tmp_path), False)
    loaded = ranks(after).run(drawn, str(tmp_path), True)
    for rank, (values, _) in enumerate(loaded):
        assert values == (draws(1000 + rank) if before < after else saved[rank][0]), rank
    warned = [text for _, lines in loaded for text in lines if f"of {before} ranks loaded on {after}" in text]
    assert len(warned) == (before < after)
