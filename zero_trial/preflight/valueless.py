"""Tensors without values: on the meta device for a GPU, and :class:`HostTensor` for the CPU.

torch computes most shapes in Python, which takes a hundred times as long as making a tensor of the
same form again: what is computed once for some operands holds for all of their form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

CPU, META = torch.device("cpu"), torch.device("meta")
_ATEN, _DEVICE = torch.ops.aten, torch.ops.prim.device.default
# Their results are in the memory of their argument, by its form alone; or none at all.
VIEWS = frozenset(
    {
        *(_ATEN.slice.Tensor, _ATEN.view.default, _ATEN.view.dtype, _ATEN.detach.default, _ATEN.t.default),
        *(_DEVICE, _ATEN.select.int, _ATEN.expand.default, _ATEN.permute.default, _ATEN.transpose.int),
    }
)
# The CPU's kernels have the statistics in the dtype of what is normed, others in fp32.
_STATISTICS = frozenset({_ATEN.native_layer_norm.default, _ATEN.native_batch_norm.default})
_LARGE = 1 << 20  # bytes of a tensor of the host that are not spent on its values


class HostTensor(torch.Tensor):
    """A tensor in the host's memory that has neither values nor memory: a meta tensor that says
    that it is on the CPU. torch's own fake tensors do the same, and take its compiler for it, which
    needs more than a second to import."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CPU

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"tensor(..., size={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return CPU if func is _DEVICE else hosted(on_meta(func, args, kwargs or {})[0])


def hosted(out: Any) -> Any:
    """Return what an operation made, meta tensors, as tensors of the host."""
    if type(out) is torch.Tensor and out.is_meta:
        return torch.Tensor._make_subclass(HostTensor, out, dispatch_device=True, device_for_backend_keys=CPU)
    return type(out)(map(hosted, out)) if isinstance(out, (list, tuple)) else out


def made_on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Perform an operation without operands on the host, which makes a tensor without values if it
    is filled or large; a small one, such as a count, may be read."""
    filled = func is _ATEN.full.default or (func in _FILLED and len(args[0]))  # zeros(()) counts steps
    if "device" in kwargs and kwargs["device"] in (None, CPU):
        if filled:
            return hosted(func(*args, **{**kwargs, "device": META, "pin_memory": False}))
        form = func(*args, **{**kwargs, "device": META})
        if isinstance(form, torch.Tensor) and form.nbytes >= _LARGE:
            return hosted(form)
    return func(*args, **kwargs)


def viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Perform one of :data:`VIEWS`."""
    if not isinstance(args[0], HostTensor):
        return func(*args, **kwargs)
    return CPU if func is _DEVICE else hosted(func(as_meta(args[0]), *args[1:], **kwargs))


class HostTensors(TorchDispatchMode):
    """Computes nothing on the host inside: the forms of results are those of the CPU's kernels."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler, a second of every run, to keep it out of
        the method below, and nothing is compiled there.
        """
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in VIEWS:
            return viewed(func, args, kwargs or {})
        tensors = tensors_in(args, kwargs or {})
        if not tensors:
            return made_on_host(func, args, kwargs or {})
        if any(isinstance(each, HostTensor) for each in tensors):
            return hosted(_performed(func, args, kwargs or {}, CPU)[0])
        return func(*args, **(kwargs or {}))


class RepeatedMeta(TorchDispatchMode):
    """Computes each operation on meta tensors once for all operands of the same form: a model of
    many layers is built in a fraction of the time."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, as LiveBytes does."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = tensors_in(args, kwargs or {})
        if tensors and all(each.is_meta for each in tensors):
            return on_meta(func, args, kwargs or {})[0]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Outcome:
    """What an operation gave: new tensors by shape, strides and dtype, and plain values; or its
    first argument."""

    made: tuple[Any, ...]
    kind: type | None  # list or tuple; None for a single result
    first: bool
    flops: int

    def again(self, args: tuple[Any, ...]) -> Any:
        if self.first:
            return args[0]
        found = [_made(each) if isinstance(each, _Form) else each for each in self.made]
        return found[0] if self.kind is None else self.kind(found)


class _Form(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def _made(form: _Form) -> torch.Tensor:
    return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")


_OUTCOMES: dict[Any, _Outcome | None] = {}  # of this process, the same in all plans; None: a view


def forget_outcomes() -> None:
    """Free what is known of operations on meta tensors: no plan follows."""
    _OUTCOMES.clear()


def on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """Perform an operation on tensors without values; return its result and its count of
    operations."""
    return _performed(func, args, kwargs, META)


def _performed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> tuple[Any, int]:
    """Do what :func:`on_meta` does, with results of the forms that ``device`` gives them.

    Results in the memory of operands (views) are made by torch each time.
    """
    try:
        key = (func, _form(args), tuple((name, _form(value)) for name, value in kwargs.items()), _modes(), device)
    except TypeError:  # an operand of another kind
        key = None
    known = _OUTCOMES.get(key)
    if known is None and key is not None and _only_fills(func, args):
        known = _OUTCOMES[key] = _Outcome((), None, True, 0)
    if known is not None:
        return known.again(args), known.flops
    given, named = mapped(as_meta, args, kwargs)
    if device == CPU and named.get("device") == CPU:
        named["device"] = META
    try:
        out = func(*given, **named)
    except NotImplementedError:  # torch has no form for it, and needs none where it returns nothing
        if func._schema.returns:
            raise
        out = None
    if device == CPU and func in _STATISTICS:
        out = (out[0], *(each.to(given[0].dtype) for each in out[1:]))
    count = flop_registry.get(func.overloadpacket)
    flops = count(*given, **named, out_val=out) if count is not None else 0
    if key is not None and key not in _OUTCOMES:
        _OUTCOMES[key] = _outcome(func, given, named, out, flops)
    return args[0] if given and out is given[0] else out, flops


def _modes() -> tuple[Any, ...]:
    """Return what beside the operands decides about results: the dtype of ``int / int``, and which
    kernel is taken."""
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def _form(value: Any) -> Any:
    """Return what of an operand decides about the form of results. Raises TypeError where that is
    not known."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise TypeError
        kind, on_meta = (torch.Tensor, True) if isinstance(value, HostTensor) else (type(value), value.is_meta)
        return kind, value.shape, value.stride(), value.dtype, on_meta
    if isinstance(value, (list, tuple)):
        return tuple(map(_form, value))
    if isinstance(value, _PLAIN):
        return type(value), value  # 1, 1.0 and True are equal
    raise TypeError


_PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


_FILLS = frozenset({_ATEN.zero_.default, _ATEN.fill_.Scalar, _ATEN.uniform_.default})  # without checks


def _only_fills(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether torch need not be asked for the form of a result, for which it may import its
    compiler: an operation fills its tensor with values, and nothing is wrong with the arguments."""
    if func is _ATEN.normal_.default:
        return bool(args[0].is_floating_point() and (len(args) < 3 or args[2] >= 0))
    return func in _FILLS


def _outcome(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, flops: int) -> _Outcome | None:
    """Return what can be given again without ``func``; None where the result is a view, is changed
    in its form, as ``out=`` may be, or is of a subclass of tensors."""
    if torch.Tag.inplace_view in func.tags or any(each.is_out for each in func._schema.arguments):
        return None
    results = list(out) if isinstance(out, (list, tuple)) else [out]
    kind = type(out) if isinstance(out, (list, tuple)) else None
    if kind is None and args and out is args[0]:
        return _Outcome((), None, True, flops)
    made: list[Any] = []
    seen = {each.untyped_storage()._cdata for each in tensors_in(args, kwargs)}
    for each in results:
        if type(each) is torch.Tensor:
            storage = each.untyped_storage()
            form = _Form(tuple(each.shape), each.stride(), each.dtype)
            if storage._cdata in seen or not each.is_meta or _made(form).untyped_storage().nbytes() != storage.nbytes():
                return None
            seen.add(storage._cdata)
            made.append(form)
        elif isinstance(each, _PLAIN):
            made.append(each)
        else:
            return None
    return _Outcome(tuple(made), kind, False, flops)


_FILLED = frozenset(
    {
        _ATEN.empty.memory_format,
        _ATEN.zeros.default,
        _ATEN.ones.default,
        _ATEN.full.default,
        _ATEN.empty_strided.default,
    }
)


def as_meta(leaf: Any) -> Any:
    """Return a tensor of the host as one of the device, a :class:`HostTensor` as what it is."""
    if isinstance(leaf, HostTensor):
        place = leaf.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride()
        return torch.empty(0, dtype=leaf.dtype, device="meta").set_(*place)
    if not isinstance(leaf, torch.Tensor) or leaf.is_meta:
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments of an operation, and in lists of them."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [leaf for leaf in value if isinstance(leaf, torch.Tensor)]
    return found


def mapped(
    change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an operation with each one changed, and each in a list of them."""

    def each(value: Any) -> Any:
        return type(value)(map(change, value)) if type(value) in (list, tuple) else change(value)

    return tuple(map(each, args)), {name: each(value) for name, value in kwargs.items()}
