"""Resident memory of ranks that build and load a model in shards, beside the formula."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.loading import OwnPeak, acts, start, status, width_of, write_file
from tests.support.pool import Pools
from zero_trial.sharding.heap import give_freed_memory_back

MEGABYTES = 48.0
GROUP = MEGABYTES / 16
SHARD = MEGABYTES / 2  # of parameters, and as much of gradients
# On top: shared memory through which a parameter is gathered, one that is whole while it is cut
# (half a group each), what may wait until it is given back (FreedBytes), and the heap's own.
SLACK = 2 * GROUP / 2 + 16.8 + 4


def grown(case: str, folder: Path) -> float:
    """Megabytes by which a rank grows at most."""
    start(case)
    gc.collect()
    give_freed_memory_back()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    for act in acts(case, width_of(MEGABYTES), folder):
        engine = act()
    peak = status("VmHWM") - before
    engine.destroy()
    return peak


@pytest.mark.parametrize("case", ["weights-3", "init-3", "meta-3"])
def test_a_rank_grows_by_its_shards_and_a_group(case: str, ranks: Pools, tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", width_of(MEGABYTES))
    slack = SLACK if case != "weights-3" else 4
    for peak in ranks(2).run(grown, case, tmp_path):
        assert peak <= 2 * SHARD + GROUP + slack


def growth_of_saving(folder: Path, stage: int) -> tuple[float, float]:
    """Megabytes by which a rank's own memory grows while it writes the weights, and while rank 0
    gets them."""
    for act in acts(f"weights-{stage}", width_of(MEGABYTES), folder):
        engine = act()
    found = []
    for save in (lambda: engine.save_16bit_model(folder / "saved"), engine._zero3_consolidated_16bit_state_dict):
        with OwnPeak() as peak:
            kept = save()
        found.append(peak.megabytes)
        del kept
    engine.destroy()
    return found[0], found[1]


def test_weights_are_written_group_by_group(ranks: Pools, tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", width_of(MEGABYTES))
    first, second = ranks(2).run(growth_of_saving, tmp_path, 3)
    # a group, what may wait until it is given back, and the heap's own
    assert max(first[0], second[0], second[1]) <= GROUP + 16.8 + 4
    assert first[1] <= MEGABYTES + GROUP + 16.8 + 4
    written, expected = (load_file(tmp_path / place) for place in ("saved/model.safetensors", "model.safetensors"))
    assert written.keys() == expected.keys() and all(torch.equal(written[name], expected[name]) for name in expected)
