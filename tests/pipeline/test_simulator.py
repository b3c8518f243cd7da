"""Validation and simulation of schedules: what runs is counted, and what is wrong is found."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.pipeline.lowered import lowered, parse, parse_row, report
from zero_trial.pipeline.schedule import (
    COMPLETES,
    COMPUTE,
    NONE,
    RECIPES,
    Action,
    ActionKind,
    ChunkPlacement,
    ParameterLifetime,
    ReductionTiming,
    Schedule,
    ScheduleError,
)
from zero_trial.pipeline.simulator import Costs, validate


def test_time_and_counts():
    body = json.loads(json.dumps(report("1f1b", 2, 3).as_dict()))
    assert (body["makespan"], body["bubble"], body["ranks"][1]["idle"]) == (12, pytest.approx(6 / 24), 3)
    assert body["ranks"][0] == {
        "rank": 0,
        "idle": 3,
        "peak_activations": 2,
        "peak_parameters": 0,
        "peak_gradients": 1,
        "gathers": 0,
        "reductions": 1,
        "messages": 3,
    }


CASES = int(os.environ.get("ZERO_TRIAL_SCHEDULE_CASES", "300"))


def random_schedule(rng: random.Random, largest: int) -> Schedule:
    name = rng.choice(list(RECIPES))
    chunks = None if RECIPES[name].fixed else rng.randint(1, 3)
    stages, micro_batches = rng.randint(1, largest), rng.randint(1, 2 * largest)
    last = stages * (chunks or RECIPES[name].chunks) - 1
    ties = [(0, last)] if last and rng.random() < 0.5 else []
    parameters, reduction = rng.choice([None, *ParameterLifetime]), rng.choice(list(ReductionTiming))
    return lowered(name, stages, micro_batches, chunks, parameters=parameters, reduction=reduction, ties=ties)


def test_random_schedules_run():
    rng = random.Random(5)
    costs = [Costs(), Costs(3, 4, 2), Costs(1, 2, 3, 0.5)]
    for _ in range(CASES):
        found = validate(random_schedule(rng, largest=4), rng.choice(costs))
        assert 0 <= found.bubble < 1 and all(rank.busy for rank in found.ranks)


def drop(rng: random.Random, row: list[Action]) -> ActionKind:
    return row.pop(rng.randrange(len(row))).kind


def double(rng: random.Random, row: list[Action]) -> ActionKind:
    action = rng.choice(row)
    row.insert(rng.randrange(len(row) + 1), action)
    return action.kind


def swap(rng: random.Random, row: list[Action]) -> ActionKind | None:
    """Swap two neighbors of which one has to come first, if there are any."""
    places = [at for at in range(len(row) - 1) if related(row[at], row[at + 1])]
    if not places:
        return None
    at = rng.choice(places)
    row[at], row[at + 1] = row[at + 1], row[at]
    return row[at].kind


RELATED = {
    tuple(map(ActionKind, pair.split()))
    for pair in ("F B", "F I", "I W", "F SEND_F", "B SEND_B", "I SEND_B", "RECV_F F", "RECV_B B", "RECV_B I")
}


def related(first: Action, second: Action) -> bool:
    """Return whether the first has to come before the second on its rank, whatever the rest
    does."""
    if ActionKind.STEP in (first.kind, second.kind):
        return second.kind is ActionKind.STEP
    if first.chunk != second.chunk:
        return False
    pair = (first.kind, second.kind)
    if pair in RELATED and first.micro_batch == second.micro_batch:
        return True
    if first.kind is ActionKind.UNSHARD or second.kind is ActionKind.RESHARD:
        return second.kind in COMPUTE or (
            first.kind in (*COMPUTE, ActionKind.UNSHARD) and second.kind is ActionKind.RESHARD
        )
    if second.kind is ActionKind.REDUCE:
        return first.kind in COMPLETES and second.micro_batch in (NONE, first.micro_batch)
    messages = first.kind is second.kind and "_" in first.kind.value
    return messages or pair == (ActionKind.REDUCE, ActionKind.TIED_REDUCE)


@pytest.mark.parametrize("change", [drop, double, swap])
def test_a_changed_row_is_found(change: Callable[[random.Random, list[Action]], ActionKind | None]):
    """Whichever action of whichever row."""
    rng = random.Random(6)
    seen: set[ActionKind | None] = set()
    for _ in range(CASES):
        schedule = random_schedule(rng, largest=3)
        rank = rng.randrange(schedule.stages)
        row = list(schedule.rows[rank])
        if kind := change(rng, row):
            seen.add(kind)
            with pytest.raises(ScheduleError):
                validate(with_row(schedule, rank, row))
    assert change is swap or seen == set(ActionKind)


def with_row(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    rows = [tuple(row) if index == rank else old for index, old in enumerate(schedule.rows)]
    return replace(schedule, rows=tuple(rows))


def rows(*texts: str, micro_batches: int = 1, **fields: object) -> Schedule:
    made = tuple(map(parse_row, texts))
    fields = {"training": False, **fields}
    return Schedule("mine", ChunkPlacement.loop(len(made)), micro_batches, made, **fields)  # type: ignore[arg-type]


def reduced(text: str, **fields: object) -> Schedule:
    return rows(text, training=True, reduction=ReductionTiming.BOUNDARY, **fields)


def swapped(schedule: Schedule, rank: int, first: str, second: str) -> Schedule:
    other = {parse(first): parse(second), parse(second): parse(first)}
    return with_row(schedule, rank, [other.get(action, action) for action in schedule.rows[rank]])


FOREIGN = "this action was already done, or does not belong to this rank's step"
BEFORE = "a prerequisite of this action has not been done: expected "
WRONG: dict[str, tuple[Callable[[], Schedule], str]] = {
    "a dropped send": (lambda: rows("0F0", "1RECV_F0 1F0"), r"mine: deadlock: .*: got rank 1 at action 0, 1RECV_F0\."),
    "a lost message": (lambda: rows("0F0 0SEND_F0", "1F0"), f"rank 1, action 0, 1F0: {BEFORE}1RECV_F0"),
    "messages that overtake": (
        lambda: rows("0F0 0F1 0SEND_F1 0SEND_F0", "1RECV_F0 1F0 1RECV_F1 1F1", micro_batches=2),
        r"rank 1, action 0, 1RECV_F0: 1RECV_F1 of rank 0 arrives first",
    ),
    "a doubled computation": (lambda: rows("0F0 0F0"), f"rank 0, action 1, 0F0: {FOREIGN}"),
    "a send to no rank": (lambda: rows("0F0 0SEND_F0"), FOREIGN),
    "a chunk of another rank": (lambda: rows("1F0"), FOREIGN),
    "no such micro-batch": (lambda: rows("0F1"), FOREIGN),
    "a missing computation": (lambda: rows("0F0", training=True), "an action is missing: expected 0I0"),
    "two input gradients": (lambda: rows("0F0 0I0 0B0", training=True), FOREIGN),
    "a backward without training": (lambda: rows("0F0 0B0"), FOREIGN),
    "parameters that are not there": (
        lambda: rows("0F0", parameters=ParameterLifetime.HOLD),
        "the chunk's parameters are not gathered",
    ),
    "parameters that stay": (
        lambda: rows("0UNSHARD 0F0", parameters=ParameterLifetime.HOLD),
        "parameters stay gathered",
    ),
    "parameters that were never freed": (lambda: rows("0UNSHARD 0F0"), "the chunk's parameters are already gathered"),
    "a missing reduction": (lambda: reduced("0F0 0B0 STEP"), f"STEP: {BEFORE}0REDUCE"),
    "an early reduction": (lambda: reduced("0F0 0REDUCE 0B0 STEP"), "the gradients to reduce: expected those of 1"),
    "a missing step": (lambda: reduced("0F0 0B0 0REDUCE"), "an action is missing: expected STEP"),
    "a tie with itself": (lambda: reduced("0F0 0B0 0REDUCE 0TIED_REDUCE0 STEP", ties=((0,),)), FOREIGN),
    "ties in another order": (
        lambda: swapped(lowered("1f1b", 2, 2, ties=[(0, 1), (0, 1)]), 1, "1TIED_REDUCE0", "1TIED_REDUCE1"),
        r"deadlock: .* rank 0 at .*, 0TIED_REDUCE0; rank 1 at .*, 1TIED_REDUCE1",
    ),
    "a ring of waiting ranks": (
        lambda: rows("0F0 0RECV_B0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0", training=True),
        "rank 0 at action 1, 0RECV_B0; rank 1 at action 0, 1RECV_F0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str):
    make, message = WRONG[name]
    with pytest.raises(ScheduleError, match=message):
        validate(make())


def test_32_stages_of_128_micro_batches_are_validated() -> None:
    """Some 50 thousand actions; the time grows as their number does."""
    found = validate(lowered("interleaved", 32, 128))
    assert sum(len(rank.spans) for rank in found.ranks) == 2 * 32 * 128 * 2
