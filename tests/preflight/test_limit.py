"""Amounts of memory."""

from __future__ import annotations

from pathlib import Path

import torch

from zero_trial.preflight.plan import machine_memory, rank_limit


def test_ranks_share_the_machine() -> None:
    whole = rank_limit(torch.device("cpu"), 1)
    assert whole is not None and rank_limit(torch.device("cpu"), 4) == whole // 4


def test_a_container_may_have_less(tmp_path: Path) -> None:
    limit, none = tmp_path / "memory.max", tmp_path / "none"
    limit.write_text("1048576\n")
    none.write_text("max\n")
    assert machine_memory((limit, none)) == 1048576
    assert machine_memory((none,)) == machine_memory((tmp_path / "missing",))
