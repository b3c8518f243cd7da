"""Gradients for user code, between the last backward pass of a step and the step: ``param.grad``.

After that pass ``param.grad`` is a :class:`LazyGradient`. It takes no memory. If full gradients
live (ZeRO 0 and 1), its first use computes the averaged, unscaled gradient, in the parameter's
dtype (for fp16 parameters in fp32). Otherwise it raises an error that names an alternative. So
``clip_grad_norm_``, which only gets the parameters, works or raises, but is never a silent no-op.

    p.grad.norm(), print(p.grad)     local at ZeRO 0; at ZeRO 1 a group is gathered over shard on
                                     its first use: n (N-1)/N elements
    p.grad.mul_(c), clip_grad_norm_  changed values are written into this rank's shard before the
                                     step, and the norm is recomputed
    p.grad = None, p.grad = tensor   the gradient is 0, or the tensor

A gradient that no one uses costs one assignment and one comparison per parameter and step.

Between the micro-batches of a step ``param.grad`` is the sum so far if autograd accumulates into
it. If the sum is stored elsewhere (in fp32 for 16-bit gradients, or reduced after every
micro-batch), it is a :class:`LazyGradient` that can only be dropped: ``param.grad = None``.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zero_trial.errors import TrialError
from zero_trial.sharding.grad_buffer import GradBuffer
from zero_trial.sharding.guards.freed import METADATA, unasked
from zero_trial.sharding.layout import widened
from zero_trial.sharding.offload.moved_states import GRADIENTS, MovedStates
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.plan import Lifetime
from zero_trial.sharding.reduce import GradReducer

_GRAD = operator.attrgetter("grad")

Multiplier = Callable[[], float]
"""Returns the factor from a reduced gradient shard to the averaged, unscaled gradient."""


class ShownBefore(NamedTuple):
    """What the parameters of a group had as ``.grad``, and the group's gradient, if it was used:
    see :meth:`ShownGradients.show_again`."""

    shown: ShownGradients
    partial: bool
    grads: list[torch.Tensor | None]
    flat: torch.Tensor | None
    used: dict[int, torch.Tensor]


class ShownGradients:
    """What the parameters of one group have as ``.grad`` after the last backward pass of a step.

    Args:
        multiplier: see :data:`Multiplier`.
    """

    def __init__(self, grad_buffer: GradBuffer, multiplier: Multiplier) -> None:
        self.grad_buffer = grad_buffer
        self._multiplier = multiplier
        self._params = grad_buffer.group.params
        self._lazy: list[LazyGradient] = []
        self._flat: torch.Tensor | None = None  # the group's gradient (n,), once some of it was used
        self._used: dict[int, torch.Tensor] = {}  # views of it, by index
        self._late: dict[int, torch.Tensor] = {}  # gradients that autograd has added since, by index
        self.shown = False
        self.partial = False  # whether more gradients are reduced before the step
        self.last = False  # the last backward pass of the step is over

    def show(self, *, partial: bool = False, foreign: bool = False) -> None:
        """Set every parameter's ``.grad``. Does not read a gradient.

        Args:
            partial: more gradients are reduced before the step; does nothing if the sum so far is
                in ``.grad``.
            foreign: the gradient is from another engine's loss, and only this rank's.
        """
        buffer, self.last = self.grad_buffer, not partial
        # Gradients that came after their group's reduction began are still in .grad.
        buffer.flush_small()
        if partial and not foreign and not buffer.hidden:
            return
        self.partial = partial or buffer.has_gradients
        if buffer.waiting:  # its shard is in the full buffer, so that they stay in .grad until the step
            with unasked():
                self._late = {index: grad for index in buffer.waiting if (grad := self._params[index].grad) is not None}
        if not self._lazy:
            self._lazy = [LazyGradient(param, self, index) for index, param in enumerate(self._params)]
        with unasked():
            for param, lazy in zip(self._params, self._lazy, strict=True):
                param.grad = lazy
        self.shown = True

    def before(self) -> ShownBefore:
        """Return the current ``.grad`` of the parameters."""
        with unasked():
            grads = list(map(_GRAD, self._params))
        return ShownBefore(self, self.partial, grads, self._flat, dict(self._used))

    def show_again(self, before: ShownBefore) -> None:
        """Restore what :meth:`before` returned, after :meth:`hide` and a pass that produced no
        gradient. Local: gathered gradients are not gathered again."""
        with unasked():
            for param, grad in zip(self._params, before.grads, strict=True):
                param.grad = grad
        self.shown, self.partial = True, before.partial
        self._flat, self._used = before.flat, before.used

    def hide(self) -> None:
        """Remove the ``.grad`` of all parameters, so that autograd can set new ones; a gradient
        that autograd has added to the shown one stays."""
        late = self._late
        with unasked():
            for index, param in enumerate(self._params):
                param.grad = late.get(index) if not self.partial else self.grad_buffer.resumed(index, late.get(index))
        self.forget()

    def forget(self) -> None:
        """Forget what was shown; the next use reads the shard again."""
        self.shown = False
        self._flat = None
        self._used.clear()
        self._late.clear()

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Keep a gradient that autograd adds to parameter ``index``; :meth:`hide` follows."""
        before, grad = self._late.get(index), grad.detach()
        self._late[index] = grad.clone() if before is None else before + grad

    def value(self, index: int) -> torch.Tensor:
        """Return the full gradient of parameter ``index``, to be read and written. Collective over
        shard when it is the group's first use in a step."""
        group, buffer = self.grad_buffer.group, self.grad_buffer
        slot = group.layout.slots[index]
        if self.shown and self.partial:
            raise TrialError(
                "the gradient of a step is unknown until its last micro-batch is reduced",
                where=f"{slot.name}.grad",
                got="an access between micro-batches, after engine.no_sync(), to gradients of another engine's loss, or to a gradient that "
                "arrived after the reduction of its bucket (use_reentrant=True and a block that is used again)",
                expected="an access after the last engine.backward() before a step",
                fix="Check engine.is_gradient_accumulation_boundary() first. To clip, set gradient_clipping in ds_config.",
            )
        if group.plan.grads is Lifetime.USE:
            raise TrialError(
                "full gradients do not live at this ZeRO stage",
                where=f"{slot.name}.grad",
                got="a gradient that is sharded over the ranks",
                expected="ZeRO stage 0 or 1",
                fix='To clip, set "gradient_clipping" in ds_config. To read or change it, use '
                "zero_trial.zero.safe_get_full_grad and safe_set_full_grad.",
            )
        if not self.shown:
            raise TrialError(
                "this gradient was already consumed by a step",
                where=f"{slot.name}.grad",
                fix="Read it between engine.backward() and engine.step(), or keep a clone().",
            )
        if index not in self._used:
            if self._flat is None:
                shard = buffer.shard.to(group.shard.device).contiguous()
                if group.comm.size > 1:
                    full = shard.new_empty(group.layout.numel)
                    group.comm.all_gather(full, shard, f".grad of {group.name}").wait()
                    shard = full
                self._flat = widened(shard) * self._multiplier()
                if group.dtype == torch.bfloat16:  # as in plain torch; in fp16 it could underflow
                    self._flat = self._flat.bfloat16()
            self._used[index] = self._flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
        return self._used[index]

    def take_edits(self) -> bool:
        """Write user code's changes into this rank's shard; return whether there are any. Local."""
        with unasked():
            grads = list(map(_GRAD, self._params))
        if not self._used and all(map(operator.is_, grads, self._lazy)):
            return False
        changed = False
        for index, (grad, lazy) in enumerate(zip(grads, self._lazy, strict=True)):
            if grad is lazy:
                if index in self._used:
                    changed |= self._write(index, self._used[index])
            elif self.partial:
                changed |= self._drop(index, grad)
            else:
                changed |= self._write(index, grad)
        return changed

    def _drop(self, index: int, value: torch.Tensor | None) -> bool:
        """Drop the sum so far of parameter ``index``, whose ``.grad`` was set to None; return
        whether part of the sum was in the shard."""
        if value is not None:
            self.value(index)  # raises
        self._multiplier()  # raises if the weight of its loss would remain
        self.grad_buffer.filled[index] = False
        self._late.pop(index, None)
        return self.grad_buffer.shard_filled and self._write(index, None)

    def _write(self, index: int, value: torch.Tensor | None) -> bool:
        """Write the elements of ``value`` that differ from the gradient in the shard; None is 0."""
        group, buffer = self.grad_buffer.group, self.grad_buffer
        factor, changed = self._multiplier(), False
        if value is None:  # decay and momentum still apply, which is logged
            buffer.unused |= {index}
        flat = None if value is None else (value.to_dense() if value.is_sparse else value).detach().reshape(-1)
        for piece in group.layout.pieces(group.comm.index):
            if piece.slot is not group.layout.slots[index]:
                continue
            own = buffer.shard[piece.offset : piece.offset + piece.numel]
            held = widened(own)
            new = torch.zeros_like(held) if flat is None else flat[piece.start : piece.stop].to(held)
            # elements that equal the gradient as shown (rounded) keep all of their digits
            differs = new != (held * factor if flat is None else (held * factor).to(flat.dtype).to(held))
            if bool(differs.any()):
                own.copy_(torch.where(differs, new / factor, held))
                changed = True
        return changed


class ParamGrads:
    """Manages ``.grad`` of all parameters of a model, and user code's changes to it.

    Args:
        reducer: reduces the gradients, and recomputes the norm of changed ones.
        multiplier: see :data:`Multiplier`.
        moved: raises TrialError if gradients are offloaded.
    """

    def __init__(self, reducer: GradReducer, multiplier: Multiplier, moved: MovedStates) -> None:
        self.multiplier = multiplier
        self._reducer = reducer
        self._moved = moved
        self._shown = [ShownGradients(grad_buffer, multiplier) for grad_buffer in reducer.grad_buffers]

    def of(self, group: ParamGroup) -> ShownGradients | None:
        """Return the gradients of ``group`` for user code; None if it is not trained."""
        self._moved.require_here("a gradient", GRADIENTS)
        return next((shown for shown in self._shown if shown.grad_buffer.group is group), None)

    @property
    def complete(self) -> bool:
        """Whether the step's last backward pass is over: ``param.grad`` shows its gradients."""
        return any(shown.shown and shown.last for shown in self._shown)

    def show(self, *, partial: bool) -> None:
        """Show gradients at the end of a pass; ``partial``: more are reduced before the step."""
        for shown in self._shown:
            shown.show(partial=partial)

    def show_foreign(self, before: Sequence[ShownBefore], *, alone: bool) -> None:
        """Make ``param.grad`` show that gradients of another loss are not reduced yet; parameters
        without one show their earlier gradient. ``alone``: on one rank, where such gradients are
        complete unless earlier ones have been reduced."""
        self.show_again([one for one in before if not one.shown.grad_buffer.has_gradients])
        for shown in self._shown:
            shown.grad_buffer.flush_small()
            late = shown.grad_buffer.has_gradients and (shown.grad_buffer.shard_filled or not alone)
            if late and not shown.shown:
                shown.show(partial=True, foreign=True)

    def rescale(self, factor: float) -> Sequence[ShownBefore]:
        """Scale the gradients of the running backward pass by ``factor``; call it before the first
        gradient arrives, and with 1.0 at the end of a pass that
        :meth:`ShardedModel.end_backward` does not end. Return what ``param.grad`` has shown so far,
        for :meth:`show_again`."""
        self._moved.require_here("backward", ("lp_params", *GRADIENTS))
        before = [shown.before() for shown in self._shown if shown.shown]
        self.hide()
        for grad_buffer in self._reducer.grad_buffers:
            grad_buffer.scaling.set(factor)
        return before

    def show_again(self, before: Sequence[ShownBefore]) -> None:
        """Restore what was shown before a pass that produced no gradient."""
        for one in before:
            one.shown.show_again(one)

    def hide(self) -> None:
        """Apply edits and remove all ``.grad``, so that autograd can set new ones."""
        for shown in self._shown:
            if shown.shown:
                if shown.take_edits():
                    self._reducer.recount(shown.grad_buffer)
                shown.hide()

    def forget(self) -> None:
        """Forget what was shown."""
        for shown in self._shown:
            if shown.shown:
                shown.forget()

    def take_edits(self, *, at_step: bool = False) -> None:
        """Apply user code's changes of ``param.grad`` since the last backward pass to the step.
        Local. ``at_step``: unreduced gradients are about to be reduced, so stop showing them."""
        for shown in self._shown:
            if not shown.shown:
                continue
            if shown.take_edits():
                self._reducer.recount(shown.grad_buffer)
            if at_step and shown.partial:
                shown.hide()

    def changed(self, grad_buffer: GradBuffer) -> None:
        """Note that the reduced gradient of a group has been written by user code."""
        self._reducer.recount(grad_buffer)
        shown = self.of(grad_buffer.group)
        if shown is not None and shown.shown:
            shown.forget()
            shown.show(partial=shown.partial)

    def require_kept(self) -> None:
        """Raise TrialError if user code has set a ``.grad`` to None that held a sum of weighted
        losses, because the weights would remain."""
        for shown in self._shown:
            buffer = shown.grad_buffer
            if not shown.shown and not buffer.hidden:
                with unasked():
                    pairs = zip(buffer.filled, buffer.group.params, strict=True)
                    if any(filled and param.grad is None for filled, param in pairs):
                        self.multiplier()


class LazyGradient(torch.Tensor):
    """A placeholder for a full gradient that is computed at its first use, or is unavailable.

    The reference to its source is weak. Python's garbage collector does not follow ``param.grad``,
    so a strong reference would leak the parameters if their engine is dropped after a backward.
    """

    _source: weakref.ref[ShownGradients]
    _index: int

    @staticmethod
    def __new__(cls, param: nn.Parameter, source: ShownGradients, index: int) -> LazyGradient:
        lazy: LazyGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device, storage_size=0
        )
        lazy._source, lazy._index = weakref.ref(source), index
        return lazy

    def __init__(self, param: nn.Parameter, source: ShownGradients, index: int) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = args[0] if args else None
        if func not in METADATA:
            args, kwargs = tree_map_only(LazyGradient, _value_of, (args, kwargs or {}))
        with unasked():
            found = func(*args, **(kwargs or {}))
        # ``param.grad *= c`` assigns the result of the operation in place
        return given if isinstance(given, LazyGradient) and found is args[0] else found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle operations below Python: autograd, which adds a late gradient."""
        if func is torch.ops.aten.add_.Tensor and torch._C._current_graph_task_id() != -1:
            lazy, grad = args[0], args[1]
            _source_of(lazy).add(lazy._index, grad)
            return lazy
        args, kwargs = tree_map_only(LazyGradient, _value_of, (args, kwargs or {}))
        return func(*args, **kwargs)


def _value_of(lazy: LazyGradient) -> torch.Tensor:
    return _source_of(lazy).value(lazy._index)


def _source_of(lazy: LazyGradient) -> ShownGradients:
    source = lazy._source()
    if source is None:
        raise TrialError(
            "the engine of this gradient no longer exists",
            where=f"a .grad of shape {tuple(lazy.shape)}",
            fix="Keep the engine, or set param.grad = None before you continue with only the module.",
        )
    return source
