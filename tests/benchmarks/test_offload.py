"""Tests for benchmarks/offload.py."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import offload, record
from benchmarks.offload import PARAMETER_COLUMNS, WIDTH, left_in_memory, measure, measure_parameters


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


def test_deepspeeds_part_of_a_row_of_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ratio is over the larger of its own memory and the disk; what it cannot do is said."""
    halves: list[tuple[int, str, int, int]] = []

    def rounds(given: Namespace, buffers: int, place: str, stage: int, count: int) -> list[Any] | str:
        halves.append((buffers, place, stage, count))
        if place == "cpu":
            return [{"seconds": [0.5] * count, "megabytes": 0.0}] if count == 2 else "ended with 1: a | b"
        return [{"seconds": [4000.0 if place == "memory" else 5000.0] * count, "megabytes": 7.0}]

    monkeypatch.setattr(offload, "deepspeed_rounds", rounds)
    given = Namespace(folder=str(tmp_path), parameters=0.02, queue_depth=2, rounds=3, rows=4)
    row = measure_parameters(given, 2, 3, {})
    assert halves == [(2, place, 3, count) for count in (2, 1) for place in ("memory", "cpu", "nvme")]
    assert row["DeepSpeed nvme"] == 5e6 and row["deepspeed_by_larger"] == 1.25 and row["deepspeed_megabytes"] == 7.0
    assert "| 4000000.0 | ended with 1: a / b | 5000000.0 | 1.25 | 7 |" in record.markdown([row], PARAMETER_COLUMNS)
    halves.clear()
    row = measure_parameters(given, 2, 2, {"nvme": "ignored", "cpu": "ignored"})
    assert {place for _, place, *_ in halves} == {"memory"} and "deepspeed_by_larger" not in row
    assert "| 4000000.0 | ignored | ignored |  |  |" in record.markdown([row], PARAMETER_COLUMNS)


@pytest.mark.parametrize(
    ("place", "locations", "left"),
    [
        ("nvme", ["nvme", "nvme"], ""),
        ("nvme", ["nvme", None], "1 of 2"),
        ("nvme", ["none at all", "nvme"], "1 of 2"),
        ("cpu", [None, None], ""),
        ("cpu", ["none at all", "none at all"], "2 of 2"),
        ("memory", ["none at all", "none at all"], ""),
    ],
)
def test_what_deepspeed_leaves_in_memory(place: str, locations: list[str | None], left: str) -> None:
    """Parameters that it does not shard have no ``ds_tensor``."""
    shards = [SimpleNamespace(ds_tensor=SimpleNamespace(final_location=each)) for each in locations]
    params = [SimpleNamespace() if shard.ds_tensor.final_location == "none at all" else shard for shard in shards]
    assert left_in_memory(params, place) == left
