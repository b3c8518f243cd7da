"""Amounts of memory."""

from __future__ import annotations

from pathlib import Path

import torch

from zero_trial.preflight.plan import cgroup_limits, machine_memory, rank_limit


def test_ranks_share_the_machine() -> None:
    whole = rank_limit(torch.device("cpu"), 1)
    assert whole is not None and rank_limit(torch.device("cpu"), 4) == whole // 4


def test_a_container_may_have_less(tmp_path: Path) -> None:
    limit, none = tmp_path / "memory.max", tmp_path / "none"
    limit.write_text("1048576\n")
    none.write_text("max\n")
    assert machine_memory((limit, none)) == 1048576
    assert machine_memory((none,)) == machine_memory((tmp_path / "missing",))


def test_a_control_group_and_those_above_it_may_have_less(tmp_path: Path) -> None:
    (tmp_path / "memory" / "a" / "b").mkdir(parents=True)
    (tmp_path / "memory" / "a" / "memory.limit_in_bytes").write_text("2097152\n")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "memory.max").write_text("1048576\n")
    assert machine_memory(cgroup_limits("4:memory:/a/b\n3:cpuset:/\n0::/\n", tmp_path)) == 2097152
    assert machine_memory(cgroup_limits("0::/c\n", tmp_path)) == 1048576
