"""This rank's pieces of the master weights, on which an optimizer steps, and where master weights
and moments are between steps.

    shard of a group    |<-------- one optimizer group -------->|<---- another ---->|
    pieces              |<----- piece ----->|<----- piece ----->|<----- piece ----->|
                        cut further if a store requires it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zero_trial.errors import ConfigError
from zero_trial.ops.optimizers.shard_step import ShardOptimizer, TensorPart
from zero_trial.sharding.grad_buffer import GradBuffer
from zero_trial.sharding.layout import ParamSlot
from zero_trial.sharding.param_group import ParamGroup

if TYPE_CHECKING:
    from zero_trial.sharding.whole_tensors import WholeTensor


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

    @property
    def reduced(self) -> torch.Tensor:
        """The reduced gradient (high-low,), where the update reads it, in the dtype of its sum."""
        return self.grad_buffer.reduced()[self.low : self.high]

    @property
    def rounded(self) -> torch.Tensor | None:
        """Where the weight's rounded copy belongs, (high-low,): this piece of the 16-bit shard;
        None if the weight is the shard itself."""
        group = self.group
        return None if group.master is group.shard else group.shard[self.low : self.high]

    def gradient(self) -> torch.Tensor:
        """Return the reduced gradient in the weight's dtype: a view if dtypes agree, else a new
        tensor (4 bytes per element)."""
        return self.reduced.to(self.weight.dtype)


class StateStore:
    """Hands out the pieces of a step batch by batch. Between ``borrow`` and ``give_back`` their
    weights and moments are where the update runs.

    This class keeps everything on the compute device; others, in ``offload``, derive from it.
    Cost: K bytes per parameter and shard (12 for Adam: master, two moments), no traffic.

    Pieces are in one batch if their gradients need no cast; else in batches of at most
    ``cast_numel`` elements, which bounds the fp32 copies. ``by_group``: one batch per group, for an
    optimizer that needs no casts and whose results can be published while it runs.
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
        """Start to fetch the first values that the next step needs; that step may be skipped."""

    def batches(self) -> Iterator[Sequence[ShardPiece]]:
        return iter(self._batches)

    def borrow(self, batch: Sequence[ShardPiece]) -> None:
        """Load masters and moments of the batch to where the update runs."""

    def give_back(self, batch: Sequence[ShardPiece], rounded: bool) -> bool:
        """Take the batch back; return whether 16-bit copies exist (``rounded``: already)."""
        return rounded

    def lent(self) -> AbstractContextManager[None]:
        """Make all masters and state readable and writable in the block, between steps or before
        the first batch of one."""
        return nullcontext()

    def state_at_hand(self, tensors: Sequence[WholeTensor]) -> AbstractContextManager[None]:
        """Load the state of whole tensors to the device that updates them, and store it after the
        block; only inside :meth:`lent`."""
        return nullcontext()

    def zeros(self, piece: ShardPiece, kind: str) -> torch.Tensor | None:
        """Return zeros for a kept state ``kind`` of a piece, else None; inside :meth:`lent`."""
        return None

    def resident_bytes(self, value: torch.Tensor) -> int:
        """Return the bytes of memory that a state tensor takes between steps."""
        return value.numel() * value.element_size()

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        """Memory of the store's own."""
        return ()

    def close(self) -> None:
        """Free the offload space, with its contents. Nothing may be borrowed afterwards."""


def batching(base: torch.optim.Optimizer, at_once: bool) -> dict[str, Any]:
    """Choose how ``base`` gets its pieces: by group, all at once (norms over tensors that span
    several pieces, or a class that may count its own steps), or limited by the memory of casts."""
    if at_once or (isinstance(base, ShardOptimizer) and not base.elementwise):
        return {"cast_numel": math.inf}
    return {"by_group": True} if isinstance(base, ShardOptimizer) and base.fuses else {}


@contextmanager
def kept_in_place(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Copy values that the block replaces (``param.data = new``) back into the weights' own memory,
    from which masters are read."""
    homes = [(weight, weight.detach(), _memory(weight)) for weight in weights]
    yield
    for weight, home, memory in homes:
        if _memory(weight) != memory:
            home.copy_(weight.detach())
            weight.data = home


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride()


def all_at_initialize(where: str, **facts: Any) -> ConfigError:
    """Return the error for parameters added to an optimizer after initialize()."""
    return ConfigError(
        "an optimizer accepts no parameters after initialize(): no gradients are reduced for them, and they would not train",
        where=where,
        fix="Pass all parameters to initialize(); parameters to be trained later can have lr 0 in their group until then.",
        **facts,
    )


@contextmanager
def without_empty_groups(base: torch.optim.Optimizer) -> Iterator[None]:
    """Hide groups of which this rank owns no tensor, because a step may access each group's first
    tensor. The probe of couplings has tested the class in the same way."""
    groups = base.param_groups  # an optimizer inside may share the list
    all_groups = list(groups)
    groups[:] = [group for group in all_groups if group["params"]]
    try:
        yield
    finally:
        groups[:] = all_groups


Make = Callable[..., ShardPiece]


def cut_pieces(
    grad_buffers: Sequence[GradBuffer],
    *,
    whole: Collection[int] = (),
    most: int | None = None,
    make: Make = ShardPiece,
) -> list[ShardPiece]:
    """Split this rank's shards into pieces: one per group and optimizer group.

    Args:
        whole: optimizer groups whose tensors are updated whole, not split (:func:`own_tensors`).
        most: split further at multiples of this many elements, counted from the shard's start.
        make: builds each piece from ShardPiece's fields.
    """
    return [piece for grad_buffer in grad_buffers for piece in _runs(grad_buffer, whole, most, make)]


def _runs(grad_buffer: GradBuffer, whole: Collection[int], most: int | None, make: Make) -> Iterator[ShardPiece]:
    group = grad_buffer.group
    low, high = group.layout.shard_range(group.comm.index)
    for opt_group, (start, stop) in sorted(group.runs.items()):
        if opt_group in whole:
            continue
        a, b = max(start, low) - low, min(stop, high) - low
        while a < b:
            end = b if most is None else min((a // most + 1) * most, b)
            yield make(group, grad_buffer, opt_group, a, end, nn.Parameter(group.master[a:end]))
            a = end


def parts_by_weight(pieces: Sequence[ShardPiece], number: Callable[[str], int]) -> dict[int, list[TensorPart]]:
    """Return the parts of tensors in each piece, by id of its weight; ``number``: of a tensor."""
    return {id(each.weight): [TensorPart(number(slot.name), *at) for slot, *at in parts_of(each)] for each in pieces}


def parts_of(piece: ShardPiece) -> Iterator[tuple[ParamSlot, int, int, int]]:
    """Yield a piece's parts of tensors: tensor, first element there, begin and end here."""
    for part in piece.group.layout.pieces(piece.group.comm.index):
        low, high = max(part.offset, piece.low), min(part.offset + part.numel, piece.high)
        if low < high:
            yield part.slot, part.start + low - part.offset, low - piece.low, high - piece.low


def rebind(base: torch.optim.Optimizer, weights: Sequence[Sequence[nn.Parameter]]) -> None:
    """Make a client's optimizer object step on ``weights`` (of each group) instead of the model's
    parameters; its groups and settings stay.

    Raises ConfigError if it already holds state, because that state belongs to whole tensors that
    this rank no longer has, and if it holds parameters outside of its groups, as an optimizer that
    wraps another one does, because it would continue to step those.
    """
    # the only torch optimizer that creates its state when it is built
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
            "the optimizer passed to initialize() already has state: it has stepped before, or creates state when it is built",
            where="optimizer",
            got=f"{type(base).__name__} with state",
            fix="Pass a callable that builds it from parameter groups: initialize(optimizer=lambda groups: ...). engine.load_checkpoint restores "
            "state of earlier steps.",
        )
    known = {id(param) for opt_group in base.param_groups for param in opt_group["params"]}
    groups = [id(opt_group) for opt_group in base.param_groups]
    for name, value in vars(base).items():
        if name not in ("param_groups", "state") and _holds(value, known, groups):
            raise ConfigError(
                "this optimizer holds the model's parameters outside of its param_groups",
                where="optimizer",
                got=f"{type(base).__name__}.{name}",
                fix="Pass a callable that builds it from parameter groups: initialize(optimizer=lambda groups: ...).",
            )
    base.state.clear()
    for opt_group, own in zip(base.param_groups, weights, strict=True):
        opt_group["params"] = list(own)
    if eager:
        for opt_group in base.param_groups:
            for weight in opt_group["params"]:
                base.state[weight] = {
                    "step": torch.tensor(0.0),
                    "sum": torch.full_like(weight, opt_group["initial_accumulator_value"]),
                }


def _holds(value: Any, params: Collection[int], groups: Collection[int], depth: int = 4) -> bool:
    """Return whether ``value`` has a parameter (ids) outside of the optimizer's own groups."""
    if torch.is_tensor(value):
        return id(value) in params
    if not depth or id(value) in groups:
        return False
    if isinstance(value, torch.optim.Optimizer):
        value = value.param_groups
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(_holds(each, params, groups, depth - 1) for each in items)
