"""The optimizer over shards: any torch optimizer, stepping on this rank's flat pieces of the master
weights, or on whole tensors where it looks at more than single elements.

Whole tensors are pieces in their shapes where nothing is sharded; elsewhere each has one owner (see
``whole_tensors``).

A StateStore says where master weights and moments are between steps: DeviceStore in ``pieces``,
others in ``offload``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

import torch

from zero_trial.comm import AxisComm
from zero_trial.errors import TrialError
from zero_trial.ops import native_on
from zero_trial.ops.optimizers import (
    DeviceScalars,
    FusedLamb,
    FusedOptimizer,
    ShardOptimizer,
    ShardUpdate,
    StepGuard,
    device_scaled_step,
    past_engine,
    scaled_step,
    supports_device_scalars,
    undo_step,
)
from zero_trial.ops.states import StatePart, seed_of
from zero_trial.sharding.ema import WeightAverage
from zero_trial.sharding.freed import register_optimizer
from zero_trial.sharding.param_group import ParamGroup, Updated
from zero_trial.sharding.pieces import (
    DeviceStore,
    ShardPiece,
    StateStore,
    StateView,
    all_at_initialize,
    batching,
    by_tensor,
    bytes_of_state,
    held_whole,
    is_by_element,
    is_elementwise_state,
    kept_in_place,
    parts_of,
    scales_by_tensor,
    segments_of,
    sizes_of,
    without_empty_groups,
)
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

    def settle(self) -> None:
        """Wait until the last step's outcome is known."""


class Publisher(Protocol):
    """The part of a ShardedModel that publishes masters which were changed between steps. A step
    publishes through ParamPublisher, group by group."""

    def wait_before_writing(self) -> None: ...

    def publish(self) -> None: ...

    def wait(self) -> None: ...


class ShardedOptimizer:
    """Steps ``base`` on the shards' pieces; everything user code knows of an optimizer
    (``param_groups``, lr) is the base's own.

    ``loss_scale`` and ``cur_scale`` report the engine's loss scale, as DeepSpeed's optimizer
    objects do.

    Args:
        groups: all parameter groups of the model, the same on every rank.
        shard: the axis that cuts them.
        whole: the tensors that are updated whole where ranks hold parts of them.
        whole_groups: optimizer groups whose tensors are updated whole, sharded or not.
        at_once: ``base`` is stepped once per step, with all of its pieces.
        publisher: of the model's parameters, for what changes them between steps.
        ema: the average of the weights that is kept beside them.
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
        whole: WholeTensors | None = None,
        whole_groups: Collection[int] = (),
        at_once: bool = False,
        publisher: Publisher | None = None,
        ema: WeightAverage | None = None,
    ) -> None:
        self.base = base
        self.pieces = list(pieces)
        self.whole = whole
        self._held = [*held_whole(self.pieces, whole_groups), *(whole.own if whole is not None else ())]
        self._publisher = publisher
        self.ema = ema
        self._closed = False
        self.store = store if store is not None else DeviceStore(self.pieces, **batching(base, at_once))
        self._status = status if status is not None else StepStatus()
        self.guard = StepGuard(base)
        self._sizes = sizes_of(base)
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
        raise past_engine()

    def add_param_group(self, param_group: Mapping[str, Any]) -> NoReturn:
        """Raise ConfigError: the engine has no gradients of parameters that come later."""
        raise all_at_initialize("optimizer.add_param_group")

    def update(
        self, multiplier: float, scalars: DeviceScalars | None = None
    ) -> Iterator[tuple[Sequence[Updated], bool]]:
        """Step with ``multiplier`` times the reduced gradients; yield pieces as soon as they are
        done, and whether their 16-bit copies are.

        Bytes per parameter from a 16-bit gradient to a 16-bit parameter (Adam): 28 in one pass
        where the optimizer fuses, else 28 and two casts of 6 each. With ``scalars`` (see
        :meth:`takes_device_scalars` and :attr:`divides`) the device may skip the step: then
        :meth:`undo_step` must follow. Optimizers that sum norms over tensors (LAMB) are collective
        over shard.
        """
        if (sizes := sizes_of(self.base)) != self._sizes:
            given = {"got": f"{type(self.base).__name__} with {sizes} tensors", "expected": self._sizes}
            raise all_at_initialize("optimizer.param_groups", **given)
        self._stateful = len(self.base.state)
        if self.ema is not None:
            self.ema.begin_step()
        with self.guard.open(self.base):
            yield from self._update(multiplier, scalars)

    def _update(self, multiplier: float, scalars: DeviceScalars | None) -> Iterator[tuple[Sequence[Updated], bool]]:
        if self.whole is not None:  # first: its exchanges come before any group's publication, on every rank
            with self.whole.at_hand(gradients=True), self._averaged(self.whole.own, scalars):
                self._step_whole(self.whole.own, multiplier, scalars)
            yield self.whole.updated, False
        for batch in self.store.batches():
            if not batch and self.whole is not None:
                continue  # the base has stepped
            self.store.borrow(batch)
            with self._averaged(batch, scalars):
                rounded = self._step_flat(batch, multiplier, scalars)
            yield batch, self.store.give_back(batch, rounded)

    def _averaged(
        self, parts: Sequence[ShardPiece | WholeTensor], scalars: DeviceScalars | None
    ) -> AbstractContextManager[None]:
        """Move the averages of ``parts`` after the block that steps them."""
        if self.ema is None:
            return nullcontext()
        found_inf = scalars.found_inf if scalars is not None else None
        return self.ema.following([part.weight for part in parts], self.base.state, found_inf)

    def _step_flat(self, pieces: Sequence[ShardPiece], multiplier: float, scalars: DeviceScalars | None) -> bool:
        """Step ``base`` on flat pieces; return whether it has made their 16-bit copies, too."""
        if isinstance(self.base, ShardOptimizer) and self.base.fuses:
            updates = [piece.update() for piece in pieces]
            self.base.step(updates=updates, multiplier=multiplier, scalars=scalars)
            return True
        for piece in pieces:
            piece.weight.grad = piece.gradient()
        with kept_in_place(piece.weight for piece in pieces):
            if scalars is None:
                scaled_step(self.base, multiplier)
            else:
                device_scaled_step(self.base, scalars.factor, scalars.found_inf)
        for piece in pieces:
            piece.weight.grad = None
        return False

    def _step_whole(self, tensors: Sequence[WholeTensor], multiplier: float, scalars: DeviceScalars | None) -> None:
        """Step ``base`` on the tensors that this rank owns. One that owns none steps nothing, as
        an optimizer may not expect to have no tensors."""
        if not tensors:
            return
        if isinstance(self.base, ShardOptimizer):
            updates = [ShardUpdate(each.weight, _gradient_of(each.weight), None, each.opt_group) for each in tensors]
            self.base.step(updates=updates, multiplier=multiplier, scalars=scalars)
        else:
            with kept_in_place(each.weight for each in tensors), without_empty_groups(self.base):
                scaled_step(self.base, multiplier)

    @property
    def updated(self) -> list[Updated]:
        """What :meth:`update` yields in a step, for the publisher."""
        return [*self.pieces, *(self.whole.updated if self.whole is not None else ())]

    @property
    def train(self) -> Callable[[], None]:
        """Let an optimizer that evaluates other weights than it trains (schedule-free) put all
        parameters back into those for training: see :attr:`eval`."""
        return self._switch("train")

    @property
    def eval(self) -> Callable[[], None]:
        """Let such an optimizer change all parameters for evaluation, until :attr:`train`. The call
        is collective over shard, between steps.

        Raises AttributeError where the optimizer has no such method, as it would itself: trainers
        ask with ``hasattr``.
        """
        return self._switch("eval")

    def _switch(self, mode: str) -> Callable[[], None]:
        switch = getattr(self.base, mode, None)
        if not callable(switch) or self._publisher is None:
            raise AttributeError(
                f"{type(self.base).__name__} has no {mode}(): only schedule-free optimizers have other weights for evaluation"
            )

        def call() -> None:
            with self._changing_masters(), kept_in_place(part.weight for part in (*self.pieces, *self._held)):
                switch()

        return call

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Let parameters and masters be the averages inside the block, and restore them to the bit
        after it. See :meth:`Engine.ema_weights`."""
        self._status.settle()
        if self.ema is None:
            raise TrialError(
                "no average of the weights is kept",
                where="engine.ema_weights",
                fix='Add to ds_config: "ema": {"decay": 0.999}.',
            )
        if self.ema.swapped or not self.ema.steps:  # before the first step the average is the weights
            yield
            return
        self._swap(self.ema)
        try:
            yield
        finally:
            if not self._closed:  # else the module keeps the averages
                self._swap(self.ema)

    def require_trained_weights(self, where: str) -> None:
        """Raise TrialError inside :meth:`ema_weights`."""
        if self.ema is not None:
            self.ema.require_trained_weights(where)

    def _swap(self, ema: WeightAverage) -> None:
        with self._changing_masters():
            own = self.whole.own if self.whole is not None else ()
            ema.swap([part.weight for part in (*self.pieces, *own)], self.base.state)

    @contextmanager
    def _changing_masters(self) -> Iterator[None]:
        """Let the block write masters and state, and publish the masters after it. Collective over
        shard, between steps."""
        self._status.settle()
        if self._publisher is not None:
            self._publisher.wait_before_writing()
        with self.store.lent(), self.whole.at_hand(gradients=False) if self.whole is not None else nullcontext():
            yield
        if self._publisher is not None:
            self._publisher.publish()
            self._publisher.wait()

    def undo_step(self) -> None:
        """Undo what the host counted and made for the last step, which the device has skipped."""
        undo_step(self.base, self._stateful)
        if self.ema is not None:
            self.ema.undo_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients from before the first micro-batch of a step, as plain torch does: those
        that another engine's loss has left here. Between micro-batches nothing is dropped."""
        self.guard.zero_grad(set_to_none)

    def lent(self) -> AbstractContextManager[None]:
        """Make masters and state readable and writable inside the block, wherever they live; only
        between steps. May be nested."""
        return self.store.lent()

    def close(self) -> None:
        """Free the store's space outside of memory. No step follows."""
        self._closed = True
        self.store.close()

    def identity(self) -> dict[str, Any]:
        """Return class and hyperparameter names, for a checkpoint: state belongs to another
        optimizer if the latter differ."""
        found = {
            "class": type(self.base).__name__,
            "settings": sorted(set(getattr(self.base, "defaults", {})) - _HOW_NOT_WHAT),
        }
        states = self.base.states if isinstance(self.base, FusedOptimizer) else "fp32"
        return found if states == "fp32" else found | {"states": states}

    def bind_tensors(self, groups: Sequence[ParamGroup], sum_over_shards: Callable[[torch.Tensor], None]) -> None:
        """Give an optimizer with norms per tensor (LAMB), or with states in fewer bits, the
        elements of each piece that belong to each tensor.

        ``groups``: all of the model, the same on every rank (see :func:`segments_of`).
        """
        if isinstance(self.base, FusedLamb):
            segments, count = segments_of(self.pieces, groups)
            self.base.bind(segments, count, sum_over_shards)
        elif isinstance(self.base, FusedOptimizer) and self.base.states != "fp32":
            self.base.bind(
                {
                    id(piece.weight): [StatePart(seed_of(slot.name), *where) for slot, *where in parts_of(piece)]
                    for piece in self.pieces
                }
            )

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
        with self.store.lent():
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
        with self.store.lent():
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


def _gradient_of(weight: torch.Tensor) -> torch.Tensor:
    return weight.grad if weight.grad is not None else torch.zeros_like(weight)


def _fused(base: torch.optim.Optimizer) -> bool:
    return any(opt_group.get("fused") or opt_group.get("capturable") for opt_group in base.param_groups)


# Hyperparameters that choose an implementation or a variant with the same state, and those that
# every optimizer has.
_HOW_NOT_WHAT = {
    "lr", "weight_decay", "maximize", "foreach", "capturable", "differentiable", "fused", "amsgrad", "decoupled_weight_decay",
    "bias_correction",
}  # fmt: skip
