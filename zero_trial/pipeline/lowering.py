"""Lowering: add messages, sharding, reductions and the optimizer's step to a schedule of
computations; and the policy that selects the sharding actions. Pure.

    build("1f1b", 2, 2), rank 1   1F0 1B0 1F1 1B1
    lowered, parameters held      1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
                                  1RESHARD 1REDUCE STEP
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from zero_trial.errors import ConfigError
from zero_trial.pipeline.schedule import (
    COMPLETES,
    Action,
    ActionKind,
    ParameterLifetime,
    ReductionTiming,
    Row,
    Schedule,
    tie_holders,
)
from zero_trial.pipeline.simulator import RankReport

Channels = dict[tuple[int, int], deque[Action]]
"""(from rank, to rank) -> the receives that match the sends, in the order of the sends."""


def lower(
    schedule: Schedule,
    *,
    parameters: ParameterLifetime | None = None,
    reduction: ReductionTiming = ReductionTiming.BOUNDARY,
    ties: Sequence[Sequence[int]] = (),
) -> Schedule:
    """Add all other actions of a step to a schedule of computations, without changing their order.
    A schedule without backwards gets neither reductions nor a step.

    For each weight that chunks on several ranks share (``ties``), sum the gradients of these ranks
    after each rank has reduced its own. Only owned shards are summed, so this moves 1/D of the
    weight. Ties are last in every row, in the same order, so that no two ranks wait for each other.
    """
    place, held = schedule.placement, tuple(tuple(tie) for tie in ties)
    lowered = replace(
        schedule,
        parameters=parameters,
        reduction=reduction if schedule.training else None,
        ties=held if schedule.training else (),
    )
    channels: Channels = defaultdict(deque)
    for rank, row in enumerate(schedule.rows):
        for send in filter(None, map(place.send, row)):
            channels[rank, place.ranks[send.other_end.chunk]].append(send.other_end)
    rows = [list(_lowered_row(lowered, rank, channels)) for rank in range(schedule.stages)]
    if schedule.training:
        for number, tie in enumerate(held):
            holders = tie_holders(tie, place)
            if len(holders) > 1:
                for rank, chunk in holders.items():
                    rows[rank].append(Action(ActionKind.TIED_REDUCE, chunk, number))
        for actions in rows:
            actions.append(Action(ActionKind.STEP))
    return replace(lowered, rows=tuple(map(tuple, rows)))


def forwards_of(schedule: Schedule) -> Schedule:
    """Return only the schedule's forwards, to be lowered for an evaluation."""
    rows = tuple(tuple(action for action in row if action.kind is ActionKind.F) for row in schedule.rows)
    return replace(schedule, name=f"{schedule.name} forwards", rows=rows, training=False)


def _lowered_row(schedule: Schedule, rank: int, channels: Channels) -> Iterator[Action]:
    """Yield a rank's computations, messages, gathers, frees and reductions.

    A gather is in flight while its rank waits for a message, and a result is sent before its rank
    frees and reduces. Receives between two ranks follow the order of the sends: messages sent
    before the needed one are received first and stored. So a channel needs no tags, and a receive
    never waits for more than the next computation does.
    """
    place, row = schedule.placement, schedule.rows[rank]
    opens, closes = _lives(row, schedule.parameters)
    last = set({action.chunk: index for index, action in enumerate(row) if action.kind in COMPLETES}.values())
    received: set[Action] = set()
    for index, action in enumerate(row):
        if index in opens:
            yield Action(ActionKind.UNSHARD, action.chunk)
        needed = place.receive(action)
        while needed is not None and needed not in received:
            message = channels[place.ranks[needed.other_end.chunk], rank].popleft()
            received.add(message)
            yield message
        yield action
        if (send := place.send(action)) is not None:
            yield send
        if index in closes:
            yield Action(ActionKind.RESHARD, action.chunk)
        if schedule.reduction is ReductionTiming.MICRO and action.kind in COMPLETES:
            yield Action(ActionKind.REDUCE, action.chunk, action.micro_batch)
        elif schedule.reduction is ReductionTiming.BOUNDARY and index in last:
            yield Action(ActionKind.REDUCE, action.chunk)


def _lives(row: Row, parameters: ParameterLifetime | None) -> tuple[set[int], set[int]]:
    """Return the indices of a row's computations before which parameters are gathered, and of those
    after which they are freed.

    A weight gradient counts as a computation that reads parameters, as it does for every way of
    splitting a backward. Each gather moves the chunk's parameters x (D-1)/D elements per rank.
    """
    places = range(len(row))
    if parameters is None:
        return set(), set()
    if parameters is ParameterLifetime.FREE:
        return set(places), set(places)
    if parameters is ParameterLifetime.HOLD:
        first = {row[index].chunk: index for index in reversed(places)}
        last = {row[index].chunk: index for index in places}
        return set(first.values()), set(last.values())
    turns = [there for here, there in pairwise(places) if row[here].chunk != row[there].chunk]
    return {0, *turns}, {*(index - 1 for index in turns), len(row) - 1}


# --- policies: the sharding actions that a ZeRO plan adds to a schedule, and their traffic --------


@dataclass(frozen=True)
class Sharding:
    """The part of a ZeRO plan that a schedule needs: ``Sharding(*plan.cuts)``.

    ``optimizer``: each rank updates a shard. ``gradients``: full gradients are freed after their
    reduction. ``parameters``: full parameters are freed between uses.
    """

    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False


@dataclass(frozen=True)
class ZeroPolicy:
    """``parameters`` is None if parameters are never freed.

    The volume is per step and rank, in units of the rank's parameters x (D-1)/D.

    | sharded | parameters | reduction | volume |
    |---|---|---|---|
    | nothing | stay | boundary | 2, an all-reduce |
    | optimizer (and gradients) | stay | boundary | 2, a reduce-scatter and an all-gather |
    | optimizer and gradients | stay | micro | M + 1 |
    | all | hold | boundary | 2, a gather and a reduce-scatter |
    | all | hold | micro | M + 1 |
    | all | chunk | boundary | u + 1, with u runs of a chunk |
    | all | free | micro | 3M; 4M where input and weight gradients are apart |
    """

    sharding: Sharding
    parameters: ParameterLifetime | None
    reduction: ReductionTiming

    def volume(self, rank: RankReport, chunks: int) -> float:
        """Return the elements that a rank with ``chunks`` equal chunks moves per step among its D
        data-parallel ranks, as in the table."""
        if not self.sharding.optimizer:
            return 2 * rank.reductions / chunks
        gathers = chunks if self.parameters is None and rank.reductions else rank.gathers
        return (gathers + rank.reductions) / chunks

    def describe(self) -> str:
        """Return ``parameters hold, gradients reduced at the boundary``"""
        held = "parameters stay" if self.parameters is None else f"parameters {self.parameters.value}"
        when = "at the boundary" if self.reduction is ReductionTiming.BOUNDARY else "per micro-batch"
        return f"{held}, gradients reduced {when}"


def choose(
    sharding: Sharding, parameters: ParameterLifetime | None = None, reduction: ReductionTiming | None = None
) -> ZeroPolicy:
    """Return the policy for the arguments; for None, choose the value with the least traffic.
    Raises ConfigError if the plan does not support the arguments."""
    if not sharding.parameters and parameters is not None:
        raise ConfigError(
            "parameters are only freed at ZeRO stage 3",
            where="pipeline.zero_policy",
            got=parameters.value,
            fix="Omit the policy, or use ZeRO stage 3.",
        )
    if not sharding.gradients and reduction is ReductionTiming.MICRO:
        raise ConfigError(
            "full gradients live at ZeRO stages 0 and 1, so reducing them per micro-batch saves nothing",
            where="pipeline.zero_policy",
            got=reduction.value,
            expected="boundary",
        )
    if sharding.parameters and parameters is None:
        parameters = ParameterLifetime.HOLD
    if reduction is None:
        often = parameters is ParameterLifetime.FREE and sharding.gradients
        reduction = ReductionTiming.MICRO if often else ReductionTiming.BOUNDARY
    return ZeroPolicy(sharding, parameters, reduction)
