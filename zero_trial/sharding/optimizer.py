"""What an optimizer keeps for its pieces, seen by logical tensor, by group, or as numbers: for checkpoints and for whoever asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from zero_trial.comm import AxisComm
from zero_trial.errors import TrialError
from zero_trial.ops import native_on
from zero_trial.ops.optimizers import (
    DeviceScalars,
    FusedLamb,
    ShardOptimizer,
    ShardUpdate,
    device_scaled_step,
    scaled_step,
    supports_device_scalars,
    undo_step,
)
from zero_trial.sharding.full_params import register_optimizer
from zero_trial.sharding.layout import ParamSlot
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.pieces import DeviceStore, ShardPiece, StateStore, segments_of


@dataclass(frozen=True)
class StateView:
    """A tensor of optimizer state, or the master weight, of one logical tensor's part: elements [start, stop) of the flattened tensor."""

    kind: str  # "master", "exp_avg" ...
    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    tensor: torch.Tensor


class OptimizerState:
    """The masters and the state of ``base``, which steps on ``pieces``; ``store`` says where both live between steps."""

    def __init__(self, base: torch.optim.Optimizer, pieces: Sequence[ShardPiece], store: StateStore) -> None:
        self._base = base
        self._pieces = pieces
        self._store = store

    def views(self) -> Iterator[StateView]:
        """Every tensor of master weights and state on this rank, by logical tensor. Their values are there only inside the store's ``lent``.

        State that is not one value per element (rows and columns of Adafactor) exists for whole tensors only and has its own shape.
        """
        for piece in self._pieces:
            state = self._base.state.get(piece.weight, {})
            if (slot := whole_slot(piece)) is not None:
                for key, value in state.items():
                    if torch.is_tensor(value) and value.dim() > 0 and not is_elementwise_state(value, piece):
                        yield StateView(key, slot.name, tuple(value.shape), 0, value.numel(), value.view(-1))
            elementwise = {key: value for key, value in state.items() if is_elementwise_state(value, piece)}
            yield from _by_tensor(piece, {"master": piece.weight.detach()} | elementwise)

    def scalars(self) -> dict[str, dict[str, float]]:
        """The state that is one number per tensor (step counts), by optimizer group: ``{"0": {"step": 12.0}}``.

        All pieces of a group step together, so their numbers are the same.
        """
        found: dict[str, dict[str, float]] = {}
        for piece in self._pieces:
            for key, value in self._base.state.get(piece.weight, {}).items():
                if not is_elementwise_state(value, piece) and (
                    isinstance(value, (int, float)) or (torch.is_tensor(value) and value.numel() == 1)
                ):
                    found.setdefault(str(piece.opt_group), {})[key] = float(value)
        return found

    def make(
        self,
        kinds: Sequence[str],
        scalars: Mapping[str, Mapping[str, float]],
        shape_of: Callable[[str, str], tuple[int, ...] | None],
    ) -> None:
        """Replaces all state by zeros of the named kinds and the scalar state, so that a checkpoint can be read into :meth:`views`.

        ``shape_of(kind, tensor)`` is the stored shape, None if there is no such state: then a piece of that tensor gets none either.
        Only inside the store's ``lent``.
        """
        self._base.state.clear()
        for piece in self._pieces:
            weight, slot = piece.weight.detach(), whole_slot(piece)
            start, stop = piece.group.runs[piece.opt_group]
            names = [
                part.name
                for part in ([slot] if slot is not None else piece.group.layout.slots)
                if start <= part.offset < stop
            ]
            state: dict[str, Any] = {}
            for kind in kinds:
                shape = next((found for name in names if (found := shape_of(kind, name)) is not None), None)
                if shape is not None:
                    own_shape = slot is not None and shape != slot.shape
                    kept = None if own_shape else self._store.zeros(piece, kind)
                    state[kind] = weight.new_zeros(shape if own_shape else weight.shape) if kept is None else kept
            for key, value in scalars.get(str(piece.opt_group), {}).items():
                state[key] = torch.tensor(
                    value, dtype=torch.float32, device=weight.device if _fused(self._base) else "cpu"
                )
            if state:
                self._base.state[piece.weight] = state

    def shard(self, group: ParamGroup, kind: str) -> torch.Tensor | None:
        """The group's shard of state ``kind`` (shard_numel,), put together from its pieces; None if there is no such state yet."""
        out: torch.Tensor | None = None
        with self._store.lent():
            for piece in self._pieces:
                value = self._base.state.get(piece.weight, {}).get(kind) if piece.group is group else None
                if torch.is_tensor(value) and is_elementwise_state(value, piece):
                    out = value.new_zeros(group.layout.shard_numel) if out is None else out
                    out[piece.low : piece.high].copy_(value.reshape(-1))
        return out

    def set_shard(self, group: ParamGroup, kind: str, shard: torch.Tensor) -> None:
        """Writes ``shard`` (shard_numel,) back into the pieces' state ``kind``."""
        with self._store.lent():
            for piece in self._pieces:
                if piece.group is group:
                    self._base.state[piece.weight][kind].view(-1).copy_(shard[piece.low : piece.high])

    def resident_bytes(self) -> int:
        """Bytes of memory for state on this rank, masters left out, and for what moves it from elsewhere."""
        states = sum(
            self._store.resident_bytes(value, kind)
            for piece in self._pieces
            for kind, value in self._base.state.get(piece.weight, {}).items()
            if torch.is_tensor(value) and is_elementwise_state(value, piece)
        )
        return states + sum(buffer.numel() * buffer.element_size() for buffer in self._store.buffers)


def _by_tensor(piece: ShardPiece, tensors: Mapping[str, torch.Tensor]) -> Iterator[StateView]:
    """What of ``tensors``, alike with the piece in shape, belongs to which logical tensor."""
    for part in piece.group.layout.pieces(piece.group.comm.index):
        low, high = max(part.offset, piece.low), min(part.offset + part.numel, piece.high)
        if low < high:
            start = part.start + low - part.offset
            for kind, tensor in tensors.items():
                flat = tensor.reshape(-1)[low - piece.low : high - piece.low]
                yield StateView(kind, part.slot.name, part.slot.shape, start, start + high - low, flat)


def whole_slot(piece: ShardPiece) -> ParamSlot | None:
    """The tensor that ``piece`` is, if it is exactly one, in its shape."""
    if piece.group.comm.size > 1:
        return None
    shape = tuple(piece.weight.shape)
    return next(
        (slot for slot in piece.group.layout.slots if slot.offset == piece.low and (slot.shape or (1,)) == shape), None
    )


def is_elementwise_state(value: Any, piece: ShardPiece) -> bool:
    """State with one value per element of the piece."""
    return torch.is_tensor(value) and value.shape == piece.weight.shape and value.dim() > 0


def _fused(base: torch.optim.Optimizer) -> bool:
    return any(opt_group.get("fused") or opt_group.get("capturable") for opt_group in base.param_groups)


# The optimizer over shards: any torch optimizer, stepping on this rank's flat pieces of the master weights.


class StepStatus:
    """What the engine knows of its steps, for code that shows numbers to users: the last step may still be undone.

    As it is: of a loop without an engine, in which every step's outcome is known and the loss is not scaled.
    """

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward pass."""
        return 1.0

    def gradient_multiplier(self) -> float:
        """The factor from a reduced gradient shard to the averaged gradient."""
        return 1.0

    def settle(self) -> None:
        """Wait until the last step's outcome is known."""


def _batching(base: torch.optim.Optimizer) -> dict[str, Any]:
    """How ``base`` wants its pieces: by group, all at once (norms over tensors that lie in several pieces), or bounded by the casts' memory."""
    if not isinstance(base, ShardOptimizer):
        return {}
    if not base.elementwise:
        return {"cast_numel": math.inf}
    return {"by_group": True} if base.fuses else {}


class ShardedOptimizer:
    """Steps ``base`` on the shards' pieces; everything user code knows of an optimizer (``param_groups``, lr) is the base's own.

    ``groups`` are all parameter groups of the model, the same on every rank, and ``shard`` is the axis that cuts them. ``loss_scale`` and
    ``cur_scale`` report the engine's loss scale, as DeepSpeed's optimizer objects do.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        pieces: Sequence[ShardPiece],
        *,
        groups: Sequence[ParamGroup] = (),
        shard: AxisComm | None = None,
        status: StepStatus | None = None,
        store: StateStore | None = None,
    ) -> None:
        self.base = base
        self.pieces = list(pieces)
        self._store = store if store is not None else DeviceStore(self.pieces, **_batching(base))
        self._kept = OptimizerState(base, self.pieces, self._store)
        self._status = status if status is not None else StepStatus()
        self._stateful = 0  # weights that had state before the last step
        register_optimizer((param for group in groups for param in group.params), self)
        if shard is not None:
            trained = [group for group in groups if group.trainable]
            self.bind_tensors(trained, lambda sums: shard.all_reduce_small(sums, "tensor norms"))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        self._status.settle()
        return self.base.param_groups

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        self._status.settle()
        return self.base.state

    @property
    def loss_scale(self) -> float:
        return self._status.loss_scale

    cur_scale = loss_scale

    def takes_device_scalars(self, device: torch.device) -> bool:
        """Return whether :meth:`update` can read factor and skip on ``device``, where the gradients are, so that the host reads nothing there."""
        if not supports_device_scalars(self.base) or not isinstance(self._store, DeviceStore):
            return False
        at_home = all(piece.weight.device == piece.grad_buffer.shard.device for piece in self.pieces)
        return at_home and (device.type == "cpu" or not isinstance(self.base, ShardOptimizer) or native_on(device))

    @property
    def divides(self) -> bool:
        """Whether device scalars must hold what gradients are divided by: torch's own fused optimizers multiply by nothing."""
        return not isinstance(self.base, ShardOptimizer)

    def expect(self) -> None:
        """A step is coming, unless it is skipped: state that lives elsewhere begins to come."""
        self._store.expect()

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise TrialError: a loop of plain torch would step without reduced gradients, and would not publish the new values."""
        raise TrialError(
            "the engine steps this optimizer: it reduces, clips and unscales the gradients before, and gathers the parameters after",
            where="optimizer.step",
            fix="Call engine.step() instead, and leave optimizer.zero_grad() out.",
        )

    def update(
        self, multiplier: float, scalars: DeviceScalars | None = None
    ) -> Iterator[tuple[Sequence[ShardPiece], bool]]:
        """Step with ``multiplier`` times the reduced gradients; yield pieces as soon as they are done, with whether their 16-bit copies are, too.

        Bytes per parameter from a 16-bit gradient to a 16-bit parameter (Adam): 28 in one pass where the optimizer fuses, else 28 and two
        casts of 6 each. With ``scalars`` (see :meth:`takes_device_scalars` and :attr:`divides`) the device may skip the step: then
        :meth:`undo_step` must follow. Optimizers that sum norms over tensors (LAMB) are collective over shard.
        """
        self._stateful = len(self.base.state)
        for batch in self._store.batches():
            self._store.borrow(batch)
            rounded = self._update(batch, multiplier, scalars)
            yield batch, self._store.give_back(batch, rounded)

    def _update(self, batch: Sequence[ShardPiece], multiplier: float, scalars: DeviceScalars | None) -> bool:
        if isinstance(self.base, ShardOptimizer) and self.base.fuses:
            updates = [ShardUpdate(piece.weight, piece.reduced, piece.rounded, piece.opt_group) for piece in batch]
            self.base.step(updates=updates, multiplier=multiplier, scalars=scalars)
            return True
        for piece in batch:
            piece.weight.grad = piece.gradient()
        if scalars is None:
            scaled_step(self.base, multiplier)
        else:
            device_scaled_step(self.base, scalars.factor, scalars.found_inf)
        for piece in batch:
            piece.weight.grad = None
        return False

    def undo_step(self) -> None:
        """Undo what the host counted and made for the last step, which the device has skipped."""
        undo_step(self.base, self._stateful)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do here: gradients live in the groups, and :meth:`Engine.zero_grad` forgets them."""

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

    def bind_tensors(self, groups: Sequence[ParamGroup], sum_over_shards: Callable[[torch.Tensor], None]) -> None:
        """Tells an optimizer with norms per tensor (LAMB) which elements of each piece belong to which tensor.

        ``groups``: all of the model, the same on every rank (see :func:`segments_of`).
        """
        if isinstance(self.base, FusedLamb):
            segments, count = segments_of(self.pieces, groups)
            self.base.bind(segments, count, sum_over_shards)

    # --- what it keeps --------------------------------------------------------------------------------------------

    def views(self) -> Iterator[StateView]:
        """See :meth:`OptimizerState.views`; values are there only inside :meth:`lent`."""
        self._status.settle()
        return self._kept.views()

    def scalars(self) -> dict[str, dict[str, float]]:
        """See :meth:`OptimizerState.scalars`."""
        self._status.settle()
        return self._kept.scalars()

    def make_state(
        self,
        kinds: Sequence[str],
        scalars: Mapping[str, Mapping[str, float]],
        shape_of: Callable[[str, str], tuple[int, ...] | None],
    ) -> None:
        """See :meth:`OptimizerState.make`; only inside :meth:`lent`."""
        self._status.settle()
        self._kept.make(kinds, scalars, shape_of)

    def state_shard(self, group: ParamGroup, kind: str) -> torch.Tensor | None:
        """See :meth:`OptimizerState.shard`."""
        self._status.settle()
        return self._kept.shard(group, kind)

    def set_state_shard(self, group: ParamGroup, kind: str, shard: torch.Tensor) -> None:
        """See :meth:`OptimizerState.set_shard`."""
        self._status.settle()
        self._kept.set_shard(group, kind, shard)

    def persistent_bytes(self) -> int:
        """See :meth:`OptimizerState.resident_bytes`."""
        self._status.settle()
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
