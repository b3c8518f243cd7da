"""Memory for the tensors of a model that was built on the meta device, whose values come from files
or from another rank, and values for buffers that no file holds.

A parameter on the meta device has a shape and no values, and torch does not let it get some: it
changes places with a parameter of a real device whose values are absent, so that it stays the same
object to the model and to an optimizer.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from zero_trial.comm import AxisComm
from zero_trial.errors import ConfigError
from zero_trial.sharding.guards.freed import (
    METADATA,
    absent,
    forget_owner,
    is_left_freed,
    owner_of_param,
    revive,
)
from zero_trial.sharding.init import PreSharded

log = logging.getLogger("zero_trial")

Given = Mapping[int, torch.Tensor]
"""The tensors of a model that had values before it got any here, by id: they keep them."""


def lacks_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the meta device, or left without values by an engine."""
    return tensor.is_meta or is_left_freed(tensor)


def place_absent(model: nn.Module, device: torch.device) -> Given:
    """Give the parameters and buffers of ``model`` that lack values other ones on ``device``: NaN
    for parameters, which take no memory, and for buffers, which do. Return the other tensors."""
    tensors = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    given = {address: tensor for address, tensor in tensors.items() if not lacks_values(tensor)}
    for param in filter(is_left_freed, model.parameters()):
        revive(param, absent(param.shape, param.dtype, device))
        forget_owner([param])
    with _without_rnn_references(model):
        for param in {id(param): param for param in model.parameters() if param.is_meta}.values():
            _change_places(param, nn.Parameter(absent(param.shape, param.dtype, device), param.requires_grad))
    for buffer in {id(buffer): buffer for buffer in model.buffers() if buffer.is_meta}.values():
        _change_places(buffer, _unfilled(buffer.shape, buffer.dtype, device))
    return given


@contextmanager
def _without_rnn_references(model: nn.Module) -> Iterator[None]:
    """Drop the weak references of torch's recurrent modules to parameters on the meta device inside
    the block, and make them again, as torch does when it moves such a module."""
    modules = [
        module
        for module in model.modules()
        if isinstance(module, nn.RNNBase) and any(param.is_meta for param in module.parameters(recurse=False))
    ]
    for module in modules:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in modules:  # not _init_flat_weights, which on a GPU gives absent values memory
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
            module._flat_weight_refs = [
                None if weight is None else weakref.ref(weight) for weight in module._flat_weights
            ]


def _change_places(tensor: torch.Tensor, other: torch.Tensor) -> None:
    other.__dict__.update(tensor.__dict__)  # marks such as tensor_model_parallel
    try:
        torch.utils.swap_tensors(tensor, other)
    except RuntimeError as fault:
        raise ConfigError(
            "a tensor on the meta device cannot get values",
            where="initialize(model)",
            got=f"{tuple(tensor.shape)}: {fault}",
            fix="Drop weak references to it, or build the model inside zero_trial.zero.Init().",
        ) from fault


def initialize_buffers(model: nn.Module, names: Sequence[str], data: AxisComm, given: Given) -> None:
    """Fill the buffers ``names``, which no file holds, by ``reset_parameters()`` of their modules
    or ``_init_weights(module)`` of one around them. Neither changes what is ``given``, nor torch's
    random state. Raises ConfigError for buffers that stay unfilled. Collective over ``data``."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    state = torch.get_rng_state()
    with torch.no_grad():
        for place in owners:
            module = model.get_submodule(place)
            path = place.split(".")
            above = (
                [model.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1)]
                if place
                else [model]
            )
            inner = next(filter(None, map(_initializer, above)), None)
            with _spare(module, list(module._parameters), given):
                _reset(module)
                if inner is not None:
                    inner(module)
    torch.set_rng_state(state)
    _require_filled(model, data, names)


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    return itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))


def _reset(module: nn.Module) -> bool:
    """Return whether the module has a method to reset what it owns, or one for what is inside it
    that its constructor calls; it has run then."""
    name = _reset_method(module)
    if name is None or not (module._parameters or module._buffers or _constructor_names(type(module), name)):
        return False
    getattr(module, name)()
    return True


def _reset_method(module: nn.Module) -> str | None:
    return next((each for each in _RESETS if _takes_nothing(getattr(module, each, None))), None)


_RESETS = ("reset_parameters", "_reset_parameters")


def _takes_nothing(method: Any) -> bool:
    """Return whether ``method`` can be called without arguments, which only its caller knows."""
    if not callable(method):
        return False
    parameters = inspect.signature(method).parameters.values()
    return all(
        each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters
    )


def _constructor_names(kind: type, *names: str) -> bool:
    """Return whether a constructor of the class uses an attribute of one of ``names``."""
    constructors = (inspect.unwrap(vars(each)["__init__"]) for each in kind.__mro__ if "__init__" in vars(each))
    used = itertools.chain.from_iterable(
        getattr(getattr(each, "__code__", None), "co_names", ()) for each in constructors
    )
    return not frozenset(names).isdisjoint(used)


def _initializer(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """Return the module's ``_init_weights``, if it has one that takes a module."""
    found = getattr(module, "_init_weights", None)
    return found if callable(found) and len(inspect.signature(found).parameters) == 1 else None


@contextmanager
def _spare(module: nn.Module, names: Sequence[str], given: Given) -> Iterator[None]:
    """Put other tensors instead of the module's own parameters ``names``, and of all
    ``given`` ones inside it: they take what is written, and are dropped."""
    places: list[tuple[dict[str, Any], str]] = [
        (module._parameters, name) for name in names if module._parameters[name] is not None
    ]
    if given:
        places += [(table, name) for table, name in _places(module) if id(table[name]) in given]
    kept = [(table, name, table[name]) for table, name in places]
    others: dict[int, torch.Tensor] = {}  # by id of the tensor in whose place it is
    with torch._C.DisableTorchFunction():
        for table, name, tensor in kept:
            if (other := others.get(id(tensor))) is None:
                shape, dtype = tensor.shape, tensor.dtype
                known = id(tensor) in given
                other = absent(shape, dtype, tensor.device) if known else torch.empty(shape, dtype=dtype)
                if isinstance(tensor, nn.Parameter):
                    other = nn.Parameter(other, tensor.requires_grad)
                others[id(tensor)] = other
            table[name] = other
    copied = {id(other): given[address] for address, other in others.items() if address in given}
    try:
        with _Copying(copied) if copied else nullcontext():
            yield
    finally:
        for table, name, tensor in kept:
            table[name] = tensor
        for table, name in _places(module) if copied else ():  # a method may have tied more names to them
            table[name] = copied.get(id(table[name]), table[name])


def _places(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """List where the tensors of a module and of all inside it are."""
    return [(table, name) for part in module.modules() for table in (part._parameters, part._buffers) for name in table]


class _Copying(TorchFunctionMode):
    """Gives a tensor a copy of another one's values when a function first touches it, so that
    initializing a large model copies only what it reads and writes.

    Args:
        sources: the other one, by id of the tensor.
    """

    def __init__(self, sources: Given) -> None:
        super().__init__()
        self._sources = dict(sources)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in METADATA:
            with torch._C.DisableTorchFunction():
                for leaf in tree_leaves((args, kwargs)):
                    if (source := self._sources.pop(id(leaf), None)) is not None:
                        owner = owner_of_param(source)
                        if isinstance(owner, PreSharded) and not owner.live:
                            leaf.data = owner.gather()
                        else:
                            leaf.data = source.detach().clone()
        return func(*args, **(kwargs or {}))


def _require_filled(model: nn.Module, data: AxisComm, names: Sequence[str]) -> None:
    found = [name for name in names if _is_unfilled(model.get_buffer(name))]
    unfilled = list(dict.fromkeys(itertools.chain.from_iterable(data.gather_json(found, "first values"))))
    if not unfilled:
        return
    kinds = dict.fromkeys(
        f"{name} ({type(model.get_submodule(name.rpartition('.')[0])).__name__})" for name in unfilled
    )
    raise ConfigError(
        "buffers are on the meta device, and nothing gives them values",
        where=f"initialize(model): {unfilled[0]}",
        got=", ".join(list(kinds)[:8]) + (f" and {len(kinds) - 8} more" if len(kinds) > 8 else ""),
        expected="modules whose reset_parameters() fills their buffers, or a model with _init_weights(module)",
        fix="Give these modules a reset_parameters(), or build the model inside zero_trial.zero.Init().",
    )


# Every byte of an element that nothing has written, unless that is a NaN: as a truth value it is
# neither of the two, and as a wide integer it is no number that a model has.
_PATTERN = 0xA5
_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def _pattern(dtype: torch.dtype) -> int:
    return int.from_bytes(bytes([_PATTERN]) * dtype.itemsize, "little", signed=dtype.itemsize > 1)


def _unfilled(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor with memory, for which :func:`_is_unfilled` is true."""
    if dtype.is_floating_point or dtype.is_complex:
        # a plain clone keeps the stride of 0 where there is one element
        return absent(shape, dtype, device).clone(memory_format=torch.contiguous_format)
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    tensor.data.view(_AS_INTEGER[dtype.itemsize]).fill_(_pattern(dtype))  # .data: its version stays 0
    return tensor


def _is_unfilled(tensor: torch.Tensor) -> bool:
    """Return whether some elements still have the value of :func:`_unfilled`. Of
    integers of one or two bytes, which may have it, all must, and nothing may have written them in
    place."""
    if tensor.numel() == 0:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    same = tensor.view(_AS_INTEGER[tensor.dtype.itemsize]) == _pattern(tensor.dtype)
    if tensor.dtype == torch.bool or tensor.dtype.itemsize > 2:
        return bool(same.any())
    return bool(same.all()) and tensor._version == 0
