"""Collects the gradients of one group in a flat buffer, filled by autograd hooks, and reports when
all of them are ready.

    micro-batch 1   autograd passes a new gradient        -> copied into its view once, and .grad
                                                          becomes the view
    micro-batch 2+  autograd accumulates into .grad, which is the view; a .grad that user code has
                    set, or removed, in between is used as the gradient
    other dtype     (16-bit gradients, fp32 accumulation) every gradient is added into its view and
                    dropped

Compared with zeroing the buffer and letting autograd add from the start, this moves 12 instead of
20 bytes per fp32 element. Gradients below SMALL elements are copied together by one foreach call
when the group is ready: one dispatch instead of one per tensor.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import repeat, takewhile
from typing import Any

import torch
from torch import nn

from zero_trial.comm import AxisComm
from zero_trial.errors import TrialError
from zero_trial.ops.dispatch import accumulate
from zero_trial.sharding.guards.freed import unasked
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.plan import Lifetime, ReduceAt

SMALL = 1 << 14  # elements
_GRAD = operator.attrgetter("grad")


class GradState(IntEnum):
    """Who may write into the full buffer.

        EMPTY ──► FILLING ──► REDUCING ──► REDUCED     gradients are reduced once per step
          ▲                      │            │
          └──────────────────────┴────────────┘        reset(); after every micro-batch, if the
                                                       plan reduces then

    | state    | the buffer                                                                   |
    | -------- | ---------------------------------------------------------------------------- |
    | EMPTY    | none, or one that is kept between steps                                      |
    | FILLING  | used only by this rank: autograd adds into it                                |
    | REDUCING | used by the reduction: later gradients stay in ``.grad``                     |
    | REDUCED  | none, or one with this rank's part of the sum; later gradients are late ones |
    """

    EMPTY = 0
    FILLING = 1
    REDUCING = 2
    REDUCED = 3


class GradBuffer:
    """The full-gradient buffer of a group, this rank's shard of it, and which gradients are still
    expected.

    Args:
        dtype, shard_dtype: of the full buffer and of the reduced shard.
        comm: the axis along which the full buffer is summed (None: the group's own).
        frees_shard: the shard has no memory between steps, unless it is part of the full buffer.
            Otherwise it keeps the memory that it gets with the first reduction.
    """

    def __init__(
        self,
        group: ParamGroup,
        *,
        dtype: torch.dtype,
        shard_dtype: torch.dtype,
        comm: AxisComm | None = None,
        frees_shard: bool = False,
    ) -> None:
        self.group = group
        self.dtype = dtype
        layout, device = group.layout, group.full.device
        # full gradients live until they are reduced
        self._frees = group.plan.grads is Lifetime.USE
        self._comm = comm if comm is not None else group.comm
        self._places = [(slot.offset, slot.offset + slot.numel, slot.shape) for slot in layout.slots]
        self._gaps = layout.gaps()
        # The full buffer (n,), and each parameter's view of it. To free the buffer, its storage is
        # resized to 0, and the views stay. Memory that peers read directly cannot be resized, so
        # there each accumulation gets a new buffer.
        self._resized = self._frees and not self._comm.shares_memory(device)
        self.full = self._nothing = torch.empty(0, dtype=dtype, device=device)
        self.views = [self._nothing] * len(layout.slots)
        self._padding: list[torch.Tensor] = []  # parts of the buffer that no parameter covers
        if self._resized or not self._frees:
            self.allocate()
        if self._resized:
            self._free()
        elif not self._frees:
            self.full.zero_()
        self.state = GradState.EMPTY
        low, high = layout.shard_range(group.comm.index)
        # the shard is this rank's part of the full buffer
        self.in_place = not self._frees and group.plan.reduce_at is ReduceAt.BOUNDARY and shard_dtype == dtype
        self.shard = (
            self.full[low:high] if self.in_place else torch.empty(layout.shard_numel, dtype=shard_dtype, device=device)
        )
        self._frees_shard = frees_shard and not self.in_place
        self.shard_filled = False  # whether the shard holds a reduced sum of this step
        if not self.in_place:
            self.shard.untyped_storage().resize_(0)
        # parameters without a gradient on this rank in all reductions of the last reduced step
        self.unused: frozenset[int] = frozenset()
        # a gradient once arrived after the group was ready (re-entrant checkpointing): from then on
        # reduce only when backward has ended
        self.late = False
        self.filled = [False] * len(group.params)  # whether the view holds a gradient of this accumulation
        # small or late gradients in .grad, to be copied together: indices, in the order of arrival
        self.waiting: dict[int, None] = {}
        # indices for which the running pass has not produced a gradient yet; None outside of a pass
        self._expected: set[int] | None = None
        self._on_ready: Callable[[GradBuffer], None] | None = None
        self.scaling = ArrivalScaling(group.params)
        self.handles: list[Any] = []
        self._shares = group.dtype == dtype  # .grad can be the view itself

    def register_hooks(self, on_ready: Callable[[GradBuffer], None]) -> None:
        """Call ``on_ready(self)`` when all parameters of the group have gradients."""
        self._on_ready = on_ready
        self.handles = [
            param.register_post_accumulate_grad_hook(self._hook(index, param.numel() < SMALL))
            for index, param in enumerate(self.group.params)
        ]

    def _hook(self, index: int, small: bool) -> Callable[[nn.Parameter], None]:
        # Weak: Python's garbage collector cannot see hooks inside autograd, so an engine that was
        # not destroyed would never be freed.
        me = weakref.ref(self)

        def on_grad(param: nn.Parameter) -> None:
            grad_buffer = me()
            if grad_buffer is None:
                return
            if grad_buffer.scaling.active:
                grad_buffer.scaling.arrived(index, param, grad_buffer)
            if small or grad_buffer.state >= GradState.REDUCING:
                grad_buffer.waiting[index] = None
            elif param.grad is not grad_buffer.views[index]:
                grad_buffer._take(index, param)
            expected = grad_buffer._expected
            if expected is None:
                return
            if index in expected:
                expected.remove(index)
                if not expected and grad_buffer._on_ready is not None:
                    # a later hook may read or change this gradient
                    if len(param._post_accumulate_grad_hooks) > 1 and _has_later_hook(param):
                        grad_buffer.late = True
                    grad_buffer._on_ready(grad_buffer)
            elif not expected:
                grad_buffer.late = True

        return on_grad

    def _take(self, index: int, param: nn.Parameter) -> None:
        """Move one gradient into its view."""
        if self.state is GradState.EMPTY:
            self.allocate()
        grad = param.grad
        if grad is None:
            return
        grad = _dense(grad)
        if self.filled[index] and not self._shares:
            accumulate(self.views[index], grad)
        else:
            self.views[index].copy_(grad)
            self.filled[index] = True
        param.grad = self.views[index] if self._shares else None
        if not self._shares and _has_later_hook(param):
            name = self.group.layout.slots[index].name
            raise TrialError(
                "this hook would find no gradient: 16-bit gradients are accumulated in fp32, outside of param.grad",
                where=f"{name}.register_post_accumulate_grad_hook",
                got="a hook that was added after initialize()",
                fix=f"Use {name}.register_hook, which receives the gradient of each pass, or safe_get_full_grad before engine.step().",
            )

    def flush_small(self, *, show: bool = True) -> None:
        """Copy the waiting small gradients; afterwards the buffer holds all gradients that have
        arrived (unless it is being reduced).

        ``show``: the parameters' ``.grad`` become the views, for autograd to add into and for user
            code to read.
        """
        waiting = self.waiting
        if not waiting or self.state >= GradState.REDUCING:
            return
        if self.state is GradState.EMPTY:
            self.allocate()
        params, views, filled = self.group.params, self.views, self.filled
        targets: list[torch.Tensor] = []
        sources: list[Any] = []
        with unasked():
            grads = list(map(_GRAD, map(params.__getitem__, waiting)))
        if len(waiting) == len(filled) and not any(filled) and all(map(operator.is_not, grads, repeat(None))):
            # the first micro-batch: no need to check each gradient
            targets, sources = list(map(views.__getitem__, waiting)), grads
            filled[:] = [True] * len(filled)
        else:
            for index, grad in zip(waiting, grads, strict=True):
                if grad is None or grad is views[index]:
                    filled[index] = filled[index] and (grad is not None or not self._shares)
                elif filled[index] and not self._shares:
                    views[index].add_(_dense(grad))
                else:
                    targets.append(views[index])
                    sources.append(grad)
                    filled[index] = True
        if targets:
            with torch.no_grad():  # user code may have set a tensor that requires grad
                try:
                    torch._foreach_copy_(targets, sources)
                except RuntimeError:  # checking each tensor first would cost as much as the rest
                    if not any(source.is_sparse for source in sources):
                        raise
                    torch._foreach_copy_(targets, list(map(_dense, sources)))
        if show:
            with unasked():
                for index in waiting:
                    params[index].grad = views[index] if self._shares else None
        waiting.clear()

    def queue_set(self) -> bool:
        """Queue every ``.grad`` that user code has set without a backward pass, as :meth:`_hook`
        queues small gradients from autograd; return whether there are any."""
        with unasked():
            given = [index for index, param in enumerate(self.group.params) if param.grad is not None]
        self.waiting = dict.fromkeys(given)
        return bool(given)

    def unreduced(self, index: int) -> torch.Tensor | None:
        """Return this rank's sum of the gradients of parameter ``index`` that are not reduced yet:
        its ``.grad`` if autograd adds into it, else the view; None without a gradient."""
        with unasked():
            grad = self.group.params[index].grad
        if type(grad) is torch.Tensor or (grad is None and self._shares):
            return grad
        return self.views[index] if self.filled[index] else None

    def resumed(self, index: int, added: torch.Tensor | None) -> torch.Tensor | None:
        """Return the tensor for ``.grad`` of parameter ``index``, into which autograd continues to
        accumulate. ``added``: a gradient that arrived while ``.grad`` held something else."""
        if not (self._shares and self.filled[index]):
            return added
        if added is not None:
            self.views[index].add_(added)
        return self.views[index]

    def without_gradient(self) -> set[int]:
        """Return which parameters have received no gradient on this rank since the last step."""
        none = {index for index, filled in enumerate(self.filled) if not filled} - set(self.waiting)
        return none & self.unused if self.shard_filled else none

    @property
    def hidden(self) -> bool:
        """Whether the sum over micro-batches is not in the parameters' ``.grad``."""
        return not self._shares or (self.group.plan.reduce_at is ReduceAt.MICRO and not any(self.filled))

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that are not reduced yet."""
        return bool(self.waiting) or any(self.filled)

    def begin_pass(self) -> None:
        """Start a new backward pass: a gradient is expected for every parameter."""
        self._expected = set(range(len(self.filled)))
        self.scaling.active = self.scaling.factor != 1.0

    def end_pass(self) -> None:
        """End the backward pass: later gradients belong to other losses."""
        if self.scaling.factor != 1.0:
            self.scaling.set(1.0)
        if self.waiting:
            self.flush_small()
        self._expected = None
        self.scaling.active = self.scaling.on_foreign is not None

    def allocate(self) -> None:
        """Allocate the full buffer, uninitialized; :meth:`seal` zeroes views without a gradient."""
        if self._resized and self.full is not self._nothing:
            self.full.untyped_storage().resize_(self.group.layout.numel * self.dtype.itemsize)
        elif self._frees or self.full is self._nothing:
            self.full = self._comm.buffer(self.group.layout.numel, self.dtype, self._nothing.device)
            for index, (start, stop, shape) in enumerate(self._places):
                self.views[index] = self.full[start:stop].view(shape)
            self._padding = [self.full[start:stop] for start, stop in self._gaps]
        self.state = GradState.FILLING

    def reduced(self) -> torch.Tensor:
        """Return the shard (shard_numel,), zeroed if nothing was reduced since it was freed. torch
        would read and write past the end of a ``shard`` without memory."""
        storage = self.shard.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.group.layout.shard_numel * self.shard.element_size())
            self.shard.zero_()
        return self.shard

    def seal(self) -> torch.Tensor:
        """Return the full buffer (n,) for its reduction: views without a gradient are zero, and
        autograd no longer writes into the buffer.

        Edits of ``.grad`` and waiting gradients are copied first. Then the views are detached from
        the parameters: a gradient that arrives later is late, and must not be added into memory
        that is being sent.
        """
        self.reduced()  # allocates the shard
        if self.state is not GradState.FILLING:
            self.allocate()
        if self._shares and (any(self.filled) or not self.shard_filled):
            with unasked():
                grads = list(map(_GRAD, self.group.params))
            for index, grad in enumerate(grads):
                # After the first reduction, ``.grad`` of the others shows the reduced gradient.
                if self.shard_filled and not self.filled[index]:
                    continue
                if grad is None:
                    if index not in self.waiting:
                        self.filled[index] = False  # user code set it to None: the gradient is 0
                elif grad is not self.views[index]:
                    self.waiting[index] = None
        if self.waiting:
            self.flush_small(show=False)
        empty: list[torch.Tensor] = []
        unused: frozenset[int] = frozenset()
        if not all(self.filled):
            unused = frozenset(
                index
                for index, (view, filled) in enumerate(zip(self.views, self.filled, strict=True))
                if not filled and view.numel()
            )
            empty = [self.views[index] for index in unused]
        self.unused = self.unused & unused if self.shard_filled else unused
        if self._frees:  # new memory is uninitialized
            empty += self._padding
        if empty:
            torch._foreach_zero_(empty)
        self.detach()
        self.state = GradState.REDUCING
        return self.full

    def end_reduction(self) -> None:
        """Note that the shard holds a reduced sum; free the full buffer if the plan requires it."""
        self.shard_filled = True
        self._free()
        self.state = GradState.EMPTY if self.group.plan.reduce_at is ReduceAt.MICRO else GradState.REDUCED

    def detach(self) -> None:
        """Detach the views from the parameters: autograd creates a new gradient next time."""
        with unasked():
            for param in self.group.params:
                param.grad = None
        count = len(self.filled)
        self.filled[:] = [False] * count

    @property
    def live(self) -> bool:
        """Whether the full buffer has memory."""
        return not self._frees or self.state in (GradState.FILLING, GradState.REDUCING)

    def _free(self) -> None:
        """Free the full buffer unless full gradients always live."""
        if self._resized:
            self.full.untyped_storage().resize_(0)
        elif self._frees:
            self.views[:] = [self._nothing] * len(self.views)
            self.full, self._padding = self._nothing, []

    def reset(self) -> None:
        """Drop every gradient of this accumulation, reduced or not."""
        self.waiting.clear()
        self.scaling.kept.clear()
        self.detach()
        self._free()
        self.state = GradState.EMPTY
        self.shard_filled = False
        if self._frees_shard:
            self.shard.untyped_storage().resize_(0)

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.scaling.remove_hooks()

    def persistent_bytes(self) -> int:
        """Count the bytes of gradients that outlive a step on this rank, after the first step."""
        full = 0 if self._frees else self.group.layout.numel * self.dtype.itemsize
        kept = not self.in_place and not self._frees_shard
        return full + (self.group.layout.shard_numel * self.shard.element_size() if kept else 0)


class ArrivalScaling:
    """Scales the gradients of passes that ``engine.backward()`` does not run, when they arrive at a
    group's parameters, and reports them.

    ``.grad`` may already hold earlier gradients. So a hook that runs before autograd accumulates
    moves them into ``kept``, and they are added again after the new gradient has been scaled.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self.active = False  # whether arriving gradients must be scaled or reported
        self.factor = 1.0  # of the running pass
        self.kept: dict[int, torch.Tensor] = {}  # by index: earlier content of .grad
        self.on_foreign: Callable[[bool], None] | None = None
        self._before: list[Any] = []  # hooks

    def report(self, on_foreign: Callable[[bool], None]) -> None:
        """Call ``on_foreign(added)`` for every gradient that arrives outside of this model's own
        passes; ``added``: autograd has already added it into the buffer. The call may begin a
        pass."""
        self.on_foreign = on_foreign
        self.active = True

    def arrived(self, index: int, param: nn.Parameter, buffer: GradBuffer) -> None:
        """Report a gradient that arrives outside of a pass, and scale it by the pass's factor."""
        if buffer._expected is None and self.on_foreign is not None:
            self.on_foreign(index in buffer.waiting or (buffer.filled[index] and buffer._shares))
        grad = param.grad if param.grad is not None else self.kept.get(index)
        if self.factor == 1.0 or grad is None:
            return
        kept = self.kept.pop(index, None)
        with torch.no_grad():
            grad.mul_(self.factor)
            param.grad = grad if kept is None or kept is grad else kept.add_(grad)

    def set(self, factor: float) -> None:
        """Scale gradients that arrive from now on by ``factor``, until the end of the pass; earlier
        ones stay unchanged. Restore content of ``.grad`` whose new gradient did not arrive."""
        with unasked():
            for index, grad in self.kept.items():
                self._params[index].grad = grad
        self.kept.clear()
        self.factor = factor
        self.active = factor != 1.0 or self.on_foreign is not None
        if factor != 1.0 and not self._before:
            me = weakref.ref(self)
            self._before = [
                param.register_hook(functools.partial(_set_aside, me, index))
                for index, param in enumerate(self._params)
            ]

    def set_aside(self, index: int) -> None:
        """Move the content of ``.grad`` of parameter ``index`` away before autograd adds to it, so
        that only the new gradient is scaled. In one pass a parameter can get several gradients if
        re-entrant checkpoints use it again."""
        if self.factor != 1.0 and index not in self.kept:
            param = self._params[index]
            with unasked():
                if param.grad is not None:
                    self.kept[index], param.grad = param.grad, None

    def remove_hooks(self) -> None:
        for handle in self._before:
            handle.remove()
        self._before.clear()


def _set_aside(scaling: weakref.ref[ArrivalScaling], index: int, grad: torch.Tensor) -> None:
    found = scaling()
    if found is not None:
        found.set_aside(index)


def _dense(grad: torch.Tensor) -> torch.Tensor:
    """Return a dense gradient for ``sparse=True``: buffers and shards hold every element."""
    return grad.to_dense() if grad.is_sparse else grad


def _has_later_hook(param: nn.Parameter) -> bool:
    """Return whether a hook of user code follows this package's on a gradient of ``param``."""
    hooks: Any = param._post_accumulate_grad_hooks
    modules = (str(getattr(hook, "__module__", "")) for hook in reversed(hooks.values()))
    return any(not module.startswith("zero_trial.") for module in takewhile(__name__.__ne__, modules))
