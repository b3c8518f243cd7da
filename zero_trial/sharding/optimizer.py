"""The optimizer over shards: any torch optimizer, stepping on this rank's flat pieces of the master
weights.

    shard of a group    |<-------- one optimizer group -------->|<---- another ---->|
    pieces              |<----- piece ----->|<----- piece ----->|<----- piece ----->|
                        cut further where a store wants it

A StateStore says where master weights and moments live between steps: DeviceStore here, others in
``offload``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from zero_trial.comm import AxisComm
from zero_trial.errors import ConfigError, TrialError
from zero_trial.ops import native_on
from zero_trial.ops.optimizers import (
    DeviceScalars,
    FusedLamb,
    ShardOptimizer,
    ShardUpdate,
    TensorSegment,
    device_scaled_step,
    scaled_step,
    supports_device_scalars,
    undo_step,
)
from zero_trial.sharding.full_params import register_optimizer
from zero_trial.sharding.grad_buffer import GradBuffer
from zero_trial.sharding.layout import ParamSlot
from zero_trial.sharding.param_group import ParamGroup


@dataclass(frozen=True)
class ShardPiece:
    """Elements [low, high) of a group's shard that belong to one optimizer group; ``weight``
    (high-low,) is that part of the master."""

    group: ParamGroup
    grad_buffer: GradBuffer
    opt_group: int
    low: int
    high: int
    weight: nn.Parameter

    @property
    def numel(self) -> int:
        return self.high - self.low

    def gradient(self) -> torch.Tensor:
        """Return the reduced gradient in the weight's dtype and shape: a view where dtypes agree,
        else a new tensor (4 bytes per element)."""
        return self.reduced.to(self.weight.dtype).view(self.weight.shape)

    @property
    def reduced(self) -> torch.Tensor:
        """The reduced gradient (high-low,), where the update reads it, in the dtype of its sum."""
        return self.grad_buffer.shard[self.low : self.high]

    @property
    def rounded(self) -> torch.Tensor | None:
        """Where the weight's rounded copy belongs, (high-low,): this piece of the 16-bit shard;
        None where the weight is the shard itself."""
        group = self.group
        return None if group.master is group.shard else group.shard[self.low : self.high]

    def update(self) -> ShardUpdate:
        """Return what a fused optimizer reads and writes."""
        return ShardUpdate(self.weight, self.reduced, self.rounded, self.opt_group)


class StateStore(Protocol):
    """Hands out the pieces of a step batch by batch. Between ``borrow`` and ``give_back`` their
    weights and moments are where the update runs."""

    def prefetch(self) -> None:
        """Start to fetch what the next step needs first; that step may be skipped."""
        ...

    def batches(self) -> Iterator[Sequence[ShardPiece]]: ...

    def borrow(self, batch: Sequence[ShardPiece]) -> None: ...

    def give_back(self, batch: Sequence[ShardPiece], rounded: bool) -> bool:
        """Take the batch back; ``rounded``: the update has made the 16-bit copies. Return whether
        they exist now."""
        ...

    def lent(self) -> AbstractContextManager[None]:
        """Make all masters and all state readable and writable inside the block; only between
        steps."""
        ...

    def zeros(self, piece: ShardPiece, kind: str) -> torch.Tensor | None:
        """Return zeros for state ``kind`` of a piece where the store keeps that kind, else None;
        only inside :meth:`lent`."""
        ...

    def resident_bytes(self, value: torch.Tensor, kind: str) -> int:
        """Return the bytes of memory that a state tensor takes between steps."""
        ...

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        """Memory of the store's own."""
        ...

    def close(self) -> None:
        """Free the space outside of memory, with its contents. Nothing is borrowed afterwards."""
        ...


class DeviceStore:
    """Keeps everything on the compute device. Price: K bytes per parameter and shard (12 for Adam:
    master, two moments), no traffic.

    Pieces go in one batch when their gradients need no cast; else in batches of at most
    ``cast_numel`` elements, which bounds the fp32 copies. ``by_group``: one batch per group, for an
    optimizer that needs no casts and whose results can be published while it goes on.
    """

    def __init__(self, pieces: Sequence[ShardPiece], cast_numel: float = 1 << 26, *, by_group: bool = False) -> None:
        if by_group:
            groups: dict[int, list[ShardPiece]] = {}
            for piece in pieces:
                groups.setdefault(id(piece.group), []).append(piece)
            self._batches = list(groups.values())
            return
        self._batches = [[]]
        room = cast_numel
        for piece in pieces:
            needs = 0 if piece.grad_buffer.shard.dtype == piece.weight.dtype else piece.numel
            if needs > room and self._batches[-1]:
                self._batches.append([])
                room = cast_numel
            self._batches[-1].append(piece)
            room -= needs

    def prefetch(self) -> None:
        return None

    def batches(self) -> Iterator[Sequence[ShardPiece]]:
        return iter(self._batches)

    def borrow(self, batch: Sequence[ShardPiece]) -> None:
        return None

    def give_back(self, batch: Sequence[ShardPiece], rounded: bool) -> bool:
        return rounded

    def lent(self) -> AbstractContextManager[None]:
        return nullcontext()

    def zeros(self, piece: ShardPiece, kind: str) -> torch.Tensor | None:
        return None

    def resident_bytes(self, value: torch.Tensor, kind: str) -> int:
        return value.numel() * value.element_size()

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        return ()

    def close(self) -> None:
        return None


Make = Callable[..., ShardPiece]


def cut_pieces(
    grad_buffers: Sequence[GradBuffer], *, whole_tensors: bool, most: int | None = None, make: Make = ShardPiece
) -> list[ShardPiece]:
    """Cut this rank's shards into pieces: one per group and optimizer group.

    Args:
        whole_tensors: one piece per tensor instead, in its shape (a scalar as (1,)), for optimizers
            that need whole tensors. Possible only where nothing is sharded; otherwise raises
            ConfigError.
        most: cut further at multiples of so many elements, counted from the shard's start (not with
            ``whole_tensors``).
        make: builds each piece from ShardPiece's fields.
    """
    if whole_tensors and any(grad_buffer.group.comm.size > 1 for grad_buffer in grad_buffers):
        raise ConfigError(
            "this optimizer needs whole tensors, and sharding cuts them",
            where="optimizer.type",
            fix="Use zero_optimization.stage 0, or an elementwise optimizer (Adam, AdamW, SGD, Lion, Adagrad, LAMB ...).",
        )
    return [
        piece
        for grad_buffer in grad_buffers
        for piece in (_tensors(grad_buffer, make) if whole_tensors else _runs(grad_buffer, most, make))
    ]


def _tensors(grad_buffer: GradBuffer, make: Make) -> Iterator[ShardPiece]:
    group = grad_buffer.group
    for slot in group.layout.slots:
        if slot.numel:
            opt_group = next(
                opt_group for opt_group, (start, stop) in group.runs.items() if start <= slot.offset < stop
            )
            end = slot.offset + slot.numel
            view = group.master[slot.offset : end].view(slot.shape or (1,))
            yield make(group, grad_buffer, opt_group, slot.offset, end, nn.Parameter(view))


def _runs(grad_buffer: GradBuffer, most: int | None, make: Make) -> Iterator[ShardPiece]:
    group = grad_buffer.group
    low, high = group.layout.shard_range(group.comm.index)
    for opt_group, (start, stop) in sorted(group.runs.items()):
        a, b = max(start, low) - low, min(stop, high) - low
        while a < b:
            end = b if most is None else min((a // most + 1) * most, b)
            yield make(group, grad_buffer, opt_group, a, end, nn.Parameter(group.master[a:end]))
            a = end


def segments_of(
    pieces: Sequence[ShardPiece], groups: Sequence[ParamGroup]
) -> tuple[dict[int, list[TensorSegment]], int]:
    """Return which elements of each piece (by id of its weight) belong to which tensor, and the
    number of tensors.

    Tensors are numbered over all ``groups``, which are the same on every rank: a rank may have no
    piece of some of them.
    """
    names = sorted({slot.name for group in groups for slot in group.layout.slots})
    number = {name: index for index, name in enumerate(names)}
    segments: dict[int, list[TensorSegment]] = {}
    for piece in pieces:
        listed = segments.setdefault(id(piece.weight), [])
        for part in piece.group.layout.pieces(piece.group.comm.index):
            low, high = max(part.offset, piece.low), min(part.offset + part.numel, piece.high)
            if low < high:
                listed.append(TensorSegment(number[part.slot.name], low - piece.low, high - piece.low))
    return segments, len(names)


def rebind(base: torch.optim.Optimizer, pieces: Sequence[ShardPiece]) -> None:
    """Make a client's optimizer object step on ``pieces`` instead of the model's parameters; its
    groups and settings stay.

    Raises ConfigError when it already holds state: that state belongs to whole tensors that this
    rank no longer has.
    """
    # the one torch optimizer that makes its state when it is built
    eager = isinstance(base, torch.optim.Adagrad)

    def has_stepped(state: Mapping[str, Any]) -> bool:
        telling = (
            [state["step"]]
            if eager
            else [value for value in state.values() if torch.is_tensor(value) and value.dim() > 0]
        )
        return any(bool(value.any()) for value in telling)

    if any(has_stepped(state) for state in base.state.values()):
        raise ConfigError(
            "the client optimizer has stepped before it was given to initialize()",
            where="optimizer",
            fix="Pass a fresh optimizer and load its state with engine.load_checkpoint.",
        )
    base.state.clear()
    for index, opt_group in enumerate(base.param_groups):
        opt_group["params"] = [piece.weight for piece in pieces if piece.opt_group == index]
    if eager:
        for opt_group in base.param_groups:
            for weight in opt_group["params"]:
                base.state[weight] = {
                    "step": torch.tensor(0.0),
                    "sum": torch.full_like(weight, opt_group["initial_accumulator_value"]),
                }


class StepStatus:
    """The state of the engine's steps, for code that shows numbers to users: the last step may
    still be undone.

    This class itself serves loops without an engine: every step's outcome is known, and the loss is
    not scaled.
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
    """Choose how ``base`` gets its pieces: by group, all at once (norms over tensors that lie in
    several pieces), or bounded by the casts' memory."""
    if not isinstance(base, ShardOptimizer):
        return {}
    if not base.elementwise:
        return {"cast_numel": math.inf}
    return {"by_group": True} if base.fuses else {}


@dataclass(frozen=True)
class StateView:
    """A tensor of optimizer state, or the master weight, of one logical tensor's part: elements
    [start, stop) of the flattened tensor."""

    kind: str  # "master", "exp_avg" ...
    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    tensor: torch.Tensor


class ShardedOptimizer:
    """Steps ``base`` on the shards' pieces; everything user code knows of an optimizer
    (``param_groups``, lr) is the base's own.

    ``loss_scale`` and ``cur_scale`` report the engine's loss scale, as DeepSpeed's optimizer
    objects do.

    Args:
        groups: all parameter groups of the model, the same on every rank.
        shard: the axis that cuts them.
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
        self.store = store if store is not None else DeviceStore(self.pieces, **_batching(base))
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
        """Return whether :meth:`update` can read factor and skip on ``device``, where the gradients
        are, so that the host reads nothing there."""
        if not supports_device_scalars(self.base) or not isinstance(self.store, DeviceStore):
            return False
        at_home = all(piece.weight.device == piece.grad_buffer.shard.device for piece in self.pieces)
        return at_home and (device.type == "cpu" or not isinstance(self.base, ShardOptimizer) or native_on(device))

    @property
    def divides(self) -> bool:
        """Whether device scalars must hold a divisor of the gradients: torch's own fused optimizers
        cannot multiply."""
        return not isinstance(self.base, ShardOptimizer)

    def prefetch(self) -> None:
        """Start to fetch state that lives elsewhere for the next step."""
        self.store.prefetch()

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise TrialError: a loop of plain torch would step without reduced gradients, and would
        not publish the new values."""
        raise TrialError(
            "the engine steps this optimizer: it reduces, clips and unscales the gradients before, and gathers the parameters after",
            where="optimizer.step",
            fix="Call engine.step() instead, and leave optimizer.zero_grad() out.",
        )

    def update(
        self, multiplier: float, scalars: DeviceScalars | None = None
    ) -> Iterator[tuple[Sequence[ShardPiece], bool]]:
        """Step with ``multiplier`` times the reduced gradients; yield pieces as soon as they are
        done, and whether their 16-bit copies are.

        Bytes per parameter from a 16-bit gradient to a 16-bit parameter (Adam): 28 in one pass
        where the optimizer fuses, else 28 and two casts of 6 each. With ``scalars`` (see
        :meth:`takes_device_scalars` and :attr:`divides`) the device may skip the step: then
        :meth:`undo_step` must follow. Optimizers that sum norms over tensors (LAMB) are collective
        over shard.
        """
        self._stateful = len(self.base.state)
        for batch in self.store.batches():
            self.store.borrow(batch)
            rounded = False
            if isinstance(self.base, ShardOptimizer) and self.base.fuses:
                rounded = True
                updates = [piece.update() for piece in batch]
                self.base.step(updates=updates, multiplier=multiplier, scalars=scalars)
            else:
                for piece in batch:
                    piece.weight.grad = piece.gradient()
                if scalars is None:
                    scaled_step(self.base, multiplier)
                else:
                    device_scaled_step(self.base, scalars.factor, scalars.found_inf)
                for piece in batch:
                    piece.weight.grad = None
            yield batch, self.store.give_back(batch, rounded)

    def undo_step(self) -> None:
        """Undo what the host counted and made for the last step, which the device has skipped."""
        undo_step(self.base, self._stateful)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients live in the groups, and :meth:`Engine.zero_grad` drops them."""

    def lent(self) -> AbstractContextManager[None]:
        """Make masters and state readable and writable inside the block, wherever they live; only
        between steps. May be nested."""
        return self.store.lent()

    def close(self) -> None:
        """Free the store's space outside of memory. No step follows."""
        self.store.close()

    def identity(self) -> dict[str, Any]:
        """Return class and hyperparameter names, for a checkpoint: state belongs to another
        optimizer if the latter differ."""
        return {"class": type(self.base).__name__, "settings": sorted(set(self.base.defaults) - _HOW_NOT_WHAT)}

    def bind_tensors(self, groups: Sequence[ParamGroup], sum_over_shards: Callable[[torch.Tensor], None]) -> None:
        """Give an optimizer with norms per tensor (LAMB) the elements of each piece that belong to
        each tensor.

        ``groups``: all of the model, the same on every rank (see :func:`segments_of`).
        """
        if isinstance(self.base, FusedLamb):
            segments, count = segments_of(self.pieces, groups)
            self.base.bind(segments, count, sum_over_shards)

    # --- state, for checkpoints and user code -----------------------------------------------------

    def views(self) -> Iterator[StateView]:
        """Yield every tensor of master weights and state on this rank, by logical tensor. Their
        values are there only inside :meth:`lent`.

        State that is not one value per element (rows and columns of Adafactor) exists for whole
        tensors only and has its own shape.
        """
        self._status.settle()
        for piece in self.pieces:
            state = self.base.state.get(piece.weight, {})
            if (slot := whole_slot(piece)) is not None:
                for key, value in state.items():
                    if torch.is_tensor(value) and value.dim() > 0 and not is_elementwise_state(value, piece):
                        yield StateView(key, slot.name, tuple(value.shape), 0, value.numel(), value.view(-1))
            elementwise = {key: value for key, value in state.items() if is_elementwise_state(value, piece)}
            yield from _by_tensor(piece, {"master": piece.weight.detach()} | elementwise)

    def scalars(self) -> dict[str, dict[str, float]]:
        """Return the state that is one number per tensor (step counts), by optimizer group: ``{"0":
        {"step": 12.0}}``.

        All pieces of a group step together, so their numbers are the same.
        """
        self._status.settle()
        found: dict[str, dict[str, float]] = {}
        for piece in self.pieces:
            for key, value in self.base.state.get(piece.weight, {}).items():
                if not is_elementwise_state(value, piece) and (
                    isinstance(value, (int, float)) or (torch.is_tensor(value) and value.numel() == 1)
                ):
                    found.setdefault(str(piece.opt_group), {})[key] = float(value)
        return found

    def make_state(
        self,
        kinds: Sequence[str],
        scalars: Mapping[str, Mapping[str, float]],
        shape_of: Callable[[str, str], tuple[int, ...] | None],
    ) -> None:
        """Replace all state by zeros of the named kinds and the scalar state, so that a checkpoint
        can be read into :meth:`views`.

        ``shape_of(kind, tensor)`` is the stored shape, None if there is no such state: then a piece
        of that tensor gets none either. Only inside :meth:`lent`.
        """
        self._status.settle()
        self.base.state.clear()
        for piece in self.pieces:
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
                    kept = None if own_shape else self.store.zeros(piece, kind)
                    state[kind] = weight.new_zeros(shape if own_shape else weight.shape) if kept is None else kept
            for key, value in scalars.get(str(piece.opt_group), {}).items():
                state[key] = torch.tensor(
                    value, dtype=torch.float32, device=weight.device if _fused(self.base) else "cpu"
                )
            if state:
                self.base.state[piece.weight] = state

    def state_shard(self, group: ParamGroup, kind: str) -> torch.Tensor | None:
        """Return the group's shard of state ``kind`` (shard_numel,), put together from its pieces;
        None if there is no such state yet."""
        self._status.settle()
        out: torch.Tensor | None = None
        with self.store.lent():
            for piece in self.pieces:
                value = self.base.state.get(piece.weight, {}).get(kind) if piece.group is group else None
                if torch.is_tensor(value) and is_elementwise_state(value, piece):
                    out = value.new_zeros(group.layout.shard_numel) if out is None else out
                    out[piece.low : piece.high].copy_(value.reshape(-1))
        return out

    def set_state_shard(self, group: ParamGroup, kind: str, shard: torch.Tensor) -> None:
        """Write ``shard`` (shard_numel,) back into the pieces' state ``kind``."""
        self._status.settle()
        with self.store.lent():
            for piece in self.pieces:
                if piece.group is group:
                    self.base.state[piece.weight][kind].view(-1).copy_(shard[piece.low : piece.high])

    def persistent_bytes(self) -> int:
        """Count the bytes of state on this rank (without masters) and of the store's own memory."""
        self._status.settle()
        states = sum(
            self.store.resident_bytes(value, kind)
            for piece in self.pieces
            for kind, value in self.base.state.get(piece.weight, {}).items()
            if torch.is_tensor(value) and is_elementwise_state(value, piece)
        )
        return states + sum(buffer.numel() * buffer.element_size() for buffer in self.store.buffers)


def _by_tensor(piece: ShardPiece, tensors: Mapping[str, torch.Tensor]) -> Iterator[StateView]:
    """Yield the part of each logical tensor that ``tensors``, which have the piece's shape,
    hold."""
    for part in piece.group.layout.pieces(piece.group.comm.index):
        low, high = max(part.offset, piece.low), min(part.offset + part.numel, piece.high)
        if low < high:
            start = part.start + low - part.offset
            for kind, tensor in tensors.items():
                flat = tensor.reshape(-1)[low - piece.low : high - piece.low]
                yield StateView(kind, part.slot.name, part.slot.shape, start, start + high - low, flat)


def whole_slot(piece: ShardPiece) -> ParamSlot | None:
    """Return the tensor that ``piece`` covers exactly, in its shape; None if there is no such
    tensor."""
    if piece.group.comm.size > 1:
        return None
    shape = tuple(piece.weight.shape)
    return next(
        (slot for slot in piece.group.layout.slots if slot.offset == piece.low and (slot.shape or (1,)) == shape), None
    )


def is_elementwise_state(value: Any, piece: ShardPiece) -> bool:
    """Return whether ``value`` is state with one value per element of the piece."""
    return torch.is_tensor(value) and value.shape == piece.weight.shape and value.dim() > 0


def _fused(base: torch.optim.Optimizer) -> bool:
    return any(opt_group.get("fused") or opt_group.get("capturable") for opt_group in base.param_groups)


# Hyperparameters that choose an implementation or a variant with the same state, and those that
# every optimizer has.
_HOW_NOT_WHAT = {
    "lr", "weight_decay", "maximize", "foreach", "capturable", "differentiable", "fused", "amsgrad", "decoupled_weight_decay",
    "bias_correction",
}  # fmt: skip
