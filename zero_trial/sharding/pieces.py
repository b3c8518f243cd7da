"""Where a shard's fp32 master weights and moments live between steps, behind ``borrow`` and ``give_back``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from zero_trial.errors import ConfigError
from zero_trial.ops.optimizers import TensorSegment
from zero_trial.sharding.grad_buffer import GradBuffer
from zero_trial.sharding.param_group import ParamGroup


@dataclass(frozen=True)
class ShardPiece:
    """Elements [low, high) of a group's shard that belong to one optimizer group; ``weight`` (high-low,) is that part of the master."""

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
        """The reduced gradient in the master's dtype and the weight's shape: a view where dtypes agree, else a new tensor (4 bytes per element)."""
        return self.reduced.to(self.weight.dtype).view(self.weight.shape)

    @property
    def reduced(self) -> torch.Tensor:
        """The reduced gradient as it lies there, (high-low,), in the dtype in which it was summed."""
        return self.grad_buffer.shard[self.low : self.high]

    @property
    def rounded(self) -> torch.Tensor | None:
        """Where the weight's rounded copy belongs, (high-low,): this piece of the 16-bit shard; None where the weight is the shard itself."""
        group = self.group
        return None if group.master is group.shard else group.shard[self.low : self.high]


class StateStore(Protocol):
    """Gives out the pieces of a step batch by batch. Between ``borrow`` and ``give_back`` their weights and moments are where the update runs."""

    def expect(self) -> None:
        """A step is coming, unless it is skipped: what it needs first may be brought nearer."""
        ...

    def batches(self) -> Iterator[Sequence[ShardPiece]]: ...

    def borrow(self, batch: Sequence[ShardPiece]) -> None: ...

    def give_back(self, batch: Sequence[ShardPiece], rounded: bool) -> bool:
        """``rounded``: the update has made the 16-bit copies. Whether they are there now."""
        ...

    def lent(self) -> AbstractContextManager[None]:
        """Inside, all masters and all state can be read and written; only between steps."""
        ...

    def zeros(self, piece: ShardPiece, kind: str) -> torch.Tensor | None:
        """State of zeros for a piece where the store keeps that kind, None where it keeps none of it; only inside :meth:`lent`."""
        ...

    def resident_bytes(self, value: torch.Tensor, kind: str) -> int:
        """Bytes of memory that a state tensor takes between steps."""
        ...

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        """Memory of the store's own."""
        ...

    def close(self) -> None:
        """Nothing will be borrowed any more: space outside of memory is given back, and what lay there is lost."""
        ...


class DeviceStore:
    """Everything stays on the compute device. Price: K bytes per parameter and shard (12 for Adam: master, two moments), no traffic.

    Pieces go in one batch when their gradients need no cast; else in batches of at most ``cast_numel`` elements, which bounds the fp32 copies.
    ``by_group``: one batch per group, for an optimizer that needs no casts and whose results can be published while it goes on.
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

    def expect(self) -> None:
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


# How this rank's shards are cut into the pieces that an optimizer steps on, each of one optimizer group.


Make = Callable[..., ShardPiece]


def cut_pieces(
    grad_buffers: Sequence[GradBuffer], *, whole_tensors: bool, most: int | None = None, make: Make = ShardPiece
) -> list[ShardPiece]:
    """This rank's pieces: one per group and optimizer group, or one per tensor, in its shape (a scalar as (1,)), for optimizers that need
    whole tensors. ``most``: the former are cut at its multiples, counted from the shard's start. ``make`` builds each from ShardPiece's fields.

    The latter is possible only where nothing is sharded; otherwise ConfigError.
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
    """Which elements of each piece (by id of its weight) belong to which tensor, and how many tensors there are.

    Tensors are numbered over all ``groups``, which are the same on every rank: a rank may have no piece of some of them.
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


# A client's optimizer object, made to step on pieces of the shards instead of the model's parameters.


def rebind(base: torch.optim.Optimizer, pieces: Sequence[ShardPiece]) -> None:
    """Makes a client's optimizer object step on ``pieces`` instead of the model's parameters; its groups and settings stay.

    Raises ConfigError when it already holds state: that state belongs to whole tensors that this rank no longer has.
    """
    eager = isinstance(base, torch.optim.Adagrad)  # the one torch optimizer that makes its state when it is built

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
