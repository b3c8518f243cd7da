"""How a run ended, and what it has to show."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class End(Enum):
    """Why the loop was left."""

    COMPLETED = "completed"
    STOPPED = "stopped"  # the trial asked
    PREEMPTED = "preempted"  # the platform asked; the run can be resumed


@dataclass(frozen=True)
class Outcome:
    """The figures of a run that ended well.

    Training seconds and samples are this process's, without validation and saving.
    """

    end: End
    step: int
    total_steps: int
    train_seconds: float
    samples: int
    checkpoint: str | None
    initial_metrics: dict[str, Any] = field(default_factory=dict)
    final_metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.train_seconds if self.train_seconds > 0 else 0.0
