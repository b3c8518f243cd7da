"""Validation and simulation of schedules: what runs is counted, and what is wrong is found."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.pipeline.lowered import lowered, report
from zero_trial.pipeline.generators import RECIPES, build
from zero_trial.pipeline.schedule import (
    COMPUTE,
    Action,
    ActionKind,
    ChunkPlacement,
    ParameterLifetime,
    ReductionTiming,
    Schedule,
    ScheduleError,
    parse_row,
)
from zero_trial.pipeline.simulator import ALIKE, Costs, SimulatedRank, SimulationReport, _Simulation, validate


def test_a_whole_backward_costs_both_halves():
    costs = Costs(forward=2, input_gradient=3, weight_gradient=5).by_kind()
    assert costs == {ActionKind.F: 2, ActionKind.I: 3, ActionKind.W: 5, ActionKind.B: 8}
    assert set(costs) == COMPUTE


def test_time_and_bubble():
    got = report("1f1b", 2, 3)
    assert (got.makespan, got.idle(0), got.idle(1)) == (12, 3, 3)
    assert got.bubble == pytest.approx(6 / 24)


def test_for_machines():
    body = json.loads(json.dumps(report("1f1b", 2, 3).as_dict()))
    assert body["makespan"] == 12 and body["bubble"] == pytest.approx(0.25)
    assert body["ranks"][0] == {
        "rank": 0,
        "idle": 3,
        "peak_activations": 2,
        "peak_parameters": 0,
        "peak_gradients": 1,
        "peak_waiting": 1,
        "gathers": 0,
        "reductions": 1,
        "tied_reductions": 0,
        "messages": 3,
    }


def test_nothing_takes_no_time():
    assert (SimulationReport(()).makespan, SimulationReport(()).bubble) == (0, 0)


def rank_of(row: str, index: int = 0) -> SimulatedRank:
    """A rank of 1F1B with 2 stages and 2 micro-batches whose row is this one."""
    schedule = build("1f1b", 2, 2)
    rows = tuple(parse_row(row) if number == index else () for number in range(2))
    return SimulatedRank(index, _Simulation(replace(schedule, rows=rows), ALIKE), ALIKE.by_kind())


def test_a_rank_goes_as_far_as_it_can():
    rank = rank_of("0F0 0SEND_F0 0RECV_B0 0B0")
    assert rank.advance()
    assert str(rank.action) == "0RECV_B0"
    assert not rank.advance()
    assert rank.clock == 1
    assert rank.report.messages == 1


def test_what_is_missing_is_named():
    with pytest.raises(
        ScheduleError, match="rank 0, action 0, 0SEND_F0: what this needs has not been computed: expected 0F0"
    ):
        rank_of("0SEND_F0").advance()
    with pytest.raises(ScheduleError, match=r"the chunk is on another rank: expected one of \[0\]"):
        rank_of("1F0").advance()


def test_a_row_that_ends_too_early():
    rank = rank_of("0F0 0F1")
    rank.advance()
    with pytest.raises(ScheduleError, match="a computation is missing: expected 0B0"):
        rank.finish()


CASES = int(os.environ.get("ZERO_TRIAL_SCHEDULE_CASES", "300"))


def random_schedule(rng: random.Random, largest: int = 6) -> Schedule:
    name = rng.choice(list(RECIPES))
    chunks = None if RECIPES[name].fixed else rng.randint(1, 3)
    stages, micro_batches = rng.randint(1, largest), rng.randint(1, 2 * largest)
    last = stages * (chunks or RECIPES[name].chunks) - 1
    ties = [(0, last)] if last and rng.random() < 0.5 else []
    parameters = rng.choice([None, *ParameterLifetime])
    return lowered(
        name,
        stages,
        micro_batches,
        chunks,
        parameters=parameters,
        reduction=rng.choice(list(ReductionTiming)),
        ties=ties,
    )


def with_row(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    return replace(
        schedule, rows=tuple(tuple(row) if index == rank else old for index, old in enumerate(schedule.rows))
    )


def test_an_example():
    report = validate(lowered("1f1b", 4, 8, parameters=ParameterLifetime.HOLD), Costs(1, 1, 1))
    assert report.bubble == pytest.approx(3 / 11)
    assert [rank.peak_activations for rank in report.ranks] == [4, 3, 2, 1]
    assert [rank.gathers for rank in report.ranks] == [1] * 4


def test_random_schedules_run():
    rng = random.Random(5)
    costs = [Costs(), Costs(3, 4, 2), Costs(1, 2, 3, 0.5)]
    for _ in range(CASES):
        schedule = random_schedule(rng, largest=4)
        report = validate(schedule, rng.choice(costs))
        assert 0 <= report.bubble < 1
        assert all(rank.busy for rank in report.ranks)


def test_a_dropped_action_is_found():
    """Whichever action of whichever row: a send, a receive, a computation, a gather, a reduction, a
    step."""
    rng = random.Random(6)
    seen = set()
    for _ in range(CASES):
        schedule = random_schedule(rng, largest=3)
        rank = rng.randrange(schedule.stages)
        row = list(schedule.rows[rank])
        seen.add(row.pop(rng.randrange(len(row))).kind)
        with pytest.raises(ScheduleError):
            validate(with_row(schedule, rank, row))
    assert seen == set(ActionKind)


def test_a_doubled_action_is_found():
    rng = random.Random(7)
    for _ in range(CASES):
        schedule = random_schedule(rng, largest=3)
        rank = rng.randrange(schedule.stages)
        row = list(schedule.rows[rank])
        row.insert(rng.randrange(len(row) + 1), rng.choice(row))
        with pytest.raises(ScheduleError):
            validate(with_row(schedule, rank, row))


def related(first: Action, second: Action) -> bool:
    """Whether the first has to come before the second on its rank, whatever the rest does."""
    if first.kind is ActionKind.STEP or second.kind is ActionKind.STEP:
        return second.kind is ActionKind.STEP
    if first.chunk != second.chunk:
        return False
    pair = (first.kind, second.kind)
    if first.micro_batch == second.micro_batch and pair in {
        (ActionKind.F, ActionKind.B),
        (ActionKind.F, ActionKind.I),
        (ActionKind.I, ActionKind.W),
        (ActionKind.F, ActionKind.SEND_F),
        (ActionKind.B, ActionKind.SEND_B),
        (ActionKind.I, ActionKind.SEND_B),
        (ActionKind.RECV_F, ActionKind.F),
        (ActionKind.RECV_B, ActionKind.B),
        (ActionKind.RECV_B, ActionKind.I),
        (ActionKind.B, ActionKind.REDUCE),
        (ActionKind.W, ActionKind.REDUCE),
    }:
        return True
    sharding = {ActionKind.UNSHARD, ActionKind.RESHARD}
    if pair == (ActionKind.UNSHARD, ActionKind.RESHARD) or (
        first.kind is ActionKind.UNSHARD and second.kind in COMPUTE
    ):
        return True
    if first.kind in COMPUTE and second.kind is ActionKind.RESHARD:
        return True
    if second.kind is ActionKind.REDUCE and second.micro_batch < 0 and first.kind in (ActionKind.B, ActionKind.W):
        return True
    if first.kind == second.kind and first.kind in (
        ActionKind.SEND_F,
        ActionKind.SEND_B,
        ActionKind.RECV_F,
        ActionKind.RECV_B,
    ):
        return True
    return first.kind is ActionKind.REDUCE and second.kind is ActionKind.TIED_REDUCE and not sharding & set(pair)


def test_swapped_actions_are_found():
    """Two neighbours of which one has to come first."""
    rng = random.Random(8)
    found = 0
    while found < CASES:
        schedule = random_schedule(rng, largest=3)
        rank = rng.randrange(schedule.stages)
        row = list(schedule.rows[rank])
        places = [at for at in range(len(row) - 1) if related(row[at], row[at + 1])]
        if not places:
            continue
        at = rng.choice(places)
        row[at], row[at + 1] = row[at + 1], row[at]
        with pytest.raises(ScheduleError):
            validate(with_row(schedule, rank, row))
        found += 1


def one_rank(text: str, **promises: object) -> Schedule:
    return replace(Schedule("mine", ChunkPlacement.loop(1), 1, (parse_row(text),)), **promises)  # type: ignore[arg-type]


def two_ranks(first: str, second: str, micro_batches: int = 1, **promises: object) -> Schedule:
    rows = (parse_row(first), parse_row(second))
    return replace(Schedule("mine", ChunkPlacement.loop(2), micro_batches, rows, training=False), **promises)  # type: ignore[arg-type]


TRAINING: dict[str, object] = {"training": True, "reduction": ReductionTiming.BOUNDARY, "steps": True}

WRONG: dict[str, tuple[Callable[[], Schedule], str]] = {
    "a dropped send": (
        lambda: two_ranks("0F0", "1RECV_F0 1F0"),
        r"mine: deadlock: got rank 1 waits forever at action 0, 1RECV_F0\.",
    ),
    "a lost message": (
        lambda: two_ranks("0F0 0SEND_F0", "1F0"),
        r"rank 1, action 0, 1F0: what this needs has not been received",
    ),
    "a message too many": (
        lambda: two_ranks("0F0 0SEND_F0 0SEND_F0", "1RECV_F0 1F0"),
        r"rank 1: a message is never received: got 1RECV_F0 from rank 0",
    ),
    "messages that overtake": (
        lambda: two_ranks("0F0 0F1 0SEND_F1 0SEND_F0", "1RECV_F0 1F0 1RECV_F1 1F1", 2),
        r"rank 1, action 0, 1RECV_F0: another message of rank 0 comes first: got 1RECV_F1",
    ),
    "a received message that is not used": (
        lambda: two_ranks("0F0 0SEND_F0 0F0", "1RECV_F0 1F0"),
        r"rank 0, action 2, 0F0: this was computed before",
    ),
    "a send to no one": (lambda: one_rank("0F0 0SEND_F0", training=False), "no other rank waits for this"),
    "a receive from no one": (lambda: one_rank("0RECV_F0 0F0", training=False), "no other rank sends this"),
    "a stranger's chunk": (
        lambda: one_rank("1F0", training=False),
        r"the chunk is on another rank: expected one of \[0\]",
    ),
    "no such micro-batch": (lambda: one_rank("0F1", training=False), "no such micro-batch"),
    "a missing computation": (lambda: one_rank("0F0"), "a computation is missing: expected 0B0"),
    "a backward before its forward": (
        lambda: one_rank("0B0 0F0"),
        "what this needs has not been computed: expected 0F0",
    ),
    "two input gradients": (lambda: one_rank("0F0 0I0 0B0"), "the input's gradient was computed before"),
    "a weight gradient that is missing": (lambda: one_rank("0F0 0I0"), "a computation is missing: expected 0B0"),
    "a backward without training": (
        lambda: one_rank("0F0 0B0", training=False),
        "does not train has a backward: got 0B0",
    ),
    "parameters that are not there": (
        lambda: one_rank("0F0 0UNSHARD 0RESHARD 0B0", parameters=ParameterLifetime.HOLD),
        "the chunk's parameters are not gathered",
    ),
    "parameters that stay": (
        lambda: one_rank("0UNSHARD 0F0 0B0", parameters=ParameterLifetime.HOLD),
        r"parameters stay gathered: got chunks \[0\]",
    ),
    "parameters that were never freed": (
        lambda: one_rank("0UNSHARD 0F0 0B0"),
        "the chunk's parameters are there already",
    ),
    "a missing reduction": (lambda: one_rank("0F0 0B0 STEP", **TRAINING), "not all gradients are reduced: got chunk 0"),
    "an early reduction": (
        lambda: one_rank("0F0 0REDUCE 0B0 STEP", **TRAINING),
        "the gradients to reduce: got those of 0 micro-batches",
    ),
    "another kind of reduction": (
        lambda: one_rank("0F0 0B0 0REDUCE0 STEP", **TRAINING),
        "the schedule reduces otherwise",
    ),
    "a missing step": (lambda: one_rank("0F0 0B0 0REDUCE", **TRAINING), "the step is missing"),
    "a step too early": (lambda: one_rank("0F0 0B0 STEP 0REDUCE", **TRAINING), "the step is the last action"),
    "a tie with itself": (
        lambda: one_rank("0F0 0B0 0REDUCE 0TIED_REDUCE0 STEP", **TRAINING, ties=((0,),)),
        "no such tie between ranks",
    ),
    "a tie without a number": (
        lambda: with_row(
            lowered("1f1b", 2, 1, ties=[(0, 1)]),
            0,
            [*parse_row("0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE"), Action(ActionKind.TIED_REDUCE, 0)],
        ),
        "no such tie between ranks",
    ),
    "a missing tie": (
        lambda: without(lowered("1f1b", 2, 2, ties=[(0, 1)]), 1, ActionKind.TIED_REDUCE),
        r"deadlock: got rank 0 waits forever at action \d+, 0TIED_REDUCE0\.",
    ),
    "ties in another order": (
        lambda: swapped(lowered("1f1b", 2, 2, ties=[(0, 1), (0, 1)]), 1, "1TIED_REDUCE0", "1TIED_REDUCE1"),
        r"rank 0 waits forever .* 0TIED_REDUCE0; rank 1 waits forever .* 1TIED_REDUCE1",
    ),
    "a tie before the reduction": (
        lambda: swapped(lowered("1f1b", 2, 2, ties=[(0, 1)]), 0, "0REDUCE", "0TIED_REDUCE0"),
        "chunk 0's gradients are not reduced",
    ),
    "a rank too few": (
        lambda: Schedule("mine", ChunkPlacement.loop(2), 1, (parse_row("0F0"),)),
        "a row per rank is needed: got 1, expected 2",
    ),
}


def without(schedule: Schedule, rank: int, kind: ActionKind) -> Schedule:
    return with_row(schedule, rank, [action for action in schedule.rows[rank] if action.kind is not kind])


def swapped(schedule: Schedule, rank: int, first: str, second: str) -> Schedule:
    other = {Action.parse(first): Action.parse(second), Action.parse(second): Action.parse(first)}
    return with_row(schedule, rank, [other.get(action, action) for action in schedule.rows[rank]])


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str):
    make, message = WRONG[name]
    with pytest.raises(ScheduleError, match=message):
        validate(make())


def test_a_ring_of_waiting_ranks():
    """Each receives before it sends what the other waits for."""
    schedule = two_ranks("0F0 0RECV_B0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0", training=True)
    with pytest.raises(
        ScheduleError, match=r"rank 0 waits forever at action 1, 0RECV_B0; rank 1 waits forever at action 0"
    ):
        validate(schedule)


def test_bounds():
    schedule = lowered("gpipe", 2, 5)
    validate(schedule, max_activations=5, max_waiting=3)
    with pytest.raises(ScheduleError, match=r"gpipe, rank 0: too many activations at once: got 5, expected at most 4"):
        validate(schedule, max_activations=4)
    validate(lowered("1f1b", 4, 8), max_waiting=2)
    with pytest.raises(
        ScheduleError, match=r"1f1b, rank 1: too many waiting messages at once: got 2, expected at most 1"
    ):
        validate(lowered("1f1b", 4, 8), max_waiting=1)


def test_a_message_takes_its_time():
    """Forward, message, forward, backward, message, backward."""
    assert validate(lowered("1f1b", 2, 1), Costs(1, 1, 1, message=5)).makespan == 1 + 5 + 1 + 2 + 5 + 2


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_h1", "zb_v"])
def test_buffers_do_not_grow_with_the_micro_batches(name: str):
    """Neither activations nor waiting messages; breadth first and GPipe are those that pay with
    memory."""
    few, many = (validate(lowered(name, 4, micro_batches)) for micro_batches in (16, 64))
    for one, other in zip(few.ranks, many.ranks, strict=True):
        assert (one.peak_activations, one.peak_waiting) == (other.peak_activations, other.peak_waiting)
        assert one.peak_waiting <= 4
    assert validate(lowered("looped_bfs", 4, 64)).ranks[0].peak_activations == 128


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_64_stages_of_512_micro_batches_are_validated_in_seconds(name: str) -> None:
    """Some 200 and 400 thousand actions; the time of each grows as their number does."""
    began = time.process_time()
    schedule = lowered(name, 64, 512)
    found = validate(schedule)
    assert time.process_time() - began < 20
    computations = 2 * 64 * 512 * RECIPES[name].chunks
    assert sum(len(rank.spans) for rank in found.ranks) == computations
