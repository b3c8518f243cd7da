"""A plan's words and numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from zero_trial.planning.memory_plan import Figures, MemoryPlan, own_process, rank_processes

MIB = 2**20
FIGURES = Figures(parameters=4 * MIB, gradients=2 * MIB, optimizer=8 * MIB, activations=22 * MIB, peak=40 * MIB)
PLAN = MemoryPlan(FIGURES, 2, "fp32", 2, 8, 1, 1_200_000, "traced")


def test_a_line() -> None:
    line = PLAN.line(limit=64 * MIB)
    assert line == "params 1.2M · per rank 14.0 MiB states + 22.0 MiB activations, peak 40.0 MiB (limit 64.0 MiB)  fits"
    assert PLAN.line(limit=39 * MIB).endswith("(limit 39.0 MiB)  does not fit")
    states = replace(PLAN, figures=Figures(MIB, MIB, MIB))
    assert (
        states.line() == "params 1.2M · per rank 3.0 MiB states"
        and states.fits(3 * MIB)
        and not states.fits(3 * MIB - 1)
    )


def test_sums() -> None:
    assert (FIGURES.states, FIGURES.temporary, FIGURES.total) == (14 * MIB, 4 * MIB, 40 * MIB)
    assert Figures(1, 2, 3).temporary is None and Figures(1, 2, 3).total == 6


def test_a_table_names_every_kind() -> None:
    text = PLAN.table(limit=64 * MIB)
    assert text.splitlines()[0] == "per rank: ZeRO-2, fp32, 2 ranks, micro batch 8, accumulation 1"
    for word in (
        "parameters and masters",
        "gradients",
        "optimizer state",
        "activations",
        "temporary",
        "peak",
        "fits",
    ):
        assert word in text
    assert "14.0 MiB     12.23 B/parameter" in text


@pytest.mark.parametrize(
    ("processes", "limit", "fits"),
    [
        (0, 40 * MIB, True),
        (1, 40 * MIB, False),
        (366 * MIB, 406 * MIB, True),
        (366 * MIB, 406 * MIB - 1, False),
        (366 * MIB, None, True),
    ],
)
def test_processes_count_beside_tensors(processes: int, limit: int | None, fits: bool) -> None:
    plan = replace(PLAN, processes=processes)
    assert plan.fits(limit) == fits and plan.figures.total == 40 * MIB
    if limit is not None:
        assert plan.line(limit).endswith(")  fits" if fits else ")  does not fit")


def test_the_row_of_processes() -> None:
    plan = replace(PLAN, processes=366 * MIB)
    (row,) = (line for line in plan.table(10**9).splitlines() if line.startswith("  processes"))
    assert row.split()[:3] == ["processes", "366.0", "MiB"] and ", processes 366.0 MiB (limit " in plan.line(10**9)
    assert plan.as_dict()["processes"] == 366 * MIB
    assert "processes" not in PLAN.table(10**9) + PLAN.line(10**9), "where none are counted"


@pytest.mark.parametrize(("ranks", "expected"), [(1, 442), (2, 397), (5, 370), (0, 442)])
def test_ranks_share_what_starts_them(ranks: int, expected: int) -> None:
    """A rank has 160 MiB twice and 32; once: a command's 20, a compiler's 70."""
    assert rank_processes(160 * MIB, ranks) == expected * MIB
    assert rank_processes(160 * MIB, 2, command=160 * MIB) == (397 + 70) * MIB


def test_this_process_has_memory_of_its_own() -> None:
    assert own_process() > 50 * MIB, "torch alone has more"


def test_json() -> None:
    plain = json.loads(json.dumps(PLAN.as_dict()))
    assert plain["stage"] == 2 and plain["figures"]["peak"] == 40 * MIB and plain["figures"]["total"] == 40 * MIB
