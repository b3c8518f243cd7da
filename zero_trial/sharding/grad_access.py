"""Gradients for user code, between the last backward pass of a step and the step: ``param.grad``,
and the safe_get_* and safe_set_* functions for gradients.

After that pass ``param.grad`` is a :class:`LazyGradient`. It takes no memory. Its first use makes
the averaged, unscaled gradient, in the parameter's dtype (of fp16 parameters in fp32), where full
gradients live (ZeRO 0 and 1), and raises an error that names the way out where they do not. So
``clip_grad_norm_``, which only gets the parameters, works or raises; it never does nothing.

    p.grad.norm(), print(p.grad)     local at ZeRO 0; at ZeRO 1 a group is gathered over shard on
                                     its first use: n (N-1)/N elements
    p.grad.mul_(c), clip_grad_norm_  values that differ from what was shown go into this rank's
                                     shard before the step, and the norm is taken anew
    p.grad = None, p.grad = tensor   the gradient is 0, or the tensor

A gradient that nobody uses costs one assignment and one comparison per parameter and step.

Between the micro-batches of a step ``param.grad`` is the sum so far where autograd adds into it.
Where the sum is elsewhere (in fp32 beside 16-bit gradients, or reduced after every micro-batch) it
is a :class:`LazyGradient` that can only be dropped: ``param.grad = None``.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zero_trial.errors import TrialError
from zero_trial.sharding.freed import METADATA, unasked
from zero_trial.sharding.full_params import local_part
from zero_trial.sharding.grad_buffer import GradBuffer
from zero_trial.sharding.layout import ParamSlot
from zero_trial.sharding.param_access import find_param, require_shape, widened
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.plan import Lifetime

_GRAD = operator.attrgetter("grad")

Multiplier = Callable[[], float]
"""Returns the factor from a reduced gradient shard to the averaged, unscaled gradient."""


class ShownBefore(NamedTuple):
    """What the parameters of a group had as ``.grad``, and the group's gradient, where it was used:
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
        self._late: dict[int, torch.Tensor] = {}  # what autograd has added since, by index
        self.shown = False
        self.partial = False  # more micro-batches follow before the step

    def show(self, *, partial: bool = False, foreign: bool = False) -> None:
        """Set every parameter's ``.grad``. Does not read a gradient.

        Args:
            partial: more is reduced before the step; nothing happens where the sum so far is in
                ``.grad``.
            foreign: it came through another engine's loss, and is this rank's own.
        """
        self.partial = partial
        if partial and not foreign:
            # gradients that came while an earlier one of this pass was reduced wait in .grad
            self.grad_buffer.flush_small()
            if not self.grad_buffer.hidden:
                return
        if not self._lazy:
            self._lazy = [LazyGradient(param, self, index) for index, param in enumerate(self._params)]
        with unasked():
            for param, lazy in zip(self._params, self._lazy, strict=True):
                param.grad = lazy
        self.shown = True

    def before(self) -> ShownBefore:
        """Return what is shown now."""
        with unasked():
            grads = list(map(_GRAD, self._params))
        return ShownBefore(self, self.partial, grads, self._flat, dict(self._used))

    def show_again(self, before: ShownBefore) -> None:
        """Show what :meth:`before` has returned, after :meth:`hide` and a pass that has brought no
        gradient. Local: what was gathered need not be again."""
        with unasked():
            for param, grad in zip(self._params, before.grads, strict=True):
                param.grad = grad
        self.shown, self.partial = True, before.partial
        self._flat, self._used = before.flat, before.used

    def hide(self) -> None:
        """Take the ``.grad`` of all parameters away, so that autograd can hand over new ones; one
        that it has added to what was shown stays."""
        if self.shown:
            late = self._late
            with unasked():
                for index, param in enumerate(self._params):
                    param.grad = (
                        late.get(index) if not self.partial else self.grad_buffer.resumed(index, late.get(index))
                    )
        self.forget()

    def forget(self) -> None:
        """Forget what was shown; the next use reads the shard again."""
        self.shown = False
        self._flat = None
        self._used.clear()
        self._late.clear()

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Keep a gradient that autograd adds to parameter ``index``; :meth:`hide` follows."""
        self._late[index] = grad.detach().clone()

    def value(self, index: int) -> torch.Tensor:
        """Return the full gradient of parameter ``index``, to be read and written. Collective over
        shard when it is the group's first use in a step."""
        group, buffer = self.grad_buffer.group, self.grad_buffer
        slot = group.layout.slots[index]
        if self.shown and self.partial:
            raise TrialError(
                "the gradient of a step is not known before its last micro-batch is reduced",
                where=f"{slot.name}.grad",
                got="a use between micro-batches, after engine.no_sync(), or of gradients of another engine's loss",
                expected="a use after the last engine.backward() before a step",
                fix="Ask engine.is_gradient_accumulation_boundary() first. To clip, set gradient_clipping in ds_config.",
            )
        if group.plan.grads is Lifetime.USE:
            raise _not_here(slot)
        if not self.shown:
            raise TrialError(
                "this gradient was used up by a step",
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
        """Write what user code has changed into this rank's shard; return whether it changed
        anything. Local."""
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

    def require_kept(self) -> None:
        """Raise TrialError where user code has set a ``.grad`` to None in which a sum of weighted
        losses was, whose weights would stay."""
        buffer = self.grad_buffer
        if not self.shown and not buffer.hidden:
            with unasked():
                if any(f and p.grad is None for f, p in zip(buffer.filled, self._params, strict=True)):
                    self._multiplier()

    def _drop(self, index: int, value: torch.Tensor | None) -> bool:
        """Drop the sum so far of parameter ``index``, whose ``.grad`` was set to None; return
        whether a part of it was in the shard."""
        if value is not None:
            self.value(index)  # raises
        self._multiplier()  # raises where the weight of its loss would stay
        self.grad_buffer.filled[index] = False
        return self.grad_buffer.shard_filled and self._write(index, None)

    def _write(self, index: int, value: torch.Tensor | None) -> bool:
        """Write the elements of ``value`` that differ from the gradient in the shard; None is 0."""
        group, buffer = self.grad_buffer.group, self.grad_buffer
        factor, changed = self._multiplier(), False
        if value is None:  # decay and momentum go on, which a line says
            buffer.unused |= {index}
        flat = None if value is None else (value.to_dense() if value.is_sparse else value).detach().reshape(-1)
        for piece in group.layout.pieces(group.comm.index):
            if piece.slot is not group.layout.slots[index]:
                continue
            own = buffer.shard[piece.offset : piece.offset + piece.numel]
            held = widened(own)
            new = torch.zeros_like(held) if flat is None else flat[piece.start : piece.stop].to(held)
            # what equals the gradient as it was shown, rounded, keeps all of its digits
            differs = new != (held * factor if flat is None else (held * factor).to(flat.dtype).to(held))
            if bool(differs.any()):
                buffer.wait_for_readers()
                own.copy_(torch.where(differs, new / factor, held))
                changed = True
        return changed


class GradientSource(Protocol):
    """What is behind a :class:`LazyGradient`."""

    def value(self, index: int) -> torch.Tensor: ...

    def add(self, index: int, grad: torch.Tensor) -> None: ...


class LazyGradient(torch.Tensor):
    """Stands for a full gradient that is made when it is first used, or that cannot be had.

    The reference to its source is weak. Python's cycle collector does not follow ``param.grad``, so
    a strong one would keep the parameters for ever once their engine is dropped after a backward.
    """

    _source: weakref.ref[GradientSource]
    _index: int

    @staticmethod
    def __new__(cls, param: nn.Parameter, source: GradientSource, index: int) -> LazyGradient:
        lazy: LazyGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device, storage_size=0
        )
        lazy._source, lazy._index = weakref.ref(source), index
        return lazy

    def __init__(self, param: nn.Parameter, source: GradientSource, index: int) -> None:
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
        # ``param.grad *= c`` assigns what the operation in place returns
        return given if isinstance(given, LazyGradient) and found is args[0] else found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Serve what reaches torch below Python: autograd, which adds a late gradient."""
        if func is torch.ops.aten.add_.Tensor and torch._C._current_graph_task_id() != -1:
            lazy, grad = args[0], args[1]
            _source_of(lazy).add(lazy._index, grad)
            return lazy
        args, kwargs = tree_map_only(LazyGradient, _value_of, (args, kwargs or {}))
        return func(*args, **kwargs)


def _value_of(lazy: LazyGradient) -> torch.Tensor:
    return _source_of(lazy).value(lazy._index)


def _source_of(lazy: LazyGradient) -> GradientSource:
    source = lazy._source()
    if source is None:
        raise TrialError(
            "the engine of this gradient is gone",
            where=f"a .grad of shape {tuple(lazy.shape)}",
            fix="Keep the engine, or set param.grad = None before you go on with the module alone.",
        )
    return source


def _not_here(slot: ParamSlot) -> TrialError:
    return TrialError(
        "full gradients do not live at this ZeRO stage",
        where=f"{slot.name}.grad",
        got="a gradient that is cut into shards",
        expected="ZeRO stage 0 or 1",
        fix='To clip, set "gradient_clipping" in ds_config. To read or change it, use zero_trial.zero.safe_get_full_grad '
        "and safe_set_full_grad.",
    )


class HiddenGradients:
    """What the weights that an optimizer steps on have as ``.grad`` between steps: an error in
    words for every use. Loops that clip or unscale ``optimizer.param_groups`` would find no
    gradient there, and do nothing without a word.

    Args:
        weights: pieces of masters, and whole tensors.
    """

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        self._weights = [(weight, LazyGradient(weight, self, index)) for index, weight in enumerate(weights)]
        for weight, lazy in self._weights:
            weight.grad = lazy

    @contextmanager
    def away(self) -> Iterator[None]:
        """Let the weights have the gradients of a step inside the block. Raises TrialError where
        user code has set one before."""
        for weight, lazy in self._weights:
            if weight.grad is not None and weight.grad is not lazy:
                raise _of_optimizer("a .grad that was set between steps")
            weight.grad = None
        try:
            yield
        finally:
            for weight, lazy in self._weights:
                weight.grad = lazy

    def value(self, index: int) -> torch.Tensor:
        """Raise TrialError."""
        raise _of_optimizer("a use of .grad between steps")

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Raise TrialError."""
        raise _of_optimizer("a backward pass through an optimizer's tensors")


def _of_optimizer(got: str) -> TrialError:
    return TrialError(
        "the tensors in optimizer.param_groups are this rank's parts of the masters, and have gradients inside engine.step() alone",
        where="optimizer.param_groups[...]['params']",
        got=got,
        fix='To clip, set "gradient_clipping" in ds_config, or use model.parameters() at ZeRO stage 0 or 1; leave '
        "torch.amp.GradScaler out: with fp16 in ds_config the engine scales. To read or change gradients, use "
        "zero_trial.zero.safe_get_full_grad and safe_set_full_grad.",
    )


# --- by parameter ---------------------------------------------------------------------------------


class TrainedGradients(Protocol):
    """The part of a sharded model that the functions below use."""

    def gradient_multiplier(self) -> float: ...

    def shown_gradients(self, group: ParamGroup) -> ShownGradients | None: ...

    def take_gradient_edits(self) -> None: ...

    def gradient_changed(self, grad_buffer: GradBuffer) -> None: ...


def _find(param: nn.Parameter) -> tuple[TrainedGradients, ParamGroup, int]:
    model, group, index = find_param(param)
    return cast("TrainedGradients", model), group, index


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the full averaged, unscaled gradient of this step after backward at the boundary; None
    before. Collective over shard."""
    model, group, index = _find(param)
    shown = model.shown_gradients(group)
    if shown is None or not shown.grad_buffer.shard_filled:
        return None
    slot = group.layout.slots[index]
    return _gathered(model, shown)[slot.offset : slot.offset + slot.numel].view(slot.shape).clone()


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the averaged, unscaled gradient, flat; None before the boundary.
    Local."""
    model, group, index = _find(param)
    shown = model.shown_gradients(group)
    if shown is None or not shown.grad_buffer.shard_filled:
        return None
    model.take_gradient_edits()
    return widened(local_part(group, index, shown.grad_buffer.reduced())) * model.gradient_multiplier()


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the averaged, unscaled gradient of this step (full shape, alike on all ranks). Local.

    The norm of the step is that of the new values. Raises TrialError before the last backward pass
    of a step.
    """
    model, group, index = _find(param)
    slot = group.layout.slots[index]
    require_shape(slot, value)
    shown = _reduced(model, param, "safe_set_full_grad")
    flat = value.detach().reshape(-1)
    parts = [flat[p.start : p.stop] for p in group.layout.pieces(group.comm.index) if p.slot is slot]
    _set_local(model, shown, index, torch.cat(parts) if parts else flat[:0])


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the averaged, unscaled gradient, as :func:`safe_get_local_grad`
    returns it. Local; raises TrialError as :func:`safe_set_full_grad` does."""
    model, _, index = _find(param)
    _set_local(model, _reduced(model, param, "safe_set_local_grad"), index, value.detach().reshape(-1))


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Set the gradient of each parameter to ``update_func(its full gradient, it)``. Gathers each
    group once. Collective over shard; raises TrialError as :func:`safe_set_full_grad` does."""
    gathered: dict[int, torch.Tensor] = {}
    for param in [param for param in param_list if param.requires_grad]:
        model, group, index = _find(param)
        shown, slot = _reduced(model, param, "safe_update_full_grad_vectorized"), group.layout.slots[index]
        if id(group) not in gathered:
            gathered[id(group)] = _gathered(model, shown)
        full = gathered[id(group)][slot.offset : slot.offset + slot.numel].view(slot.shape)
        safe_set_full_grad(param, update_func(full, param))


def _reduced(model: TrainedGradients, param: nn.Parameter, where: str) -> ShownGradients:
    """Return the gradients of the parameter's group. Raises TrialError where there are none yet."""
    _, group, index = _find(param)
    shown = model.shown_gradients(group)
    if shown is None or not shown.grad_buffer.shard_filled:
        raise TrialError(
            "there is no gradient to set yet" if shown is not None else "this parameter is not trained",
            where=f"{where}({group.layout.slots[index].name})",
            fix="Call it between the last engine.backward() of a step and engine.step().",
        )
    return shown


def _gathered(model: TrainedGradients, shown: ShownGradients) -> torch.Tensor:
    """Return the group's averaged gradient (n,). Collective over shard."""
    model.take_gradient_edits()
    group = shown.grad_buffer.group
    shard = shown.grad_buffer.reduced().to(group.shard.device).contiguous()
    full = shard.new_empty(group.layout.numel)
    group.comm.all_gather(full, shard, f"gradient of {group.name}").wait()
    return widened(full) * model.gradient_multiplier()


def _set_local(model: TrainedGradients, shown: ShownGradients, index: int, values: torch.Tensor) -> None:
    """Write this rank's elements (averaged, unscaled) of parameter ``index`` into its shard."""
    model.take_gradient_edits()
    buffer, layout = shown.grad_buffer, shown.grad_buffer.group.layout
    pieces = [p for p in layout.pieces(buffer.group.comm.index) if p.slot is layout.slots[index]]
    if values.numel() != sum(piece.numel for piece in pieces):
        raise TrialError(
            "the value does not have the size of this rank's part",
            where=layout.slots[index].name,
            got=values.numel(),
            expected=sum(piece.numel for piece in pieces),
        )
    buffer.wait_for_readers()
    start = 0
    for piece in pieces:
        own = buffer.shard[piece.offset : piece.offset + piece.numel]
        own.copy_(values[start : start + piece.numel].to(widened(own)) / model.gradient_multiplier())
        start += piece.numel
    model.gradient_changed(buffer)
