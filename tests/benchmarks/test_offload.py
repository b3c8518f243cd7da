"""Tests for benchmarks/offload.py."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from benchmarks.offload import WIDTH, measure


def test_one_row(tmp_path: Path) -> None:
    given = Namespace(folder=str(tmp_path), parameters=WIDTH**2 / 1e6, sub_group=1 << 18, queue_depth=2, rounds=1)
    row = measure(given, 2)
    assert row["buffers"] == 2 and row["elements"] == 1 << 18
    assert all(row[name] > 0 for name in ("memory", "nvme", "disk", "nvme_by_disk", "read_rate", "write_rate"))
    moved = row["rate"] * row["nvme"] * 1e3
    assert abs(moved / (2 * 12 * WIDTH**2) - 1) < 1e-6, "twelve bytes in each direction"
