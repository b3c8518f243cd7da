"""Loading refuses what it cannot make whole; what it brings back is in test_saving.py."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zero_trial
from benchmarks.loading import acts, start, width_of, write_file
from tests.support.heap import LivePeak
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
        with pytest.raises(
            CheckpointError, match=r"a checkpoint of DeepSpeed\. Make one of ours.*zero-trial ckpt import"
        ):
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


@dataclass
class Draws:
    """What one rank drew from each generator after it had saved or loaded, and the warnings of the
    load."""

    values: dict[str, float]
    warnings: list[str] = field(default_factory=list)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def draw() -> dict[str, float]:
    return {"torch": torch.rand(()).item(), "random": random.random(), "numpy": numpy.random.rand()}


def saved_and_drawn(folder: str) -> Draws:
    rank, size = rank_and_size()
    engine, *_ = zero_trial.initialize(model=nn.Linear(2, 2), config=CONFIG | {"train_batch_size": size})
    seed_all(100 + rank)
    engine.save_checkpoint(folder, "a")
    return Draws(draw())


def loaded_and_drawn(folder: str) -> Draws:
    rank, size = rank_and_size()
    engine, *_ = zero_trial.initialize(model=nn.Linear(2, 2), config=CONFIG | {"train_batch_size": size})
    seed_all(1000 + rank)
    lines = logged_lines()
    engine.load_checkpoint(folder, "a")
    return Draws(draw(), lines)


def from_seed(seed: int) -> dict[str, float]:
    seed_all(seed)
    return draw()


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_random_generators_on_another_number_of_ranks(ranks: Pools, tmp_path: Path, before: int, after: int) -> None:
    """Rank r takes the state of saved rank r; where there are more ranks, none does."""
    saved = [one.values for one in ranks(before).run(saved_and_drawn, str(tmp_path))]
    loaded = ranks(after).run(loaded_and_drawn, str(tmp_path))
    for rank, found in enumerate(loaded):
        assert found.values == (from_seed(1000 + rank) if before < after else saved[rank]), rank
    warned = [text for found in loaded for text in found.warnings if f"of {before} ranks loaded on {after}" in text]
    assert len(warned) == (before < after)


# --- resident memory of ranks that build and load a model in shards, beside the formula -----------


MEGABYTES = 48.0
GROUP = MEGABYTES / 16
SHARD = MEGABYTES / 2  # of parameters, and as much of gradients
# On top: a parameter that is whole while it is cut (half a group), messages through which
# parameters were gathered, and the heap's own.
SLACK = GROUP / 2 + 8 + 4


def grown(case: str, folder: Path) -> float:
    """Megabytes by which a rank grows at most."""
    start(case)
    gc.collect()
    with LivePeak("VmRSS") as peak:
        for act in acts(case, width_of(MEGABYTES), folder):
            engine = act()
    engine.destroy()
    return peak.megabytes


@pytest.mark.parametrize("case", ["weights-3", "meta-3"])
def test_a_rank_grows_by_its_shards_and_a_group(case: str, ranks: Pools, tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", width_of(MEGABYTES))
    limit = 2 * SHARD + GROUP + SLACK
    if case == "weights-3":  # gradients have no memory yet, and what is read goes to its place
        limit = 1.15 * (SHARD + GROUP) + 4  # of the heap
    for peak in ranks(2).run(grown, case, tmp_path):
        assert peak <= limit


def growth_of_saving(folder: Path, stage: int) -> tuple[float, float]:
    """Megabytes by which a rank's own memory grows while it writes the weights, and while rank 0
    gets them."""
    for act in acts(f"weights-{stage}", width_of(MEGABYTES), folder):
        engine = act()
    found = []
    for save in (lambda: engine.save_16bit_model(folder / "saved"), engine._zero3_consolidated_16bit_state_dict):
        with LivePeak() as peak:
            kept = save()
        found.append(peak.megabytes)
        del kept
    engine.destroy()
    return found[0], found[1]


def test_weights_are_written_group_by_group(ranks: Pools, tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", width_of(MEGABYTES))
    first, second = ranks(2).run(growth_of_saving, tmp_path, 3)
    # a group, and the heap's own
    assert max(first[0], second[0], second[1]) <= GROUP + 4
    assert first[1] <= MEGABYTES + GROUP + 4
    written, expected = (load_file(tmp_path / place) for place in ("saved/model.safetensors", "model.safetensors"))
    assert written.keys() == expected.keys() and all(torch.equal(written[name], expected[name]) for name in expected)
