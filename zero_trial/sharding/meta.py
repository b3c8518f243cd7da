"""First values of a model that was built on the meta device, by the modules' own
``reset_parameters``.

A parameter on the meta device has a shape and no values, and torch does not let it get some: it
changes places with a parameter of a real device whose values are absent, so that it stays the same
object to the model and to an optimizer.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zero_trial.comm import AxisComm
from zero_trial.errors import ConfigError
from zero_trial.sharding.freed import absent, own_params, owner_of_param
from zero_trial.sharding.heap import FreedBytes
from zero_trial.sharding.init import PreSharded, lifting


def place_absent(model: nn.Module, device: torch.device) -> None:
    """Give the parameters and buffers of ``model`` that are on the meta device another one: NaN
    for parameters, which take no memory, and for buffers, which do."""
    for param in {id(param): param for param in model.parameters() if param.is_meta}.values():
        _change_places(param, nn.Parameter(absent(param.shape, param.dtype, device), param.requires_grad))
    for buffer in {id(buffer): buffer for buffer in model.buffers() if buffer.is_meta}.values():
        _change_places(buffer, absent(buffer.shape, buffer.dtype, device).clone())


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


def initialize_meta(model: nn.Module, data: AxisComm) -> None:
    """Give a model whose parameters are absent the values that building it would have given them:
    module by module, cut over ``data`` where it has several ranks. Collective over ``data``.

    Random numbers are drawn in the order of construction, a module after its children:
    ``reset_parameters`` (or ``_reset_parameters``) of each module, and where a class defines
    ``_init_weights``, as those of transformers do, that for all modules inside. Of a tied parameter
    the values of its first module stay. Raises ConfigError that names the parameters and buffers
    which nothing has filled.
    """
    first: dict[int, nn.Module] = {}
    for module in _children_first(model):
        for param in module.parameters(recurse=False):
            first.setdefault(id(param), module)

    def tied(module: nn.Module) -> list[str]:
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        return [name for name, param in own if first[id(param)] is not module]

    initialized: set[nn.Module] = set()
    heap = FreedBytes()
    with lifting(), torch.no_grad():
        for module in _children_first(model):
            own = [param for param in module.parameters(recurse=False) if first[id(param)] is module]
            with torch._C.DisableTorchFunction():
                for param in own:
                    param.data = param.detach().clone()  # of what is absent: memory full of NaN
            with _spare(module, tied(module)):
                _reset(module)
            if data.size > 1:
                with torch._C.DisableTorchFunction():
                    for param in own:
                        own_params([param], PreSharded(param, data, heap))
            if (initialize := _initializer(module)) is None:
                continue
            flags = hasattr(module, "_initialize_weights")  # of transformers, which ties at the end
            for part in _children_first(module):
                if not flags or part not in initialized:
                    initialized.add(part)
                    with _spare(part, tied(part) if flags else ()):
                        initialize(part)
    heap.give_back()
    _require_filled(model, data)


def initialize_buffers(model: nn.Module, names: Sequence[str], data: AxisComm) -> None:
    """Fill the buffers ``names``, which no file holds, by their modules' own initialization; the
    random numbers that it draws are given back. Raises ConfigError for those that stay unfilled."""
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
            with _spare(module, list(module._parameters)):
                _reset(module)
                if inner is not None:
                    inner(module)
    torch.set_rng_state(state)
    _require_filled(model, data, names)


def _children_first(module: nn.Module, known: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """Yield the modules in the order of ``Module.apply``, each once."""
    known = known if known is not None else set()
    if module in known:
        return
    known.add(module)
    for child in module.children():
        yield from _children_first(child, known)
    yield module


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset) and (module._parameters or module._buffers):
        reset()


def _initializer(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """Return the module's ``_init_weights``, if it has one that takes a module."""
    found = getattr(module, "_init_weights", None)
    return found if callable(found) and len(inspect.signature(found).parameters) == 1 else None


@contextmanager
def _spare(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Put other parameters in the place of the module's own ones ``names``: they take what is
    written, and are dropped."""
    kept = {name: param for name in names if (param := module._parameters[name]) is not None}
    with torch._C.DisableTorchFunction():
        module._parameters |= {
            name: nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad) for name, p in kept.items()
        }
    try:
        yield
    finally:
        module._parameters.update(kept)


def _require_filled(model: nn.Module, data: AxisComm, names: Sequence[str] | None = None) -> None:
    found = [
        name
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers())
        if (names is None or name in names) and _is_unfilled(tensor)
    ]
    unfilled = list(dict.fromkeys(itertools.chain.from_iterable(data.gather_json(found, "first values"))))
    if not unfilled:
        return
    kinds = dict.fromkeys(
        f"{name} ({type(model.get_submodule(name.rpartition('.')[0])).__name__})" for name in unfilled
    )
    raise ConfigError(
        "the model is on the meta device, and nothing of its own gives these values",
        where=f"initialize(model): {unfilled[0]}",
        got=", ".join(list(kinds)[:8]) + (f" and {len(kinds) - 8} more" if len(kinds) > 8 else ""),
        expected="modules whose reset_parameters() fills their parameters and buffers, or a model with _init_weights(module)",
        fix="Give these modules a reset_parameters(), pass weights=, or build the model inside zero_trial.zero.Init().",
    )


def _is_unfilled(tensor: torch.Tensor) -> bool:
    """Return whether some of this rank's elements still have the value of :func:`absent`."""
    owner = owner_of_param(tensor)
    own = owner.part_of(tensor) if isinstance(owner, PreSharded) and isinstance(tensor, nn.Parameter) else tensor
    with torch._C.DisableTorchFunction():
        if own.dtype == torch.bool or own.numel() == 0:
            return False
        if own.is_floating_point() or own.is_complex():
            return bool(own.isnan().any())
        return bool((own == torch.iinfo(own.dtype).max).any())
