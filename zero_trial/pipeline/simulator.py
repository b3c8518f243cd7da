"""The simulator: finds deadlocks and wrong computations in a schedule before it runs. Pure.

A rank performs its actions in order. A send never waits. A receive waits until the message has been
sent, and messages between two ranks arrive in the order of the sends. A reduction of tied weights
waits for all ranks that hold them. Nothing else waits for other ranks: other reductions and gathers
run among data-parallel ranks, which all perform the same row. The result does not depend on the
order in which ranks run, so simulating one order finds every deadlock (a Kahn network is
deterministic; Kahn 1974).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zero_trial.errors import ConfigError
from zero_trial.pipeline.schedule import (
    COMPLETES,
    COMPUTE,
    NONE,
    RECEIVES,
    Action,
    ActionKind,
    ReductionTiming,
    Schedule,
    ScheduleError,
    tie_holders,
)


@dataclass(frozen=True)
class Costs:
    """Times of forward, input and weight gradient, and message; the first three usually equal."""

    forward: float = 1
    input_gradient: float = 1
    weight_gradient: float = 1
    message: float = 0

    def by_kind(self) -> dict[ActionKind, float]:
        """Return the cost of each computation."""
        return {
            ActionKind.F: self.forward,
            ActionKind.B: self.input_gradient + self.weight_gradient,
            ActionKind.I: self.input_gradient,
            ActionKind.W: self.weight_gradient,
        }


ALIKE = Costs()


# --- the report: time, bubble, and each rank's memory and traffic ---------------------------------


class Span(NamedTuple):
    """One computation with its start and end time."""

    begin: float
    end: float
    action: Action


@dataclass
class RankReport:
    """One rank's counts; a peak is the largest number that exists at the same time.

    An activation is the memory that one chunk keeps for one micro-batch from its forward to its
    last gradient. A parameter or gradient is one chunk's full copy.
    """

    spans: list[Span] = field(default_factory=list)
    peak_activations: int = 0
    peak_parameters: int = 0
    peak_gradients: int = 0
    gathers: int = 0
    reductions: int = 0
    messages: int = 0  # sent

    @property
    def busy(self) -> float:
        return sum(span.end - span.begin for span in self.spans)


@dataclass(frozen=True)
class SimulationReport:
    """All ranks of a completed schedule."""

    ranks: tuple[RankReport, ...]

    @property
    def makespan(self) -> float:
        """Return the time from the start of the first computation to the end of the last."""
        return max((rank.spans[-1].end for rank in self.ranks if rank.spans), default=0)

    @property
    def bubble(self) -> float:
        """Return the fraction of all ranks' time that is idle."""
        total = self.makespan * len(self.ranks)
        return 1 - sum(rank.busy for rank in self.ranks) / total if total else 0.0

    def idle(self, rank: int) -> float:
        """Return a rank's idle time."""
        return self.makespan - self.ranks[rank].busy

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        ranks = [{"rank": index, "idle": self.idle(index), **vars(rank)} for index, rank in enumerate(self.ranks)]
        for rank in ranks:
            del rank["spans"]
        return {"makespan": self.makespan, "bubble": self.bubble, "ranks": ranks}


# --- the actions of a rank, and their dependencies ------------------------------------------------


def _expected(schedule: Schedule, rank: int) -> Iterator[Action]:
    """Yield the actions that a rank must perform exactly once (all but gathers and frees)."""
    place = schedule.placement
    for chunk in place.of(rank):
        kinds = [ActionKind.F]
        kinds += [ActionKind.RECV_F] if place.sends_backward(chunk) else []
        kinds += [ActionKind.SEND_F] if place.sends_forward(chunk) else []
        if schedule.training:
            kinds += [ActionKind.I, ActionKind.W]
            kinds += [ActionKind.SEND_B] if place.sends_backward(chunk) else []
            kinds += [ActionKind.RECV_B] if place.sends_forward(chunk) else []
        kinds += [ActionKind.REDUCE] if schedule.reduction is ReductionTiming.MICRO else []
        for number in range(schedule.micro_batches):
            yield from (Action(kind, chunk, number) for kind in kinds)
        if schedule.reduction is ReductionTiming.BOUNDARY:
            yield Action(ActionKind.REDUCE, chunk)
    for number, tie in enumerate(schedule.ties):
        holders = tie_holders(tie, place)
        if len(holders) > 1 and rank in holders:
            yield Action(ActionKind.TIED_REDUCE, holders[rank], number)
    if schedule.reduction is not None:
        yield Action(ActionKind.STEP)


_BEFORE = {
    ActionKind.W: ActionKind.I,
    ActionKind.SEND_F: ActionKind.F,
    ActionKind.SEND_B: ActionKind.I,
    ActionKind.REDUCE: ActionKind.W,
}


class _Rank:
    """The state of one rank: its progress, completed actions, and what it holds in memory."""

    def __init__(self, index: int, schedule: Schedule) -> None:
        self.index = index
        self.schedule = schedule
        self.row = schedule.rows[index]
        self.at = 0
        self.clock = 0.0
        self.report = RankReport()
        self.expected = set(_expected(schedule, index))
        self.done: dict[Action, float] = {}  # with the time at which the result is ready
        self.live: set[tuple[int, int]] = set()  # chunk and micro-batch
        self.open: set[int] = set()
        self.full: dict[int, int] = {}  # chunk -> number of micro-batches with complete, unreduced gradients

    def fault(self, what: str, expected: object = None) -> ScheduleError:
        action = self.row[self.at] if self.at < len(self.row) else "the end"
        return ScheduleError(
            what, where=f"{self.schedule.name}, rank {self.index}, action {self.at}, {action}", expected=expected
        )

    def needs(self, action: Action) -> list[Action]:
        """Return the actions of this rank that must precede ``action``."""
        kind, chunk, number = action
        place = self.schedule.placement
        if kind in (ActionKind.F, ActionKind.B, ActionKind.I):
            forward = kind is ActionKind.F
            neighbor = chunk - 1 if forward else chunk + 1
            found = [] if forward else [Action(ActionKind.F, chunk, number)]
            if message := place.receive(action):
                found.append(message)
            elif 0 <= neighbor <= place.last:
                found.append(Action(ActionKind.F if forward else ActionKind.I, neighbor, number))
            return found
        if kind is ActionKind.TIED_REDUCE:
            tie = self.schedule.ties[number]
            return [each for each in self.expected if each.kind is ActionKind.REDUCE and each.chunk in tie]
        if kind is ActionKind.STEP:
            return [each for each in self.expected if each != action]
        before = _BEFORE.get(kind)
        return [Action(before, chunk, number)] if before is not None and number != NONE else []

    def perform(self, action: Action, cost: float) -> None:
        kind, chunk, number = action
        units = [action] if kind not in (ActionKind.UNSHARD, ActionKind.RESHARD) else []
        if kind is ActionKind.B:
            units = [Action(ActionKind.I, chunk, number), Action(ActionKind.W, chunk, number)]
        for unit in units:
            if unit not in self.expected or unit in self.done:
                raise self.fault("this action was already done, or does not belong to this rank's step")
        needed = self.needs(action)
        if missing := [each for each in needed if each not in self.done]:
            raise self.fault("a prerequisite of this action has not been done", expected=missing[0])
        ready = max((self.done[each] for each in needed), default=0.0)
        if kind in COMPUTE:
            if self.schedule.parameters is not None and chunk not in self.open:
                raise self.fault("the chunk's parameters are not gathered")
            begin = max(self.clock, ready)
            self.clock = ready = begin + cost
            self.report.spans.append(Span(begin, ready, action))
        for unit in units:
            self.done[unit] = ready
        self._count(kind, chunk, number)

    def _count(self, kind: ActionKind, chunk: int, number: int) -> None:
        """Update what the rank holds after an action, and the report."""
        report, schedule = self.report, self.schedule
        if kind is ActionKind.F and schedule.training:
            self.live.add((chunk, number))
            report.peak_activations = max(report.peak_activations, len(self.live))
        elif kind in COMPLETES:
            self.live.discard((chunk, number))
            self.full[chunk] = self.full.get(chunk, 0) + 1
            report.peak_gradients = max(report.peak_gradients, len(self.full))
        elif kind is ActionKind.UNSHARD:
            if schedule.parameters is None or chunk in self.open:
                raise self.fault("the chunk's parameters are already gathered")
            self.open.add(chunk)
            report.gathers += 1
            report.peak_parameters = max(report.peak_parameters, len(self.open))
        elif kind is ActionKind.RESHARD:
            if chunk not in self.open:
                raise self.fault("the chunk's parameters are not gathered")
            self.open.remove(chunk)
        elif kind is ActionKind.REDUCE:
            wanted = schedule.micro_batches if number == NONE else 1
            if self.full.pop(chunk, 0) != wanted:
                raise self.fault("the gradients to reduce", expected=f"those of {wanted} micro-batches")
            report.reductions += 1
        elif kind is ActionKind.SEND_F or kind is ActionKind.SEND_B:
            report.messages += 1
        elif kind is ActionKind.STEP and self.at != len(self.row) - 1:
            raise self.fault("the step is the last action")

    def finish(self) -> None:
        """Check the final state of a rank that has performed its row."""
        if missing := self.expected - self.done.keys():
            raise self.fault("an action is missing", expected=min(missing))
        if self.open:
            raise self.fault("parameters stay gathered")


# --- all ranks ------------------------------------------------------------------------------------


def validate(schedule: Schedule, costs: Costs = ALIKE) -> SimulationReport:
    """Simulate the lowered schedule and return its costs. Raises ScheduleError, with rank, position
    and action, if

    - a rank deadlocks, or a message overtakes another;
    - an action is missing, is repeated, does not belong to the rank, or precedes what it depends
      on: its input, its output's gradient, its parameters, or complete gradients.
    """
    place, by_kind = schedule.placement, costs.by_kind()
    ranks = [_Rank(index, schedule) for index in range(schedule.stages)]
    channels: dict[tuple[int, int], deque[tuple[Action, float]]] = defaultdict(deque)
    holders = [len(tie_holders(tie, place)) for tie in schedule.ties]
    arrived: list[set[int]] = [set() for _ in schedule.ties]

    def step(rank: _Rank, action: Action) -> bool:
        """Perform an action unless it must wait."""
        kind, _, number = action
        if kind in RECEIVES:
            source = place.ranks[action.other_end.chunk]
            if not (channel := channels[source, rank.index]):
                return False
            message, sent = channel.popleft()
            if message != action:
                raise rank.fault(f"{message} of rank {source} arrives first")
            rank.perform(action, 0)
            rank.done[action] = sent + costs.message
            return True
        if kind is ActionKind.TIED_REDUCE:
            arrived[number].add(rank.index)
            if len(arrived[number]) < holders[number]:
                return False
        rank.perform(action, by_kind.get(kind, 0))
        if kind is ActionKind.SEND_F or kind is ActionKind.SEND_B:
            message = action.other_end
            channels[rank.index, place.ranks[message.chunk]].append((message, rank.done[action]))
        return True

    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while rank.at < len(rank.row) and step(rank, rank.row[rank.at]):
                rank.at += 1
                moved = True
    if waiting := [rank for rank in ranks if rank.at < len(rank.row)]:
        text = "; ".join(f"rank {rank.index} at action {rank.at}, {rank.row[rank.at]}" for rank in waiting)
        raise ScheduleError("deadlock: ranks wait forever", where=schedule.name, got=text)
    for rank in ranks:
        rank.finish()
    return SimulationReport(tuple(rank.report for rank in ranks))


# --- the picture of a report: a row per rank and a column per unit of time ------------------------
#
#     rank 0  F0 F1 .  .  B0 -  F2 B1 -  .  B2 -
#     rank 1  .  F0 B0 -  F1 B1 -  F2 B2 -  .  .
#
# ``.`` is idle, ``-`` continues an action that is longer than one unit. With several chunks per
# rank an action is prefixed with its chunk: ``2F0``.


def grid(report: SimulationReport) -> str:
    """Draw a report. Raises ConfigError if its costs are not whole numbers."""
    chunks = any(len({span.action.chunk for span in rank.spans}) > 1 for rank in report.ranks)
    rows = [_cells(rank, int(report.makespan), chunks) for rank in report.ranks]
    width = max((len(cell) for row in rows for cell in row), default=1)
    head = len(f"rank {len(rows) - 1}")
    return "\n".join(
        f"{f'rank {index}':<{head}}  {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for index, row in enumerate(rows)
    )


def rows_as_text(schedule: Schedule) -> str:
    """Return every action of every rank, including messages and sharding, in row order."""
    return "\n".join(f"rank {index}  {' '.join(map(str, row))}" for index, row in enumerate(schedule.rows))


def _cells(rank: RankReport, columns: int, chunks: bool) -> list[str]:
    cells = ["."] * columns
    for begin, end, action in rank.spans:
        if begin != int(begin) or end != int(end):
            raise ConfigError("a grid needs integer times", where="schedule", got=(begin, end))
        label = str(action) if chunks else f"{action.kind.value}{action.micro_batch}"
        cells[int(begin) : int(end)] = [label, *["-"] * int(end - begin - 1)]
    return cells
