"""Unshards parameters ahead of need and reshards them after use, where they do not always live;
publishes those that a step has updated.

Blocks are gathered when their module's forward begins, kept or freed when it ends, gathered again
when a gradient reaches one of the module's outputs, and freed when their own gradients are ready.
The module that is used next is gathered while the present one computes.

    Unsharder       gathers and frees, by hooks on the blocks' modules; publishes
    UseOrder        which block is used next: the order of the step before
    SideOutputs     tensors that a forward leaves on a module instead of returning them
"""

from __future__ import annotations

import functools
import sys
import weakref
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from zero_trial.comm import Pending
from zero_trial.errors import TrialError
from zero_trial.sharding.grouping import ROOT, UnshardLimits
from zero_trial.sharding.module_hooks import AroundForward, ModuleHook, keep_out_of_graphs
from zero_trial.sharding.param_group import GroupState, ParamGroup, trace_range
from zero_trial.sharding.plan import Reshard


class Unsharder:
    """Keeps the full parameters of a model's blocks while they are needed.

    Args:
        modules: for each block name the modules, in their usual order, that it stands for (several
            where small ones were put together).
        groups: by block name, those whose parameters do not always live.
    """

    def __init__(
        self,
        modules: Mapping[str, Sequence[nn.Module]],
        groups: Mapping[str, Sequence[ParamGroup]],
        reshard: Reshard,
        limits: UnshardLimits,
    ) -> None:
        self._groups = groups
        self._reshard = reshard
        self._limits = limits
        self._sizes = {block: sum(group.layout.numel for group in chosen) for block, chosen in groups.items()}
        # whether all parameters may live at once
        self.fits_whole = sum(self._sizes.values()) <= limits.max_live
        self._order = UseOrder(self._sizes)
        self._end_queued = False  # _end_of_backward is queued
        # the backward pass builds a graph of its own (create_graph), whose backward needs the
        # weights again
        self._builds_graph = False
        # An optimizer step follows the backward pass: nothing is kept for another micro-batch.
        self.last_micro_batch = True
        self._inside_root = False
        self._pins: Counter[int] = Counter()  # by id of the group: open blocks that use it
        # by block with frozen parameters: the tensors that it has returned, by id
        self._returned: dict[str, weakref.WeakValueDictionary[int, torch.Tensor]] = {
            block: weakref.WeakValueDictionary()
            for block, chosen in groups.items()
            if not all(group.trainable for group in chosen)
        }
        self.handles: list[Any] = []
        self._modules = modules
        self._around: dict[nn.Module, AroundForward] = {}
        self._untraced = False
        if reshard is Reshard.SCHEDULED:
            return  # a schedule knows when a block computes
        for block in groups:
            for module in modules[block]:
                self._install(module, block, first=module is modules[block][0], last=module is modules[block][-1])
        if ROOT in groups:
            self._install_side_doors(modules[ROOT][0])

    def _install(self, module: nn.Module, block: str, *, first: bool, last: bool) -> None:
        before = functools.partial(self._before_forward, block, first)
        after = functools.partial(self._after_forward, block, last, SideOutputs(module))
        self._around[module] = AroundForward(module, before, after)
        self.handles.append(self._around[module])

    def _install_side_doors(self, root: nn.Module) -> None:
        """Gather the root's parameters also for direct calls of its parts: ``model.head(x)``."""
        held = {id(param) for group in self._groups[ROOT] for param in group.params}
        for module in root.modules():
            if module is not root and any(id(param) in held for param in module.parameters(recurse=False)):
                self.handles.append(module.register_forward_pre_hook(ModuleHook(self._enter_sideways), prepend=True))
                self.handles.append(module.register_forward_hook(ModuleHook(self._leave_sideways)))

    def _enter_sideways(self, module: nn.Module, args: Any) -> None:
        if not self._inside_root:
            self.unshard(ROOT, record=False)

    def _leave_sideways(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._inside_root and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(self._before_backward, weakref.ref(self), ROOT))

    def drop_pass(self) -> None:
        """Free what a backward pass that raised has left unsharded. Local."""
        if self._end_queued:
            self._builds_graph = False
            self._end_of_backward()

    def end_step(self) -> None:
        """End a sequence of uses: its order becomes the prediction of the next."""
        # A pass that raised has not cleared these.
        self._inside_root = self._end_queued = self._builds_graph = False
        self._order.end_step()

    def unshard(self, block: str, *, record: bool = True) -> None:
        """Gather the block's parameters, and start to gather those of the next blocks. Collective
        over shard.

        ``record=False`` for uses outside of training steps (evaluation): they predict nothing.
        """
        # All reads start before the first gather, and all gathers before the first wait, so that
        # the groups of a block overlap. The next blocks are gathered last: they must not delay
        # this one, which computes as soon as this returns. Every rank makes the same calls in the
        # same order, because each of them is a collective; so the order of uses, the limits and
        # the sizes decide, and never what has arrived on this rank.
        if record:
            self._order.use(block)
        for group in self._groups.get(block, ()):
            if group.offloaded is not None:
                group.start_read_or_ready()
        for group in self._groups.get(block, ()):
            group.unshard_async()
        for group in self._groups.get(block, ()):
            group.finish_unshard()
        if record:
            self._prefetch(block)

    def unshard_async(self, block: str) -> None:
        """Start to gather the block's parameters for :meth:`unshard`. Collective over shard."""
        for group in self._groups.get(block, ()):
            group.unshard_async()

    def reshard(self, block: str) -> None:
        """Free the block's parameters; a gather under way is waited for first."""
        for group in self._groups.get(block, ()):
            group.finish_unshard()
            self.free(group)

    def reshard_all(self) -> None:
        """Free every block; a gather under way is waited for first."""
        for block in self._groups:
            self.reshard(block)

    def free(self, group: ParamGroup, *, stale: bool = False) -> None:
        """Free the full values of ``group``, unless they always live, or user code has gathered
        them (:meth:`pin`). ``stale``: an update has replaced them, so free them even then.

        After a use nothing else frees full values, so that no caller can free what another one
        still uses: whichever part has gathered a group asks here when its own use is over.
        """
        if stale or not self._pins[id(group)]:
            group.reshard(stale=stale)

    def publish(
        self,
        groups: Sequence[ParamGroup],
        updated: Sequence[ParamGroup] = (),
        updates: Iterable[tuple[Sequence[ParamGroup], bool]] = (),
        *,
        replaced: bool = False,
    ) -> None:
        """Publish each of ``groups`` as soon as its last update is done; return when all parameters
        that always live are whole on every rank. Collective over shard.

            update 0 | all-gather 0 ...........
                     | update 1 | all-gather 1 ...
                                | the end of the step waits for all

        The groups go in the model's order on every rank, because a collective needs one order, and
        ranks finish groups in different ones: a rank may have no piece of a group at all (its part
        is padding), and pieces of one group may come in several updates. A group whose update is
        done waits for those before it. Full values that do not always live are freed first: the
        update has made them stale.

        Moves n (N-1)/N elements per step for the parameters that always live and are sharded. Those
        whose home has the full copy are gathered in the same way and go home, at most two groups at
        a time.

        Args:
            updated: every group of all ``updates``, once for each time that it comes.
            updates: yields groups whose masters are new, and whether their 16-bit copies are.
            replaced: frozen groups have new values, too; else they are freed.
        """
        left, queue = Counter(map(id, updated)), deque(groups)
        unrounded: set[int] = set()
        under_way: deque[tuple[ParamGroup, Pending]] = deque()
        for done, rounded in chain(updates, [((), True)]):
            left.subtract(map(id, done))
            if not rounded:
                unrounded.update(map(id, done))
            while queue and not left[id(queue[0])]:
                group = queue.popleft()
                if not (group.trainable or replaced):
                    self.free(group)
                    continue
                with trace_range("publish"):
                    self.free(group, stale=True)
                    pending = group.publish(rounded=id(group) in left and id(group) not in unrounded)
                if pending is not None:
                    under_way.append((group, pending))
                while group.plan.whole_home and len(under_way) > 1:
                    _finish(*under_way.popleft())
        while under_way:
            _finish(*under_way.popleft())

    def pin(self, groups: Iterable[ParamGroup]) -> None:
        """Keep the full values of ``groups`` for a block of user code (GatheredParameters), until
        :meth:`unpin`. Blocks may be nested."""
        self._pins.update(map(id, groups))

    def unpin(self, groups: Iterable[ParamGroup]) -> None:
        self._pins.subtract(map(id, groups))

    def compilable(self) -> list[nn.Module]:
        """List the modules whose parameters come and go, each as a whole; the root, in which all
        others are, only where it is alone. Empty where all parameters always live."""
        blocks = [module for block, modules in self._modules.items() if block != ROOT for module in modules]
        return blocks or list(self._modules.get(ROOT, ()))

    def live_numel(self) -> int:
        """Count the elements of full parameters that live now or are being gathered."""
        return sum(
            group.layout.numel
            for chosen in self._groups.values()
            for group in chosen
            if group.state is not GroupState.SHARDED
        )

    def reshard_after_gradients(self, group: ParamGroup) -> None:
        """Free the group's parameters, whose gradients are complete, unless they are kept."""
        if group.block in self._groups and not self._keeps_after_backward(group.block):
            self.free(group)

    def free_frozen(self, block: str) -> None:
        """Free the block's frozen parameters, whose gradients never come: a gradient has reached an
        input of the block. They stay if they are kept."""
        if not self._keeps_after_backward(block):
            for group in self._groups[block]:
                if not group.trainable:
                    self.free(group)

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _prefetch(self, current: str) -> None:
        if self._limits.prefetch <= 0:
            return
        fits = True
        for block in self._order.upcoming(self._limits.prefetch):
            fits = fits and (self._reshard is not Reshard.WITHIN_LIMITS or self._fits(self._sizes[block]))
            for group in self._groups[block]:
                if (group.offloaded is None or group.start_read_or_ready()) and fits:
                    group.unshard_async()
        if self._away:
            self._read_ahead(current)

    @functools.cached_property
    def _away(self) -> dict[str, list[ParamGroup]]:
        """The blocks' groups that live outside of memory."""
        found = {block: [group for group in chosen if group.offloaded] for block, chosen in self._groups.items()}
        return {block: chosen for block, chosen in found.items() if chosen}

    def _read_ahead(self, current: str) -> None:
        """Start to read what lives outside of memory, as far ahead as there are buffers: that
        needs no memory of its own. Also the block that is used now, where it is freed before its
        next use: the last one of a forward is the first of the backward."""
        in_backward = torch._C._current_graph_task_id() != -1
        again = not (self._keeps_after_backward(current) if in_backward else self._keeps_after_forward(current))
        for block in self._order.following():
            for group in self._away.get(block, ()):
                if not group.read_ahead(again=again and block == current):
                    return

    def _before_forward(self, block: str, first: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._untraced and "torch._dynamo" in sys.modules:
            keep_out_of_graphs()
            self._untraced = True
        if module._compiled_call_impl is not None:
            self._around[module].follow_compiler()
        self._inside_root = self._inside_root or block == ROOT
        self.unshard(block, record=torch.is_grad_enabled())
        if first and torch.is_grad_enabled() and not all(group.trainable for group in self._groups[block]):
            # not where its backward begins, too: what it has returned before goes in again
            inputs = (t for t in tensors_in((args, kwargs)) if self._returned[block].get(id(t)) is not t)
            self._free_when_reached(block, inputs)

    def _after_forward(
        self, block: str, last: bool, aside: SideOutputs, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        self._inside_root = self._inside_root and block != ROOT
        if torch.is_grad_enabled():
            outputs = [t for t in (*tensors_in(output), *aside.tensors()) if t.requires_grad]
            for tensor in outputs:
                tensor.register_hook(functools.partial(self._before_backward, weakref.ref(self), block))
                if block in self._returned:
                    self._returned[block][id(tensor)] = tensor
            if not outputs and any(group.trainable for group in self._groups[block]):
                # No output requires grad, so no hook can gather the block for its backward: keep
                # it until the step.
                return
        # Keep the block if a later module of the same merged block is still to run. Keep it in a
        # recomputation (activation checkpointing), too: this forward runs inside the backward pass
        # (autograd has a task), and the block's own gradients follow at once. They free it
        # (reshard_after_gradients); to free it here would gather it a third time.
        if not last or torch._C._current_graph_task_id() != -1:
            return
        if not self._keeps_after_forward(block):
            for group in self._groups[block]:
                self.free(group)

    @staticmethod
    def _before_backward(reference: weakref.ref[Unsharder], block: str, grad: torch.Tensor) -> None:
        """Begin the backward pass of ``block``: the hook of its outputs.

        It refers to the unsharder weakly. Python's cycle collector does not follow a hook of an
        autograd graph, so an output that a module keeps (``self.aux = ...``) would keep the module
        forever.
        """
        unsharder = reference()
        if unsharder is None:
            raise TrialError(
                "a backward pass reached a model whose engine is gone",
                where=f"block {block!r}",
                fix="Keep the engine until the last backward pass of its losses.",
            )
        unsharder.unshard(block)
        unsharder._builds_graph = torch.is_grad_enabled()
        if not unsharder._end_queued:
            unsharder._end_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(unsharder._end_of_backward)

    def _end_of_backward(self) -> None:
        """Free what backward left behind, but not prefetched groups."""
        self._end_queued = False
        for block, chosen in self._groups.items():
            if any(group.live for group in chosen) and not self._keeps_after_backward(block):
                for group in chosen:
                    self.free(group)

    def _free_when_reached(self, block: str, inputs: Iterable[torch.Tensor]) -> None:
        reference = weakref.ref(self)

        def free(_: torch.Tensor) -> None:
            unsharder = reference()
            if unsharder is not None:
                unsharder.free_frozen(block)

        for tensor in inputs:
            if tensor.requires_grad:
                tensor.register_hook(free)

    def _keeps_after_forward(self, block: str) -> bool:
        within = self._reshard is Reshard.WITHIN_LIMITS
        if block == ROOT:  # its backward comes first
            return torch.is_grad_enabled() and not (within and self._limits.frees_all)
        return self._within_limits(block) if within else self._reshard is Reshard.AFTER_STEP

    def _keeps_after_backward(self, block: str) -> bool:
        if self._builds_graph or self._reshard is Reshard.SCHEDULED:
            return True
        if self._reshard is Reshard.AFTER_FORWARD or self.last_micro_batch:
            return False
        return self._reshard is Reshard.AFTER_STEP or self._within_limits(block)

    def _within_limits(self, block: str) -> bool:
        """Return whether to keep ``block`` for its next use, in this micro-batch or the next."""
        distance = self._order.distance(block)
        near = distance is None or distance <= self._limits.max_reuse_distance
        return near and not self._limits.frees_all and self._fits()

    def _fits(self, more: int = 0) -> bool:
        """Return whether what lives now, and ``more`` elements, stay within max_live."""
        return self.fits_whole or self.live_numel() + more <= self._limits.max_live


def _finish(group: ParamGroup, pending: Pending) -> None:
    """Wait for a publication, and bring values home that live there."""
    pending.wait()
    if group.plan.whole_home:
        group.finish_publish()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List every tensor in nested containers and objects with attributes."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)) and not callable(leaf):
            found.extend(t for t in tree_flatten(dict(vars(leaf)))[0] if isinstance(t, torch.Tensor))
    return found


class UseOrder:
    """The sequence of blocks of one step, and a cursor in that of the step before. Pure.

        recorded   root  h0  h1  h2 | h2  h1  h0
        cursor                ^        the next needs: h2, then h2 (still live), h1

    A step that leaves the remembered order is followed as it goes, without prefetching, and becomes
    the order of the next. A use costs time for the blocks that are looked ahead at, not for all
    that the step still has (blocks times micro-batches, twice).
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._last: list[str] = []
        self._passed: list[int] = [0]  # elements of all uses of the last step before each of them
        self._uses: dict[str, list[int]] = {}  # by block: its places in the last step
        self._now: list[str] = []
        self.on_track = False

    def end_step(self) -> None:
        """End the step: the recorded order becomes the prediction of the next."""
        if self._now and self._now != self._last:
            self._last = self._now
            self._passed = [0, *accumulate(self._sizes[block] for block in self._last)]
            self._uses = {}
            for position, block in enumerate(self._last):
                self._uses.setdefault(block, []).append(position)
        self._now = []
        self.on_track = bool(self._last)

    def use(self, block: str) -> None:
        """Record that ``block`` is used now."""
        position = len(self._now)
        if position >= len(self._last) or self._last[position] != block:
            self.on_track = False
        self._now.append(block)

    def upcoming(self, budget: int) -> list[str]:
        """List the different blocks that come next, while their elements fit into ``budget``. The
        first is always listed, unless this step has left the remembered order."""
        found: list[str] = []
        # not by way of following(): a generator costs a call for each block, at every use
        for position in range(len(self._now), len(self._last) if self.on_track else 0):
            block = self._last[position]
            if block not in found:
                if found and self._sizes[block] > budget:
                    break
                found.append(block)
                budget -= self._sizes[block]
                if budget <= 0:
                    break
        return found

    def following(self) -> Iterator[str]:
        """Yield the different blocks that come next, unless the step left the known order."""
        found: set[str] = set()
        for position in range(len(self._now), len(self._last) if self.on_track else 0):
            block = self._last[position]
            if block not in found:
                yield block
                found.add(block)
                if len(found) == len(self._uses):
                    return

    def distance(self, block: str) -> int | None:
        """Count the elements used before ``block`` is used again; None if unknown."""
        if not self.on_track:
            return None
        now, places = len(self._now), self._uses.get(block, [])
        later = bisect_left(places, now)
        return self._passed[places[later]] - self._passed[now] if later < len(places) else None


_OWN = frozenset(vars(nn.Module()))  # what every module has


class SideOutputs:
    """Tensors that a forward leaves on ``block`` or a module inside it instead of returning them:
    an auxiliary loss, say, through which gradients may come back.

    torch's own modules leave nothing: they are examined only where they hold an attribute that
    could be a tensor, or have got a new one (a user's hook does that). Price: one look at an
    attribute for each of the others', one comparison for each quiet module.
    """

    def __init__(self, block: nn.Module) -> None:
        self._watched: list[Mapping[str, Any]] = []
        self._quiet: list[tuple[Mapping[str, Any], int]] = []
        for module in block.modules():
            own = vars(module)
            if _is_quiet(module):
                self._quiet.append((own, len(own)))
            else:
                self._watched.append(own)

    def tensors(self) -> list[torch.Tensor]:
        """List those that exist now and have a history."""
        tables = [*self._watched, *(own for own, size in self._quiet if len(own) != size)]
        return [
            value
            for own in tables
            for value in own.values()
            if value.__class__ is torch.Tensor and value.grad_fn is not None
        ]


def _is_quiet(module: nn.Module) -> bool:
    fixed = (value for name, value in vars(module).items() if name not in _OWN)
    plain = (bool, int, float, str, tuple)  # no tensors
    return type(module).__module__.startswith("torch.nn.") and all(isinstance(value, plain) for value in fixed)
