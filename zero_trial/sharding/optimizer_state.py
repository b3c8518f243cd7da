"""Master weights and optimizer state on this rank by logical tensor: for checkpoints, and for code
that reads or writes the state of one parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from zero_trial.errors import CheckpointError
from zero_trial.ops.optimizers.fused import FusedOptimizer
from zero_trial.sharding.layout import ParamSlot
from zero_trial.sharding.offload.moved_states import MovedStates, tensors_inside
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.pieces import ShardPiece, StateStore, parts_of
from zero_trial.sharding.whole_tensors import WholeTensor, WholeTensors


@dataclass(frozen=True)
class TensorSlice:
    """Elements [start, stop) of a flattened tensor, as one rank holds them."""

    kind: str  # "master", "exp_avg" ...
    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    tensor: torch.Tensor


def slices_of(
    group: ParamGroup, kind: str, shard: torch.Tensor, only: ParamSlot | None = None
) -> Iterator[TensorSlice]:
    """Yield the part of each tensor (or of one) in ``shard`` (shard_numel,) of a group."""
    for piece in group.layout.pieces(group.comm.index):
        if only is None or piece.slot is only:
            values = shard[piece.offset : piece.offset + piece.numel]
            yield TensorSlice(kind, piece.slot.name, piece.slot.shape, piece.start, piece.stop, values)


class StateByTensor:
    """The masters and the state of ``base``, by logical tensor, also if they are offloaded.

    Args:
        pieces: the pieces that ``base`` steps on, with the tensors of ``whole``.
        moved: the states that a script has temporarily offloaded.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        pieces: Sequence[ShardPiece],
        store: StateStore,
        whole: WholeTensors | None,
        moved: MovedStates | None,
    ) -> None:
        self._base = base
        self._pieces = pieces
        self._store = store
        self._whole = whole
        self._moved = moved
        self.held: Sequence[WholeTensor] = whole.own if whole is not None else ()
        self.parts: list[ShardPiece | WholeTensor] = [*pieces, *self.held]
        self._piece_of = {id(piece.weight): piece for piece in pieces}

    def _state(self, part: ShardPiece | WholeTensor) -> dict[str, Any]:
        state: dict[str, Any] = self._base.state.get(part.weight, {})
        return state

    def lent(self) -> AbstractContextManager[None]:
        """Make masters and state readable and writable in the block. May be nested."""
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
                    elementwise = piece is not None and _is_by_element(key, value, weight)
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
        found = []
        for part in self.parts:
            flat = parts_of(part) if isinstance(part, ShardPiece) else ()
            names = [f"{slot.name}{list(slot.shape)}[{start}:{start + high - low}]" for slot, start, low, high in flat]
            found.append([part.slot.name] if isinstance(part, WholeTensor) else names)
        return found

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Make the tensors that this rank updates whole readable and writable, and their state;
        only inside :meth:`lent`."""
        values = self._whole.at_hand(gradients=False) if self._whole is not None else nullcontext()
        with values, self._store.state_at_hand(self.held):
            yield

    def identity(self) -> dict[str, Any]:
        """Return class and hyperparameter names, which must match a checkpoint's."""
        found = {
            "class": type(self._base).__name__,
            "settings": sorted(set(getattr(self._base, "defaults", {})) - _HOW_NOT_WHAT),
        }
        states = self._base.states if isinstance(self._base, FusedOptimizer) else "fp32"
        return found if states == "fp32" else found | {"states": states}

    def views(self, only: ParamGroup | None = None) -> Iterator[TensorSlice]:
        """Yield every tensor of state on this rank (of one group), by logical tensor. Their values
        are valid only inside :meth:`lent`.

        State that is not one value per element (rows and columns of Adafactor) exists for whole
        tensors only and has its own shape.
        """
        for part in self.parts:
            state = self._state(part) if only is None or part.group is only else {}
            tensors = {
                key: value
                for key, value in state.items()
                if _is_by_element(key, value, part.weight)
                or (isinstance(part, WholeTensor) and torch.is_tensor(value) and value.dim() > 0)
            }
            if isinstance(part, WholeTensor):
                for key, value in tensors.items():
                    yield TensorSlice(key, part.slot.name, tuple(value.shape), 0, value.numel(), value.view(-1))
                continue
            for slot, start, low, high in parts_of(part):
                for key, value in tensors.items():
                    yield TensorSlice(key, slot.name, slot.shape, start, start + high - low, value[low:high])

    @contextmanager
    def slices(self, group: ParamGroup, slot: ParamSlot, kind: str) -> Iterator[list[TensorSlice]]:
        """Yield this rank's slices of state ``kind`` of a tensor, readable and writable inside."""
        group.wait_for_copies()
        with self.lent():
            yield [view for view in self.views(group) if (view.name, view.kind) == (slot.name, kind)]

    def has(self, kind: str) -> bool:
        """Return whether this rank has state ``kind`` of any tensor."""
        return any(kind in state for state in self._base.state.values())

    def whole_states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and state of each tensor that is updated whole here, and has any state:
        numbers and tensors of any shape, also in lists and dicts."""
        for held, name in zip(self.held, self.whole_names, strict=True):
            if state := self._state(held):
                yield name, dict(state)

    def refuse_lost_states(self) -> None:
        """Raise CheckpointError for state that a checkpoint by tensor would lose: state of no
        parameter, or state of a flat piece that is neither one value per element nor one number."""
        strays = [key for key in self._base.state if not torch.is_tensor(key)]
        if strays:
            raise CheckpointError(
                "this optimizer has state that belongs to no parameter, which a checkpoint would lose",
                where=f"{type(self._base).__name__}.state",
                got=", ".join(map(repr, strays[:4])),
                expected="parameters as the keys of optimizer.state",
                fix="Store numbers in the optimizer's param_groups, which are saved, or save only the weights with engine.save_16bit_model.",
            )
        for piece in self._pieces:
            for key, value in self._state(piece).items():
                if value is not None and not _is_number(value) and not _is_by_element(key, value, piece.weight):
                    raise CheckpointError(
                        "this optimizer has state of flat pieces that is not one value per element, which a checkpoint would lose",
                        where=f"{type(self._base).__name__}.state",
                        got=f"{key} of {tuple(value.shape) if torch.is_tensor(value) else type(value).__name__}",
                        expected=f"one value for each of {piece.numel} elements, or a single number",
                        fix="Remove elementwise = True from the class (zero_optimization.elementwise_optimizer from ds_config): whole "
                        "tensors are saved with all of their state.",
                    )

    @property
    def whole_names(self) -> list[str]:
        """The tensors that are updated whole here."""
        return [part.slot.name for part in self.held]

    def scalars(self) -> dict[str, dict[str, float]]:
        """Return the state that is one number per tensor (step counts), by optimizer group: ``{"0":
        {"step": 12.0}}``.

        All flat pieces of a group step together, so their numbers are the same. Tensors that are
        updated whole have their own in :meth:`whole_states`.
        """
        found: dict[str, dict[str, float]] = {}
        for piece in self.parts:
            for key, value in self._state(piece).items():
                if _is_number(value) and not _is_by_element(key, value, piece.weight):
                    found.setdefault(str(piece.opt_group), {})[key] = float(value)
        return found

    def make_state(
        self,
        kinds: Sequence[str],
        scalars: Mapping[str, Mapping[str, float]],
        shape_of: Callable[[str, str], tuple[int, ...] | None],
        states: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Replace all state with zeros of the named kinds and the scalar state, so that checkpoints
        can be read into :meth:`views`.

        ``shape_of(kind, tensor)`` is the stored shape, None if there is no such state: then a piece
        of that tensor gets none either. ``states``: what :meth:`whole_states` has yielded, by name;
        a tensor that it has gets this state. Only inside :meth:`lent`.
        """
        self._base.state.clear()
        for held, name in zip(self.held, self.whole_names, strict=True):
            state = dict(states.get(name, {}))
            if name not in states:
                shapes = {kind: shape for kind in kinds if (shape := shape_of(kind, name)) is not None}
                state = {kind: held.weight.new_zeros(shape) for kind, shape in shapes.items()}
                state |= self._scalars_of(held, scalars)
            if state:
                self._base.state[held.weight] = state
        for piece in self._pieces:
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
        self, piece: ShardPiece | WholeTensor, scalars: Mapping[str, Mapping[str, float]]
    ) -> dict[str, torch.Tensor]:
        device = piece.weight.device if _fused(self._base) else "cpu"
        own = scalars.get(str(piece.opt_group), {})
        return {key: torch.tensor(value, dtype=torch.float32, device=device) for key, value in own.items()}

    def persistent_bytes(self) -> int:
        """Count the bytes of state on this rank (without masters) and of the store's own memory."""
        states = sum(
            self._store.resident_bytes(value)
            for piece in self._pieces
            for kind, value in self._state(piece).items()
            if torch.is_tensor(value) and _is_by_element(kind, value, piece.weight)
        )
        whole = [value for held in self.held for value in tensors_inside(self._state(held))]
        states += sum(self._store.resident_bytes(value) for value in whole)
        return states + sum(buffer.numel() * buffer.element_size() for buffer in self._store.buffers)


def _is_by_element(kind: str, value: Any, weight: torch.Tensor) -> bool:
    """Return whether state ``kind`` has a value per element. All state of a scalar parameter has
    one, except its step count."""
    return torch.is_tensor(value) and value.shape == weight.shape and (weight.dim() > 0 or kind != "step")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (torch.is_tensor(value) and value.numel() == 1)


def _fused(base: torch.optim.Optimizer) -> bool:
    return any(opt_group.get("fused") or opt_group.get("capturable") for opt_group in base.param_groups)


# Hyperparameters that choose an implementation or a variant with the same state, and those that
# every optimizer has.
_HOW_NOT_WHAT = {
    "lr", "weight_decay", "maximize", "foreach", "capturable", "differentiable", "fused", "amsgrad", "decoupled_weight_decay",
    "bias_correction",
}  # fmt: skip
