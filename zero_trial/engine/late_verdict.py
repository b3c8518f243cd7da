"""A step that the host does not wait in: the device applies or skips it, and the host hears of that when it must know.

    step()       square sum -> all-reduce -> (norm, factor, found_inf) on the device; the sum starts for the host; the update reads factor
                 and found_inf; values are published. Schedule and counts of steps advance as if it were applied.
    backward()   the next one: the sum has long arrived, while the device is still busy with the update and the forward. Loss scale, counts,
                 culprit. A skipped step's schedule and counts of steps are put back.

Whoever asks earlier waits for the norm alone, not for what is queued behind it. A skipped step leaves what :class:`Verdict` leaves, to the
bit; only its publication is sent, of the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zero_trial.engine.courier import Courier
from zero_trial.engine.nonfinite import NonFinite, Row, agree, evidence
from zero_trial.engine.rollback import advance, can_go_back
from zero_trial.engine.verdict import Verdict
from zero_trial.engine.wiring import Wiring
from zero_trial.errors import Diverged
from zero_trial.ops.library import OPS
from zero_trial.ops.optimizers import Gate
from zero_trial.zero import ShardedModel, ShardedOptimizer
from zero_trial.zero.norm import divisor
from zero_trial.zero.reducer import Culprit

_TOTAL, _CONTROL = slice(0, 2), slice(2, 5)  # a float64 sum of squares; norm, factor, found_inf


@dataclass(frozen=True)
class _Open:
    """A step whose outcome the host does not know, and what it needs when it hears of it."""

    step: int
    unscale: float
    go_back: Sequence[Callable[[], None]]
    culprits: Sequence[Culprit]
    sums: Mapping[int, torch.Tensor]
    unused: frozenset[str]  # blocks whose forward had not run


@dataclass(frozen=True)
class _Untold:
    """What is known of a step with a gradient that is not finite, and not told yet. ``found``: None where it was not skipped."""

    opened: _Open
    found: list[Row] | None
    scale: float
    error: Diverged | None


class LateVerdict(Verdict):
    """For an ``optimizer`` that takes gates. The numbers of :class:`Verdict` hold after :meth:`known`, which every reader calls."""

    def __init__(
        self, sharded: ShardedModel, wiring: Wiring, device: torch.device, optimizer: ShardedOptimizer
    ) -> None:
        super().__init__(sharded, wiring, device)
        self._optimizer = optimizer
        self.courier = Courier(device, _CONTROL.stop)
        self._open: _Open | None = None
        self._untold: _Untold | None = None
        optimizer.when_asked = self._settle

    # --- asked ----------------------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        return self._open is not None

    def known(self) -> Verdict:
        self._settle()
        return self

    def conclude(self) -> None:
        self._settle()
        untold, self._untold = self._untold, None
        if untold is not None:
            if untold.found is not None and not self._alone:
                self.nonfinite = self._culprit(untold.opened, untold.found)
            self._tell(True, untold.scale, untold.error)

    def close(self) -> None:
        self._settle()
        untold, self._untold = self._untold, None
        if untold is not None:
            self._tell(True, untold.scale, untold.error)

    def _settle(self) -> None:
        """Hears of the last step. Waits for its norm."""
        opened, self._open = self._open, None
        if opened is None:
            return
        total = self.courier.receive()[_TOTAL].view(torch.float64).item()
        self.norm = self._norm(float(total), opened.unscale)
        finite = math.isfinite(self.norm)
        self.applied = finite or not self._wiring.skip_nonfinite
        found = None if self.applied else self._put_back(opened)
        scale, error = self._advance(not finite)
        if not finite:
            self._untold = _Untold(opened, found, scale, error)

    def _put_back(self, opened: _Open) -> list[Row]:
        for go_back in opened.go_back:
            go_back()
        self._count_skip(opened.step)
        found = evidence(self._sharded, opened.culprits, opened.sums)
        if self._alone:
            self.nonfinite = self._culprit(opened, found)
        else:  # a rank that asks alone cannot ask the others
            self.nonfinite = NonFinite(opened.step, None, "a parameter that the next backward pass names")
        return found

    def _culprit(self, opened: _Open, found: Sequence[Row]) -> NonFinite:
        return agree(self._sharded, opened.step, found, lambda block: block not in opened.unused)

    @property
    def _alone(self) -> bool:
        mesh = self._sharded.mesh
        return mesh.data.size == mesh.pipe.size == mesh.model.size == 1

    # --- a step ---------------------------------------------------------------------------------------------------

    def decide(self, step: int, schedule: Any, arguments: Mapping[str, Any]) -> None:
        self.conclude()
        model, unscale = self._sharded, self.unscale()
        gate = self._gate(unscale)
        self.courier.send()
        reducer = model.reducer
        unused = {unit.block for unit in model.units if not model.gatherer.was_used(unit.block)}
        go_back = [self._optimizer.take_back]
        opened = _Open(step, unscale, go_back, list(reducer.culprits), dict(reducer.square_sums), frozenset(unused))
        self._update(lambda: model.update(1.0, gate, defer=self._wiring.defer_publish))
        self._open = opened
        reducer.reset()
        if schedule is None:
            return
        if not self._wiring.skip_nonfinite:
            schedule.step(**arguments)
        elif can_go_back(schedule):
            go_back.insert(0, advance(schedule, self._optimizer.base.param_groups, arguments))
        elif self.known().applied:
            schedule.step(**arguments)

    def _gate(self, unscale: float) -> Gate:
        """Of the reduced gradients, on the device; what the host is to hear of them is in the courier's room."""
        room, clip = self.courier.there, self._wiring.clip
        total, control = room[_TOTAL].view(torch.float64), room[_CONTROL]
        total.copy_(self._square_sum())
        OPS.step_control_(total, None, control, unscale, clip)
        factor = divisor(total, unscale, clip) if self._optimizer.divides else control[1:2]
        return Gate(factor, control[2] if self._wiring.skip_nonfinite else None)


def choose_verdict(
    sharded: ShardedModel, wiring: Wiring, device: torch.device, optimizer: ShardedOptimizer | None
) -> Verdict:
    """Late on CUDA, where waiting would empty the queue, for optimizers that the device can tell what to do."""
    if device.type == "cuda" and optimizer is not None and optimizer.takes_gates(device):
        return LateVerdict(sharded, wiring, device, optimizer)
    return Verdict(sharded, wiring, device)
