"""Resident memory of ranks that build and load a model in shards, beside the formula."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from benchmarks.loading import acts, start, status, width_of, write_file
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
