"""The benchmark of the ops on a GPU, rehearsed on the CPU with a few elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import record
from benchmarks.ops import gpu
from tests.support.pretended_gpus import Gpus

CPU = torch.device("cpu")


def test_every_contender_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "elements", lambda device: 1000)
    rows: list[dict[str, Any]] = []
    assert gpu.run(CPU, 1, [], rows.append) == 0
    assert [row["name"] for row in rows] == [contender.name for contender in gpu.CONTENDERS]
    assert [row for row in rows if "why" in row] == []
    assert gpu.with_percentages(rows)[0]["percent"] == pytest.approx(100.0)
    assert all(row["gb_per_s"] == pytest.approx(row["bytes"] * 1000 / row["ms"] / 1e6) for row in rows)
    assert len(record.markdown(gpu.with_percentages(rows), gpu.COLUMNS).splitlines()) == len(rows) + 2


def test_a_gpu_is_measured(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events, the cover that hides the host, and our contenders; torch's own need a real one."""
    monkeypatch.setattr(gpu, "elements", lambda device: 100)
    monkeypatch.setattr(gpu, "COVER", 10)
    monkeypatch.setattr(gpu, "on_host", lambda run, *_: (run(), 1e-6)[1])
    ours = ["copy", "AdamW bf16: ours", "norm, clip and AdamW bf16, 37 tensors: ours", "square sum bf16: ours"]
    rows: list[dict[str, Any]] = []
    before = gpus.emulator.library.launch_count()
    assert gpu.run(torch.device("cuda", 0), 1, ours, rows.append) == 0
    assert [row for row in rows if "why" in row] == [] and [row["name"] for row in rows] == ours
    assert (
        gpus.emulator.library.launch_count() == before + 4 * (1 + 2 + 1) + 2
    )  # two to warm up, one, the host's on two chunks
