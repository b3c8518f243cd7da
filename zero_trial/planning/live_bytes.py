"""Count the bytes of live tensors at each moment of a run."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import flop_registry

_CPU, _META = torch.device("cpu"), torch.device("meta")
_ATEN, _DEVICE = torch.ops.aten, torch.ops.prim.device.default
# Their results are in the memory of their argument.
_VIEWS = frozenset(
    {
        *(_ATEN.slice.Tensor, _ATEN.view.default, _ATEN.view.dtype, _ATEN.detach.default, _ATEN.t.default),
        *(_ATEN.select.int, _ATEN.expand.default, _ATEN.permute.default, _ATEN.transpose.int),
    }
)


@dataclass
class _Storage:
    """One live storage: its bytes when last looked at, and whether autograd saved a tensor in
    it."""

    ref: weakref.ref[Any]
    size: int
    number: int
    on_host: bool = False
    saved: bool = False


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered; what it counted stays counted until it dies, entered or not.

    ``live`` bytes now, ``peak`` the most since :meth:`restart`: ``backward_peak`` while autograd
    has saved tensors, ``step_peak`` while it has none. Views of one storage count once; a
    storage that is resized counts with its new size at once. Not seen: memory that no tensor holds
    (libraries, kernels' own workspace, caches of an allocator), and tensors over memory that no
    operation made (shared memory, files) unless they are held. ``only``: the type of the device
    whose memory counts; where it is not the CPU, tensors in the CPU's memory count as ``host``.
    """

    def __init__(self, only: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._only = only
        self._storages: dict[int, _Storage] = {}
        self._followed: Callable[[], Iterable[torch.Tensor]] = tuple
        self._made = 0
        self._before = 0
        self._saved_from = 0
        self.live = 0
        self.backward_peak = 0
        self.step_peak = 0
        self.host = 0
        self.host_peak = 0
        self.saved = 0
        self.saved_peak = 0
        self.flops = 0  # counted by AbsentDevice

    def __enter__(self) -> LiveBytes:
        """Count from here on. No operation resizes a storage, so that is watched apart."""
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resized(self._resize)  # type: ignore[assignment, method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def _resized(self, resize: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        def watched(storage: Any, size: int) -> Any:
            out = resize(storage, size)
            known = self._storages.get(storage._cdata)
            if known is not None and known.ref() is not None:
                self._measure(known, size)
            return out

        return watched

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made before, or elsewhere."""
        for tensor in tensors:
            self._see(tensor)
        self._note_peaks()

    def follow(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Look at ``tensors()`` again at every operation: their storages come and go without one
        (mapped memory).
        """
        self._followed = tensors
        self.hold(tensors())

    def restart(self) -> None:
        """Reset the peaks."""
        self._look_again()
        self.backward_peak = self.step_peak = self.live
        self.saved_peak, self.host_peak = self.saved, self.host

    @property
    def peak(self) -> int:
        """Return the most bytes that lived at one time since :meth:`restart`."""
        return max(self.backward_peak, self.step_peak)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count as ``saved`` the storages made inside that autograd saves for backward, while they
        live.

        What was there before (parameters, buffers, the batch) is not: it would be there without
        backward too.
        """
        self._saved_from = self._made
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
            yield

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler, a second of every run, to keep it out of
        the method below, and nothing is compiled there.
        """
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and (args[0].is_meta or isinstance(args[0], _VALUELESS)):
            return _fake_number(args[0])
        if func in _VIEWS or func is _DEVICE:  # most of all operations, and no memory
            return func(*args, **(kwargs or {}))
        out = self._call(func, args, kwargs or {})
        given: set[int] | None = None  # storages of the arguments, some of which are not counted
        for leaf in (out,) if isinstance(out, torch.Tensor) else tree_flatten(out)[0]:
            if not isinstance(leaf, torch.Tensor):
                continue
            if not self._knows(leaf):
                given = _storages(args) if given is None else given
                if leaf.untyped_storage()._cdata in given:
                    continue
            self._see(leaf)
        self._look_again()
        self._note_peaks()
        return out

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perform one operation."""
        return func(*args, **kwargs)

    def _note_peaks(self) -> None:
        if self.saved:
            self.backward_peak = max(self.backward_peak, self.live)
        else:
            self.step_peak = max(self.step_peak, self.live)
        self.host_peak = max(self.host_peak, self.host)

    def _knows(self, tensor: torch.Tensor) -> bool:
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return known is not None and known.ref() is not None

    def _look_again(self) -> None:
        for tensor in self._followed():
            self._see(tensor)

    def _see(self, tensor: torch.Tensor) -> None:
        on_host = self._only is not None and tensor.device.type != self._only
        if on_host and tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._storages.get(key)
        if known is not None and known.ref() is not None:
            self._measure(known, size)
            return
        if known is not None:
            self._gone(key, known.number)
        self._made += 1
        self._storages[key] = _Storage(
            weakref.ref(storage, partial(self._gone, key, self._made)), size, self._made, on_host
        )
        self._add(self._storages[key], size)

    def _measure(self, known: _Storage, size: int) -> None:
        if size != known.size:
            self._add(known, size - known.size)
            known.size = size

    def _add(self, known: _Storage, more: int) -> None:
        if known.on_host:
            self.host += more
            return
        self.live += more
        if known.saved:
            self.saved += more

    def _gone(self, key: int, number: int, _: Any = None) -> None:
        known = self._storages.get(key)
        # the address has been given to another storage since
        if known is None or known.number != number:
            return
        del self._storages[key]
        self._add(known, -known.size)

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            known = self._storages.get(tensor.untyped_storage()._cdata)
            if known is not None and not known.saved and not known.on_host and known.number > self._saved_from:
                known.saved = True
                self.saved += known.size
                self.saved_peak = max(self.saved_peak, self.saved)
            if tensor.grad_fn is not None:
                # A node that holds its own output by way of a hook would hold itself: a graph that
                # is run in part only would stay forever.
                return tensor.detach()
        return tensor


class AbsentDevice(LiveBytes):
    """Counts what a GPU would hold that is not in this machine, and apart from it the host.

    What is on the device are meta tensors: torch computes shapes, dtypes and lifetimes of them some
    four times as fast as those of fake tensors. Tensors in the host's memory are ordinary ones
    where they are small and :class:`_HostTensor` where they are large. Copies between the two do
    nothing, and a tensor of the host that meets one of the device is taken to be there.

    Attention is the kernel that keeps no scores, as GPUs have it (Dao et al. 2022).
    """

    def __init__(self) -> None:
        super().__init__("meta")
        self._attention = _FlashAttention()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Do what every LiveBytes does, with attention as GPUs have it."""
        with self._attention, super().saving():
            yield

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        of_device = [leaf.is_meta for leaf in _tensors(args, kwargs)]
        if not any(of_device):
            return self._on_host(func, args, kwargs)
        if func is _ATEN.copy_.default:
            return args[0]
        if func is _ATEN._to_copy.default and kwargs.get("device") == _CPU:
            made = {"dtype": kwargs.get("dtype") or args[0].dtype, "device": _CPU}
            return self._on_host(_ATEN.empty.memory_format, (args[0].shape,), made)
        if not all(of_device):
            args, kwargs = tree_map(_on_device, (args, kwargs))
        out, count = _on_meta(func, args, kwargs)
        self.flops += count
        return out

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perform an operation on the host; a factory makes a tensor without values."""
        made = func is _ATEN.full.default or (func in _FACTORIES and len(args[0]))  # zeros(()) counts steps
        if made and kwargs.get("device", _CPU) in (None, _CPU):
            return _hosted(func(*args, **{**kwargs, "device": _META, "pin_memory": False}))
        return func(*args, **kwargs)


class _HostTensor(torch.Tensor):
    """A tensor in the host's memory that has neither values nor memory: a meta tensor that says
    that it is on the CPU. torch's own fake tensors do the same, and take its compiler for it, which
    needs more than a second to import."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _CPU

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"tensor(..., size={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _CPU if func is _DEVICE else _hosted(_on_meta(func, args, kwargs or {})[0])


def _hosted(out: Any) -> Any:
    """Return what an operation made, meta tensors, as tensors of the host."""
    if type(out) is torch.Tensor and out.is_meta:
        return torch.Tensor._make_subclass(_HostTensor, out, dispatch_device=True, device_for_backend_keys=_CPU)
    return type(out)(map(_hosted, out)) if isinstance(out, (list, tuple)) else out


_VALUELESS = (FakeTensor, _HostTensor)


class ModulesOnMeta(TorchFunctionMode):
    """Creates tensors on the meta device inside the constructor of a module, and elsewhere, such as
    in code that prepares data, where they are."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
                with _META:
                    return func(*args, **(kwargs or {}))
            frame = frame.f_back
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
        tensors = _tensors(args, kwargs or {})
        if tensors and all(each.is_meta for each in tensors):
            return _on_meta(func, args, kwargs or {})[0]
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


_OUTCOMES: dict[Any, _Outcome] = {}  # of this process; the same in all plans


def forget_outcomes() -> None:
    """Free what is known of operations on meta tensors: no plan follows."""
    _OUTCOMES.clear()


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """Perform an operation on tensors without values; return its result and its count of
    operations.

    torch computes most shapes in Python, which takes a hundred times as long as making a tensor of
    the same form again: what is computed once for some operands holds for all of their form.
    Results in the memory of operands (views) are made by torch each time.
    """
    try:
        key = (func, _form(args), tuple((name, _form(value)) for name, value in kwargs.items()), _modes())
    except TypeError:  # an operand of another kind
        key = None
    known = _OUTCOMES.get(key)
    if known is not None:
        return known.again(args), known.flops
    if key is not None and _only_fills(func, args):
        _OUTCOMES[key] = _Outcome((), None, True, 0)
        return args[0], 0
    given, named = tree_map(_on_device, (args, kwargs))
    out = func(*given, **named)
    count = flop_registry.get(func.overloadpacket)
    flops = count(*given, **named, out_val=out) if count is not None else 0
    outcome = _outcome(func, given, named, out, flops) if key is not None else None
    if outcome is not None:
        _OUTCOMES[key] = outcome
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
        kind, on_meta = (torch.Tensor, True) if isinstance(value, _HostTensor) else (type(value), value.is_meta)
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
    seen = {each.untyped_storage()._cdata for each in _tensors(args, kwargs)}
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


_FACTORIES = frozenset(
    {
        _ATEN.empty.memory_format,
        _ATEN.zeros.default,
        _ATEN.ones.default,
        _ATEN.full.default,
        _ATEN.empty_strided.default,
    }
)


def _on_device(leaf: Any) -> Any:
    """Return a tensor of the host as one of the device, a :class:`_HostTensor` as what it is."""
    if isinstance(leaf, _HostTensor):
        place = leaf.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride()
        return torch.empty(0, dtype=leaf.dtype, device="meta").set_(*place)
    if not isinstance(leaf, torch.Tensor) or leaf.is_meta:
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


class _FlashAttention(TorchFunctionMode):
    """Calls the attention kernel that keeps no scores, which torch does not choose for meta
    tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            return self._backward(args[0], **kwargs)
        if func is not F.scaled_dot_product_attention or kwargs.get("enable_gqa") or not args[0].is_meta:
            return func(*args, **kwargs)
        named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        query, key, value = named["query"], named["key"], named["value"]
        if query.dim() != 4 or query.shape[-1] != value.shape[-1]:
            return func(*args, **kwargs)
        mask = named.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
        return _ATEN._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, named.get("is_causal", False), attn_mask=mask, scale=named.get("scale")
        )[0]

    def _backward(
        self,
        root: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Run a backward inside of the mode, which torch leaves for a call that it has shown: a
        checkpointed layer calls attention again there, and must find the same kernel."""
        retain = create_graph if retain_graph is None else retain_graph
        gradient = torch.ones_like(root) if gradient is None else gradient
        with self:
            # torch.autograd.backward would leave the mode, too
            _engine_run_backward(
                (root,),
                (gradient,),
                retain,
                create_graph,
                tuple(inputs or ()),
                allow_unreachable=True,
                accumulate_grad=True,
            )


def _storages(args: tuple[Any, ...]) -> set[int]:
    """Return the storages of the tensors among the arguments."""
    return {leaf.untyped_storage()._cdata for leaf in _tensors(args, {})}


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments of an operation, and in lists of them."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [leaf for leaf in value if isinstance(leaf, torch.Tensor)]
    return found


def _fake_number(tensor: torch.Tensor) -> float | bool:
    """Return what a tensor without values answers to ``item()``: losses and norms are 1.0,
    conditions False.

    An integer could decide a shape, and a wrong shape a wrong plan: LookupError.
    """
    if tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point():
        return 1.0
    raise LookupError("an integer is read from a tensor, and this one has no values")
