"""A plan's words and numbers."""

from __future__ import annotations

import json
from dataclasses import replace

from zero_trial.preflight.plan import Figures, MemoryPlan

MIB = 2**20
FIGURES = Figures(
    parameters=4 * MIB, gradients=2 * MIB, optimizer=8 * MIB, activations=22 * MIB, peak=40 * MIB, exchange=MIB
)
PLAN = MemoryPlan(FIGURES, 2, "fp32", 2, 8, 1, 1_200_000, "traced")


def test_a_line() -> None:
    line = PLAN.line(limit=64 * MIB)
    assert line == "params 1.2M · per rank 14.0 MiB states + 22.0 MiB activations, peak 40.0 MiB (limit 64.0 MiB)  fits"
    # the shared segments count too
    assert PLAN.line(limit=40 * MIB).endswith("(limit 40.0 MiB)  does not fit")
    states = replace(PLAN, figures=Figures(MIB, MIB, MIB))
    assert (
        states.line() == "params 1.2M · per rank 3.0 MiB states"
        and states.fits(3 * MIB)
        and not states.fits(3 * MIB - 1)
    )


def test_sums() -> None:
    assert (FIGURES.states, FIGURES.temporary, FIGURES.total) == (14 * MIB, 4 * MIB, 41 * MIB)
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
        "exchange segments",
        "fits",
    ):
        assert word in text
    assert "14.0 MiB     12.23 B/parameter" in text


def test_json() -> None:
    plain = json.loads(json.dumps(PLAN.as_dict()))
    assert plain["stage"] == 2 and plain["figures"]["peak"] == 40 * MIB and plain["figures"]["total"] == 41 * MIB
