"""Master weights and optimizer state on this rank by logical tensor: for checkpoints, and for code
that reads or writes the state of one parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from zero_trial.errors import CheckpointError
from zero_trial.ops.optimizers import FusedOptimizer
from zero_trial.sharding.layout import ParamSlot
from zero_trial.sharding.offload.moved_states import MovedStates
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.pieces import ShardPiece, StateStore, parts_of
from zero_trial.sharding.whole_tensors import WholeTensor, WholeTensors


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


@dataclass(frozen=True)
class HeldWhole:
    """A piece that is a whole tensor, since nothing is sharded."""

    slot: ParamSlot
    opt_group: int
    weight: nn.Parameter


class StateByTensor:
    """The masters and the state of ``base``, by logical tensor, wherever they are between steps.

    Args:
        pieces: what ``base`` steps on, with the tensors of ``whole``.
        whole_groups: optimizer groups whose tensors are updated whole, sharded or not.
        moved: the states that a script has moved away for a while.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        pieces: Sequence[ShardPiece],
        store: StateStore,
        whole: WholeTensors | None,
        whole_groups: Collection[int],
        moved: MovedStates | None,
    ) -> None:
        self._base = base
        self._pieces = pieces
        self._store = store
        self._whole = whole
        self._moved = moved
        owned: Sequence[WholeTensor] = whole.own if whole is not None else ()
        self.parts: list[ShardPiece | WholeTensor] = [*pieces, *owned]
        self.held: list[HeldWhole | WholeTensor] = [*_held_whole(pieces, whole_groups), *owned]
        self._piece_of = {id(piece.weight): piece for piece in pieces}
        known = {id(held.weight) for held in self.held}
        self._flat = [piece for piece in pieces if id(piece.weight) not in known]

    def lent(self) -> AbstractContextManager[None]:
        """Make masters and state readable and writable inside the block, wherever they live; only
        between steps. May be nested."""
        if self._moved is not None:
            self._moved.require_here("masters and optimizer state", ("optim_states", "hp_params"))
        return self._store.lent()

    def load(self, weight: torch.Tensor, saved: Mapping[str, Any]) -> None:
        """Write the state of one weight where the store keeps it; only inside :meth:`lent`."""
        piece = self._piece_of.get(id(weight))
        own = self._base.state.pop(weight, {})
        loaded = {}
        for key, value in saved.items():
            if torch.is_tensor(value):
                home = own.get(key)
                if not (torch.is_tensor(home) and home.shape == value.shape and home.dtype == value.dtype):
                    elementwise = piece is not None and _is_elementwise_state(value, piece)
                    home = self._store.zeros(piece, key) if piece is not None and elementwise else None
                    if home is None:
                        device = weight.device if value.dim() or _fused(self._base) else "cpu"
                        home = torch.empty_like(value, device=device)
                loaded[key] = home.copy_(value)
            else:
                loaded[key] = copy.deepcopy(value)
        if loaded:
            self._base.state[weight] = loaded

    def layout(self) -> list[list[str]]:
        """Return which elements of which tensors each part holds."""
        whole = [each.slot.name for each in self._whole.own] if self._whole is not None else []
        flat = [
            [
                f"{slot.name}{list(slot.shape)}[{start}:{start + high - low}]"
                for slot, start, low, high in parts_of(piece)
            ]
            for piece in self._pieces
        ]
        return [*flat, *([name] for name in whole)]

    def at_hand(self) -> AbstractContextManager[None]:
        """Make the tensors that this rank updates whole readable and writable."""
        return self._whole.at_hand(gradients=False) if self._whole is not None else nullcontext()

    def identity(self) -> dict[str, Any]:
        """Return class and hyperparameter names, for a checkpoint: state belongs to another
        optimizer if the latter differ."""
        found = {
            "class": type(self._base).__name__,
            "settings": sorted(set(getattr(self._base, "defaults", {})) - _HOW_NOT_WHAT),
        }
        states = self._base.states if isinstance(self._base, FusedOptimizer) else "fp32"
        return found if states == "fp32" else found | {"states": states}

    def views(self) -> Iterator[StateView]:
        """Yield every tensor of master weights and state on this rank, by logical tensor. Their
        values are there only inside :meth:`lent`.

        State that is not one value per element (rows and columns of Adafactor) exists for whole
        tensors only and has its own shape.
        """
        for held in self.held:
            for key, value in self._base.state.get(held.weight, {}).items():
                if torch.is_tensor(value) and (value.dim() > 0 or _is_by_element(key, value, held.weight)):
                    yield StateView(key, held.slot.name, tuple(value.shape), 0, value.numel(), value.view(-1))
        known = {id(held.weight) for held in self.held}
        for piece in self._pieces:
            state = {} if id(piece.weight) in known else self._base.state.get(piece.weight, {})
            elementwise = {key: value for key, value in state.items() if _is_elementwise_state(value, piece)}
            yield from _by_tensor(piece, {"master": piece.weight.detach()} | elementwise)

    def whole_states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and state of each tensor that is updated whole here, and has any state:
        numbers and tensors of any shape, also in lists and dicts."""
        for held in self.held:
            state = self._base.state.get(held.weight, {})
            if state:
                yield held.slot.name, dict(state)

    def refuse_lost_states(self) -> None:
        """Raise CheckpointError for state that a checkpoint by tensor would lose: of no parameter,
        or of a flat piece and neither a value per element nor a single number."""
        strays = [key for key in self._base.state if not torch.is_tensor(key)]
        if strays:
            raise CheckpointError(
                "this optimizer keeps state that belongs to no parameter, which a checkpoint would lose",
                where=f"{type(self._base).__name__}.state",
                got=", ".join(map(repr, strays[:4])),
                expected="keys that are parameters",
                fix="Keep numbers in the optimizer's param_groups, which are saved, "
                "or save the weights alone with engine.save_16bit_model.",
            )
        for piece in self._flat:
            for key, value in self._base.state.get(piece.weight, {}).items():
                single = (
                    value is None or isinstance(value, (int, float)) or (torch.is_tensor(value) and value.numel() == 1)
                )
                if not single and not _is_by_element(key, value, piece.weight):
                    raise CheckpointError(
                        "this optimizer keeps state of flat pieces that is not one value per element, which a checkpoint would lose",
                        where=f"{type(self._base).__name__}.state",
                        got=f"{key} of {tuple(value.shape) if torch.is_tensor(value) else type(value).__name__}",
                        expected=f"a value for each of {piece.numel} elements, or one number",
                        fix="Remove elementwise = True from the class (zero_optimization.elementwise_optimizer from ds_config): whole "
                        "tensors are saved with all of their state.",
                    )

    @property
    def whole_names(self) -> list[str]:
        """The tensors that are updated whole here."""
        return [held.slot.name for held in self.held]

    def scalars(self) -> dict[str, dict[str, float]]:
        """Return the state that is one number per tensor (step counts), by optimizer group: ``{"0":
        {"step": 12.0}}``.

        All flat pieces of a group step together, so their numbers are the same. Tensors that are
        updated whole have their own in :meth:`whole_states`.
        """
        found: dict[str, dict[str, float]] = {}
        for piece in self.parts:
            for key, value in self._base.state.get(piece.weight, {}).items():
                if not _is_by_element(key, value, piece.weight) and (
                    isinstance(value, (int, float)) or (torch.is_tensor(value) and value.numel() == 1)
                ):
                    found.setdefault(str(piece.opt_group), {})[key] = float(value)
        return found

    def make_state(
        self,
        kinds: Sequence[str],
        scalars: Mapping[str, Mapping[str, float]],
        shape_of: Callable[[str, str], tuple[int, ...] | None],
        states: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Replace all state by zeros of the named kinds and the scalar state, so that a checkpoint
        can be read into :meth:`views`.

        ``shape_of(kind, tensor)`` is the stored shape, None if there is no such state: then a piece
        of that tensor gets none either. ``states``: what :meth:`whole_states` has yielded, by name;
        a tensor that it has gets this state. Only inside :meth:`lent`.
        """
        self._base.state.clear()
        for held in self.held:
            if held.slot.name in states:
                state = dict(states[held.slot.name])
            else:
                state = {}
                for kind in kinds:
                    if (shape := shape_of(kind, held.slot.name)) is not None:
                        state[kind] = held.weight.new_zeros(shape)
                state |= self._scalars_of(held, scalars)
            if state:
                self._base.state[held.weight] = state
        for piece in self._flat:
            start, stop = piece.group.runs[piece.opt_group]
            names = [slot.name for slot in piece.group.layout.slots if start <= slot.offset < stop]
            state = {}
            for kind in kinds:
                if any(shape_of(kind, name) is not None for name in names):
                    kept = self._store.zeros(piece, kind)
                    if kept is None and isinstance(self._base, FusedOptimizer):
                        kept = self._base.new_moment(piece.weight.detach(), kind)
                    state[kind] = torch.zeros_like(piece.weight.detach()) if kept is None else kept
            state |= self._scalars_of(piece, scalars)
            if state:
                self._base.state[piece.weight] = state

    def _scalars_of(
        self, piece: ShardPiece | HeldWhole | WholeTensor, scalars: Mapping[str, Mapping[str, float]]
    ) -> dict[str, torch.Tensor]:
        device = piece.weight.device if _fused(self._base) else "cpu"
        own = scalars.get(str(piece.opt_group), {})
        return {key: torch.tensor(value, dtype=torch.float32, device=device) for key, value in own.items()}

    def whole_tensor(self, group: ParamGroup, index: int) -> WholeTensor | None:
        """Return the tensor of slot ``index`` where one rank updates it whole and has its state;
        None where every rank has a shard of that."""
        tensors = self._whole.tensors if self._whole is not None else ()
        slot = group.layout.slots[index]
        return next((each for each in tensors if each.group is group and each.slot is slot), None)

    def own_state(self, tensor: WholeTensor, kind: str) -> torch.Tensor | None:
        """Return state ``kind`` of a tensor that one rank updates whole, to be read or written, on
        that rank; nothing on the others. None if there is no such state yet."""
        if tensor.owner != tensor.group.comm.index:
            return tensor.weight.new_empty(0)
        tensor.group.wait_for_copies()
        value = self._base.state.get(tensor.weight, {}).get(kind)
        return value if torch.is_tensor(value) else None

    def state_shard(self, group: ParamGroup, kind: str) -> torch.Tensor | None:
        """Return the group's shard of state ``kind`` (shard_numel,), put together from its pieces;
        None if there is no such state yet."""
        out: torch.Tensor | None = None
        with self.lent():
            for piece in self._pieces:
                value = self._base.state.get(piece.weight, {}).get(kind) if piece.group is group else None
                if torch.is_tensor(value) and _is_elementwise_state(value, piece):
                    wide = value.reshape(-1)
                    if isinstance(self._base, FusedOptimizer):
                        wide = self._base.moment(piece.weight, kind)
                    out = wide.new_zeros(group.layout.shard_numel) if out is None else out
                    out[piece.low : piece.high].copy_(wide)
        return out

    def set_state_shard(self, group: ParamGroup, kind: str, shard: torch.Tensor) -> None:
        """Write ``shard`` (shard_numel,) back into the pieces' state ``kind``."""
        group.wait_for_copies()
        with self.lent():
            for piece in self._pieces:
                if piece.group is group:
                    values = shard[piece.low : piece.high]
                    if isinstance(self._base, FusedOptimizer):
                        self._base.set_moment(piece.weight, kind, values)
                    else:
                        self._base.state[piece.weight][kind].view(-1).copy_(values)

    def persistent_bytes(self) -> int:
        """Count the bytes of state on this rank (without masters) and of the store's own memory."""
        states = sum(
            self._store.resident_bytes(value, kind)
            for piece in self._flat
            for kind, value in self._base.state.get(piece.weight, {}).items()
            if torch.is_tensor(value) and _is_by_element(kind, value, piece.weight)
        )
        states += sum(_bytes_of_state(self._base.state.get(held.weight, {})) for held in self.held)
        return states + sum(buffer.numel() * buffer.element_size() for buffer in self._store.buffers)


def _held_whole(pieces: Sequence[ShardPiece], whole_groups: Collection[int]) -> list[HeldWhole]:
    """Return the pieces that are whole tensors: those of the optimizer groups ``whole_groups``."""
    found = []
    for piece in pieces:
        if piece.opt_group in whole_groups:
            slot = next(slot for slot in piece.group.layout.slots if slot.numel and slot.offset == piece.low)
            found.append(HeldWhole(slot, piece.opt_group, piece.weight))
    return found


def _by_tensor(piece: ShardPiece, tensors: Mapping[str, torch.Tensor]) -> Iterator[StateView]:
    """Yield the part of each logical tensor that ``tensors``, which have the piece's shape,
    hold."""
    for slot, start, low, high in parts_of(piece):
        for kind, tensor in tensors.items():
            yield StateView(kind, slot.name, slot.shape, start, start + high - low, tensor.reshape(-1)[low:high])


def _is_elementwise_state(value: Any, piece: ShardPiece) -> bool:
    """Return whether ``value`` is state with one value per element of the piece."""
    return _has_shape_of(value, piece.weight)


def _is_by_element(kind: str, value: Any, weight: torch.Tensor) -> bool:
    """Return whether state ``kind`` has a value per element. All state of a scalar parameter has
    one, but the count of its steps."""
    return _has_shape_of(value, weight) and (weight.dim() > 0 or kind != "step")


def _has_shape_of(value: Any, weight: torch.Tensor) -> bool:
    """Return whether ``value`` is a tensor of the weight's shape."""
    return torch.is_tensor(value) and value.shape == weight.shape


def _bytes_of_state(state: Any) -> int:
    """Count the bytes of the tensors in ``state``; single numbers do not count."""
    if torch.is_tensor(state):
        return state.numel() * state.element_size() if state.dim() else 0
    inside = state.values() if isinstance(state, Mapping) else state if isinstance(state, (list, tuple)) else ()
    return sum(_bytes_of_state(each) for each in inside)


def _fused(base: torch.optim.Optimizer) -> bool:
    return any(opt_group.get("fused") or opt_group.get("capturable") for opt_group in base.param_groups)


# Hyperparameters that choose an implementation or a variant with the same state, and those that
# every optimizer has.
_HOW_NOT_WHAT = {
    "lr", "weight_decay", "maximize", "foreach", "capturable", "differentiable", "fused", "amsgrad", "decoupled_weight_decay",
    "bias_correction",
}  # fmt: skip
