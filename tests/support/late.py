"""The deferred step outcome on a CPU: an engine that uses it, and proof that the host reads nothing
that would be on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import zero_trial
from zero_trial.engine.outcome import PinnedReadback
from zero_trial.engine.step import StepOutcome

# What waits for a CUDA device, or for which the host must know a value.
WAITING = frozenset(
    ["aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal", "aten::masked_select"]
)


def make_late(engine: zero_trial.Engine) -> StepOutcome:
    """Let ``engine`` do as on CUDA, from before its first step."""
    assert engine.optimizer is not None and engine.optimizer.takes_device_scalars(engine.device)
    engine.outcome.deferred = True
    return engine.outcome


def waits(outcome: StepOutcome) -> int:
    """How often the host has waited for the device's outcome."""
    return outcome._readback.received if outcome._readback is not None else 0


class Device(TorchDispatchMode):
    """Inside, ``tensors``, what is computed from them, and what is written with that live on a
    pretended device.

    :attr:`reads` are the operations that would have waited for it: a value that the host asked for,
    or a tensor from there in one that the host owns. Ops of zero_trial are looked at from outside,
    as kernels are.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], host: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._kept = list(tensors)  # so that no address is used twice
        self._there = {_storage(tensor) for tensor in self._kept}
        self._host = {_storage(tensor) for tensor in host}
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        from_there = any(_storage(tensor) in self._there for tensor in given)
        name = func._schema.name
        if from_there and name in WAITING:
            self.reads.append(name)
        result = func(*args, **kwargs)
        if from_there:
            outcome = tree_flatten((result, self._written(func, args, kwargs)))[0]
            for tensor in {id(leaf): leaf for leaf in outcome if isinstance(leaf, torch.Tensor)}.values():
                if _storage(tensor) in self._host:
                    if not kwargs.get("non_blocking", len(args) > 2 and args[2]):
                        self.reads.append(f"{name} to the host")
                    continue
                self._there.add(_storage(tensor))
                self._kept.append(tensor)
        return result

    def _written(self, func: Any, args: Any, kwargs: Any) -> list[Any]:
        found = []
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found.append(args[index] if index < len(args) else kwargs.get(argument.name))
        return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def on_device(engine: zero_trial.Engine, outcome: StepOutcome, act: Callable[[], Any]) -> list[str]:
    """What ``act()`` read of gradients, their norm, masters and parameters."""
    units = engine.sharded.groups
    tensors = [unit.full for unit in units] + [unit.shard for unit in units] + [unit.master for unit in units]
    tensors += [landing.shard for landing in engine.sharded.grad_buffers] + list(
        engine.sharded.reducer.square_sums.values()
    )
    if outcome._readback is None and outcome.deferred:
        outcome._readback = PinnedReadback(engine.device, 11)
    readback = outcome._readback
    there, here = ([readback.there], [readback._here]) if readback is not None else ([], [])
    with Device([*tensors, *there], here) as device:
        act()
    return device.reads
