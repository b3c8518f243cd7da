"""Beyond one accelerator the host runs ahead: in a step whose collectives run on a device, it waits
for none of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support import strict_backend
from tests.support.dense import STAGES, Case, Turn, build_engine
from tests.support.dense import tower_loss as loss
from tests.support.late import make_late, on_device
from tests.support.models import Tower
from tests.support.pool import RankPool

WARM, STEPS = 2, 3


@pytest.fixture(scope="module")
def strict() -> Iterator[RankPool]:
    pool = RankPool(4, world="strict")
    yield pool
    pool.close()


def steady_steps(zero: dict[str, Any], config: dict[str, Any]) -> tuple[list[str], list[str], int, float]:
    """What the host waited for in some steps after the first ones, what it read of the device's
    values, what it launched, and the last loss."""
    with strict_backend.pretended_device():
        engine = build_engine(Case(lambda: Tower(5, 8), loss, config=config, clip=1.0), zero)
        verdict = make_late(engine)
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
        reads = on_device(engine, verdict, lambda: [step(number) for number in range(WARM, WARM + STEPS)])
        waits, launches = list(strict_backend.host_waits), list(strict_backend.launched)
        last = losses[-1].item()
        engine.destroy()
    return waits, reads, len(launches), last


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
    for waits, reads, launches, _ in strict.run(steady_steps, zero, config):
        assert waits == []
        assert reads == []
        assert launches >= 2 * STEPS


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_no_host_wait_where_whole_tensors_travel(strict: RankPool, stage: str) -> None:
    """The device decides over Muon's steps, too: factor and skip are read there."""
    muon = {"type": "Muon", "params": {"muon_lr": 1e-3, "adam_lr": 1e-3, "eps": 1e-3}}
    config = {"comm_transport": "gloo", "gradient_accumulation_steps": 1, "optimizer": muon}
    answers = strict.run(steady_steps, STAGES[stage], config)
    for waits, reads, launches, _ in answers:
        assert (waits, reads) == ([], [])
        assert launches >= 5 * STEPS


def test_a_wait_for_the_outcome_of_a_step_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits there for a device whose collectives wait for another rank says so, as in
    any collective."""
    engine = build_engine(Case(lambda: Tower(5, 8), loss), STAGES["zero1"])
    outcome, heartbeat = make_late(engine), engine.mesh.heartbeat
    engine.backward(loss(engine, Turn(0, 0, 0)))
    engine.step()
    readback = outcome._readback
    assert readback is not None
    found, receive = [], readback.receive

    def watched() -> torch.Tensor:
        found.append(heartbeat.positions()[0])
        return receive()

    monkeypatch.setattr(readback, "receive", watched)
    assert engine.get_global_grad_norm() is not None
    (position,) = found
    assert position is not None and position.inside
    assert position.operation.startswith("the outcome of step ")
    after = heartbeat.positions()[0]
    assert after is not None and not after.inside
