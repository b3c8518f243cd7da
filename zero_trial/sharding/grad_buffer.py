"""Collects the gradients of one group in one flat buffer, filled by autograd's hooks, and reports
when all of them are ready.

    micro-batch 1   autograd hands over a fresh gradient  -> copied into its view once, and .grad
                                                          becomes the view
    micro-batch 2+  autograd adds into .grad, that is into the view, by itself; a .grad that user
                    code has set, or taken away, in between is the gradient
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
from collections.abc import Callable
from itertools import repeat, takewhile
from typing import Any

import torch
from torch import nn

from zero_trial.comm import AxisComm
from zero_trial.errors import TrialError
from zero_trial.ops.dispatch import accumulate
from zero_trial.sharding.grad_memory import BufferPool, FlatGrads, gradient_memory
from zero_trial.sharding.guards.freed import unasked
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.plan import Lifetime, ReduceAt

SMALL = 1 << 14  # elements
_GRAD = operator.attrgetter("grad")


class GradBuffer:
    """The full-gradient buffer of a group, this rank's shard of it, and the count of gradients that
    are still to come.

    Args:
        dtype, shard_dtype: of the full buffer and of the reduced shard.
        comm: the axis along which the full buffer is summed (None: the group's own).
        pool: where full buffers come from if peers read them in place.
        frees_shard: the shard has no memory between steps, where it is not part of the full buffer.
            Else it keeps what it gets with the first reduction.
    """

    def __init__(
        self,
        group: ParamGroup,
        *,
        dtype: torch.dtype,
        shard_dtype: torch.dtype,
        comm: AxisComm | None = None,
        pool: BufferPool | None = None,
        frees_shard: bool = False,
    ) -> None:
        self.group = group
        self.dtype = dtype
        layout, device = group.layout, group.full.device
        kept = group.plan.grads is not Lifetime.USE
        self._memory = gradient_memory(
            layout, dtype, device, group.plan, comm if comm is not None else group.comm, pool
        )
        self._nothing = torch.empty(0, dtype=dtype, device=device)
        self.views = [self._nothing] * len(layout.slots)  # of the full buffer, while there is one
        low, high = layout.shard_range(group.comm.index)
        # the shard is this rank's part of the full buffer
        self.in_place = kept and group.plan.reduce_at is ReduceAt.BOUNDARY and shard_dtype == dtype
        self.shard = (
            self.full[low:high] if self.in_place else torch.empty(layout.shard_numel, dtype=shard_dtype, device=device)
        )
        self._frees_shard = frees_shard and not self.in_place
        self._shard_bytes = layout.shard_numel * shard_dtype.itemsize
        self.shard_filled = False  # holds a reduced sum of this step
        self._shard_lives = self.in_place
        if not self.in_place:
            self.shard.untyped_storage().resize_(0)
        # which parameters had no gradient here in any reduction of the last step that had one
        self.unused: frozenset[int] = frozenset()
        self.live = kept
        self._frees = not kept
        self._owned = False  # no peer reads the full buffer
        self._stale = False  # padding may hold anything
        # closed to writes from the reduction's start until the step; later gradients stay in
        # param.grad
        self.sealed = False
        # a gradient came once after the group was ready (re-entrant checkpointing): from then on
        # reduce only when backward has ended
        self.late = False
        count = len(group.params)
        self.filled = [False] * count  # the view holds a gradient of this accumulation
        self.waiting: list[int] = []  # small or late gradients in .grad, to be copied together
        self._queued = [False] * count
        self._seen = [0] * count  # the pass in which a parameter last counted
        self._pass = 0
        self._missing = 0
        self._counting = False
        self._on_ready: Callable[[GradBuffer], None] | None = None
        self._on_foreign: Callable[[bool], None] | None = None
        # what the gradients of the running pass are multiplied by, and by index what .grad holds,
        # while the next gradient takes its place
        self._factor = 1.0
        self._kept: dict[int, torch.Tensor] = {}
        self._before: list[Any] = []  # hooks
        self._examines = False  # gradients that come now need more than to be copied
        self.handles: list[Any] = []
        self._shares = group.dtype == dtype  # .grad can be the view itself

    def register_hooks(self, on_ready: Callable[[GradBuffer], None]) -> None:
        """Call ``on_ready(self)`` when every parameter of the group has got its gradient in the
        running backward pass."""
        self._on_ready = on_ready
        self.handles = [
            param.register_post_accumulate_grad_hook(self._hook(index, param.numel() < SMALL))
            for index, param in enumerate(self.group.params)
        ]

    def on_foreign_gradient(self, call: Callable[[bool], None]) -> None:
        """Call ``call(added)`` for every gradient that comes outside of a pass of this model's own;
        ``added``: autograd has added it into the buffer already. The call may begin a pass."""
        self._on_foreign = call
        self._examines = True

    @property
    def full(self) -> torch.Tensor:
        """The full buffer (n,); has no elements while it has no memory at all."""
        flat = self._memory.flat
        return flat.full if flat is not None else self._nothing

    def _hook(self, index: int, small: bool) -> Callable[[nn.Parameter], None]:
        # Weak: autograd holds hooks where Python's garbage collector does not look, so that an
        # engine that was not destroyed would never be freed.
        me = weakref.ref(self)
        seen, queued, waiting = self._seen, self._queued, self.waiting

        def on_grad(param: nn.Parameter) -> None:
            grad_buffer = me()
            if grad_buffer is None:
                return
            if grad_buffer._examines:
                grad_buffer._examine(index, param)
            if small or grad_buffer.sealed:
                if not queued[index]:
                    queued[index] = True
                    waiting.append(index)
            elif param.grad is not grad_buffer.views[index]:
                grad_buffer._take(index, param)
            if not grad_buffer._counting:
                return
            if seen[index] != grad_buffer._pass:
                seen[index] = grad_buffer._pass
                grad_buffer._missing -= 1
                if not grad_buffer._missing and grad_buffer._on_ready is not None:
                    # a hook that follows may read or change this gradient
                    if len(param._post_accumulate_grad_hooks) > 1 and _has_later_hook(param):
                        grad_buffer.late = True
                    grad_buffer._on_ready(grad_buffer)
            elif not grad_buffer._missing:
                grad_buffer.late = True

        return on_grad

    def _examine(self, index: int, param: nn.Parameter) -> None:
        """Report a gradient that comes outside of a pass, and multiply it where its pass says
        so."""
        grad = param.grad
        if not self._counting and self._on_foreign is not None:
            self._on_foreign(self._queued[index] or (self.filled[index] and self._shares))
            grad = param.grad if param.grad is not None else self._kept.get(index)
        if self._factor == 1.0 or grad is None:
            return
        kept = self._kept.pop(index, None)
        with torch.no_grad():
            grad.mul_(self._factor)
            param.grad = grad if kept is None or kept is grad else kept.add_(grad)

    def rescale(self, factor: float) -> None:
        """Multiply the gradients that come from now on, until :meth:`end_pass`, by ``factor``; what
        has come stays."""
        self._restore()
        self._factor = factor
        self._examines = factor != 1.0 or self._on_foreign is not None
        if factor != 1.0 and not self._before:
            me = weakref.ref(self)
            self._before = [
                param.register_hook(functools.partial(_set_aside, me, index))
                for index, param in enumerate(self.group.params)
            ]

    def set_aside(self, index: int) -> None:
        """Take what ``.grad`` of parameter ``index`` holds away before autograd adds to it, so that
        the gradient that comes can be multiplied alone. A pass brings several to a parameter where
        re-entrant checkpoints use it again."""
        if self._factor != 1.0 and index not in self._kept:
            param = self.group.params[index]
            with unasked():
                if param.grad is not None:
                    self._kept[index], param.grad = param.grad, None

    def _restore(self) -> None:
        """Multiply no further gradient. Put back what :meth:`set_aside` took away for a gradient
        that did not come."""
        with unasked():
            for index, grad in self._kept.items():
                self.group.params[index].grad = grad
        self._kept.clear()
        self._factor = 1.0

    def _take(self, index: int, param: nn.Parameter) -> None:
        """Move one gradient into its view."""
        if not self._owned:
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
            raise _unseen(self.group.layout.slots[index].name)

    def flush_small(self, *, show: bool = True) -> None:
        """Copy the small gradients that wait; afterwards the buffer holds all that has come (unless
        it is sealed).

        ``show``: the parameters' ``.grad`` become the views, for autograd to add into and for user
            code to read.
        """
        waiting = self.waiting
        if not waiting or self.sealed:
            return
        if not self._owned:
            self.allocate()
        params, views, filled = self.group.params, self.views, self.filled
        targets: list[torch.Tensor] = []
        sources: list[Any] = []
        with unasked():
            grads = list(map(_GRAD, map(params.__getitem__, waiting)))
        for index in waiting:
            self._queued[index] = False
        if len(waiting) == len(filled) and not any(filled) and all(map(operator.is_not, grads, repeat(None))):
            # the first micro-batch: without a look at each
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
                except RuntimeError:  # asking each tensor first costs as much as the rest of this
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
        self.waiting[:] = given
        for index in given:
            self._queued[index] = True
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
        """Return what belongs into ``.grad`` of parameter ``index``, so that autograd can go on
        there. ``added``: came while something else was in its place."""
        if not (self._shares and self.filled[index]):
            return added
        if added is not None:
            self.views[index].add_(added)
        return self.views[index]

    @property
    def hidden(self) -> bool:
        """Whether the sum over micro-batches is not in the parameters' ``.grad``."""
        return not self._shares or (self.group.plan.reduce_at is ReduceAt.MICRO and not any(self.filled))

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that are not reduced yet."""
        return bool(self.waiting) or any(self.filled)

    def begin_pass(self) -> None:
        """Start a new backward pass: every parameter is expected once more."""
        self._pass += 1
        self._missing = len(self.group.params)
        self._counting = True
        self._examines = self._factor != 1.0

    def end_pass(self) -> None:
        """End the backward pass: gradients that come until the next one belong to other losses and
        complete nothing."""
        if self._factor != 1.0:
            self._restore()
        if self.waiting:
            self.flush_small()
        self._counting = False
        self._examines = self._on_foreign is not None

    def allocate(self) -> FlatGrads:
        """Give the full buffer memory, with whatever that held: :meth:`seal` zeroes what got no
        gradient.

        Waits for peers that still read an earlier sum's parts there.
        """
        flat = self._memory.borrow()
        self.views[:] = flat.views
        self._stale = self._stale or not self.live
        self.live = self._owned = True
        return flat

    def wait_for_readers(self) -> None:
        """Wait until the reduced gradient may be written: where it is in the full buffer, peers may
        be reading it. Peers must come as far."""
        if self.in_place:
            self._memory.borrow()

    def reduced(self) -> torch.Tensor:
        """Return the shard (shard_numel,), of zeros where nothing was reduced since it was freed:
        torch would read and write past the end of ``shard`` while that has no memory."""
        if self._allocate_shard():
            self.shard.zero_()
        return self.shard

    def _allocate_shard(self) -> bool:
        """Give the shard its memory; return whether it had none."""
        if self._shard_lives:
            return False
        self.shard.untyped_storage().resize_(self._shard_bytes)
        self._shard_lives = True
        return True

    def seal(self) -> torch.Tensor:
        """Return the full buffer (n,) for its reduction: what got no gradient is zero, and autograd
        no longer writes into it."""
        self.sealed = False
        self._allocate_shard()
        if self._shares and (any(self.filled) or not self.shard_filled):
            self._take_edits()
        if self.waiting:
            self.flush_small(show=False)
        flat = self._memory.flat if self._owned else None
        if flat is None:
            flat = self.allocate()
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
        if self._stale:
            empty += flat.padding
            self._stale = False
        if empty:
            torch._foreach_zero_(empty)
        self.detach()
        self.sealed = True
        self._owned = False
        return flat.full

    def _take_edits(self) -> None:
        """Let count what user code has set as ``.grad`` since the gradient came; None is 0."""
        with unasked():
            grads = [param.grad for param in self.group.params]
        for index, grad in enumerate(grads):
            # After the first reduction, ``.grad`` of the others shows what is reduced.
            if self.shard_filled and not self.filled[index]:
                continue
            if grad is not self.views[index] and not self._queued[index]:
                if grad is None:
                    self.filled[index] = False
                else:
                    self._queued[index] = True
                    self.waiting.append(index)

    def end_reduction(self) -> None:
        """Note that the shard holds a reduced sum; free the full buffer where full gradients do not
        always live."""
        self.shard_filled = True
        if self.group.plan.reduce_at is ReduceAt.MICRO:
            self.sealed = False
        if self._frees and self.live:
            self.free()

    def detach(self) -> None:
        """Take the views away from the parameters: autograd makes a new gradient next time."""
        with unasked():
            for param in self.group.params:
                param.grad = None
        count = len(self.filled)
        self.filled[:] = [False] * count

    def free(self) -> None:
        """Give the full buffer's memory back, where full gradients do not always live (the shard
        has its own)."""
        if self._frees and self.live:
            self.views[:] = [self._nothing] * len(self.views)
            self._memory.give_back()
            self.live = self._owned = False

    def reset(self) -> None:
        """Drop every gradient of this accumulation, reduced or not."""
        for index in self.waiting:
            self._queued[index] = False
        self.waiting.clear()
        self._kept.clear()
        self.detach()
        self.sealed = self.shard_filled = False
        if self._frees_shard and self._shard_lives:
            self.shard.untyped_storage().resize_(0)
            self._shard_lives = False
        if self._frees and self.live:
            self.free()

    def remove_hooks(self) -> None:
        for handle in (*self.handles, *self._before):
            handle.remove()
        self.handles.clear()
        self._before.clear()

    def persistent_bytes(self) -> int:
        """Count the bytes of gradients that outlive a step on this rank, from the first on."""
        full = 0 if self._frees else self.group.layout.numel * self.dtype.itemsize
        return full + (0 if self.in_place or self._frees_shard else self._shard_bytes)


def _set_aside(buffer: weakref.ref[GradBuffer], index: int, grad: torch.Tensor) -> None:
    found = buffer()
    if found is not None:
        found.set_aside(index)


def _dense(grad: torch.Tensor) -> torch.Tensor:
    """Return a dense gradient for embeddings with ``sparse=True``: buffers, norms and shards have a
    place for every element."""
    return grad.to_dense() if grad.is_sparse else grad


def _has_later_hook(param: nn.Parameter) -> bool:
    """Return whether a hook of user code follows this package's on a gradient of ``param``."""
    hooks: Any = param._post_accumulate_grad_hooks
    modules = (str(getattr(hook, "__module__", "")) for hook in reversed(hooks.values()))
    return any(not module.startswith("zero_trial.") for module in takewhile(__name__.__ne__, modules))


def _unseen(name: str) -> TrialError:
    return TrialError(
        "this hook would find no gradient: 16-bit gradients are added up in fp32, outside of param.grad",
        where=f"{name}.register_post_accumulate_grad_hook",
        got="a hook that was added after initialize()",
        fix=f"Use {name}.register_hook, which gets the gradient of each pass, or safe_get_full_grad before engine.step().",
    )
