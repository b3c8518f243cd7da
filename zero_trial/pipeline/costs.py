"""What one chunk's computation of one micro-batch costs, in any unit of time."""

from __future__ import annotations

from dataclasses import dataclass

from zero_trial.pipeline.actions import Kind


@dataclass(frozen=True)
class Costs:
    """Forward, input gradient, weight gradient and message. The usual rule of thumb has the first three alike and messages hidden."""

    forward: float = 1
    input_gradient: float = 1
    weight_gradient: float = 1
    message: float = 0

    def by_kind(self) -> dict[Kind, float]:
        """The cost of each computation."""
        return {
            Kind.F: self.forward,
            Kind.B: self.input_gradient + self.weight_gradient,
            Kind.I: self.input_gradient,
            Kind.W: self.weight_gradient,
        }


ALIKE = Costs()
