"""Unshards parameters before they are needed and reshards them after use, unless they always live;
publishes parameters that a step has updated.

Blocks are gathered when their module's forward begins, kept or freed when it ends, gathered again
when a gradient reaches one of the module's outputs, and freed when their own gradients are ready.
The next module is gathered while the current one computes.

    Unsharder       gathers and frees, by hooks on the blocks' modules; publishes
    UseOrder        which block is used next: the order of the previous step
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
        modules: for each block name its modules, in their usual order (several if small modules
            were merged into one block).
        groups: by block name, the groups whose parameters do not always live.
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
        # the backward pass builds a graph (create_graph), whose own backward needs the weights
        # again
        self._builds_graph = False
        # An optimizer step follows the backward pass: nothing is kept for another micro-batch.
        self.last_micro_batch = True
        self._inside_root = False
        self._pins: Counter[int] = Counter()  # by id of the group: open blocks that use it
        # by block with frozen parameters: the tensors that the block returned, by id
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
        """Gather the root's parameters for direct calls of its parts, too: ``model.head(x)``."""
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
        """Free the blocks that a failed backward pass has left unsharded. Local."""
        if self._end_queued:
            self._builds_graph = False
            self._end_of_backward()

    def end_step(self) -> None:
        """End a step's sequence of uses: its order becomes the prediction for the next step."""
        # a pass that raised did not clear these
        self._inside_root = self._end_queued = self._builds_graph = False
        self._order.end_step()

    def unshard(self, block: str, *, record: bool = True) -> None:
        """Gather the block's parameters, and start to gather those of the next blocks. Collective
        over shard.

        ``record=False`` for uses outside of training steps (evaluation): they predict nothing.
        """
        # All reads start before the first gather, and all gathers before the first wait, so that
        # the groups of a block overlap. The next blocks are gathered last, so that they do not
        # delay this block, which computes as soon as this method returns. Each gather is a
        # collective, so every rank must make the same calls in the same order: only the order of
        # uses, the limits and the sizes may decide, never which values have arrived on this rank.
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
        """Free the block's parameters, after waiting for a gather in flight."""
        for group in self._groups.get(block, ()):
            group.finish_unshard()
            self.free(group)

    def reshard_all(self) -> None:
        """Free every block, after waiting for gathers in flight."""
        for block in self._groups:
            self.reshard(block)

    def free(self, group: ParamGroup, *, stale: bool = False) -> None:
        """Free the full values of ``group``, unless they always live, or user code has gathered
        them (:meth:`pin`). ``stale``: an update has replaced them, so free them even then.

        Every caller that gathered a group calls this method when its own use is over. Nothing else
        frees full values after a use, so no caller can free values that another one still uses.
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
        that always live are complete on every rank. Collective over shard.

            update 0 | all-gather 0 ...........
                     | update 1 | all-gather 1 ...
                                | the end of the step waits for all

        Every rank publishes the groups in the model's order, because collectives need the same
        order, but ranks finish groups in different orders: a rank may have no piece of a group (its
        part is padding), and pieces of one group may be in several updates. A group whose update is
        done waits for the groups before it. Full values that do not always live are freed first,
        because the update has made them stale.

        Moves n (N-1)/N elements per step for the parameters that always live and are sharded.
        Parameters whose full copy is offloaded are gathered in the same way and then copied to the
        offloaded home, at most two groups at a time.

        Args:
            updated: every group of all ``updates``, once for each of its updates.
            updates: yields groups with new masters, and whether their 16-bit copies are new, too.
            replaced: whether frozen groups have new values, too; otherwise they are freed.
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
        """List the modules whose parameters are gathered and freed as a whole; the root, which
        contains all others, only if it is the only one. Empty if all parameters always live."""
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
        """Free the group's parameters, unless they are kept; their gradients are complete."""
        if group.block in self._groups and not self._keeps_after_backward(group.block):
            self.free(group)

    def free_frozen(self, block: str) -> None:
        """Free the block's frozen parameters, unless they are kept. They get no gradients, so their
        backward ends when a gradient reaches an input of the block."""
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
        """By block, the groups that are offloaded."""
        found = {block: [group for group in chosen if group.offloaded] for block, chosen in self._groups.items()}
        return {block: chosen for block, chosen in found.items() if chosen}

    def _read_ahead(self, current: str) -> None:
        """Start to read offloaded groups, as far ahead as there are free buffers, which needs no
        extra memory. Include the current block if it is freed before its next use: the last block
        of a forward is the first of the backward."""
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
            # Skip inputs that are this block's own earlier outputs: a hook there would fire at the
            # start of its backward, not at its end.
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
        # Keep the block if a later module of the same merged block is still to run. Also keep it in
        # a recomputation (activation checkpointing): this forward runs inside the backward pass
        # (autograd has a task), and the block's own backward follows immediately and frees it
        # (reshard_after_gradients). If we freed the block here, it would be gathered a third time.
        if not last or torch._C._current_graph_task_id() != -1:
            return
        if not self._keeps_after_forward(block):
            for group in self._groups[block]:
                self.free(group)

    @staticmethod
    def _before_backward(reference: weakref.ref[Unsharder], block: str, grad: torch.Tensor) -> None:
        """Begin the backward pass of ``block``; registered as a hook on its outputs.

        Takes a weak reference: Python's garbage collector cannot follow hooks of an autograd graph,
        so an output that a module stores (``self.aux = ...``) would keep the module alive
        forever.
        """
        unsharder = reference()
        if unsharder is None:
            raise TrialError(
                "a backward pass reached a model whose engine no longer exists",
                where=f"block {block!r}",
                fix="Keep a reference to the engine until the last backward pass of its losses.",
            )
        unsharder.unshard(block)
        unsharder._builds_graph = torch.is_grad_enabled()
        if not unsharder._end_queued:
            unsharder._end_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(unsharder._end_of_backward)

    def _end_of_backward(self) -> None:
        """Free the blocks that backward left unsharded, but not prefetched groups."""
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
        if block == ROOT:  # its backward runs first
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
        """Return whether the live elements and ``more`` of them stay within max_live."""
        return self.fits_whole or self.live_numel() + more <= self._limits.max_live


def _finish(group: ParamGroup, pending: Pending) -> None:
    """Wait for a publication, and copy offloaded values to their home."""
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

    If a step deviates from the recorded order, prefetching stops, and the step's own order becomes
    the prediction for the next step. The cost of a use depends on the number of blocks looked ahead
    at, not on the number of uses left in the step (2 x blocks x micro-batches).
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._last: list[str] = []
        self._passed: list[int] = [0]  # by position in the last step: elements of all uses before it
        self._uses: dict[str, list[int]] = {}  # by block: its positions in the last step
        self._now: list[str] = []
        self.on_track = False

    def end_step(self) -> None:
        """End the step: the recorded order becomes the prediction for the next step."""
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
        """List the next distinct blocks whose elements fit into ``budget``. The first is always
        listed, unless this step has left the recorded order."""
        found: list[str] = []
        # does not use following(): a generator costs a call for each block, at every use
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
        """Yield the next distinct blocks, unless this step has left the recorded order."""
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


_OWN = frozenset(vars(nn.Module()))  # attributes of every module


class SideOutputs:
    """Tensors that a forward stores on ``block`` or a module inside it instead of returning them,
    such as an auxiliary loss, through which gradients may flow back.

    torch's own modules store none, so they are examined only if they have an attribute that could
    be a tensor, or got a new attribute (from a user's hook). Cost per forward: one check for each
    attribute of the watched modules, one comparison for each quiet module.
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
        """List the side outputs that exist now and have a graph."""
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
