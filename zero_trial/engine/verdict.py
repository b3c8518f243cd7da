"""What becomes of a step once its gradients are there: applied or skipped, and what follows for loss scale, schedule and counts.

    Verdict        the host reads the norm, then applies or skips: where reading costs nothing, or an optimizer must be told by the host
    LateVerdict    the device applies or skips; the host hears of it later (see late_verdict)

What it says is asked through :meth:`Verdict.known`.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zero_trial.engine.nonfinite import NonFinite, blame, name_culprit
from zero_trial.engine.wiring import Wiring
from zero_trial.errors import Diverged
from zero_trial.precision.loss_scale import LossScale
from zero_trial.zero import ShardedModel
from zero_trial.zero.norm import clip_factor

log = logging.getLogger("zero_trial")


class Verdict:
    """``norm``: of the last step's averaged, unscaled gradient. ``applied``: it has changed the parameters. ``scaler``: the loss scale of the
    next backward pass."""

    def __init__(self, sharded: ShardedModel, wiring: Wiring, device: torch.device) -> None:
        self._sharded = sharded
        self._wiring = wiring
        self._device = device
        self.scaler: LossScale = wiring.policy.loss_scale
        self.norm: float | None = None
        self.applied = False
        self.skipped = 0
        self.skipped_at: deque[int] = deque(maxlen=1000)  # the last skipped steps' numbers
        self.nonfinite: NonFinite | None = None

    # --- asked ----------------------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """The last step's outcome is not known yet; to ask for it is to wait."""
        return False

    def known(self) -> Verdict:
        """Itself, with everything known. Local: a single rank may ask."""
        return self

    def conclude(self) -> None:
        """Everything is known, on all ranks also who was to blame, and a run without a way out ends. Collective over all.

        Raises Diverged on every rank.
        """

    def close(self) -> None:
        """The same for an engine that ends, in which other ranks may have failed: local, so that a culprit may stay unnamed."""

    def unscale(self) -> float:
        """From a reduced shard (a sum over ranks of scaled gradients) to the averaged gradient, or to the sum where that was asked for."""
        return 1.0 / (self._wiring.divisor * self._sharded.wire_scale * self.known().scaler.scale)

    # --- a step ---------------------------------------------------------------------------------------------------

    def decide(self, step: int, schedule: Any, arguments: Mapping[str, Any]) -> None:
        """Updates, publishes and advances ``schedule`` with the reduced gradients of step number ``step``, or skips it. Collective.

        Afterwards the gradients are forgotten. Raises Diverged.
        """
        self.norm = self._norm(float(self._square_sum().item()), self.unscale())
        finite = math.isfinite(self.norm)
        self.applied = finite or not self._wiring.skip_nonfinite
        if self.applied:
            factor = clip_factor(self.norm, self._wiring.clip) if finite else 1.0
            self._update(lambda: self._sharded.update(self.unscale() * factor, defer=self._wiring.defer_publish))
            if schedule is not None:
                schedule.step(**arguments)
        else:
            self.nonfinite = name_culprit(self._sharded, step)
            self._count_skip(step)
        self._sharded.reducer.reset()
        scale, error = self._advance(not finite)
        self._tell(not finite, scale, error)

    def _square_sum(self) -> torch.Tensor:
        """Of the reduced gradient, (1,) in float64; not finite if any element on any rank is not. One scalar all-reduce over each of
        shard, replica (of which each rank counts a slice), model (where copies are counted once) and pipe (tied weights, too)."""
        sums = self._sharded.owned_square_sums()
        total = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=self._device)
        total = total.reshape(1)
        mesh = self._sharded.mesh
        for axis in (mesh.shard, mesh.replica, mesh.model, mesh.pipe):
            axis.all_reduce_small(total, "gradient norm")
        return total

    def _norm(self, square_sum: float, unscale: float) -> float:
        return math.sqrt(square_sum) * unscale if square_sum >= 0 else math.nan

    def _update(self, update: Callable[[], None]) -> None:
        self._sharded.settle()
        update()
        if self._wiring.defer_publish:
            self._sharded.wait_when_called()
        else:
            self._sharded.wait()

    def _count_skip(self, step: int) -> None:
        self.skipped += 1
        self.skipped_at.append(step)

    def _advance(self, overflow: bool) -> tuple[float, Diverged | None]:
        """The loss scale of the next step; returns this one's, and why there can be no next one."""
        before = self.scaler.scale
        update = self.scaler.update(overflow)
        self.scaler = update.state
        return before, update.error

    def _tell(self, overflow: bool, before: float, error: Diverged | None) -> None:
        """One line on rank 0 about a skipped step; the end of the run on all ranks if there is no way out."""
        if overflow and self._sharded.mesh.rank == 0 and self.nonfinite is not None:
            now = self.scaler.scale
            change = f"; loss scale {before:g} -> {now:g}" if before != now else ""
            log.warning("%s; the step is skipped on all ranks%s", self.nonfinite.describe(), change)
        if error is not None:
            raise blame(error, self.nonfinite)
