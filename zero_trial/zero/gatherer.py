"""Turns this rank's shards into full parameters ahead of need, and frees them after use.

Blocks are gathered when their module's forward begins, kept or freed when it ends, gathered again when a gradient reaches one of the
module's outputs, and freed when its own gradients are complete. The module that is used next is gathered while the present one computes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from zero_trial.zero.hook import Hook
from zero_trial.zero.partition import ROOT
from zero_trial.zero.plan import Reshard
from zero_trial.zero.prefetch import UseOrder
from zero_trial.zero.side_outputs import SideOutputs
from zero_trial.zero.unit import Unit


@dataclass(frozen=True)
class LiveLimits:
    """Elements: how many gathered ones may live at once, how soon one must be needed again to be kept, how many may be fetched ahead."""

    max_live: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    prefetch: int = 50_000_000


class Gatherer:
    """Keeps the blocks of one model alive while they are needed. ``units``: by block name, those whose parameters do not always live.

    ``modules``: for each block name the modules, in their usual order, that it stands for (several where small ones were put together).
    """

    def __init__(
        self,
        modules: Mapping[str, Sequence[nn.Module]],
        units: Mapping[str, Sequence[Unit]],
        reshard: Reshard,
        limits: LiveLimits,
    ) -> None:
        self._units = units
        self._reshard = reshard
        self._limits = limits
        self._sizes = {block: sum(unit.layout.numel for unit in chosen) for block, chosen in units.items()}
        self._total = sum(self._sizes.values())
        self._order = UseOrder(self._sizes)
        self._cleaning = False
        self._to_be_continued = (
            False  # the backward pass builds a graph of its own (create_graph), whose backward needs the weights again
        )
        self.last_micro_batch = True
        self._inside_root = False
        self.handles: list[Any] = []
        if reshard is Reshard.WHEN_TOLD:
            return  # somebody else knows when a block computes
        for block in units:
            for module in modules[block]:
                self._install(module, block, first=module is modules[block][0], last=module is modules[block][-1])
        if ROOT in units:
            self._install_side_doors(modules[ROOT][0])

    def _install(self, module: nn.Module, block: str, *, first: bool, last: bool) -> None:
        before = functools.partial(self._before_forward, block, first)
        after = functools.partial(self._after_forward, block, last, SideOutputs(module))
        self.handles.append(module.register_forward_pre_hook(Hook(before), prepend=True, with_kwargs=True))
        self.handles.append(module.register_forward_hook(Hook(after), with_kwargs=True))

    def _install_side_doors(self, root: nn.Module) -> None:
        """The root's parameters are also found by who calls its parts directly: ``model.head(x)``, or a method that is not forward."""
        held = {id(param) for unit in self._units[ROOT] for param in unit.params}
        for module in root.modules():
            if module is not root and any(id(param) in held for param in module.parameters(recurse=False)):
                self.handles.append(module.register_forward_pre_hook(Hook(self._enter_sideways), prepend=True))
                self.handles.append(module.register_forward_hook(Hook(self._leave_sideways)))

    def _enter_sideways(self, module: nn.Module, args: Any) -> None:
        if not self._inside_root:
            self.ensure(ROOT, record=False)

    def _leave_sideways(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._inside_root and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(self._before_backward, ROOT))

    def start_step(self) -> None:
        """Parameters are about to change hands: a new sequence of uses begins."""
        # A pass that raised did not say that it ended.
        self._inside_root = self._cleaning = self._to_be_continued = False
        self._order.start_step()

    def ensure(self, block: str, *, record: bool = True) -> None:
        """The block's parameters are there when this returns; what comes next is on its way. Collective over shard.

        ``record=False`` for uses that are no part of a training step (evaluation): they predict nothing.
        """
        if record:
            self._order.visit(block)
        for unit in self._units.get(block, ()):
            if unit.away is not None:
                unit.expect()
        for unit in self._units.get(block, ()):
            unit.start_gather()
        for unit in self._units.get(block, ()):
            unit.finish_gather()
        if record:
            self._prefetch()

    def start(self, block: str) -> None:
        """The block's parameters are on their way: :meth:`ensure` waits for them. Collective over shard."""
        for unit in self._units.get(block, ()):
            unit.start_gather()

    def release(self, block: str) -> None:
        """The block's parameters are needed no more; a gather under way is waited for first."""
        for unit in self._units.get(block, ()):
            unit.finish_gather()
            unit.free()

    def ensure_all(self) -> None:
        """Brings every block to life, outside the order of a step."""
        for chosen in self._units.values():
            for unit in chosen:
                unit.start_gather()
        for chosen in self._units.values():
            for unit in chosen:
                unit.finish_gather()

    def free_all(self) -> None:
        """Frees every block; a gather under way is waited for first."""
        for chosen in self._units.values():
            for unit in chosen:
                unit.finish_gather()
                unit.free()

    def was_used(self, block: str) -> bool:
        """Has the block's forward run, with gradients, since the last update? True for what always lives."""
        told = self._reshard is Reshard.WHEN_TOLD
        return told or block not in self._units or self._order.seen(block)

    def live_numel(self) -> int:
        """Elements of full parameters that live now or are on their way."""
        return sum(
            unit.layout.numel for chosen in self._units.values() for unit in chosen if unit.live or unit.gathering
        )

    def after_gradients(self, unit: Unit) -> None:
        """The unit's gradients are complete: its parameters are needed no more in this backward pass."""
        if unit.block in self._units and not self._keeps_after_backward():
            unit.free()

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _prefetch(self) -> None:
        if self._limits.prefetch <= 0:
            return
        fits = True
        for block in self._order.upcoming(self._limits.prefetch):
            fits = fits and (self._reshard is not Reshard.WITHIN_LIMITS or self._fits(self._sizes[block]))
            for unit in self._units[block]:
                if (unit.away is None or unit.expect()) and fits:
                    unit.start_gather()

    def _before_forward(self, block: str, first: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside_root = self._inside_root or block == ROOT
        self.ensure(block, record=torch.is_grad_enabled())
        frozen = [unit for unit in self._units[block] if not unit.trainable]
        if frozen and first and torch.is_grad_enabled():
            self._free_when_reached(frozen, tensors_in((args, kwargs)))

    def _after_forward(
        self, block: str, last: bool, aside: SideOutputs, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        self._inside_root = self._inside_root and block != ROOT
        if torch.is_grad_enabled():
            outputs = [t for t in (*tensors_in(output), *aside.tensors()) if t.requires_grad]
            for tensor in outputs:
                tensor.register_hook(functools.partial(self._before_backward, block))
            if not outputs and any(unit.trainable for unit in self._units[block]):
                return  # the way back is not visible: stay until the step
        if not last or torch._C._current_graph_task_id() != -1:
            return  # its neighbours come next; or: recomputation inside a backward pass: its gradients follow at once
        if not self._keeps_after_forward(block):
            for unit in self._units[block]:
                unit.free()

    def _before_backward(self, block: str, grad: torch.Tensor) -> None:
        self.ensure(block)
        self._to_be_continued = torch.is_grad_enabled()
        if not self._cleaning:
            self._cleaning = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        """Frees what backward left behind: units whose parameters were not all used, and frozen ones. What is fetched ahead stays."""
        self._cleaning = False
        if not self._keeps_after_backward():
            for chosen in self._units.values():
                for unit in chosen:
                    unit.free()

    def _free_when_reached(self, units: list[Unit], inputs: Iterable[torch.Tensor]) -> None:
        def free(_: torch.Tensor) -> None:
            if not self._keeps_after_backward():
                for unit in units:
                    unit.free()

        for tensor in inputs:
            if tensor.requires_grad:
                tensor.register_hook(free)

    def _keeps_after_forward(self, block: str) -> bool:
        if block == ROOT:
            return torch.is_grad_enabled()
        if self._reshard is not Reshard.WITHIN_LIMITS:
            return self._reshard is Reshard.AFTER_STEP
        distance = self._order.distance(block)
        near = distance is None or distance <= self._limits.max_reuse_distance
        return near and self._limits.max_reuse_distance > 0 and self._fits()

    def _keeps_after_backward(self) -> bool:
        if self._to_be_continued or self._reshard is Reshard.WHEN_TOLD:
            return True
        if self._reshard is Reshard.AFTER_FORWARD or self.last_micro_batch:
            return False
        return self._reshard is Reshard.AFTER_STEP or self._fits()

    def _fits(self, more: int = 0) -> bool:
        """Whether what lives now, and ``more`` elements, stay within max_live."""
        return self._total <= self._limits.max_live or self.live_numel() + more <= self._limits.max_live


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts, dataclasses and plain objects with attributes (model outputs)."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)) and not callable(leaf):
            found.extend(t for t in tree_flatten(dict(vars(leaf)))[0] if isinstance(t, torch.Tensor))
    return found
