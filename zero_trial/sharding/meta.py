"""Memory for the tensors of a model that was built on the meta device, whose values come from files
or from another rank, and values for buffers that no file holds.

A parameter on the meta device has a shape and no values, and torch does not allow setting them. So
it is swapped with a parameter on a real device whose values are absent, and stays the same object
for the model and an optimizer.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from zero_trial.comm import AxisComm
from zero_trial.errors import ConfigError
from zero_trial.sharding.guards.freed import FreedParameter, absent, forget_owner, is_left_freed, revive
from zero_trial.util.text import listed


def lacks_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the meta device, or left without values by an engine."""
    return tensor.is_meta or is_left_freed(tensor)


def place_absent(model: nn.Module, device: torch.device) -> set[int]:
    """Replace the parameters and buffers of ``model`` that lack values with NaN on ``device``:
    parameters take no memory, buffers do. Return the ids of the other tensors, which keep their
    values."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    given = {id(tensor) for tensor in tensors if not lacks_values(tensor)}
    for param in filter(is_left_freed, model.parameters()):
        revive(param, absent(param.shape, param.dtype, device))
        forget_owner([param])
    rnns = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in rnns:
        module._flat_weight_refs = []  # weak references, with which torch swaps no tensor
    for param in [param for param in model.parameters() if param.is_meta]:
        _change_places(param, nn.Parameter(absent(param.shape, param.dtype, device), param.requires_grad))
    for module in rnns:
        module._flat_weight_refs = [
            weight if weight is None else weakref.ref(weight) for weight in module._flat_weights
        ]
    for buffer in [buffer for buffer in model.buffers() if buffer.is_meta]:
        other = absent(buffer.shape, buffer.dtype, device)
        _change_places(buffer, other.clone(memory_format=torch.contiguous_format))  # with memory
    return given


def _change_places(tensor: torch.Tensor, other: torch.Tensor) -> None:
    other.__dict__.update(tensor.__dict__)  # marks such as tensor_model_parallel
    other.__class__ = tensor.__class__  # such as OpaqueParameter
    try:
        torch.utils.swap_tensors(tensor, other)
    except RuntimeError as fault:
        raise ConfigError(
            "a tensor on the meta device cannot be given values",
            where="initialize(model)",
            got=f"{tuple(tensor.shape)}: {fault}",
            fix="Drop weak references to it, or build the model inside zero_trial.zero.Init().",
        ) from fault


def initialize_buffers(model: nn.Module, names: Sequence[str], data: AxisComm, given: Collection[int]) -> None:
    """Fill the buffers ``names``, which no file holds, by ``reset_parameters()`` of their modules
    and ``_init_weights(module)`` of one around them. Neither changes other tensors, nor torch's
    random state. Raises ConfigError for buffers that stay unfilled. Collective over ``data``."""
    state, absent_ones = torch.get_rng_state(), {name: model.get_buffer(name) for name in names}
    for place in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = model.get_submodule(place)
        path = place.split(".") if place else []
        around = (model.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1))
        inner = next(filter(None, map(_initializer, around)), None)
        resets = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
        with torch.no_grad(), _spared(module, given):
            if (reset := next(filter(_takes_nothing, resets), None)) is not None:
                reset()
            if inner is not None:
                inner(module)
    torch.set_rng_state(state)
    found = [name for name, before in absent_ones.items() if _is_unfilled(model.get_buffer(name), before)]
    _require_filled(model, list(itertools.chain.from_iterable(data.gather_json(found, "first values"))))


def _takes_nothing(method: Any) -> bool:
    """Return whether ``method`` can be called without arguments."""
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind()
    except TypeError:
        return False
    return True


def _initializer(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """Return the module's ``_init_weights``, if it has one that takes a module."""
    found = getattr(module, "_init_weights", None)
    return found if callable(found) and len(inspect.signature(found).parameters) == 1 else None


@contextmanager
def _spared(module: nn.Module, given: Collection[int]) -> Iterator[None]:
    """Inside the block, replace the parameters in ``module`` and its ``given`` buffers, because
    methods that fill the other buffers write these, too. Replacements in the module itself have its
    current values; those in inner modules are on the meta device."""
    kept = [
        (table, name, tensor, part is module)
        for part in module.modules()
        for table in cast("list[dict[str, Any]]", [part._parameters, part._buffers])
        for name, tensor in table.items()
        if isinstance(tensor, nn.Parameter) or id(tensor) in given
    ]
    with torch._C.DisableTorchFunctionSubclass():
        for table, name, tensor, own in kept:
            other = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if own else "meta")
            if own and id(tensor) in given and not isinstance(tensor, FreedParameter):
                other.copy_(tensor)
            table[name] = nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other
    try:
        yield
    finally:
        for table, name, tensor, _ in kept:
            table[name] = tensor


def _require_filled(model: nn.Module, unfilled: Sequence[str]) -> None:
    if not unfilled:
        return
    owners = {name: type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in unfilled}
    kinds = [f"{name} ({kind})" for name, kind in owners.items()]
    raise ConfigError(
        "buffers are on the meta device, and nothing fills them with values",
        where=f"initialize(model): {unfilled[0]}",
        got=listed(kinds, 8),
        expected="modules whose reset_parameters() fills their buffers, or a model with _init_weights(module)",
        fix="Give these modules a reset_parameters(), or build the model inside zero_trial.zero.Init().",
    )


def _is_unfilled(buffer: torch.Tensor, before: torch.Tensor) -> bool:
    """Return whether a buffer, which was ``before``, still has the values of :func:`absent`: a NaN,
    or for integers and booleans only these values, if nothing has written them in place."""
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(buffer.isnan().any())
    same = buffer is before and buffer.numel() > 0 and buffer._version == 0
    return same and torch.equal(buffer, absent(buffer.shape, buffer.dtype, buffer.device))
