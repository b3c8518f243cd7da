"""What a simulated schedule costs: its time, its bubble, and for each rank what lives and what moves. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zero_trial.pipeline.actions import Action


class Span(NamedTuple):
    """One computation with its begin and end."""

    begin: float
    end: float
    action: Action


@dataclass
class RankReport:
    """One rank's counts; `live` and the other peaks are largest numbers of things that exist at once.

    An activation is what one chunk keeps of one micro-batch from its forward until its last gradient. A parameter or gradient is one chunk's
    full copy. A waiting message has been sent to this rank and not been used yet, whoever keeps it.
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
        """All but the spans."""
        return {name: value for name, value in vars(self).items() if name != "spans"}


@dataclass(frozen=True)
class Report:
    """All ranks of a schedule that ran through."""

    ranks: tuple[RankReport, ...]

    @property
    def makespan(self) -> float:
        """From the first computation's begin to the last one's end."""
        return max((rank.spans[-1].end for rank in self.ranks if rank.spans), default=0)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they compute nothing."""
        total = self.makespan * len(self.ranks)
        return 1 - sum(rank.busy for rank in self.ranks) / total if total else 0.0

    def idle(self, rank: int) -> float:
        """Time in which a rank computes nothing."""
        return self.makespan - self.ranks[rank].busy

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        ranks = [{"rank": index, "idle": self.idle(index), **rank.counts()} for index, rank in enumerate(self.ranks)]
        return {"makespan": self.makespan, "bubble": self.bubble, "ranks": ranks}
