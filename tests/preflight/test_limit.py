"""Amounts of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zero_trial.errors import ConfigError
from zero_trial.preflight.plan import machine_memory, parse_size, rank_limit


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("16GiB", 16 * 2**30),
        ("16 GB", 16 * 10**9),
        ("1.5gib", 3 * 2**29),
        ("500M", 5 * 10**8),
        ("1e9", 10**9),
        ("4096", 4096),
        ("2TiB", 2**41),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "0", "16XB", "16 G i B", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="--limit: not an amount of memory"):
        parse_size(text)


def test_ranks_share_the_machine() -> None:
    whole = rank_limit(torch.device("cpu"), 1)
    assert whole is not None and rank_limit(torch.device("cpu"), 4) == whole // 4


def test_a_container_may_have_less(tmp_path: Path) -> None:
    limit, none = tmp_path / "memory.max", tmp_path / "none"
    limit.write_text("1048576\n")
    none.write_text("max\n")
    assert machine_memory((limit, none)) == 1048576
    assert machine_memory((none,)) == machine_memory((tmp_path / "missing",))
