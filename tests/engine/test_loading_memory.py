"""Resident memory of ranks that build and load a model in shards, beside the formula."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.loading import acts, start, width_of, write_file
from tests.support.heap import LivePeak
from tests.support.pool import Pools

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


@pytest.mark.parametrize("case", ["weights-3", "init-3", "meta-3"])
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
