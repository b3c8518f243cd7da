"""Passes: from a schedule of computations to one with messages, sharding, reductions and the optimizer's step. Pure.

Each takes a schedule and returns one with more actions in its rows; none moves a computation.

    build("1f1b", 2, 2), rank 1              1F0 1B0                     1F1 1B1
    add_reduce, boundary                                                     1B1                   1REDUCE
    add_unshard_reshard, hold       1UNSHARD 1F0                             1B1          1RESHARD 1REDUCE
    add_send_recv          1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1   1B1 1SEND_B1 1RESHARD 1REDUCE
    add_step                                                                                              STEP
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from zero_trial.pipeline.actions import COMPUTE, Action, Kind
from zero_trial.pipeline.placement import Placement
from zero_trial.pipeline.schedule import Parameters, Reduction, Row, Schedule, ScheduleError

Channels = dict[tuple[int, int], deque[Action]]
"""(from rank, to rank) -> the receives of what is sent, in the order of sending."""


def lower(
    schedule: Schedule,
    *,
    parameters: Parameters | None = None,
    reduction: Reduction = Reduction.BOUNDARY,
    ties: Sequence[Sequence[int]] = (),
) -> Schedule:
    """All passes in their order; a schedule without backwards gets neither reductions nor a step.

    Messages come after sharding: so a gather is under way while its rank waits for a message, and a result is sent before its rank turns to
    freeing and reducing.
    """
    if schedule.training:
        schedule = add_reduce(schedule, reduction)
    if parameters is not None:
        schedule = add_unshard_reshard(schedule, parameters)
    schedule = add_send_recv(schedule)
    return add_step(add_tied_reduce(schedule, ties)) if schedule.training else schedule


def add_send_recv(schedule: Schedule) -> Schedule:
    """Each output and input gradient that another rank needs is sent right after it is computed, and received before it is needed.

    Receives between two ranks come in the order of the sends: a message that was sent before the one that is needed is received before it,
    and kept. So a channel needs no tags, and a receive never waits for more than the computation after it does.
    Price: one message per micro-batch for each border between chunks on different ranks, and as many back for training.
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


def _message(action: Action, place: Placement) -> tuple[Action, Action] | None:
    """The send and the receive that follow a computation, if another rank waits for its result."""
    kind, chunk, micro_batch, _ = action
    if kind is Kind.F and place.sends_forward(chunk):
        return Action(Kind.SEND_F, chunk, micro_batch), Action(Kind.RECV_F, chunk + 1, micro_batch)
    if (kind is Kind.B or kind is Kind.I) and place.sends_backward(chunk):
        return Action(Kind.SEND_B, chunk, micro_batch), Action(Kind.RECV_B, chunk - 1, micro_batch)
    return None


def _with_receives(row: Row, rank: int, place: Placement, channels: Channels) -> Iterator[Action]:
    received: set[Action] = set()
    for action in row:
        kind, chunk, micro_batch, _ = action
        source: int | None = None
        if kind is Kind.F and chunk > 0:
            source, wanted = place.ranks[chunk - 1], Action(Kind.RECV_F, chunk, micro_batch)
        elif (kind is Kind.B or kind is Kind.I) and chunk < place.last:
            source, wanted = place.ranks[chunk + 1], Action(Kind.RECV_B, chunk, micro_batch)
        if source is not None and source != rank:
            channel = channels.get((source, rank), deque())
            while wanted not in received:
                if not channel:
                    raise ScheduleError(
                        "nobody computes what this needs", where=f"rank {rank}, {action}", got=f"no send for {wanted}"
                    )
                message = channel.popleft()
                received.add(message)
                yield message
        yield action


def add_unshard_reshard(schedule: Schedule, parameters: Parameters) -> Schedule:
    """A chunk's parameters are gathered before it computes and freed after: for all of the step, for a run, or for one computation.

    A weight gradient counts as a computation that reads parameters, which holds for every way of cutting a backward in two.
    Price in gathers per chunk and step: HOLD 1; CHUNK its runs u (2 and, for the last chunk, 1 in looped breadth-first); FREE 2M, or 3M where
    input and weight gradients are apart. Each gather moves the chunk's parameters x (D-1)/D elements per rank.
    """
    rows = tuple(tuple(_sharded(row, parameters)) for row in schedule.rows)
    return replace(schedule, rows=rows, parameters=parameters)


def _sharded(row: Row, parameters: Parameters) -> Iterator[Action]:
    computes = [index for index, action in enumerate(row) if action.kind in COMPUTE]
    opens, closes = _lives(row, computes, parameters)
    for index, action in enumerate(row):
        if index in opens:
            yield Action(Kind.UNSHARD, action.chunk)
        yield action
        if index in closes:
            yield Action(Kind.RESHARD, action.chunk)


def _lives(row: Row, computes: Sequence[int], parameters: Parameters) -> tuple[set[int], set[int]]:
    """The computations of a row before which parameters are gathered, and those after which they are freed."""
    if parameters is Parameters.FREE:
        return set(computes), set(computes)
    if parameters is Parameters.HOLD:
        first = {row[index].chunk: index for index in reversed(computes)}
        last = {row[index].chunk: index for index in computes}
        return set(first.values()), set(last.values())
    turns = [(here, there) for here, there in pairwise(computes) if row[here].chunk != row[there].chunk]
    return {*computes[:1], *(there for _, there in turns)}, {*(here for here, _ in turns), *computes[-1:]}


def add_reduce(schedule: Schedule, reduction: Reduction) -> Schedule:
    """A chunk's gradients are reduced over the data-parallel ranks once they are complete: for the step, or for a micro-batch.

    Price in reductions per chunk and step: BOUNDARY 1, with its full gradients alive from its first backward to its last; MICRO M.
    """
    rows = tuple(tuple(_reduced(row, reduction)) for row in schedule.rows)
    return replace(schedule, rows=rows, reduction=reduction)


def _reduced(row: Row, reduction: Reduction) -> Iterator[Action]:
    completes = [index for index, action in enumerate(row) if action.kind is Kind.B or action.kind is Kind.W]
    last = set({row[index].chunk: index for index in completes}.values())
    for index, action in enumerate(row):
        yield action
        if action.kind is not Kind.B and action.kind is not Kind.W:
            continue
        if reduction is Reduction.MICRO:
            yield Action(Kind.REDUCE, action.chunk, action.micro_batch)
        elif index in last:
            yield Action(Kind.REDUCE, action.chunk)


def add_tied_reduce(schedule: Schedule, ties: Sequence[Sequence[int]]) -> Schedule:
    """Each weight that chunks on several ranks share gets the sum of its gradients there, after each rank has reduced its own.

    Only the shard that a rank owns is summed, so it moves 1/D of the weight. Ties come last in every row and in the same order, so that no
    two ranks wait for each other. Chunks of one rank share one parameter and need nothing.
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
                rows[rank].append(Action(Kind.TIED_REDUCE, chunk, tie=number))
    return replace(schedule, rows=tuple(map(tuple, rows)), ties=groups)


def tie_holders(tie: Sequence[int], place: Placement) -> dict[int, int]:
    """The ranks that hold a tied weight, each with its first chunk that does."""
    return {place.ranks[chunk]: chunk for chunk in sorted(tie, reverse=True)}


def add_step(schedule: Schedule) -> Schedule:
    """Every rank ends with the optimizer's step."""
    return replace(schedule, rows=tuple((*row, Action(Kind.STEP)) for row in schedule.rows), steps=True)
