"""The lifetime table of a ZeRO stage: how long each full copy lives, and where parameters are
between uses. Pure.

| ZeRO stage | full parameters live         | full gradients live | master weights and moments |
| ---------- | ---------------------------- | ------------------- | -------------------------- |
| 0          | always                       | always              | whole on every rank        |
| 1          | always                       | always              | one shard per rank         |
| 2          | always                       | until reduced       | one shard per rank         |
| 3          | while their group computes   | until reduced       | one shard per rank         |

Gradients that always live keep one buffer, which every step fills again.

Parameters that are offloaded live only while their group computes, at every stage. Between uses
their home stores this rank's shard at stage 3, and the full copy at stages 0 to 2: then a use needs
no communication, and the update's all-gather is stored in the home.

Traffic per optimizer step, in elements per rank, N ranks on the shard axis, Psi parameters, g
micro-batches (Rajbhandari et al. 2020, section 7):

    stage 0          2 r Psi (N-1)/N              r = 1 if reduced at the boundary, g if at
                                                  every micro-batch
    stages 1, 2      (1 + r) Psi (N-1)/N
    stage 3          (a + r) Psi (N-1)/N          a = 1 if parameters are kept for the step, up to
                                                  2g when freed after every use

Offloaded parameters add no traffic between ranks. Each step a rank reads a Psi elements from its
home at stages 0 to 2 and a Psi/N at stage 3, and writes the updated values once.

Training code depends on the plan, not on the stage's number. The number is only used if a file or a
user specifies it: to read DeepSpeed's checkpoints, to compare stages in a memory plan, in
options and messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from zero_trial.errors import ConfigError

if TYPE_CHECKING:
    import torch


class Lifetime(Enum):
    """How long the full copy of something lives."""

    ALWAYS = "always"  # from construction to the end
    USE = "use"  # parameters: while their group computes; gradients: until they are reduced


class Home(Enum):
    """Where the values of parameters that do not always live are between uses."""

    DEVICE = "device"  # in the memory of the device that computes
    HOST = "cpu"  # in the host's memory, of a rank that computes on another device
    NVME = "nvme"  # in a file of this rank

    @classmethod
    def of(cls, device: str, wanted: str) -> Home:
        """Return the home for ``wanted`` (none, cpu, nvme) on a rank that uses ``device``."""
        return cls.DEVICE if wanted in ("none", device) else cls(wanted)


class OffloadedShard(Protocol):
    """A group's home outside of the device: its shard or full copy, changed only in updates."""

    def start_read(self) -> bool:
        """Start to read the values, which are needed soon, if a buffer is free. Return whether an
        earlier call has started the read."""
        ...

    def read_ahead(self) -> bool:
        """Start to read the values for a later use; return whether more buffers are free."""
        ...

    def fetch(self, into: torch.Tensor) -> None:
        """Read all values into ``into``; device work that is launched afterwards sees them."""
        ...

    def fetch_part(self, into: torch.Tensor, low: int) -> None:
        """Read the values from element ``low`` on into ``into``, after an update."""
        ...

    def store(self, values: torch.Tensor) -> None:
        """Replace all values with ``values``, which may be overwritten when this returns."""
        ...

    def forget(self) -> None:
        """Drop values that were read ahead: they are about to change."""
        ...

    def close(self) -> None:
        """Free everything. The values are no longer needed."""
        ...

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        """Buffers that values are read through; other shards may share them."""
        ...


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
    """How long each full copy lives, when it is exchanged, and where parameters are
    between uses. ``whole_home``: the home stores their full copy, not this rank's shard."""

    shard_optimizer: bool
    params: Lifetime
    grads: Lifetime
    reduce_at: ReduceAt
    reshard: Reshard = Reshard.WITHIN_LIMITS
    home: Home = Home.DEVICE
    whole_home: bool = False

    def persistent(self) -> ZeroPlan:
        """Return the plan for parameters too small to free: always live, otherwise the same."""
        return replace(self, params=Lifetime.ALWAYS, home=Home.DEVICE, whole_home=False)

    def scheduled(self, *, reduce_at: ReduceAt) -> ZeroPlan:
        """Return the plan for a schedule that gathers, frees and reduces."""
        return replace(self, reduce_at=reduce_at, reshard=Reshard.SCHEDULED)

    def at(self, home: Home) -> ZeroPlan:
        """Return the plan with parameters at ``home`` between uses, otherwise the same."""
        whole = self.whole_home or self.params is Lifetime.ALWAYS
        if home is Home.DEVICE:
            return replace(self, params=Lifetime.ALWAYS if whole else Lifetime.USE, home=Home.DEVICE, whole_home=False)
        return replace(self, params=Lifetime.USE, home=home, whole_home=whole)

    @property
    def frees_parameters(self) -> bool:
        """Whether full parameters do not always live."""
        return self.params is not Lifetime.ALWAYS

    @property
    def gathers_parameters(self) -> bool:
        """Whether a use of parameters communicates, because each rank only stores a shard."""
        return self.frees_parameters and not self.whole_home

    @property
    def cuts(self) -> tuple[bool, bool, bool]:
        """Whether optimizer state, gradients and parameters are sharded between uses."""
        return self.shard_optimizer, self.grads is Lifetime.USE, self.frees_parameters

    @property
    def reduces_every_micro_batch(self) -> bool:
        return self.reduce_at is ReduceAt.MICRO

    def describe(self) -> str:
        state = "one shard per rank" if self.shard_optimizer else "whole on every rank"
        away = f" (from {self.home.value})" if self.home is not Home.DEVICE else ""
        return (
            f"parameters live {self.params.value}{away}, gradients {'until reduced' if self.grads is Lifetime.USE else 'always'} "
            f"(reduced at {self.reduce_at.value}), optimizer state {state}"
        )


_STAGES = {
    0: ZeroPlan(False, Lifetime.ALWAYS, Lifetime.ALWAYS, ReduceAt.BOUNDARY),
    1: ZeroPlan(True, Lifetime.ALWAYS, Lifetime.ALWAYS, ReduceAt.BOUNDARY),
    2: ZeroPlan(True, Lifetime.ALWAYS, Lifetime.USE, ReduceAt.BOUNDARY),
    3: ZeroPlan(True, Lifetime.USE, Lifetime.USE, ReduceAt.MICRO),
}


def plan_for_stage(
    stage: int, *, reduce_every: str = "auto", reshard_after: str = "auto", home: Home = Home.DEVICE
) -> ZeroPlan:
    """Return the plan of a ZeRO stage; ``reduce_every`` (auto, micro, boundary) and
    ``reshard_after`` (auto, forward, step) override its choices, ``home``: where parameters are
    between uses.

    At the boundary, stage 2 keeps the full gradients of an accumulation until its end and moves 2
    Psi instead of (g+1) Psi; with one micro-batch per step both are the same.
    """
    if stage not in _STAGES:
        raise ConfigError("no such ZeRO stage", where="zero_optimization.stage", got=stage, expected="0, 1, 2 or 3")
    plan = _STAGES[stage]
    return replace(
        plan,
        reduce_at=plan.reduce_at if reduce_every == "auto" else ReduceAt(reduce_every),
        reshard=Reshard(reshard_after),
    ).at(home)
