"""What an optimizer keeps for its pieces, seen by logical tensor, by unit, or as numbers: for checkpoints and for whoever asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zero_trial.zero.layout import Slot
from zero_trial.zero.store import ShardPiece, StateStore
from zero_trial.zero.unit import Unit


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
                    found.setdefault(str(piece.group), {})[key] = float(value)
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
            start, stop = piece.unit.runs[piece.group]
            names = [
                part.name
                for part in ([slot] if slot is not None else piece.unit.layout.slots)
                if start <= part.offset < stop
            ]
            state: dict[str, Any] = {}
            for kind in kinds:
                shape = next((found for name in names if (found := shape_of(kind, name)) is not None), None)
                if shape is not None:
                    own_shape = slot is not None and shape != slot.shape
                    kept = None if own_shape else self._store.zeros(piece, kind)
                    state[kind] = weight.new_zeros(shape if own_shape else weight.shape) if kept is None else kept
            for key, value in scalars.get(str(piece.group), {}).items():
                state[key] = torch.tensor(
                    value, dtype=torch.float32, device=weight.device if _fused(self._base) else "cpu"
                )
            if state:
                self._base.state[piece.weight] = state

    def shard(self, unit: Unit, kind: str) -> torch.Tensor | None:
        """The unit's shard of state ``kind`` (shard_numel,), put together from its pieces; None if there is no such state yet."""
        out: torch.Tensor | None = None
        with self._store.lent():
            for piece in self._pieces:
                value = self._base.state.get(piece.weight, {}).get(kind) if piece.unit is unit else None
                if torch.is_tensor(value) and is_elementwise_state(value, piece):
                    out = value.new_zeros(unit.layout.shard_numel) if out is None else out
                    out[piece.low : piece.high].copy_(value.reshape(-1))
        return out

    def set_shard(self, unit: Unit, kind: str, shard: torch.Tensor) -> None:
        """Writes ``shard`` (shard_numel,) back into the pieces' state ``kind``."""
        with self._store.lent():
            for piece in self._pieces:
                if piece.unit is unit:
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
    for part in piece.unit.layout.pieces(piece.unit.comm.index):
        low, high = max(part.offset, piece.low), min(part.offset + part.numel, piece.high)
        if low < high:
            start = part.start + low - part.offset
            for kind, tensor in tensors.items():
                flat = tensor.reshape(-1)[low - piece.low : high - piece.low]
                yield StateView(kind, part.slot.name, part.slot.shape, start, start + high - low, flat)


def whole_slot(piece: ShardPiece) -> Slot | None:
    """The tensor that ``piece`` is, if it is exactly one, in its shape."""
    if piece.unit.comm.size > 1:
        return None
    shape = tuple(piece.weight.shape)
    return next(
        (slot for slot in piece.unit.layout.slots if slot.offset == piece.low and (slot.shape or (1,)) == shape), None
    )


def is_elementwise_state(value: Any, piece: ShardPiece) -> bool:
    """State with one value per element of the piece."""
    return torch.is_tensor(value) and value.shape == piece.weight.shape and value.dim() > 0


def _fused(base: torch.optim.Optimizer) -> bool:
    return any(group.get("fused") or group.get("capturable") for group in base.param_groups)
