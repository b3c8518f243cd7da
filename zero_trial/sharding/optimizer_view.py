"""What torch, DeepSpeed and checkpoints see of the optimizer over shards: groups and their
settings, state by tensor, the loss scale."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

import torch

from zero_trial.errors import CheckpointError
from zero_trial.ops.optimizers import FusedOptimizer, StepGuard, past_engine, state_hooks
from zero_trial.precision import DynamicScale, LossScale, LossScaleView, StaticScale
from zero_trial.sharding.full_params import ParameterOffload
from zero_trial.sharding.offload.moved_states import MovedStates
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.pieces import (
    ShardPiece,
    StateStore,
    StateView,
    all_at_initialize,
    by_tensor,
    bytes_of_state,
    held_whole,
    is_by_element,
    is_elementwise_state,
    parts_of,
    refuse_lost_states,
    scales_by_tensor,
)
from zero_trial.sharding.plan import Lifetime
from zero_trial.sharding.whole_tensors import WholeTensor, WholeTensors


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

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped for a gradient that is not finite."""
        return False

    @property
    def scaler(self) -> LossScale:
        """The loss scale and how it changes."""
        return StaticScale(1.0)

    def restore_scaler(self, state: Mapping[str, Any]) -> None:
        """Go on from the JSON values of a :attr:`scaler`."""

    def settle(self) -> None:
        """Wait until the last step's outcome is known."""


class Publisher(Protocol):
    """The part of a ShardedModel that publishes masters which were changed between steps. A step
    publishes through ParamPublisher, group by group."""

    moved: MovedStates

    def take_live_edits(self) -> None: ...

    def wait_before_writing(self) -> None: ...

    def publish(self) -> None: ...

    def wait(self) -> None: ...


class TorchView(torch.optim.Optimizer):
    """The part of a sharded optimizer that torch, DeepSpeed and checkpoints see: settings by group,
    state by tensor, and where the loss scale is.

    It is a torch.optim.Optimizer: torch's schedulers take it, and write into the groups of
    ``base``, which are its own.

    Args:
        base: the optimizer that steps on this rank's pieces.
        whole_groups: optimizer groups whose tensors are updated whole, sharded or not.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        pieces: Sequence[ShardPiece],
        store: StateStore,
        whole: WholeTensors | None,
        whole_groups: Collection[int],
        status: StepStatus,
        publisher: Publisher | None,
        groups: Sequence[ParamGroup],
    ) -> None:
        # torch's own constructor would make other groups and state
        self.base = base
        self.pieces = list(pieces)
        self.store = store
        self.whole = whole
        self.guard = StepGuard(base)
        self._held = [*held_whole(self.pieces, whole_groups), *(whole.own if whole is not None else ())]
        self._groups = groups
        self._publisher = publisher
        self._status = status
        self._opt_called = False  # torch's schedulers ask whether a step was taken

    # --- torch's and DeepSpeed's names ------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that steps on this rank's pieces, under DeepSpeed's name."""
        self._status.settle()
        self._wait_for_copies()  # the caller may write into its state
        return self.base

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        self._status.settle()
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._status.settle()
        self.base.param_groups = groups

    @property
    def state(self) -> Any:
        self._status.settle()
        self._wait_for_copies()  # the caller may write into it
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self._status.settle()
        self.base.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.base.defaults

    @property
    def loss_scale(self) -> float:
        return self._status.loss_scale

    cur_scale = loss_scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped for a gradient that is not finite."""
        return self._status.overflow

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the gradients."""
        return isinstance(self._status.scaler, DynamicScale)

    @property
    def loss_scaler(self) -> LossScaleView:
        """The loss scale with its counters, as they are now."""
        return LossScaleView.of(self._status.loss_scale, self._status.scaler)

    loss_scale_config = loss_scaler

    def needs_scaler(self) -> bool:
        """Return whether a loss must be scaled (fp16), as ``engine.backward`` and ``engine.scale``
        do."""
        return self._status.scaler != StaticScale(1.0)

    @property
    def cuts(self) -> tuple[bool, bool, bool]:
        """Whether optimizer state, gradients and parameters are cut into shards."""
        state, grads, params = (
            zip(*(group.plan.cuts for group in self._groups), strict=True) if self._groups else ((),) * 3
        )
        return any(state), any(grads), any(params)

    @property
    def parameter_offload(self) -> ParameterOffload:
        """The owner of stage 3's hooks, under DeepSpeed's name. Other stages do not have it, by
        which libraries know them."""
        if all(group.plan.params is Lifetime.ALWAYS for group in self._groups):
            raise AttributeError("parameter_offload exists at ZeRO stage 3 only")
        return ParameterOffload()

    def get_lr(self) -> Any:
        """Return the learning rate of the first group."""
        return self.param_groups[0]["lr"]

    def set_lr(self, lr: Any) -> None:
        """Set the learning rate of all groups."""
        for group in self.param_groups:
            group["lr"] = lr

    def step(self, closure: Any = None) -> NoReturn:
        """Raise TrialError: a loop of plain torch would step without reduced gradients, and would
        not publish the new values."""
        raise past_engine()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients from before the first micro-batch of a step, as plain torch does: those
        that another engine's loss has left here. Between micro-batches nothing is dropped."""
        self.guard.zero_grad(set_to_none)

    def add_param_group(self, param_group: Mapping[str, Any]) -> NoReturn:
        """Raise ConfigError: the engine has no gradients of parameters that come later."""
        raise all_at_initialize("optimizer.add_param_group")

    def refresh_fp32_params(self) -> None:
        """Take the parameters' values, as they are now, for the masters: after weights were written
        past the engine (``param.data.copy_``). At stage 3 freed parameters are unchanged."""
        self._status.settle()
        self._wait_for_copies()
        with self.lent(), torch.no_grad():
            for group in self._groups:
                if group.plan.params is Lifetime.ALWAYS:
                    group.load_full()
                elif group.master is not group.shard:
                    with group.materialized():
                        group.master.copy_(group.shard)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register a hook on the steps of :attr:`base`. Raises ConfigError where it would see flat
        pieces: only an optimizer that had hooks before ``initialize`` steps on whole tensors."""
        self.guard.refuse_late_hooks(self.base)
        return self.base.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Register a hook on the steps of :attr:`base`; see :meth:`register_step_pre_hook`."""
        self.guard.refuse_late_hooks(self.base)
        return self.base.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> NoReturn:
        """Raise ConfigError: checkpoints hold the state of each tensor, and would not call it."""
        raise state_hooks(self.base)

    register_state_dict_post_hook = register_state_dict_pre_hook
    register_load_state_dict_pre_hook = register_state_dict_pre_hook
    register_load_state_dict_post_hook = register_state_dict_pre_hook

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part as torch's dict of ``state`` and ``param_groups``, with
        ``masters`` (a tensor for each piece), ``layout`` (what is in the pieces) and
        ``loss_scaler``: copies, for :meth:`load_state_dict` of the same model on as many ranks.
        Checkpoints for other numbers of ranks are ``engine.save_checkpoint``'s.

        Collective over shard where tensors are updated whole.
        """
        self._status.settle()
        if self._publisher is not None:
            self._publisher.take_live_edits()
        with self.lent(), self._at_hand():
            packed = copy.deepcopy(self.base.state_dict())
            masters = [part.weight.detach().clone() for part in self._parts()]
        layout = self._layout()
        return {**packed, "masters": masters, "layout": layout, "loss_scaler": self._status.scaler.to_json()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict` of the same rank: settings, state, masters, loss scale; the
        parameters follow the masters. Collective over shard.

        Raises CheckpointError for a state of other pieces, before anything is changed.
        """
        own = self._layout()
        if (layout := state_dict.get("layout")) != own:
            raise CheckpointError(
                "this is not the state of this rank's part of the model",
                where="optimizer.load_state_dict",
                got=sorted(state_dict) if layout is None else _difference(layout, own),
                expected="state_dict() of the same rank, of as many" if layout is None else _difference(own, layout),
                fix="To load on another number of ranks or at another stage, use engine.save_checkpoint and load_checkpoint.",
            )
        parts, groups = self._parts(), self.base.param_groups
        masters = state_dict["masters"]
        piece_of = {id(piece.weight): piece for piece in self.pieces}
        with self._changing_masters(), torch.no_grad():
            for part, master in zip(parts, masters, strict=True):
                part.weight.copy_(master)
            weights = [weight for group in groups for weight in group["params"]]
            for index, weight in enumerate(weights):
                self._load_state_of(weight, state_dict["state"].get(index, {}), piece_of.get(id(weight)))
            for group, saved in zip(groups, state_dict["param_groups"], strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})
        self._status.restore_scaler(state_dict["loss_scaler"])

    def _load_state_of(self, weight: torch.Tensor, saved: Mapping[str, Any], piece: ShardPiece | None) -> None:
        """Write the state of one weight where the store keeps it; only inside :meth:`lent`."""
        own = self.base.state.pop(weight, {})
        loaded = {}
        for key, value in saved.items():
            if torch.is_tensor(value):
                home = own.get(key)
                if not (torch.is_tensor(home) and home.shape == value.shape and home.dtype == value.dtype):
                    elementwise = piece is not None and is_elementwise_state(value, piece)
                    home = self.store.zeros(piece, key) if piece is not None and elementwise else None
                    if home is None:
                        device = weight.device if value.dim() or _fused(self.base) else "cpu"
                        home = torch.empty_like(value, device=device)
                loaded[key] = home.copy_(value)
            else:
                loaded[key] = copy.deepcopy(value)
        if loaded:
            self.base.state[weight] = loaded

    def _layout(self) -> list[list[str]]:
        """Return which elements of which tensors each part holds."""
        whole = [each.slot.name for each in self.whole.own] if self.whole is not None else []
        flat = [
            [
                f"{slot.name}{list(slot.shape)}[{start}:{start + high - low}]"
                for slot, start, low, high in parts_of(piece)
            ]
            for piece in self.pieces
        ]
        return [*flat, *([name] for name in whole)]

    def _parts(self) -> list[ShardPiece | WholeTensor]:
        return [*self.pieces, *(self.whole.own if self.whole is not None else ())]

    def _at_hand(self) -> AbstractContextManager[None]:
        """Make the tensors that this rank updates whole readable and writable."""
        return self.whole.at_hand(gradients=False) if self.whole is not None else nullcontext()

    def lent(self) -> AbstractContextManager[None]:
        """Make masters and state readable and writable inside the block, wherever they live; only
        between steps. May be nested."""
        if self._publisher is not None:
            self._publisher.moved.require_here("masters and optimizer state", ("optim_states", "hp_params"))
        return self.store.lent()

    @contextmanager
    def _changing_masters(self) -> Iterator[None]:
        """Let the block write masters and state, and publish the masters after it. Collective over
        shard, between steps."""
        self._status.settle()
        if self._publisher is not None:
            self._publisher.take_live_edits()
            self._publisher.wait_before_writing()
        self._wait_for_copies()
        with self.lent(), self._at_hand():
            yield
        if self._publisher is not None:
            self._publisher.publish()
            self._publisher.wait()

    def _wait_for_copies(self) -> None:
        for group in self._groups:
            group.wait_for_copies()

    def identity(self) -> dict[str, Any]:
        """Return class and hyperparameter names, for a checkpoint: state belongs to another
        optimizer if the latter differ."""
        found = {
            "class": type(self.base).__name__,
            "settings": sorted(set(getattr(self.base, "defaults", {})) - _HOW_NOT_WHAT),
        }
        states = self.base.states if isinstance(self.base, FusedOptimizer) else "fp32"
        return found if states == "fp32" else found | {"states": states}

    # --- state, for checkpoints and user code -----------------------------------------------------

    def views(self) -> Iterator[StateView]:
        """Yield every tensor of master weights and state on this rank, by logical tensor. Their
        values are there only inside :meth:`lent`.

        State that is not one value per element (rows and columns of Adafactor) exists for whole
        tensors only and has its own shape.
        """
        self._status.settle()
        for held in self._held:
            for key, value in self.base.state.get(held.weight, {}).items():
                if torch.is_tensor(value) and (value.dim() > 0 or is_by_element(key, value, held.weight)):
                    yield StateView(key, held.slot.name, tuple(value.shape), 0, value.numel(), value.view(-1))
        known = {id(held.weight) for held in self._held}
        for piece in self.pieces:
            state = {} if id(piece.weight) in known else self.base.state.get(piece.weight, {})
            elementwise = {key: value for key, value in state.items() if is_elementwise_state(value, piece)}
            yield from scales_by_tensor(piece, state)
            yield from by_tensor(piece, {"master": piece.weight.detach()} | elementwise)

    def whole_states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and state of each tensor that is updated whole here, and has any state:
        numbers and tensors of any shape, also in lists and dicts."""
        self._status.settle()
        for held in self._held:
            state = self.base.state.get(held.weight, {})
            if state:
                yield held.slot.name, dict(state)

    def refuse_lost_states(self) -> None:
        """See :func:`zero_trial.sharding.pieces.refuse_lost_states`."""
        known = {id(held.weight) for held in self._held}
        refuse_lost_states(self.base, [piece for piece in self.pieces if id(piece.weight) not in known])

    @property
    def whole_names(self) -> list[str]:
        """The tensors that are updated whole here."""
        return [held.slot.name for held in self._held]

    def scalars(self) -> dict[str, dict[str, float]]:
        """Return the state that is one number per tensor (step counts), by optimizer group: ``{"0":
        {"step": 12.0}}``.

        All flat pieces of a group step together, so their numbers are the same. Tensors that are
        updated whole have their own in :meth:`whole_states`.
        """
        self._status.settle()
        found: dict[str, dict[str, float]] = {}
        for piece in (*self.pieces, *self._held):
            for key, value in self.base.state.get(piece.weight, {}).items():
                if not is_by_element(key, value, piece.weight) and (
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
        self._status.settle()
        self.base.state.clear()
        for held in self._held:
            if held.slot.name in states:
                state = dict(states[held.slot.name])
            else:
                state = {}
                for kind in kinds:
                    if (shape := shape_of(kind, held.slot.name)) is not None:
                        state[kind] = held.weight.new_zeros(shape)
                state |= self._scalars_of(held, scalars)
            if state:
                self.base.state[held.weight] = state
        known = {id(held.weight) for held in self._held}
        for piece in self.pieces:
            if id(piece.weight) in known:
                continue
            start, stop = piece.group.runs[piece.opt_group]
            names = [slot.name for slot in piece.group.layout.slots if start <= slot.offset < stop]
            state = {}
            for kind in kinds:
                if any(shape_of(kind, name) is not None for name in names):
                    kept = self.store.zeros(piece, kind)
                    if kept is None and isinstance(self.base, FusedOptimizer):
                        kept = self.base.new_moment(piece.weight.detach(), kind)
                    state[kind] = torch.zeros_like(piece.weight.detach()) if kept is None else kept
            state |= self._scalars_of(piece, scalars)
            if state:
                self.base.state[piece.weight] = state

    def _scalars_of(
        self, piece: ShardPiece | WholeTensor, scalars: Mapping[str, Mapping[str, float]]
    ) -> dict[str, torch.Tensor]:
        device = piece.weight.device if _fused(self.base) else "cpu"
        own = scalars.get(str(piece.opt_group), {})
        return {key: torch.tensor(value, dtype=torch.float32, device=device) for key, value in own.items()}

    def whole_tensor(self, group: ParamGroup, index: int) -> WholeTensor | None:
        """Return the tensor of slot ``index`` where one rank updates it whole and has its state;
        None where every rank has a shard of that."""
        tensors = self.whole.tensors if self.whole is not None else ()
        slot = group.layout.slots[index]
        return next((each for each in tensors if each.group is group and each.slot is slot), None)

    def state_shard(self, group: ParamGroup, kind: str) -> torch.Tensor | None:
        """Return the group's shard of state ``kind`` (shard_numel,), put together from its pieces;
        None if there is no such state yet."""
        self._status.settle()
        out: torch.Tensor | None = None
        with self.lent():
            for piece in self.pieces:
                value = self.base.state.get(piece.weight, {}).get(kind) if piece.group is group else None
                if torch.is_tensor(value) and is_elementwise_state(value, piece):
                    wide = value.reshape(-1)
                    if isinstance(self.base, FusedOptimizer):
                        wide = self.base.moment(piece.weight, kind)
                    out = wide.new_zeros(group.layout.shard_numel) if out is None else out
                    out[piece.low : piece.high].copy_(wide)
        return out

    def set_state_shard(self, group: ParamGroup, kind: str, shard: torch.Tensor) -> None:
        """Write ``shard`` (shard_numel,) back into the pieces' state ``kind``."""
        self._status.settle()
        group.wait_for_copies()
        with self.lent():
            for piece in self.pieces:
                if piece.group is group:
                    values = shard[piece.low : piece.high]
                    if isinstance(self.base, FusedOptimizer):
                        self.base.set_moment(piece.weight, kind, values)
                    else:
                        self.base.state[piece.weight][kind].view(-1).copy_(values)

    def persistent_bytes(self) -> int:
        """Count the bytes of state on this rank (without masters) and of the store's own memory."""
        self._status.settle()
        known = {id(held.weight) for held in self._held}
        states = sum(
            self.store.resident_bytes(value, kind)
            for piece in self.pieces
            if id(piece.weight) not in known
            for kind, value in self.base.state.get(piece.weight, {}).items()
            if torch.is_tensor(value) and is_by_element(kind, value, piece.weight)
        )
        states += sum(bytes_of_state(self.base.state.get(held.weight, {})) for held in self._held)
        return states + sum(buffer.numel() * buffer.element_size() for buffer in self.store.buffers)


def _difference(layout: Sequence[Sequence[str]], other: Sequence[Sequence[str]]) -> str:
    """Return the first parts that only ``layout`` has."""
    known = {name for names in other for name in names}
    found = [name for names in layout for name in names if name not in known]
    return ", ".join(found[:3]) or "the same elements in other pieces"


def _fused(base: torch.optim.Optimizer) -> bool:
    return any(opt_group.get("fused") or opt_group.get("capturable") for opt_group in base.param_groups)


# Hyperparameters that choose an implementation or a variant with the same state, and those that
# every optimizer has.
_HOW_NOT_WHAT = {
    "lr", "weight_decay", "maximize", "foreach", "capturable", "differentiable", "fused", "amsgrad", "decoupled_weight_decay",
    "bias_correction",
}  # fmt: skip
