"""Beyond one accelerator the host runs ahead: it waits for no collective that runs on a device, and
reads one tensor per step, the sums of the norm (test_on_standin counts that)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support import strict_backend
from tests.support.dense import STAGES, Case, Turn, build_engine
from tests.support.dense import tower_loss as loss
from tests.support.models import Tower
from tests.support.pool import RankPool

WARM, STEPS = 2, 3


@pytest.fixture(scope="module")
def strict() -> Iterator[RankPool]:
    pool = RankPool(4, world="strict")
    yield pool
    pool.close()


def steady_steps(zero: dict[str, Any], config: dict[str, Any]) -> tuple[list[str], int, float]:
    """Return what the host waited for in some steps after the first ones, how much it launched, and
    the last loss."""
    with strict_backend.pretended_device():
        engine = build_engine(Case(lambda: Tower(5, 8), loss, config=config, clip=1.0), zero)
        losses: list[torch.Tensor] = []

        def step(number: int) -> None:
            for turn in range(config["gradient_accumulation_steps"]):
                losses.append(loss(engine, Turn(number, turn, engine.global_rank)))
                engine.backward(losses[-1])
                engine.step()

        for number in range(WARM):
            step(number)
        strict_backend.host_waits.clear()
        strict_backend.launched.clear()
        for number in range(WARM, WARM + STEPS):
            step(number)
        waits, launches = list(strict_backend.host_waits), list(strict_backend.launched)
        last = losses[-1].item()
        engine.destroy()
    return waits, len(launches), last


@pytest.mark.parametrize(
    ("stage", "replicas", "accumulation"),
    [
        *(("zero0", 4, accumulation) for accumulation in (1, 2)),
        *((stage, replicas, 3 - replicas) for stage in STAGES if stage != "zero0" for replicas in (1, 2)),
    ],
)
def test_no_host_wait_in_a_step(strict: RankPool, stage: str, replicas: int, accumulation: int) -> None:
    zero = STAGES[stage]
    config = {"comm_transport": "gloo", "mesh": {"replica": replicas}, "gradient_accumulation_steps": accumulation}
    for waits, launches, _ in strict.run(steady_steps, zero, config):
        assert waits == []
        assert launches >= 2 * STEPS


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_no_host_wait_where_whole_tensors_travel(strict: RankPool, stage: str) -> None:
    muon = {"type": "Muon", "params": {"muon_lr": 1e-3, "adam_lr": 1e-3, "eps": 1e-3}}
    config = {"comm_transport": "gloo", "gradient_accumulation_steps": 1, "optimizer": muon}
    answers = strict.run(steady_steps, STAGES[stage], config)
    for waits, launches, _ in answers:
        assert waits == []
        assert launches >= 5 * STEPS
