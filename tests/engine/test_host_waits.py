"""Beyond one accelerator the host runs ahead: it waits for no collective that runs on a device, and
reads one tensor per step, the sums of the norm (test_on_standin counts that)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import strict_backend
from tests.support.dense import STAGES, Case, build_engine, train_ranks
from tests.support.dense import tower_loss as loss
from tests.support.models import ADAMW, Tower
from tests.support.pool import RankPool

WARM, STEPS = 2, 4


@pytest.fixture(scope="module")
def strict() -> Iterator[RankPool]:
    pool = RankPool(4, world="strict")
    yield pool
    pool.close()


def steady_steps(zero: dict[str, Any], config: dict[str, Any], optimizer: dict[str, Any]) -> tuple[list[str], int]:
    """Return what the host waited for in some steps after the first ones, and how much it
    launched."""
    accumulation = config["gradient_accumulation_steps"]
    case = Case(
        lambda: Tower(5, 8), loss, optimizer=optimizer, config=config, accumulation=accumulation, clip=1.0, steps=STEPS
    )
    with strict_backend.pretended_device():
        engine = build_engine(case, zero)
        for number, _ in enumerate(train_ranks(case, engine)):
            if number == WARM - 1:
                strict_backend.host_waits.clear()
                strict_backend.launched.clear()
        found = list(strict_backend.host_waits), len(strict_backend.launched)
        engine.destroy()
    return found


MUON = {"type": "Muon", "params": {"muon_lr": 1e-3, "adam_lr": 1e-3, "eps": 1e-3}}


@pytest.mark.parametrize(
    ("stage", "replicas", "accumulation", "optimizer", "least"),
    [
        *(("zero0", 4, accumulation, ADAMW, 2) for accumulation in (1, 2)),
        *((stage, replicas, 3 - replicas, ADAMW, 2) for stage in STAGES if stage != "zero0" for replicas in (1, 2)),
        ("zero1", 1, 1, MUON, 5),  # whole tensors travel
        ("zero3", 1, 1, MUON, 5),
    ],
)
def test_no_host_wait_in_a_step(
    strict: RankPool, stage: str, replicas: int, accumulation: int, optimizer: dict[str, Any], least: int
) -> None:
    config = {"comm_transport": "gloo", "mesh": {"replica": replicas}, "gradient_accumulation_steps": accumulation}
    for waits, launches in strict.run(steady_steps, STAGES[stage], config, optimizer):
        assert waits == []
        assert launches >= least * (STEPS - WARM)
