"""Validation: all ranks of a schedule are simulated, and what would hang or go wrong is said before anything runs. Pure.

A rank performs its actions in order. A send never waits. A receive waits until the message has been sent, and messages between two ranks
arrive in the order of the sends; a reduction of tied weights waits for all that hold them; nothing else waits for other ranks, since
reductions and gathers are among data-parallel ranks, which all perform the same row. Whatever order such ranks take in reality, they come to
the same end: so one order is enough to find every deadlock (a Kahn network is determinate; Kahn 1974).
"""

from __future__ import annotations

from collections import deque

from zero_trial.pipeline.actions import Action
from zero_trial.pipeline.costs import ALIKE, Costs
from zero_trial.pipeline.passes import tie_holders
from zero_trial.pipeline.report import Report
from zero_trial.pipeline.schedule import Schedule, ScheduleError
from zero_trial.pipeline.simulated_rank import SimulatedRank


def validate(
    schedule: Schedule, costs: Costs = ALIKE, *, max_activations: int | None = None, max_waiting: int | None = None
) -> Report:
    """What the lowered schedule costs. Raises ScheduleError, naming rank, place and action, if

    - a rank waits for ever, or a message is lost or overtaken by another;
    - a computation is missing, comes twice, or comes before what it needs: its input, its output's gradient, its parameters;
    - gradients are not reduced, reduced twice or before they are complete; a tied weight or a step is missing;
    - a rank holds more than ``max_activations`` activations, or ``max_waiting`` received messages, at once.
    """
    ranks = _Simulation(schedule, costs).run()
    report = Report(tuple(rank.report for rank in ranks))
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
                    f"rank {rank.index} waits for ever at action {rank.at}, {rank.action}" for rank in waiting
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
