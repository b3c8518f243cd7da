"""Tests for benchmarks/offload.py."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from benchmarks.offload import WIDTH, measure, measure_parameters


def test_one_row(tmp_path: Path) -> None:
    given = Namespace(folder=str(tmp_path), parameters=WIDTH**2 / 1e6, sub_group=1 << 18, queue_depth=2, rounds=1)
    row = measure(given, 2, {})
    assert row["buffers"] == 2 and row["elements"] == 1 << 18
    assert all(row[name] > 0 for name in ("memory", "nvme", "disk", "nvme_by_larger", "read_rate", "write_rate"))
    moved = row["rate"] * row["nvme"] * 1e3
    assert abs(moved / (2 * 12 * WIDTH**2) - 1) < 1e-6, "twelve bytes in each direction"


def test_one_row_of_parameters(tmp_path: Path) -> None:
    given = Namespace(folder=str(tmp_path), parameters=2 * WIDTH**2 / 1e6, queue_depth=2, rounds=1, rows=4)
    row = measure_parameters(given, 2)
    assert all(row[name] > 0 for name in ("memory", "nvme", "disk", "nvme_by_memory"))
    assert row["megabytes"] == 2 * WIDTH**2 * 2 * 2 / 1e6, "both blocks, forward and backward"
    assert row["shards"] == 2 * WIDTH**2 * 2 / 2**20 and 0 < row["ring"] <= row["shards"] / 4
