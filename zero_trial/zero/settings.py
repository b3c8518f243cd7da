"""What ds_config says about how a model is sharded: sizes, blocks, and how gradients travel."""

from __future__ import annotations

from dataclasses import dataclass, field

from zero_trial.zero.gatherer import LiveLimits
from zero_trial.zero.partition import LeafRules, Limits


@dataclass(frozen=True)
class ShardingSettings:
    """``wire_scale`` multiplies gradients before their sum; ``overlap``: units are reduced while others still compute."""

    limits: Limits = field(default_factory=Limits)
    live: LiveLimits = field(default_factory=LiveLimits)
    leaf: LeafRules = field(default_factory=LeafRules)
    wire_scale: float = 1.0
    overlap: bool = True

    @property
    def in_flight(self) -> int:
        """How many units' reductions may be under way at once."""
        return 2 if self.overlap else 0
