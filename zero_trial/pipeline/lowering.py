"""Passes: from a schedule of computations to one with messages, sharding, reductions and the
optimizer's step. Pure.

Each takes a schedule and returns one with more actions in its rows; none moves a computation.

    build("1f1b", 2, 2), rank 1   1F0 1B0 1F1 1B1
    add_reduce, boundary          1F0 1B0 1F1 1B1 1REDUCE
    add_unshard_reshard, hold     1UNSHARD 1F0 1B0 1F1 1B1 1RESHARD 1REDUCE
    add_send_recv                 1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
                                  1RESHARD 1REDUCE
    add_step                      ... 1RESHARD 1REDUCE STEP
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from zero_trial.errors import ConfigError
from zero_trial.pipeline.schedule import (
    COMPUTE,
    Action,
    ActionKind,
    ChunkPlacement,
    ParameterLifetime,
    ReductionTiming,
    Row,
    Schedule,
    ScheduleError,
    tie_holders,
)
from zero_trial.pipeline.simulator import RankReport

Channels = dict[tuple[int, int], deque[Action]]
"""(from rank, to rank) -> the receives of what is sent, in the order of sending."""


def lower(
    schedule: Schedule,
    *,
    parameters: ParameterLifetime | None = None,
    reduction: ReductionTiming = ReductionTiming.BOUNDARY,
    ties: Sequence[Sequence[int]] = (),
) -> Schedule:
    """Apply all passes in their order; a schedule without backwards gets neither reductions nor a
    step.

    Messages come after sharding: so a gather is under way while its rank waits for a message, and a
    result is sent before its rank turns to freeing and reducing.
    """
    if schedule.training:
        schedule = add_reduce(schedule, reduction)
    if parameters is not None:
        schedule = add_unshard_reshard(schedule, parameters)
    schedule = add_send_recv(schedule)
    return add_step(add_tied_reduce(schedule, ties)) if schedule.training else schedule


def add_send_recv(schedule: Schedule) -> Schedule:
    """Send each output and input gradient that another rank needs right after it is computed, and
    receive it before it is needed.

    Receives between two ranks come in the order of the sends: a message that was sent before the
    one that is needed is received before it, and kept. So a channel needs no tags, and a receive
    never waits for more than the computation after it does. Price: one message per micro-batch for
    each border between chunks on different ranks, and as many back for training.
    """
    place = schedule.placement
    channels: Channels = {}
    sending: list[Row] = []
    for rank, row in enumerate(schedule.rows):
        out: list[Action] = []
        for action in row:
            out.append(action)
            message = _message(action, place)
            if message is not None:
                send, receive = message
                out.append(send)
                channels.setdefault((rank, place.ranks[receive.chunk]), deque()).append(receive)
        sending.append(tuple(out))
    rows = tuple(tuple(_with_receives(row, rank, place, channels)) for rank, row in enumerate(sending))
    return replace(schedule, rows=rows)


def _message(action: Action, place: ChunkPlacement) -> tuple[Action, Action] | None:
    """Return the send and the receive that follow a computation, if another rank waits for its
    result."""
    kind, chunk, micro_batch, _ = action
    if kind is ActionKind.F and place.sends_forward(chunk):
        return Action(ActionKind.SEND_F, chunk, micro_batch), Action(ActionKind.RECV_F, chunk + 1, micro_batch)
    if (kind is ActionKind.B or kind is ActionKind.I) and place.sends_backward(chunk):
        return Action(ActionKind.SEND_B, chunk, micro_batch), Action(ActionKind.RECV_B, chunk - 1, micro_batch)
    return None


def _with_receives(row: Row, rank: int, place: ChunkPlacement, channels: Channels) -> Iterator[Action]:
    received: set[Action] = set()
    for action in row:
        kind, chunk, micro_batch, _ = action
        source: int | None = None
        if kind is ActionKind.F and chunk > 0:
            source, wanted = place.ranks[chunk - 1], Action(ActionKind.RECV_F, chunk, micro_batch)
        elif (kind is ActionKind.B or kind is ActionKind.I) and chunk < place.last:
            source, wanted = place.ranks[chunk + 1], Action(ActionKind.RECV_B, chunk, micro_batch)
        if source is not None and source != rank:
            channel = channels.get((source, rank), deque())
            while wanted not in received:
                if not channel:
                    raise ScheduleError(
                        "no rank computes what this needs", where=f"rank {rank}, {action}", got=f"no send for {wanted}"
                    )
                message = channel.popleft()
                received.add(message)
                yield message
        yield action


def add_unshard_reshard(schedule: Schedule, parameters: ParameterLifetime) -> Schedule:
    """Gather a chunk's parameters before it computes and free them after: for all of the step, for
    a run, or for one computation.

    A weight gradient counts as a computation that reads parameters, which holds for every way of
    cutting a backward in two. Price in gathers per chunk and step: HOLD 1; CHUNK its runs u (2 and,
    for the last chunk, 1 in looped breadth-first); FREE 2M, or 3M where input and weight gradients
    are apart. Each gather moves the chunk's parameters x (D-1)/D elements per rank.
    """
    rows = tuple(tuple(_sharded(row, parameters)) for row in schedule.rows)
    return replace(schedule, rows=rows, parameters=parameters)


def _sharded(row: Row, parameters: ParameterLifetime) -> Iterator[Action]:
    computes = [index for index, action in enumerate(row) if action.kind in COMPUTE]
    opens, closes = _lives(row, computes, parameters)
    for index, action in enumerate(row):
        if index in opens:
            yield Action(ActionKind.UNSHARD, action.chunk)
        yield action
        if index in closes:
            yield Action(ActionKind.RESHARD, action.chunk)


def _lives(row: Row, computes: Sequence[int], parameters: ParameterLifetime) -> tuple[set[int], set[int]]:
    """Return the computations of a row before which parameters are gathered, and those after which
    they are freed."""
    if parameters is ParameterLifetime.FREE:
        return set(computes), set(computes)
    if parameters is ParameterLifetime.HOLD:
        first = {row[index].chunk: index for index in reversed(computes)}
        last = {row[index].chunk: index for index in computes}
        return set(first.values()), set(last.values())
    turns = [(here, there) for here, there in pairwise(computes) if row[here].chunk != row[there].chunk]
    return {*computes[:1], *(there for _, there in turns)}, {*(here for here, _ in turns), *computes[-1:]}


def add_reduce(schedule: Schedule, reduction: ReductionTiming) -> Schedule:
    """Reduce a chunk's gradients over the data-parallel ranks once they are complete: for the step,
    or for a micro-batch.

    Price in reductions per chunk and step: BOUNDARY 1, with its full gradients alive from its first
    backward to its last; MICRO M.
    """
    rows = tuple(tuple(_reduced(row, reduction)) for row in schedule.rows)
    return replace(schedule, rows=rows, reduction=reduction)


def _reduced(row: Row, reduction: ReductionTiming) -> Iterator[Action]:
    completes = [
        index for index, action in enumerate(row) if action.kind is ActionKind.B or action.kind is ActionKind.W
    ]
    last = set({row[index].chunk: index for index in completes}.values())
    for index, action in enumerate(row):
        yield action
        if action.kind is not ActionKind.B and action.kind is not ActionKind.W:
            continue
        if reduction is ReductionTiming.MICRO:
            yield Action(ActionKind.REDUCE, action.chunk, action.micro_batch)
        elif index in last:
            yield Action(ActionKind.REDUCE, action.chunk)


def add_tied_reduce(schedule: Schedule, ties: Sequence[Sequence[int]]) -> Schedule:
    """Give each weight that chunks on several ranks share the sum of its gradients there, after
    each rank has reduced its own.

    Only the shard that a rank owns is summed, so it moves 1/D of the weight. Ties come last in
    every row and in the same order, so that no two ranks wait for each other. Chunks of one rank
    share one parameter and need nothing.
    """
    groups = tuple(tuple(sorted(set(tie))) for tie in ties)
    for tie in groups:
        if not tie or tie[0] < 0 or tie[-1] > schedule.placement.last:
            raise ScheduleError(
                "a tie names a chunk that is not there",
                where="ties",
                got=tie,
                expected=f"chunks 0 to {schedule.placement.last}",
            )
    rows = [list(row) for row in schedule.rows]
    for number, tie in enumerate(groups):
        holders = tie_holders(tie, schedule.placement)
        if len(holders) > 1:
            for rank, chunk in holders.items():
                rows[rank].append(Action(ActionKind.TIED_REDUCE, chunk, tie=number))
    return replace(schedule, rows=tuple(map(tuple, rows)), ties=groups)


def add_step(schedule: Schedule) -> Schedule:
    """End every rank with the optimizer's step."""
    return replace(schedule, rows=tuple((*row, Action(ActionKind.STEP)) for row in schedule.rows), steps=True)


# --- policies: which sharding actions a ZeRO plan puts into a schedule, and what they move --------


@dataclass(frozen=True)
class Sharding:
    """What a ZeRO plan cuts into shards and frees, as far as a schedule has to know it:
    ``Sharding(*plan.cuts)``.

    ``optimizer``: each rank updates a shard. ``gradients``: full ones are freed once they are
    reduced. ``parameters``: full ones are freed between uses.
    """

    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False


@dataclass(frozen=True)
class ZeroPolicy:
    """``parameters`` is None where parameters are never freed.

    The volume is per step and rank, in the rank's parameters x (D-1)/D.

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
        """Return the elements that a rank with ``chunks`` alike chunks moves per step among its D
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
    """Return the policy for the arguments; what is None is chosen so that least is moved. Raises
    ConfigError for what the plan cannot do."""
    if not sharding.parameters and parameters is not None:
        raise ConfigError(
            "parameters are freed at ZeRO stage 3 only",
            where="pipeline.zero_policy",
            got=parameters.value,
            fix="Leave the policy out, or use ZeRO stage 3.",
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


def candidates(
    sharding: Sharding,
    parameters: ParameterLifetime | None = None,
    reduction: ReductionTiming | None = None,
    *,
    chunks: int = 1,
) -> list[ZeroPolicy]:
    """Return all policies that agree with the arguments, those that move less before those that
    need less memory. ``chunks`` are per rank."""
    first = choose(sharding, parameters, reduction)
    pairs: list[tuple[ParameterLifetime | None, ReductionTiming]] = [(first.parameters, first.reduction)]
    if sharding.parameters:
        several = [(ParameterLifetime.CHUNK, ReductionTiming.BOUNDARY)] if chunks > 1 else []
        # full gradients that always live (offloaded parameters at stages 0 and 1) are reduced once
        when = ReductionTiming.MICRO if sharding.gradients else ReductionTiming.BOUNDARY
        pairs += [*several, (ParameterLifetime.HOLD, when), (ParameterLifetime.FREE, when)]
    elif sharding.gradients:
        pairs += [(None, ReductionTiming.MICRO)]
    fitting = [(held, when) for held, when in pairs if parameters in (None, held) and reduction in (None, when)]
    return [choose(sharding, held, when) for held, when in dict.fromkeys(fitting)]


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of one rank's part of the model: whole parameters, whole gradients, whole optimizer
    state, over ``ranks`` that share them."""

    parameters: int
    gradients: int
    optimizer: int
    ranks: int


def needed(policy: ZeroPolicy, weights: ModelBytes, rank: RankReport, chunks: int) -> int:
    """Return the most bytes that a rank holds in a step: shards, and full copies at the same time.
    Activations and messages are not counted."""
    sharding, ranks = policy.sharding, weights.ranks
    optimizer = weights.optimizer // ranks if sharding.optimizer else weights.optimizer
    parameters = weights.parameters
    if sharding.parameters:
        parameters = parameters // ranks + parameters * rank.peak_parameters // chunks
    gradients = weights.gradients
    if sharding.gradients:
        gradients = gradients // ranks + gradients * rank.peak_gradients // chunks
    return optimizer + parameters + gradients


@dataclass(frozen=True)
class PricedPolicy:
    """A policy with its price on the rank that needs most: bytes without activations, and elements
    moved as ``Policy.volume`` has them."""

    policy: ZeroPolicy
    bytes: int
    volume: float
    fits: bool = True


def choose_fitting(
    policies: Sequence[ZeroPolicy], price: Callable[[ZeroPolicy], tuple[int, float]], limit: int | None
) -> PricedPolicy:
    """Return the first policy that needs at most ``limit`` bytes; where none does, the one that
    needs least. ``price`` gives bytes and volume."""
    choices = [PricedPolicy(policy, *price(policy)) for policy in policies]
    fitting = next((choice for choice in choices if limit is None or choice.bytes <= limit), None)
    if fitting is not None:
        return fitting
    least = min(choices, key=lambda choice: choice.bytes)
    return replace(least, fits=False)
