"""Parameters whose values are in the shards of all ranks: the placeholder for the values, the class
that refuses to read them, and the directory from a parameter to the owner of its shard.

While it is freed, a parameter is an instance of :class:`FreedParameter`, whose
``__torch_function__`` intercepts every use from Python. Metadata (shape, dtype, device, counts,
``requires_grad_``, hooks, ``.grad``) works; a use that needs values raises TrialError. An unsharded
parameter is a :class:`ShardedParameter`, which intercepts nothing, so that a step has no overhead.
Cost: one class assignment for each parameter that is freed or unsharded (0.07 microseconds).

Both classes provide DeepSpeed's attributes of partitioned parameters (``ds_id``, ``ds_status``,
``ds_tensor`` ...), which libraries read; ordinary parameters, and those of an engine that does not
free any, do not have them.

Not intercepted: functions of C++ extensions that are bound without torch's parser,
``untyped_storage()`` and ``data_ptr()``, and uses inside another class's ``__torch_function__``.
There a freed parameter reads as NaN.

User code passes only parameters, as in DeepSpeed's API, so the directory starts from a bare
``nn.Parameter``. It is weak in both directions: it keeps neither parameters nor engines alive, and
stores nothing on the tensor.
"""

from __future__ import annotations

import copy
import functools
import itertools
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast
from weakref import ref

import torch
from torch import nn
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from zero_trial.comm import AxisComm
from zero_trial.errors import TrialError
from zero_trial.util.text import listed

unasked: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
"""A block in which torch calls no class's ``__torch_function__``: the fast way to set ``.grad`` of
freed parameters."""


def absent(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of ``shape`` over a single NaN: it takes no memory, and its use in arithmetic
    is visible. Integers get their largest value."""
    numbers = dtype.is_floating_point or dtype.is_complex or dtype == torch.bool
    value = float("nan") if numbers else torch.iinfo(dtype).max
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))


def is_absent(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has elements and no memory of its own for them."""
    return tensor.numel() > 1 and not any(tensor.stride())


# --- the classes of sharded parameters ------------------------------------------------------------


class ZeroParamStatus(Enum):
    """Where the values of a sharded parameter are."""

    AVAILABLE = 1  # unsharded on this rank
    NOT_AVAILABLE = 2  # in the shards of all ranks
    INFLIGHT = 3  # only in DeepSpeed: a parameter that is being gathered is NOT_AVAILABLE here


class WatchedParameter(nn.Parameter):
    """A parameter of an engine. An edit of its ``.data`` increments the version, unlike in torch:
    so an engine detects edits, which shards and fp32 masters do not see."""

    _plain: type = nn.Parameter  # its class without an engine

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        set_data(self, values)

    def set_(self, *args: Any, **named: Any) -> Any:
        if args and args[0] is self:  # by torch's parametrizations, which PEFT adds in each forward
            return self
        return super().set_(*args, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        copied.__class__ = type(self)._plain
        return cast("nn.Parameter", copied)


class ShardedParameter(WatchedParameter):
    """A parameter whose full values an engine at ZeRO stage 3, or zero.Init, frees and gathers, or
    keeps because it is small. While it has an owner it also has the attributes of
    :data:`DS_NAMES`."""

    def __getattr__(self, name: str) -> Any:
        if name not in DS_NAMES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if (owner := owner_of_param(self)) is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}: no engine shards it")
        return DS_NAMES[name](self, owner)


DS_NAMES: Mapping[str, Callable[[ShardedParameter, ShardOwner], Any]] = {
    # unique in the process; equal on all ranks that build the same models in the same order
    "ds_id": lambda param, owner: _record(param).number,
    "ds_shape": lambda param, owner: param.shape,
    "ds_numel": lambda param, owner: param.numel(),
    "ds_status": lambda param, owner: (
        ZeroParamStatus.NOT_AVAILABLE if isinstance(param, FreedParameter) else ZeroParamStatus.AVAILABLE
    ),
    # a copy of this rank's part of the values, flat; empty if its shard holds none of them
    "ds_tensor": lambda param, owner: owner.part_of(param),
}
"""DeepSpeed's attributes of a sharded parameter."""


_PROPERTIES = [
    "shape", "ndim", "dtype", "device", "layout", "is_leaf", "requires_grad", "grad", "grad_fn", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_mtia", "is_xla", "is_xpu",
    "itemsize", "nbytes", "name", "retains_grad", "output_nr", "_base", "_version", "_backward_hooks",
    "_post_accumulate_grad_hooks",
]  # fmt: skip
_METHODS = [
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "get_device", "is_complex",
    "is_floating_point", "is_signed", "is_inference", "is_contiguous", "_is_view", "untyped_storage", "__len__",
]  # fmt: skip

METADATA: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES]
    + [getattr(torch.Tensor, name) for name in _METHODS]
    + [torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_inference]
)
"""Functions that need no values: programs that look at every tensor of the process call them."""

_ALLOWED = METADATA | frozenset(
    [getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad", "_backward_hooks")]
    + [
        getattr(torch.Tensor, name)
        for name in ("requires_grad_", "data_ptr", "register_hook", "retain_grad", "__dir__")
    ]
    + [getattr(torch.Tensor, name) for name in ("is_pinned", "is_shared")]
    + [torch.Tensor.register_post_accumulate_grad_hook, torch.autograd.grad, torch.autograd.backward]
    # results that have only the shape, dtype and device of the parameter
    + [getattr(torch, f"{name}_like") for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")]
    + [getattr(torch.Tensor, f"new_{name}") for name in ("empty", "zeros", "ones", "full", "tensor")]
    + [torch.result_type, torch._has_compatible_shallow_copy_type]
)
# These need no values if they change nothing: then they return the parameter itself.
_CONVERSIONS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16", "contiguous")
)
# These take shape, dtype or device from a second tensor.
_SHAPED_LIKE = frozenset(
    getattr(torch.Tensor, name) for name in ("to", "type_as", "expand_as", "view_as", "reshape_as", "is_same_size")
)
_GET_DATA, set_data = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
_CUDA_INTERFACE = torch.Tensor.__cuda_array_interface__.__get__
_COMPARISONS = frozenset([torch.Tensor.__eq__, torch.Tensor.__ne__, torch.Tensor.eq, torch.Tensor.ne])


class FreedParameter(ShardedParameter):
    """A parameter whose values are in the shards of all ranks: see the top of this file."""

    _live: type = ShardedParameter  # its class while it is whole

    @property
    def data(self) -> torch.Tensor:
        return cast("torch.Tensor", _GET_DATA(self))

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        set_data(self, values)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        with unasked():
            if func in _ALLOWED:
                return func(*args, **named)
            first = args[0] if args else None
            if func in _SHAPED_LIKE and not isinstance(first, FreedParameter):
                return func(*args, **named)
            if func in _CONVERSIONS:
                result = func(*args, **named)
                if result is first or isinstance(result, str):
                    return result
            if func is torch.nn.functional.pad and not any(named.get("pad", args[1:2] and args[1])):
                return first  # transformers pads each bias to the length of a tied weight
            if func is torch.Tensor.detach:
                return _detached(cast("nn.Parameter", first))
            if func == _GET_DATA:
                return first  # for ``p.data.dtype`` and the like: other uses of the result come here again
            if func == set_data and args[1] is first:
                return None
            if func == _CUDA_INTERFACE:
                raise AttributeError("__cuda_array_interface__")  # as for a tensor without values on a device
            if func in _COMPARISONS and args[1] is None:
                return func(*args, **named)
            if func is torch.Tensor.__repr__ or (func is torch.Tensor.__format__ and not args[1]):
                return f"{_named(cast('nn.Parameter', first))}, whose values are in the shards of all ranks"
            freed = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, FreedParameter)]
            if func in _LOADERS_USE:
                owners = [owner_of_param(leaf) for leaf in freed]
                if all(owner is not None and owner.module is None for owner in owners):
                    return _gathered(func, args, named, freed)
            raise _refused(freed[0], _spelled(func))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) in memo:
            return cast("nn.Parameter", memo[id(self)])
        owner = owner_of_param(self)
        if owner is None or (copied := owner.copied(self)) is None:
            raise _refused(self, "copy.deepcopy")
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _refused(self, "pickle, or torch.save")


@functools.cache
def sharded_class(kind: type) -> type:
    """Return the class that a parameter of class ``kind`` has while it is unsharded."""
    if issubclass(kind, FreedParameter):
        return kind._live
    if issubclass(kind, ShardedParameter):
        return kind
    return _derived(ShardedParameter, plain_class(kind))


@functools.cache
def _derived(own: type, kind: type) -> type:
    return own if kind is nn.Parameter else type(kind.__name__, (own, kind), {"_plain": kind})


@functools.cache
def freed_class(kind: type) -> type:
    """Return the class that a parameter of class ``kind`` has while it is freed."""
    live = sharded_class(kind)
    return FreedParameter if live is ShardedParameter else type(live.__name__, (FreedParameter, live), {"_live": live})


def plain_class(kind: type) -> type:
    """Return the class that a parameter of class ``kind`` has without an engine."""
    return kind._plain if issubclass(kind, WatchedParameter) else kind


def free(param: nn.Parameter, placeholder: torch.Tensor) -> None:
    """Free the values of ``param``; ``placeholder`` has its shape, dtype and device."""
    kind = type(param)
    param.__class__ = sharded_class(kind)
    set_data(param, placeholder)
    param.__class__ = freed_class(kind)


def twin_of(param: nn.Parameter, placeholder: torch.Tensor) -> nn.Parameter:
    """Return a new parameter that is freed like ``param``; it has no owner yet."""
    twin = nn.Parameter(placeholder, requires_grad=param.requires_grad)
    twin.__class__ = type(param)
    return twin


def revive(param: nn.Parameter, values: torch.Tensor) -> None:
    """Set the values of ``param`` (again)."""
    if isinstance(param, FreedParameter):
        param.__class__ = sharded_class(type(param))
    set_data(param, values)


def mark_sharded(params: Iterable[nn.Parameter]) -> None:
    """Mark ``params``, some of which may always live, as sharded."""
    for param in params:
        if not isinstance(param, FreedParameter):
            param.__class__ = sharded_class(type(param))


def mark_watched(params: Iterable[nn.Parameter]) -> None:
    """Make edits of ``.data`` of ``params``, which are unsharded, increment the version."""
    for param in params:
        kind = type(param)
        if issubclass(kind, nn.Parameter) and not issubclass(kind, WatchedParameter):
            param.__class__ = _derived(WatchedParameter, kind)


# What load_state_dict() and transformers' tie_weights() do to parameters. Before there is an
# engine, these gather: all ranks load a model together, and rank 0's values count.
_LOADERS_USE: frozenset[Any] = frozenset([torch.Tensor.copy_, set_data, torch.nn.functional.pad, torch._weight_norm])


def _gathered(func: Any, args: Sequence[Any], named: Mapping[str, Any], freed: Sequence[nn.Parameter]) -> Any:
    """Call ``func`` with ``freed`` parameters gathered; keep rank 0's writes. Collective."""
    opened = [(cast("ShardOwner", owner_of_param(param)), [param]) for param in freed]
    for owner, params in opened:
        owner.open(params, reads=False)
    try:
        return func(*args, **named)
    finally:
        for owner, params in opened:
            owner.close(params, 0)


def _detached(param: nn.Parameter) -> nn.Parameter:
    """Return a freed tensor with the same metadata, which never gets values. Used for
    ``state_dict()`` between ``zero.Init`` and ``initialize``, for loaders that read names, shapes
    and dtypes."""
    entry = nn.Parameter(param.detach(), requires_grad=False)
    entry.__class__ = FreedParameter
    return entry


def _spelled(func: Any) -> str:
    """Return a function's name as users write it: ``Tensor.clone``, ``Tensor.data``."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"Tensor.{getattr(getattr(func, '__self__', None), '__name__', name)}"
    owner = getattr(func, "__objclass__", None)
    return f"Tensor.{name}" if owner is not None or hasattr(torch.Tensor, name) else name


def _named(param: nn.Parameter) -> str:
    owner = owner_of_param(param)
    name = owner.name_of(param) if owner is not None else None
    return name if name is not None else f"a parameter of shape {tuple(param.shape)}"


def _refused(param: nn.Parameter, use: str) -> TrialError:
    """Return the error for a use of a freed parameter; it names the line of the user's code."""
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), str(Path(copy.__file__)))
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(inside)]
    place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    with unasked():
        if is_left_freed(param):
            return TrialError(
                "this parameter has no values: an engine freed it, and that engine no longer exists",
                where=f"{place}{use}",
                got=_named(param),
                expected="a use on rank 0, which has all values after engine.destroy()",
                fix="Give the model to initialize() on every rank, or call engine.destroy(rank0_only=False).",
            )
        return TrialError(
            "this parameter is freed: its values are in the shards of all ranks, or where offload_param keeps them",
            where=f"{place}{use}",
            got=_named(param),
            expected="a use in the forward of its own module (call the module instead of reading its weights), or a gathered parameter",
            fix="Read it inside zero_trial.zero.GatheredParameters([param]), which every rank enters; with modifier_rank=0 edits are kept. To "
            'save, use engine.save_16bit_model or engine.module_state_dict; for a moving average, "ema" in ds_config.',
        )


def lost_edits(names: Sequence[str], when: str) -> TrialError:
    """Return the error for edits of parameters whose values are in shards."""
    return TrialError(
        f"parameters were edited {when}, and the edits are lost: they do not reach the other ranks",
        where=names[0],
        got=listed(names),
        fix="Edit them inside zero_trial.zero.GatheredParameters(params, modifier_rank=0).",
    )


def one_memory(name: str, other: str) -> TrialError:
    """Return the error for parameters that user code has tied by ``param.data = other.data``."""
    return TrialError(
        "two parameters were made to share memory, but would diverge in the next step",
        where=name,
        got=f"the memory of {other}",
        fix="Tie parameters before initialize() by assigning the same parameter (b.weight = a.weight); to copy values, use param.copy_(other) "
        "under torch.no_grad().",
    )


# transforms of torch.func whose tensors have no memory of their own; vmap's pass
_DIFFERENTIATE = (TransformType.Grad, TransformType.Jvp)


def refuse_transforms(name: str) -> None:
    """Raise TrialError if torch.func differentiates: a gather cannot write into its tensors."""
    if (transform := peek_interpreter_stack()) is not None and transform.key() in _DIFFERENTIATE:
        raise TrialError(
            "torch.func cannot differentiate through gathering of parameters (ZeRO stage 3, offload_param)",
            where=name,
            got="a forward inside torch.func.grad, vjp, jvp or the like, with freed parameters",
            expected="parameters that are gathered before the transform starts",
            fix="Call it inside zero_trial.zero.GatheredParameters(model), which every rank enters, or train at stage 2 without offload_param.",
        )


# --- the directory --------------------------------------------------------------------------------


class ShardOwner(Protocol):
    """Keeps the shards of some parameters: a model's FullParams, or a PreSharded before."""

    comm: AxisComm  # of the ranks that enter a block together

    @property
    def module(self) -> nn.Module | None:
        """The module of the engine that has the shards; None before there is an engine."""

    def open(self, params: list[nn.Parameter], *, reads: bool) -> None:
        """Gather full parameters for a block that edits or ``reads`` them. Over shard."""

    def close(self, params: list[nn.Parameter], source: int | None, *, undo: bool = False) -> None:
        """Send the edits of rank ``source`` to all ranks; free the values that :meth:`open`
        gathered. ``source`` None: raise TrialError if this rank has edited; ``undo``: discard its
        edits instead. Collective over the ranks of :attr:`comm` with a source, else local."""

    def name_of(self, param: nn.Parameter) -> str | None:
        """Return the parameter's name in the model; None if it is not known yet."""

    def part_of(self, param: nn.Parameter) -> torch.Tensor:
        """Return a copy of this rank's elements of the parameter, flat. Local."""

    def copied(self, param: nn.Parameter) -> nn.Parameter | None:
        """Return a copy of a freed parameter, with a shard of its own; None if an engine has the
        shards, because it cannot add any. Local."""


def _nothing() -> None:
    return None


@dataclass
class _Record:
    """The record of a parameter: a number, and references to its owner, to the owner that sends its
    edits if every rank has it in full (frozen, at stages 0 to 2), and to its optimizer state."""

    number: int
    owner: Callable[[], ShardOwner | None] = _nothing
    replicated: Callable[[], ShardOwner | None] = _nothing
    state: Callable[[], object] = _nothing


_RECORDS = WeakTensorKeyDictionary()  # parameter -> its _Record
_NEXT_NUMBER = itertools.count()


def _record(param: torch.Tensor) -> _Record:
    if (found := _RECORDS.get(param)) is None:
        found = _RECORDS[param] = _Record(next(_NEXT_NUMBER))
    return cast("_Record", found)


def register_owner(params: Iterable[nn.Parameter], owner: ShardOwner) -> None:
    """Record that ``owner`` keeps the shards of ``params`` from now on."""
    for param in params:
        _record(param).owner = ref(owner)


def register_replicated(params: Iterable[nn.Parameter], owner: ShardOwner) -> None:
    """Record that ``owner`` sends edits of ``params``, which every rank has whole, to all ranks.
    If several engines have a parameter, the last one sends them."""
    for param in params:
        _record(param).replicated = ref(owner)


def forget_replicated(params: Iterable[nn.Parameter], owner: ShardOwner) -> None:
    """Stop ``owner`` from sending edits of ``params``."""
    for param in params:
        if (known := _record(param)).replicated() is owner:
            param.__class__ = plain_class(type(param))
            known.replicated = _nothing


def own_params(params: Iterable[nn.Parameter], owner: ShardOwner) -> None:
    """Record ``owner`` and keep it alive as long as ``params``."""
    for param in params:
        _record(param).owner = lambda: owner


def forget_owner(params: Iterable[nn.Parameter]) -> None:
    """Make ``params``, which are unsharded, ordinary parameters again."""
    for param in params:
        if not isinstance(param, FreedParameter):
            param.__class__ = plain_class(type(param))
        if (known := _RECORDS.get(param)) is not None:
            known.owner = known.state = _nothing


def register_state(params: Iterable[nn.Parameter], state: object) -> None:
    """Record that ``state`` has the optimizer state of ``params`` from now on."""
    for param in params:
        _record(param).state = ref(state)


def state_of_param(param: torch.Tensor) -> Any:
    """Return the owner of the optimizer state of ``param``; None if there is none."""
    found = _RECORDS.get(param)
    return found.state() if found is not None else None


def owner_of_param(param: torch.Tensor) -> ShardOwner | None:
    """Return the owner of ``param``; None for an ordinary parameter that no engine has sharded."""
    found = _RECORDS.get(param)
    return cast("_Record", found).owner() if found is not None else None


def is_left_freed(tensor: torch.Tensor) -> bool:
    """Return whether an engine that no longer exists has left the parameter without values."""
    had_owner = isinstance(tensor, FreedParameter) and tensor in _RECORDS  # a detached one never had
    return had_owner and owner_of_param(tensor) is None


def by_owner(params: Iterable[nn.Parameter]) -> list[tuple[ShardOwner, list[nn.Parameter]]]:
    """Group parameters by owner, in the order of their parameters' numbers, which is that of
    all ranks even if user code has them in a set; those of no engine are left out."""
    found: dict[int, tuple[ShardOwner, list[nn.Parameter]]] = {}
    known = [(_record(param), param) for param in params if param in _RECORDS]
    for record, param in sorted(known, key=lambda pair: pair[0].number):
        if (owner := record.owner() or record.replicated()) is not None:
            found.setdefault(id(owner), (owner, []))[1].append(param)
    return list(found.values())
