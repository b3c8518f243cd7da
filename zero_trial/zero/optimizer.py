"""The optimizer over shards: any torch optimizer, stepping on this rank's flat pieces of the master weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from zero_trial.errors import TrialError
from zero_trial.ops import native_on
from zero_trial.ops.optimizers import (
    FusedLamb,
    Gate,
    PieceOptimizer,
    PieceWork,
    fused_step,
    gated_step,
    scaled_step,
    take_back,
    takes_gates,
)
from zero_trial.zero.optimizer_state import OptimizerState, StateView
from zero_trial.zero.pieces import segments_of
from zero_trial.zero.store import DeviceStore, ShardPiece, StateStore
from zero_trial.zero.unit import Unit


def _nobody(pieces: Sequence[ShardPiece], rounded: bool) -> None:
    return None


def _known() -> None:
    """Every step's outcome is."""


def _batching(base: torch.optim.Optimizer) -> dict[str, Any]:
    """How ``base`` wants its pieces: by unit, all at once (norms over tensors that lie in several pieces), or bounded by the casts' memory."""
    if not isinstance(base, PieceOptimizer):
        return {}
    if not base.elementwise:
        return {"cast_numel": math.inf}
    return {"by_unit": True} if base.fuses else {}


class ShardedOptimizer:
    """Steps ``base`` on the shards' pieces; everything user code knows of an optimizer (``param_groups``, lr) is the base's own.

    ``loss_scale`` and ``cur_scale`` report what ``scale`` returns, as DeepSpeed's optimizer objects do.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        pieces: Sequence[ShardPiece],
        *,
        scale: Callable[[], float],
        store: StateStore | None = None,
    ) -> None:
        self.base = base
        self.pieces = list(pieces)
        self._store = store if store is not None else DeviceStore(self.pieces, **_batching(base))
        self._kept = OptimizerState(base, self.pieces, self._store)
        self._scale = scale
        self._stateful = 0  # weights that had state before the last step
        # What must happen before numbers are shown: the last step may still be taken back.
        self.when_asked: Callable[[], None] = _known

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        self.when_asked()
        return self.base.param_groups

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        self.when_asked()
        return self.base.state

    @property
    def loss_scale(self) -> float:
        return self._scale()

    cur_scale = loss_scale

    def takes_gates(self, device: torch.device) -> bool:
        """Whether :meth:`step` can be told by ``device``, where the gradients are, without the host's reading anything there."""
        if not takes_gates(self.base) or not isinstance(self._store, DeviceStore):
            return False
        at_home = all(piece.weight.device == piece.landing.shard.device for piece in self.pieces)
        return at_home and (device.type == "cpu" or not isinstance(self.base, PieceOptimizer) or native_on(device))

    @property
    def divides(self) -> bool:
        """Whether a gate must hold what gradients are divided by: torch's own fused optimizers multiply by nothing."""
        return not isinstance(self.base, PieceOptimizer)

    def expect(self) -> None:
        """A step is coming, unless it is skipped: state that lives elsewhere begins to come."""
        self._store.expect()

    def step(
        self,
        multiplier: float | None = None,
        updated: Callable[[Sequence[ShardPiece], bool], None] = _nobody,
        gate: Gate | None = None,
    ) -> None:
        """One update with ``multiplier`` times the reduced gradients. Optimizers that sum norms over tensors (LAMB) are collective over shard.

        ``updated(pieces, rounded)`` hears of pieces as soon as they are done; ``rounded``: their 16-bit copies are, too. Bytes per parameter
        from a 16-bit gradient to a 16-bit parameter (Adam): 28 in one pass where the optimizer fuses, else 28 and two casts of 6 each.
        With a ``gate`` (see :meth:`takes_gates` and :attr:`divides`) the device may skip the step: then :meth:`take_back` must follow.

        Called without numbers, as a loop of plain torch does, it is a TrialError: nobody would bring the new values to the parameters.
        """
        if not isinstance(multiplier, (int, float)):
            raise TrialError(
                "the engine steps this optimizer: it reduces, clips and unscales the gradients before, and gathers the parameters after",
                where="optimizer.step",
                fix="Call engine.step() instead, and leave optimizer.zero_grad() out.",
            )
        self._stateful = len(self.base.state)
        for batch in self._store.batches():
            self._store.borrow(batch)
            rounded = self._update(batch, multiplier, gate)
            updated(batch, self._store.give_back(batch, rounded))

    def _update(self, batch: Sequence[ShardPiece], multiplier: float, gate: Gate | None) -> bool:
        if isinstance(self.base, PieceOptimizer) and self.base.fuses:
            work = [PieceWork(piece.weight, piece.reduced, piece.rounded, piece.group) for piece in batch]
            fused_step(self.base, work, multiplier, gate)
            return True
        for piece in batch:
            piece.weight.grad = piece.gradient()
        if gate is None:
            scaled_step(self.base, multiplier)
        else:
            gated_step(self.base, gate.factor, gate.found_inf)
        for piece in batch:
            piece.weight.grad = None
        return False

    def take_back(self) -> None:
        """The device has skipped the last step: what the host counted and made for it is as before."""
        take_back(self.base, self._stateful)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do here: gradients live in the units, and :meth:`Engine.zero_grad` forgets them."""

    def lent(self) -> AbstractContextManager[None]:
        """Inside, masters and state can be read and written wherever they live; only between steps. May be nested."""
        return self._store.lent()

    def close(self) -> None:
        """There will be no step any more: space outside of memory is given back."""
        self._store.close()

    @property
    def store(self) -> StateStore:
        return self._store

    def identity(self) -> dict[str, Any]:
        """Class and hyperparameters' names, for a checkpoint: state is another optimizer's if the latter differ."""
        return {"class": type(self.base).__name__, "settings": sorted(set(self.base.defaults) - _HOW_NOT_WHAT)}

    def bind_tensors(self, units: Sequence[Unit], sum_over_shards: Callable[[torch.Tensor], None]) -> None:
        """Tells an optimizer with norms per tensor (LAMB) which elements of each piece belong to which tensor.

        ``units``: all of the model, the same on every rank (see :func:`segments_of`).
        """
        if isinstance(self.base, FusedLamb):
            segments, count = segments_of(self.pieces, units)
            self.base.bind(segments, count, sum_over_shards)

    # --- what it keeps --------------------------------------------------------------------------------------------

    def views(self) -> Iterator[StateView]:
        """See :meth:`OptimizerState.views`; values are there only inside :meth:`lent`."""
        self.when_asked()
        return self._kept.views()

    def scalars(self) -> dict[str, dict[str, float]]:
        """See :meth:`OptimizerState.scalars`."""
        self.when_asked()
        return self._kept.scalars()

    def make_state(
        self,
        kinds: Sequence[str],
        scalars: Mapping[str, Mapping[str, float]],
        shape_of: Callable[[str, str], tuple[int, ...] | None],
    ) -> None:
        """See :meth:`OptimizerState.make`; only inside :meth:`lent`."""
        self.when_asked()
        self._kept.make(kinds, scalars, shape_of)

    def state_shard(self, unit: Unit, kind: str) -> torch.Tensor | None:
        """See :meth:`OptimizerState.shard`."""
        self.when_asked()
        return self._kept.shard(unit, kind)

    def set_state_shard(self, unit: Unit, kind: str, shard: torch.Tensor) -> None:
        """See :meth:`OptimizerState.set_shard`."""
        self.when_asked()
        self._kept.set_shard(unit, kind, shard)

    def persistent_bytes(self) -> int:
        """See :meth:`OptimizerState.resident_bytes`."""
        self.when_asked()
        return self._kept.resident_bytes()


# Hyperparameters that choose an implementation or a variant with the same state, and those that every optimizer has.
_HOW_NOT_WHAT = frozenset(
    [
        "lr",
        "weight_decay",
        "maximize",
        "foreach",
        "capturable",
        "differentiable",
        "fused",
        "amsgrad",
        "decoupled_weight_decay",
        "bias_correction",
    ]
)
