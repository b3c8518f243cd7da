"""How torch's operators run on the stand-in device: the CPU's kernels, later, over the same pages.

An operator computes the shapes of its results on tensors without data, and queues a call of the
same operator on tensors of the CPU that have the device's addresses. No operator is listed, but for
copies and for what only changes a tensor's description.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.support.device.scheduler import DeviceFault, Use, overlap

if TYPE_CHECKING:
    from tests.support.device.device import Device

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# A pageable tensor of the host may be given to these; CUDA's kernels copy it themselves.
_TAKES_HOST_INDICES = ("aten::index", "aten::_index_put_impl_", "aten::index_put")

_MOST_SHAPES = 4096  # that are remembered; numbers among the arguments make ever new ones


class plainly:
    """Inside, operators go straight to their kernels: no autograd, no modes."""

    __slots__ = ("_guards",)

    def __enter__(self) -> None:
        guards = (
            torch._C._AutoDispatchBelowAutograd(),
            torch._C._DisableTorchDispatch(),
            torch._C.DisableTorchFunction(),
        )
        self._guards = guards
        for guard in guards:
            guard.__enter__()

    def __exit__(self, *error: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(*error)


def is_there(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "standin"


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same lists and tuples with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(each, change) for each in value)
    return value


def tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def extent(tensor: Tensor, writes: bool) -> Use:
    """The bytes from the tensor's first element to its last."""
    low, nbytes = tensor.data_ptr(), tensor.element_size()
    if tensor.is_contiguous():
        high = low + tensor.numel() * nbytes
    else:
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        high = low + (span + 1) * nbytes
    return Use(tensor.untyped_storage().data_ptr(), low, high, writes)


def meta_of(tensor: Tensor) -> Tensor:
    if not is_there(tensor):
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _key(value: Any) -> Any:
    """Tell apart what gives results of other shapes; None where more than that tells: a tensor of
    the host, whose numbers may."""
    if isinstance(value, Tensor):
        return (value.size(), value.stride(), value.dtype) if is_there(value) else None
    if isinstance(value, list | tuple):
        keys = []
        for each in value:
            if (key := _key(each)) is None:
                return None
            keys.append(key)
        return tuple(keys)
    return (type(value), value)  # 1 is not 1.0 here


def _with_kernels_of_the_cpu() -> list[str]:
    """Operators that torch composes of others on most devices, with other bits than the CPU's own
    kernels."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composed = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return [name for name in names if has(name, "CPU") and any(has(name, key) for key in composed)]


class Schema:
    """What an operator writes, and what its results are."""

    def __init__(self, op: Any) -> None:
        arguments = op._schema.arguments
        writes = [each.alias_info is not None and each.alias_info.is_write for each in arguments]
        self.name = op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
        self.names = [each.name for each in arguments]
        self.written = [name for name, written in zip(self.names, writes, strict=True) if written]
        results = op._schema.returns
        aliases = [each.alias_info for each in results]
        self.describes = bool(results) and all(each is not None and not each.is_write for each in aliases)
        self.returns_written = bool(results) and all(each is not None and each.is_write for each in aliases)
        self.gives_tensors = all(str(each.type) in ("Tensor", "List[Tensor]") for each in results)
        self.random = torch.Tag.nondeterministic_seeded in op.tags


@dataclass(eq=False)
class _PinnedUse:
    """Pinned memory that a copy uses when it runs, and what must be there then."""

    host: Tensor
    extent: Use
    expected: Tensor


class Operators:
    """The kernels of ``device``."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._schemas: dict[Any, Schema] = {}
        self._dtypes: dict[Any, list[torch.dtype]] = {}
        self._shapes: dict[Any, Any] = {}  # of results that have been computed before
        pages = (ctypes.c_uint8 * device.arena_bytes).from_address(device.base)
        self._pages = torch.frombuffer(pages, dtype=torch.uint8)
        self._typed: dict[torch.dtype, Tensor] = {}
        self._pinned: list[_PinnedUse] = []  # by copies that have not run, in the order of launch
        everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        everything.fallback(self.boxed, "PrivateUse1")
        aten.impl("_copy_from", self.copy_from, "PrivateUse1")
        aten.impl("_local_scalar_dense", self.local_scalar, "PrivateUse1")
        aten.impl("record_stream", self.record_stream, "PrivateUse1")
        aten.impl("resize_", self.resize_, "PrivateUse1")
        # as for CUDA: ``param.data`` may go from the host to the device and back
        aten.impl("_has_compatible_shallow_copy_type", lambda tensor, other: True, "PrivateUse1")
        for name in _with_kernels_of_the_cpu():
            overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, overload[0]), overload[2] or "default")
            aten.impl(name.removeprefix("aten::"), partial(self.boxed, op), "PrivateUse1")
        self._libraries = (everything, aten)  # the registrations last as long as they

    def pages_of(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor of the CPU, for work that runs on the device."""
        typed = self._typed.get(tensor.dtype)
        if typed is None:
            typed = self._typed[tensor.dtype] = self._pages.view(tensor.dtype)
        offset = (tensor.data_ptr() - self._device.base) // tensor.element_size() if tensor.numel() else 0
        return typed.as_strided(tensor.size(), tensor.stride(), offset)

    # --- any operator -----------------------------------------------------------------------------

    def boxed(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        with plainly():
            schema = self._schemas.get(op)
            if schema is None:
                schema = self._schemas[op] = Schema(op)
            if schema.describes or schema.name.startswith("aten::set_"):
                return op.redispatch(_CPU_KEYS, *args, **kwargs)
            self._device.library.standin_operator(schema.name.encode())
            values = dict(zip(schema.names, args, strict=False)) | kwargs
            given = [each for value in values.values() for each in tensors_in(value)]
            self._require_one_device(schema.name, given)
            if not schema.gives_tensors:
                return self._at_once(op, schema, args, kwargs)
            if not schema.returns_written and op._schema.returns:
                key = _key((op, args, tuple(kwargs.items()), torch.get_default_dtype()))
                shapes = self._shapes.get(key) if key is not None else None
                if shapes is None:
                    try:
                        named = {name: mapped(each, meta_of) for name, each in kwargs.items()}
                        shapes = op(*mapped(args, meta_of), **named)
                    except (NotImplementedError, RuntimeError) as error:
                        if "meta" not in str(error).lower() and not isinstance(error, NotImplementedError):
                            raise
                        return self._at_once(op, schema, args, kwargs)
                    if not isinstance(shapes, Tensor) and any(each.dtype.itemsize == 2 for each in given):
                        shapes = self._with_dtypes_of_the_cpu(op, shapes, args, kwargs)
                    if key is not None:
                        if len(self._shapes) == _MOST_SHAPES:
                            self._shapes.clear()
                        self._shapes[key] = shapes
                results = mapped(shapes, self._empty_like)
                self._queue(op, schema, args, kwargs, values, list(tensors_in(results)))
                return results
            self._grow_outputs(op, schema, values)
            self._queue(op, schema, args, kwargs, values, [])
            written = [values[name] for name in schema.written]
            if not op._schema.returns:
                return None
            return written[0] if len(op._schema.returns) == 1 else tuple(written[: len(op._schema.returns)])

    def _with_dtypes_of_the_cpu(self, op: Any, shapes: Any, args: Any, kwargs: Any) -> Any:
        """Some kernels of 16-bit tensors keep statistics in 16 bits on the CPU and in 32 elsewhere,
        which tensors without data do not tell: look once at what the CPU makes of zeros."""
        masks = tuple(tuple(each) for each in args if isinstance(each, list) and each and isinstance(each[0], bool))
        key = (op, masks, *(each.dtype for each in tensors_in(args)))  # a mask says which results there are
        if key not in self._dtypes:
            zeros = lambda given: torch.zeros(given.shape, dtype=given.dtype)  # noqa: E731
            made = op(*mapped(args, zeros), **{name: mapped(each, zeros) for name, each in kwargs.items()})
            self._dtypes[key] = [each.dtype for each in tensors_in(made)]
        dtypes = iter(self._dtypes[key])
        return mapped(shapes, lambda shape: shape.to(next(dtypes)))

    def _require_one_device(self, name: str, given: list[Tensor]) -> None:
        for tensor in given:
            if tensor.device.type == "cpu" and not name.startswith(_TAKES_HOST_INDICES):
                raise RuntimeError(f"standin: {name} was given a tensor of the host beside tensors of the device")

    def _empty_like(self, shape: Tensor) -> Tensor:
        return torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device=self._device.torch_device)

    def _grow_outputs(self, op: Any, schema: Schema, values: dict[str, Any]) -> None:
        """An empty ``out=`` gets the shape of the result."""
        outs = [each for name in schema.written for each in tensors_in(values[name])]
        if "out" not in schema.name or all(each.numel() for each in outs):
            return
        shapes = op(**{key: mapped(each, meta_of) for key, each in values.items()})
        for out, shape in zip(outs, tensors_in(shapes), strict=True):
            if out.shape != shape.shape:
                out.resize_(shape.shape)

    def _call(self, op: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
        """The operator on the device's pages, with the host's indices as they are now."""

        def there(tensor: Tensor) -> Tensor:
            return self.pages_of(tensor) if is_there(tensor) else tensor.clone()

        placed = mapped(args, there)
        named = {key: mapped(each, there) for key, each in kwargs.items() if key != "device"}
        if "device" in kwargs:
            named["device"] = torch.device("cpu")
        return lambda: op(*placed, **named)

    def _queue(
        self, op: Any, schema: Schema, args: Any, kwargs: Any, values: dict[str, Any], results: list[Tensor]
    ) -> None:
        call, targets = self._call(op, args, kwargs), [self.pages_of(each) for each in results]

        def run() -> None:
            with plainly():
                made = self._drawn(call) if schema.random else call()
                for target, source in zip(targets, tensors_in(made) if targets else (), strict=True):
                    target.copy_(source)

        self._device.launch(schema.name, [*self._uses(schema, values), *uses(results, writes=True)], run)

    def _drawn(self, call: Callable[[], Any]) -> Any:
        with self._device.random_numbers():
            return call()

    def _uses(self, schema: Schema, values: dict[str, Any]) -> list[Use]:
        return [use for name, value in values.items() for use in uses(tensors_in(value), name in schema.written)]

    def _at_once(self, op: Any, schema: Schema, args: Any, kwargs: Any) -> Any:
        """The host must know the result, or its shape: it waits."""
        values = dict(zip(schema.names, args, strict=False)) | kwargs
        call, found = self._call(op, args, kwargs), []

        def run() -> None:
            with plainly():
                found.append(self._drawn(call) if schema.random else call())

        self._device.launch(schema.name, self._uses(schema, values), run)
        self._device.synchronize_stream(what=schema.name)
        return mapped(found[0], lambda made: made.to(self._device.torch_device))

    # --- copies, and what has no data -------------------------------------------------------------

    def copy_from(self, source: Tensor, into: Tensor, non_blocking: bool = False) -> Tensor:
        with plainly():
            if into.numel():
                self._copy(source, into, non_blocking)
            return into

    def _copy(self, source: Tensor, into: Tensor, non_blocking: bool, what: str = "") -> None:
        down, up = is_there(source) and not is_there(into), is_there(into) and not is_there(source)
        host = into if down else source
        pinned = (down or up) and self._device.is_pinned(host)
        name = f"copy{' to the host' if down else ' to the device' if up else ''}"
        self._device.library.standin_operator(name.encode())
        here = self.pages_of(source) if is_there(source) else source
        there = self.pages_of(into) if is_there(into) else into
        accesses = [*uses([source] if is_there(source) else [], False), *uses([into] if is_there(into) else [], True)]
        kind = name.removeprefix("copy ") if down or up else "compute"
        if up and not pinned:
            here = source.clone()  # staged: the host may write to it at once
        with self._device.scheduler.paused():
            pinned_use: _PinnedUse | None = None
            if pinned:
                self._device.scheduler.add_pinned(host.untyped_storage().data_ptr(), host.untyped_storage().nbytes())
                accesses.append(extent(host, writes=down))
                pinned_use = self._use_pinned(host, accesses[-1], spoils=non_blocking)

            def run() -> None:
                with plainly():
                    if pinned_use is None:
                        there.copy_(here)
                    else:
                        self._run_pinned(pinned_use, there, here)

            self._device.launch(name, accesses, run, kind=kind, nbytes=into.numel() * into.element_size())
        if (down or up) and not (pinned and non_blocking):
            self._device.synchronize_stream(what=what or name)

    def _use_pinned(self, host: Tensor, extent: Use, *, spoils: bool) -> _PinnedUse:
        """Note a copy. Until one to the host has run, the host finds NaN there, unless a copy
        before it still needs what is there."""
        if extent.writes and spoils and not any(overlap(extent, other.extent) for other in self._pinned):
            _spoil(host)
        self._pinned.append(_PinnedUse(host, extent, host.clone()))
        return self._pinned[-1]

    def _run_pinned(self, use: _PinnedUse, there: Tensor, here: Tensor) -> None:
        """Copy. What a copy to the host writes is what those after it find: the scheduler has
        compared their order when they were launched."""
        self._pinned.remove(use)
        later = [other for other in self._pinned if use.extent.writes and overlap(use.extent, other.extent)]
        for each in (use, *later):
            if not _same(each.expected, each.host):
                raise DeviceFault("the host wrote to pinned memory while a copy used it")
        there.copy_(here)
        for each in later:
            each.expected = each.host.clone()

    def local_scalar(self, tensor: Tensor) -> Any:
        with plainly():
            here = torch.empty((), dtype=tensor.dtype)
            self._copy(tensor.reshape(()), here, False, "a number")
            return here.item()

    def record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        if tensor.untyped_storage().nbytes():
            self._device.scheduler.use_on_stream(tensor.untyped_storage().data_ptr(), stream.stream_id)

    def resize_(self, tensor: Tensor, size: Any, memory_format: Any = None) -> Tensor:
        with plainly():
            grown = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
            if grown.untyped_storage().nbytes() > tensor.untyped_storage().nbytes():
                if tensor.numel():
                    grown.view(-1)[: tensor.numel()].copy_(tensor.reshape(-1))
                return torch.ops.aten.set_.source_Tensor(tensor, grown)
            return tensor.as_strided_(grown.size(), grown.stride())


def uses(tensors: Iterable[Tensor], writes: bool) -> list[Use]:
    return [extent(each, writes) for each in tensors if is_there(each) and each.numel()]


def _spoil(tensor: Tensor) -> None:
    """Until the copy has run, the host finds NaN there."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 1 if tensor.dtype == torch.bool else 113)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
