"""The simulator: all ranks of a schedule are run through, and what would hang or compute something
wrong is found before anything runs. Pure.

A rank performs its actions in order. A send never waits. A receive waits until the message has been
sent, and messages between two ranks arrive in the order of the sends; a reduction of tied weights
waits for all that hold them; nothing else waits for other ranks, since reductions and gathers are
among data-parallel ranks, which all perform the same row. Whatever order such ranks take in
reality, they come to the same end: so one order is enough to find every deadlock (a Kahn network is
determinate; Kahn 1974).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from zero_trial.pipeline.schedule import (
    COMPUTE,
    Action,
    ActionKind,
    ReductionTiming,
    Schedule,
    ScheduleError,
    tie_holders,
)


@dataclass(frozen=True)
class Costs:
    """Forward, input gradient, weight gradient and message. The usual rule of thumb has the first
    three alike and messages hidden."""

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


# --- the report: time, bubble, and for each rank what lives and what moves ------------------------


class Span(NamedTuple):
    """One computation with its begin and end."""

    begin: float
    end: float
    action: Action


@dataclass
class RankReport:
    """One rank's counts; `live` and the other peaks are largest numbers of things that exist at
    once.

    An activation is what one chunk keeps of one micro-batch from its forward until its last
    gradient. A parameter or gradient is one chunk's full copy. A waiting message has been sent to
    this rank and not been used yet.
    """

    spans: list[Span] = field(default_factory=list)
    peak_activations: int = 0
    peak_parameters: int = 0
    peak_gradients: int = 0
    peak_waiting: int = 0
    gathers: int = 0
    reductions: int = 0
    tied_reductions: int = 0
    messages: int = 0  # sent

    @property
    def busy(self) -> float:
        return sum(span.end - span.begin for span in self.spans)

    def counts(self) -> dict[str, int]:
        """Return all fields but the spans."""
        return {name: value for name, value in vars(self).items() if name != "spans"}


@dataclass(frozen=True)
class SimulationReport:
    """All ranks of a schedule that ran through."""

    ranks: tuple[RankReport, ...]

    @property
    def makespan(self) -> float:
        """Return the time from the first computation's begin to the last one's end."""
        return max((rank.spans[-1].end for rank in self.ranks if rank.spans), default=0)

    @property
    def bubble(self) -> float:
        """Return the part of all ranks' time in which they compute nothing."""
        total = self.makespan * len(self.ranks)
        return 1 - sum(rank.busy for rank in self.ranks) / total if total else 0.0

    def idle(self, rank: int) -> float:
        """Return the time in which a rank computes nothing."""
        return self.makespan - self.ranks[rank].busy

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        ranks = [{"rank": index, "idle": self.idle(index), **rank.counts()} for index, rank in enumerate(self.ranks)]
        return {"makespan": self.makespan, "bubble": self.bubble, "ranks": ranks}


# --- one rank: how far it is, what it has, and what each action needs to be there -----------------


Item = tuple[int, int]
"""(chunk, micro-batch)."""


class SimulatedRank:
    """One rank: how far it is, what it has, and the table kind -> what happens."""

    def __init__(self, index: int, world: _Simulation, costs: dict[ActionKind, float]) -> None:
        schedule = world.schedule
        self.index = index
        self.world = world
        self.place = schedule.placement
        self.row = schedule.rows[index] if index < len(schedule.rows) else ()
        self.at = 0
        self.clock = 0.0
        self.costs = costs
        self.report = RankReport()
        self.sharded = schedule.parameters is not None
        self.mine = set(self.place.of(index))
        self.done: dict[
            Action, float
        ] = {}  # computations, with the time of their end; receives, with the time of the send
        self.live: set[Item] = set()
        self.waiting: set[Action] = set()
        # +1 when a message is sent here, -1 when it is used
        self.stays: list[tuple[float, int]] = []
        self.open: set[int] = set()
        # chunk -> micro-batches whose gradients are there and not reduced
        self.full: dict[int, int] = {}
        self.reduced: dict[int, int] = {}  # chunk -> micro-batches whose gradients are reduced
        self.tied: set[int] = set()
        self._perform: dict[ActionKind, Callable[[Action], bool]] = {
            ActionKind.F: self.forward,
            ActionKind.B: self.backward,
            ActionKind.I: self.backward,
            ActionKind.W: self.weights,
            ActionKind.SEND_F: self.send,
            ActionKind.SEND_B: self.send,
            ActionKind.RECV_F: self.receive,
            ActionKind.RECV_B: self.receive,
            ActionKind.UNSHARD: self.unshard,
            ActionKind.RESHARD: self.reshard,
            ActionKind.REDUCE: self.reduce,
            ActionKind.TIED_REDUCE: self.tied_reduce,
            ActionKind.STEP: self.step,
        }

    @property
    def action(self) -> Action | None:
        """Return the next action; None at the end of the row."""
        return self.row[self.at] if self.at < len(self.row) else None

    def advance(self) -> bool:
        """Perform actions until one has to wait; return whether there was any."""
        before = self.at
        while self.at < len(self.row):
            action = self.row[self.at]
            if action.kind is not ActionKind.STEP and action.chunk not in self.mine:
                raise self.fault("the chunk is on another rank", expected=f"one of {sorted(self.mine)}")
            if not self._perform[action.kind](action):
                break
            self.at += 1
        return self.at > before

    def fault(self, what: str, **facts: object) -> ScheduleError:
        where = f"{self.world.schedule.name}, rank {self.index}, action {self.at}, {self.action}"
        return ScheduleError(what, where=where, got=facts.get("got"), expected=facts.get("expected"))

    # Computations. Each starts when the rank is free and what it needs is there.

    def compute(self, action: Action, ready: float, sent: float | None = None) -> bool:
        if action in self.done:
            raise self.fault("this was computed before")
        if not 0 <= action.micro_batch < self.world.schedule.micro_batches:
            raise self.fault("no such micro-batch", expected=f"0 to {self.world.schedule.micro_batches - 1}")
        if self.sharded and action.chunk not in self.open:
            raise self.fault("the chunk's parameters are not gathered")
        begin = max(self.clock, ready)
        self.clock = self.done[action] = begin + self.costs[action.kind]
        self.report.spans.append(Span(begin, self.clock, action))
        if sent is not None:
            self.stays += ((sent, 1), (begin, -1))
        return True

    def take(self, message: Action) -> float:
        """Use a received message; return when it was sent."""
        if message not in self.done:
            raise self.fault("what this needs has not been received", expected=message)
        self.waiting.discard(message)
        return self.done[message]

    def own(self, *results: Action) -> float:
        """Return when one of these computations of this rank ended."""
        for result in results:
            if result in self.done:
                return self.done[result]
        raise self.fault("what this needs has not been computed", expected=results[0])

    def forward(self, action: Action) -> bool:
        _, chunk, micro_batch, _ = action
        ready, sent = 0.0, None
        if self.place.sends_backward(chunk):  # its input is another rank's output
            sent = self.take(Action(ActionKind.RECV_F, chunk, micro_batch))
            ready = sent + self.world.message_cost
        elif chunk > 0:
            ready = self.own(Action(ActionKind.F, chunk - 1, micro_batch))
        if self.world.schedule.training:
            self.live.add((chunk, micro_batch))
            self.report.peak_activations = max(self.report.peak_activations, len(self.live))
        return self.compute(action, ready, sent)

    def backward(self, action: Action) -> bool:
        kind, chunk, micro_batch, _ = action
        ready = self.own(Action(ActionKind.F, chunk, micro_batch))
        if Action(ActionKind.I if kind is ActionKind.B else ActionKind.B, chunk, micro_batch) in self.done:
            raise self.fault("the input's gradient was computed before")
        sent = None
        if self.place.sends_forward(chunk):  # its output's gradient comes from another rank
            sent = self.take(Action(ActionKind.RECV_B, chunk, micro_batch))
            ready = max(ready, sent + self.world.message_cost)
        elif chunk < self.place.last:
            ready = max(
                ready,
                self.own(Action(ActionKind.I, chunk + 1, micro_batch), Action(ActionKind.B, chunk + 1, micro_batch)),
            )
        self.compute(action, ready, sent)
        if kind is ActionKind.B:
            self.complete(chunk, micro_batch)
        return True

    def weights(self, action: Action) -> bool:
        _, chunk, micro_batch, _ = action
        self.compute(action, self.own(Action(ActionKind.I, chunk, micro_batch)))
        self.complete(chunk, micro_batch)
        return True

    def complete(self, chunk: int, micro_batch: int) -> None:
        """Note that all gradients of a micro-batch are complete, and free its activations."""
        self.live.discard((chunk, micro_batch))
        if chunk in self.reduced and self.world.schedule.reduction is ReductionTiming.BOUNDARY:
            raise self.fault("the chunk's gradients have been reduced already")
        self.full[chunk] = self.full.get(chunk, 0) + 1
        self.report.peak_gradients = max(self.report.peak_gradients, len(self.full))

    # Messages.

    def send(self, action: Action) -> bool:
        kind, chunk, micro_batch, _ = action
        forward = kind is ActionKind.SEND_F
        if not (self.place.sends_forward(chunk) if forward else self.place.sends_backward(chunk)):
            raise self.fault("no other rank waits for this")
        if forward:
            ready, message = (
                self.own(Action(ActionKind.F, chunk, micro_batch)),
                Action(ActionKind.RECV_F, chunk + 1, micro_batch),
            )
        else:
            ready = self.own(Action(ActionKind.I, chunk, micro_batch), Action(ActionKind.B, chunk, micro_batch))
            message = Action(ActionKind.RECV_B, chunk - 1, micro_batch)
        channel = self.world.channels.setdefault((self.index, self.place.ranks[message.chunk]), deque())
        channel.append((message, ready))
        self.report.messages += 1
        return True

    def receive(self, action: Action) -> bool:
        forward = action.kind is ActionKind.RECV_F
        if not (self.place.sends_backward(action.chunk) if forward else self.place.sends_forward(action.chunk)):
            raise self.fault("no other rank sends this")
        source = self.place.ranks[action.chunk - 1 if forward else action.chunk + 1]
        channel = self.world.channels.get((source, self.index))
        if not channel:
            return False
        message, sent = channel.popleft()
        if message != action:
            raise self.fault(f"another message of rank {source} comes first", got=message)
        self.done[action] = sent
        self.waiting.add(action)
        return True

    # Sharding.

    def unshard(self, action: Action) -> bool:
        if not self.sharded or action.chunk in self.open:
            raise self.fault("the chunk's parameters are there already")
        self.open.add(action.chunk)
        self.report.gathers += 1
        self.report.peak_parameters = max(self.report.peak_parameters, len(self.open))
        return True

    def reshard(self, action: Action) -> bool:
        if action.chunk not in self.open:
            raise self.fault("the chunk's parameters are not gathered")
        self.open.remove(action.chunk)
        return True

    def reduce(self, action: Action) -> bool:
        schedule = self.world.schedule
        whole = action.micro_batch < 0
        if schedule.reduction is not (ReductionTiming.BOUNDARY if whole else ReductionTiming.MICRO):
            raise self.fault("the schedule reduces otherwise", expected=schedule.reduction)
        if not whole:
            self.own(
                Action(ActionKind.W, action.chunk, action.micro_batch),
                Action(ActionKind.B, action.chunk, action.micro_batch),
            )
        there = self.full.pop(action.chunk, 0)
        wanted = schedule.micro_batches if whole else 1
        if there != wanted:
            raise self.fault("the gradients to reduce", got=f"those of {there} micro-batches", expected=wanted)
        self.reduced[action.chunk] = self.reduced.get(action.chunk, 0) + there
        self.report.reductions += 1
        return True

    def tied_reduce(self, action: Action) -> bool:
        world, number = self.world, action.tie
        if not 0 <= number < len(world.holders) or len(world.holders[number]) < 2 or number in self.tied:
            raise self.fault("no such tie between ranks, or a second time")
        for chunk in self.mine.intersection(world.schedule.ties[number]):
            if self.reduced.get(chunk) != world.schedule.micro_batches:
                raise self.fault(f"chunk {chunk}'s gradients are not reduced")
        arrived = world.arrived[number]
        arrived.add(self.index)
        if arrived != world.holders[number]:
            return False
        self.tied.add(number)
        self.report.tied_reductions += 1
        return True

    def step(self, action: Action) -> bool:
        if self.at != len(self.row) - 1 or not self.world.schedule.steps:
            raise self.fault("the step is the last action of a training schedule")
        return True

    def finish(self) -> None:
        """Check what must be true of a rank that has performed its row."""
        schedule = self.world.schedule
        self.report.peak_waiting = max(
            accumulate(change for _, change in sorted(self.stays, key=lambda stay: (stay[0], -stay[1]))), default=0
        )
        kinds = (ActionKind.F, ActionKind.B) if schedule.training else (ActionKind.F,)
        for chunk in sorted(self.mine):
            for micro_batch in range(schedule.micro_batches):
                for kind in kinds:
                    self._expect_computed(Action(kind, chunk, micro_batch))
            if schedule.reduction is not None and self.reduced.get(chunk) != schedule.micro_batches:
                raise self.fault(
                    "not all gradients are reduced", got=f"chunk {chunk}", expected=schedule.reduction.value
                )
        if self.open:
            raise self.fault("parameters stay gathered", got=f"chunks {sorted(self.open)}")
        if self.waiting:
            raise self.fault("a received message is never used", got=min(self.waiting))
        missing = [
            n
            for n, ranks in enumerate(self.world.holders)
            if len(ranks) > 1 and self.index in ranks and n not in self.tied
        ]
        if missing:
            raise self.fault("tied weights are not reduced", got=f"ties {missing}")
        if schedule.steps and (not self.row or self.row[-1].kind is not ActionKind.STEP):
            raise self.fault("the step is missing")
        strangers = [action for action in self.done if action.kind in COMPUTE and action.kind is not ActionKind.F]
        if strangers and not schedule.training:
            raise self.fault("a schedule that does not train has a backward", got=strangers[0])

    def _expect_computed(self, action: Action) -> None:
        kind, chunk, micro_batch, _ = action
        if action in self.done:
            return
        if (
            kind is ActionKind.B and Action(ActionKind.W, chunk, micro_batch) in self.done
        ):  # and I before it, or it could not have been
            return
        raise self.fault("a computation is missing", expected=action)


# --- all ranks ------------------------------------------------------------------------------------


def validate(
    schedule: Schedule, costs: Costs = ALIKE, *, max_activations: int | None = None, max_waiting: int | None = None
) -> SimulationReport:
    """Simulate the lowered schedule and return its costs. Raises ScheduleError, naming rank, place
    and action, if

    - a rank waits forever, or a message is lost or overtaken by another;
    - a computation is missing, comes twice, or comes before what it needs: its input, its output's
      gradient, its parameters;
    - gradients are not reduced, reduced twice or before they are complete; a tied weight or a step
      is missing;
    - a rank holds more than ``max_activations`` activations, or ``max_waiting`` received messages,
      at once.
    """
    ranks = _Simulation(schedule, costs).run()
    report = SimulationReport(tuple(rank.report for rank in ranks))
    for index, rank in enumerate(report.ranks):
        for what, got, limit in (
            ("activations", rank.peak_activations, max_activations),
            ("waiting messages", rank.peak_waiting, max_waiting),
        ):
            if limit is not None and got > limit:
                raise ScheduleError(
                    f"too many {what} at once",
                    where=f"{schedule.name}, rank {index}",
                    got=got,
                    expected=f"at most {limit}",
                )
    return report


class _Simulation:
    """The ranks, the channels between them, and the loop that lets each go as far as it can."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.message_cost = costs.message
        self.channels: dict[tuple[int, int], deque[tuple[Action, float]]] = {}
        self.arrived: dict[int, set[int]] = {number: set() for number in range(len(schedule.ties))}
        self.holders = [set(tie_holders(tie, schedule.placement)) for tie in schedule.ties]
        self.ranks = [SimulatedRank(index, self, costs.by_kind()) for index in range(schedule.stages)]

    def run(self) -> list[SimulatedRank]:
        if len(self.schedule.rows) != len(self.ranks):
            raise ScheduleError(
                "a row per rank is needed",
                where=self.schedule.name,
                got=len(self.schedule.rows),
                expected=len(self.ranks),
            )
        # Each must be tried, whether or not one before it has moved.
        while any([rank.advance() for rank in self.ranks]):  # noqa: C419
            pass
        waiting = [rank for rank in self.ranks if rank.action is not None]
        if waiting:
            raise ScheduleError(
                "deadlock",
                where=self.schedule.name,
                got="; ".join(
                    f"rank {rank.index} waits forever at action {rank.at}, {rank.action}" for rank in waiting
                ),
            )
        for rank in self.ranks:
            rank.finish()
        for (source, target), channel in self.channels.items():
            if channel:
                raise ScheduleError(
                    "a message is never received",
                    where=f"{self.schedule.name}, rank {target}",
                    got=f"{channel[0][0]} from rank {source}",
                )
        return self.ranks
