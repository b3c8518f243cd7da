"""First values of a model that was built on the meta device, by the modules' own
``reset_parameters``.

A parameter on the meta device has a shape and no values, and torch does not let it get some: it
changes places with a parameter of a real device whose values are absent, so that it stays the same
object to the model and to an optimizer.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

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
    own_params,
    owner_of_param,
    revive,
)
from zero_trial.sharding.heap import FreedBytes
from zero_trial.sharding.init import PreSharded, lifting

log = logging.getLogger("zero_trial")

Given = Mapping[int, torch.Tensor]
"""The tensors of a model that had values before it got any here, by id: they keep them."""
Keep = Callable[[torch.Tensor], torch.Tensor]
"""Puts the values of a tensor somewhere else, and returns them as they are found there."""


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
    the block, and make them anew, as torch does when it moves such a module."""
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


def initialize_meta(model: nn.Module, data: AxisComm, keep: Keep | None = None) -> None:
    """Give the tensors of a model that are on the meta device the values that building it would
    have given them: module by module, on the host, whose random numbers they are, and cut over
    ``data`` where it has several ranks. Collective over ``data``.

    Random numbers are drawn in the order of construction, a module after its children:
    ``reset_parameters`` (or ``_reset_parameters``) of each module that has tensors of its own, or
    whose constructor names it, and where a class defines ``_init_weights``, as those of
    transformers do, that for all modules inside. Of a tied parameter the values of its first module
    stay; layers of torch's ``TransformerEncoder`` and ``Decoder`` are copies of the first.
    ``keep``: moves the values of a module that is filled to where they are until groups are built,
    so that they are never in memory together. Raises ConfigError that names the parameters and
    buffers which nothing has filled, and for layers that may or may not be such copies.
    """
    copies = _copied_layers(model)
    run = _Initialization(model, place_absent(model, torch.device("cpu")), copies)
    heap = FreedBytes()
    with lifting(), torch.no_grad():
        for module in _children_first(model):
            own = run.allocate(module)
            run.fill(module)
            _put_away(own, data, heap, keep)
            run.initialize_inside(module)
    heap.give_back()
    _require_filled(model, data, run.given)
    if data.index == 0:
        _log_sources(model, copies, run.only_reset)
        _log_draws(run.initialized_alone())


class _Initialization:
    """What gives the modules of a model their first values, as far as it has run.

    Args:
        given: the tensors that had values before.
        copies: the modules whose values are those of another one.
    """

    def __init__(self, model: nn.Module, given: Given, copies: Mapping[nn.Module, nn.Module]) -> None:
        self.given = given
        self.only_reset: set[nn.Module] = set()  # by reset_parameters, and by no _init_weights after it
        self._copies = copies
        self._initialized: set[nn.Module] = set()  # by an _init_weights
        self._first: dict[int, nn.Module] = {}  # by id of a parameter: the first module that has it
        for module in _children_first(model):
            for param in module.parameters(recurse=False):
                self._first.setdefault(id(param), module)

    def allocate(self, module: nn.Module) -> list[nn.Parameter]:
        """Give the parameters that get their values from ``module`` memory, and return them."""
        params = module.parameters(recurse=False)
        own = [param for param in params if self._first[id(param)] is module and id(param) not in self.given]
        with torch._C.DisableTorchFunction():
            for param in own:
                param.data = _unfilled(param.shape, param.dtype, param.device)
        return own

    def fill(self, module: nn.Module) -> None:
        """Copy or reset the module's own tensors, where some lack values."""
        if (source := self._copies.get(module)) is not None:
            for tensor, other in zip(_own_tensors(module), _own_tensors(source), strict=True):
                tensor.copy_(other)
            return
        own = [*_own_tensors(module)]
        if self._have_values(own or _tensors_inside(module)):
            return
        with _spare(module, self._tied(module), self.given):
            if _reset(module):
                self.only_reset.add(module)

    def initialize_inside(self, module: nn.Module) -> None:
        """Call the module's ``_init_weights``, if it has one, for all modules inside."""
        if (initialize := _initializer(module)) is None:
            return
        flags = hasattr(module, "_initialize_weights")  # of transformers, which ties at the end
        for part in _children_first(module):
            if (flags and part in self._initialized) or self._have_values(_tensors_inside(part)):
                continue
            self._initialized.add(part)
            self.only_reset.discard(part)
            with _spare(part, self._tied(part) if flags else (), self.given):
                initialize(part)

    def initialized_alone(self) -> list[nn.Module]:
        """Return the modules of which an ``_init_weights`` alone has filled own parameters."""
        return [
            module
            for module in self._initialized
            if module not in self._copies
            and _reset_method(module) is None
            and any(id(param) not in self.given for param in module.parameters(recurse=False))
        ]

    def _tied(self, module: nn.Module) -> list[str]:
        """Name the module's own parameters that get their values from another one."""
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        return [name for name, param in own if self._first[id(param)] is not module]

    def _have_values(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether there are tensors, and all had values before."""
        found = [id(tensor) in self.given for tensor in tensors]
        return bool(found) and all(found)


def _put_away(params: Sequence[nn.Parameter], data: AxisComm, heap: FreedBytes, keep: Keep | None) -> None:
    """Cut filled parameters over ``data``, or move them to where ``keep`` does. Collective over
    ``data``."""
    if data.size > 1:
        with torch._C.DisableTorchFunction():
            for param in params:
                own_params([param], PreSharded(param, data, heap, keep))
    elif keep is not None:
        for param in params:
            heap.add(param)
            param.data = keep(param.data)


def _log_sources(model: nn.Module, copies: Mapping[nn.Module, nn.Module], only_reset: Collection[nn.Module]) -> None:
    """Log which layers are copies, and which classes ``reset_parameters`` alone has filled."""
    if copies:
        tops = (name.rpartition(".")[0] for name, module in model.named_modules() if module in copies)
        log.info(
            "initialize: on the meta device every layer in %s gets the first one's values, as torch's constructors copy them",
            ", ".join(dict.fromkeys(top for top in tops if model.get_submodule(top) not in copies)),
        )
    if only_reset:
        log.info(
            "initialize: reset_parameters() alone gave first values to %s on the meta device; what constructors "
            "write after it is not repeated",
            ", ".join(sorted({type(module).__name__ for module in only_reset})),
        )


def _log_draws(modules: Iterable[nn.Module]) -> None:
    """Log which classes of ``modules`` draw random numbers in their constructors."""
    kinds = {type(module) for module in modules}
    if drawing := sorted({kind.__name__ for kind in kinds if _constructor_names(kind, *_DRAWS)}):
        log.info(
            "initialize: the random numbers that the constructors of %s draw are not repeated on the meta device: first "
            "values have the same distribution as in a model that is built on the host, and other bits; weights= is exact",
            ", ".join(drawing),
        )


def initialize_buffers(model: nn.Module, names: Sequence[str], data: AxisComm, given: Given) -> None:
    """Fill the buffers ``names``, which no file holds, by their modules' own initialization, which
    does not change what is ``given``; the random numbers that it draws are given back. Raises
    ConfigError for those that stay unfilled."""
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
    _require_filled(model, data, given, names)


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    return itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))


def _copied_layers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Map the modules inside layers that torch copies (``copy.deepcopy``) to those of the first
    layer; none where their parameters have values. To be called while the model is on the meta
    device."""
    found: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if not isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)):
            continue
        layers = [*cast(nn.Module, module.layers).children()]
        params: list[torch.Tensor] = [param for layer in layers for param in layer.parameters()]
        # buffers alone lack values after load_state_dict(assign=True): their modules fill them
        if not any(tensor.is_meta for tensor in params or itertools.chain(*map(_tensors_inside, layers))):
            continue
        if doubt := _doubt_of_copies(model, module, layers):
            raise ConfigError(
                "on the meta device these layers can only be copies of one layer, as torch's constructor makes them",
                where=f"initialize(model): {type(module).__module__}.{type(module).__qualname__}",
                got=doubt,
                expected="torch's own constructor, the layers that it made, and no other layer like them",
                fix="Build the model inside zero_trial.zero.Init(), or pass weights=.",
            )
        first, *copies = layers
        for layer in copies:
            found |= dict(zip(layer.modules(), first.modules(), strict=True))
    return found


def _doubt_of_copies(model: nn.Module, module: nn.Module, layers: Sequence[nn.Module]) -> str:
    """Return why ``layers`` of one of torch's encoders and decoders may not be copies of one layer
    that torch's constructor got for them alone, or an empty string."""
    tensors = [tensor for layer in layers for tensor in _tensors_inside(layer)]
    if given := sum(not tensor.is_meta for tensor in tensors):
        return f"values for {given} of the {len(tensors)} tensors of its layers"
    if "__init__" in {name for kind in type(module).__mro__ for name in vars(kind) if not _is_of_torch(kind)}:
        return "a constructor of its own, which may change layers or put others in their place"
    outline = _outline(layers[0])
    if any(_outline(layer) != outline for layer in layers):
        return "layers that are not alike"
    # torch counts writes, from 0 in a copy: what a constructor has written later has more
    if not any(tensor._version for tensor in _tensors_inside(model) if tensor.is_meta):
        return "a model of which no write is known, as after copy.deepcopy(model) or model.to('meta')"
    if any(tensor._version for tensor in tensors) and not all(
        map(_is_only_repeated, layers, itertools.repeat(_around(model, module)))
    ):
        return "layers that were made or written after torch's constructor copied its own"
    others = (name for name, part in model.named_modules() if part not in layers and _outline(part) == outline)
    if other := next(others, ""):  # one layer may have been given to two constructors
        return (
            f"layers like {other}: two encoders of one shape, or one and a layer, may or may not be of the same layer"
        )
    return ""


def _around(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """Return the modules in which ``module`` is, the inner ones first."""
    return [part for part in _children_first(model) if part is not module and module in part.modules()]


def _is_only_repeated(layer: nn.Module, around: Sequence[nn.Module]) -> bool:
    """Return whether the writes that torch has counted in a layer are those of the modules
    ``around`` it which :func:`initialize_meta` repeats: torch's own ``Transformer``, and
    initializers."""
    again = copy.deepcopy(layer)  # on the meta device: neither memory nor random numbers
    initialized: set[nn.Module] = set()
    with torch.no_grad(), torch.device("meta"):
        for module in around:
            if getattr(type(module), "_reset_parameters", None) is nn.Transformer._reset_parameters:
                nn.Transformer._reset_parameters(cast(nn.Transformer, again))
            if (initialize := _initializer(module)) is None:
                continue
            for part in _children_first(again):
                if not (hasattr(module, "_initialize_weights") and part in initialized):
                    initialized.add(part)
                    initialize(part)
    pairs = zip(_tensors_inside(layer), _tensors_inside(again), strict=True)
    return all(tensor._version == other._version for tensor, other in pairs)


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "builtins")


def _tensors_inside(module: nn.Module) -> Iterator[torch.Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def _outline(layer: nn.Module) -> list[tuple[type[nn.Module], list[torch.Size]]]:
    return [(type(part), [tensor.shape for tensor in _own_tensors(part)]) for part in layer.modules()]


def _children_first(module: nn.Module, known: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """Yield the modules in the order of ``Module.apply``, each once."""
    known = known if known is not None else set()
    if module in known:
        return
    known.add(module)
    for child in module.children():
        yield from _children_first(child, known)
    yield module


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
_DRAWS = (
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like"),
    *("normal_", "uniform_", "log_normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_"),
    *("trunc_normal_", "xavier_normal_", "xavier_uniform_", "kaiming_normal_", "kaiming_uniform_"),
    *("orthogonal_", "sparse_"),
)


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
    """Put other tensors in the place of the module's own parameters ``names``, and of all
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


def _require_filled(model: nn.Module, data: AxisComm, given: Given, names: Sequence[str] | None = None) -> None:
    found = [
        name
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers())
        if (names is None or name in names) and id(tensor) not in given and _is_unfilled(tensor)
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
    """Return whether some of this rank's elements still have the value of :func:`_unfilled`. Of
    integers of one or two bytes, which may have it, all must, and nothing may have written them in
    place."""
    owner = owner_of_param(tensor)
    own = owner.part_of(tensor) if isinstance(owner, PreSharded) and isinstance(tensor, nn.Parameter) else tensor
    with torch._C.DisableTorchFunction():
        if own.numel() == 0:
            return False
        if own.is_floating_point() or own.is_complex():
            return bool(own.isnan().any())
        same = own.view(_AS_INTEGER[own.dtype.itemsize]) == _pattern(own.dtype)
        if own.dtype == torch.bool or own.dtype.itemsize > 2:
            return bool(same.any())
        return bool(same.all()) and own._version == 0
