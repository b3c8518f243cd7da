"""The lifetime table of a ZeRO stage: how long the full copy of each thing lives. Pure.

| ZeRO stage | full parameters live         | full gradients live | master weights and moments |
| ---------- | ---------------------------- | ------------------- | -------------------------- |
| 0          | always                       | always              | whole on every rank        |
| 1          | always                       | always              | one shard per rank         |
| 2          | always                       | until reduced       | one shard per rank         |
| 3          | while their group computes   | until reduced       | one shard per rank         |

Gradients that always live keep one buffer, which every step fills anew.

Traffic per optimizer step, in elements per rank, N ranks on the shard axis, Psi parameters, g
micro-batches (Rajbhandari et al. 2020, section 7):

    stage 0          2 r Psi (N-1)/N              r = 1 when reduced at the boundary, g when at
                                                  every micro-batch
    stages 1, 2      (1 + r) Psi (N-1)/N
    stage 3          (a + r) Psi (N-1)/N          a = 1 when parameters are kept for the step, up to
                                                  2g when freed after every use

Code that trains decides by the plan, not by the stage's number. The number is used where a file or
a user names it: reading DeepSpeed's checkpoints, comparing the stages in a memory plan, options and
messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zero_trial.errors import ConfigError


class Lifetime(Enum):
    """How long the full copy of something lives."""

    ALWAYS = "always"  # from construction to the end
    USE = "use"  # parameters: while their group computes; gradients: until they are reduced


class ReduceAt(Enum):
    """When gradients cross the wire."""

    BOUNDARY = "boundary"  # once per optimizer step, after the last micro-batch
    MICRO = "micro"  # after every micro-batch


class Reshard(Enum):
    """When parameters that do not always live are freed."""

    WITHIN_LIMITS = "auto"  # kept while max_live_parameters and max_reuse_distance allow
    AFTER_FORWARD = "forward"  # after every forward and every backward of their group
    AFTER_STEP = "step"  # kept until the optimizer step
    # gathered and freed by a schedule's actions, manual group by manual group
    SCHEDULED = "scheduled"


@dataclass(frozen=True)
class ZeroPlan:
    """How long the full copy of each thing lives, and when it is exchanged."""

    shard_optimizer: bool
    params: Lifetime
    grads: Lifetime
    reduce_at: ReduceAt
    reshard: Reshard = Reshard.WITHIN_LIMITS

    def persistent(self) -> ZeroPlan:
        """Return the plan for parameters too small to be worth freeing: always live, otherwise the
        same."""
        return ZeroPlan(self.shard_optimizer, Lifetime.ALWAYS, self.grads, self.reduce_at, self.reshard)

    def scheduled(self, *, reduce_at: ReduceAt) -> ZeroPlan:
        """Return the plan for a schedule that gathers, frees and reduces."""
        return ZeroPlan(self.shard_optimizer, self.params, self.grads, reduce_at, Reshard.SCHEDULED)

    @property
    def frees_parameters(self) -> bool:
        """Whether full parameters do not always live."""
        return self.params is not Lifetime.ALWAYS

    @property
    def cuts(self) -> tuple[bool, bool, bool]:
        """Whether optimizer state, gradients and parameters are cut into shards between uses."""
        return self.shard_optimizer, self.grads is Lifetime.USE, self.frees_parameters

    @property
    def frees_memory(self) -> bool:
        """Whether some full copies are freed and allocated again in every step."""
        return Lifetime.USE in (self.params, self.grads)

    @property
    def reduces_every_micro_batch(self) -> bool:
        return self.reduce_at is ReduceAt.MICRO

    def describe(self) -> str:
        state = "one shard per rank" if self.shard_optimizer else "whole on every rank"
        return (
            f"parameters live {self.params.value}, gradients {'until reduced' if self.grads is Lifetime.USE else 'always'} "
            f"(reduced at {self.reduce_at.value}), optimizer state {state}"
        )


_STAGES = {
    0: ZeroPlan(False, Lifetime.ALWAYS, Lifetime.ALWAYS, ReduceAt.BOUNDARY),
    1: ZeroPlan(True, Lifetime.ALWAYS, Lifetime.ALWAYS, ReduceAt.BOUNDARY),
    2: ZeroPlan(True, Lifetime.ALWAYS, Lifetime.USE, ReduceAt.BOUNDARY),
    3: ZeroPlan(True, Lifetime.USE, Lifetime.USE, ReduceAt.MICRO),
}


def plan_for_stage(stage: int, *, reduce_every: str = "auto", reshard_after: str = "auto") -> ZeroPlan:
    """Return the plan of a ZeRO stage; ``reduce_every`` (auto, micro, boundary) and
    ``reshard_after`` (auto, forward, step) override its choices.

    At the boundary, stage 2 keeps the full gradients of an accumulation until its end and moves 2
    Psi instead of (g+1) Psi; with one micro-batch per step both are the same.
    """
    if stage not in _STAGES:
        raise ConfigError("no such ZeRO stage", where="zero_optimization.stage", got=stage, expected="0, 1, 2 or 3")
    plan = _STAGES[stage]
    return ZeroPlan(
        plan.shard_optimizer,
        plan.params,
        plan.grads,
        plan.reduce_at if reduce_every == "auto" else _choice(ReduceAt, reduce_every, "zero_optimization.reduce_every"),
        plan.reshard if reshard_after == "auto" else _choice(Reshard, reshard_after, "zero_optimization.reshard_after"),
    )


def _choice(kind: type[ReduceAt] | type[Reshard], value: str, where: str):  # type: ignore[no-untyped-def]
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(["auto", *(member.value for member in kind if member.value not in ("auto", "scheduled"))])
        raise ConfigError("unknown choice", where=where, got=repr(value), expected=f"one of {allowed}") from None
