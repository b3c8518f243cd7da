"""Count the bytes of live tensors at each moment of a run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

_ATEN, _DEVICE = torch.ops.aten, torch.ops.prim.device.default
# Operations whose results share the memory of their argument.
_VIEWS = frozenset(
    {
        *(_ATEN.slice.Tensor, _ATEN.view.default, _ATEN.view.dtype, _ATEN.detach.default, _ATEN.t.default),
        *(_ATEN.select.int, _ATEN.expand.default, _ATEN.permute.default, _ATEN.transpose.int),
    }
)


@dataclass
class _Storage:
    """One live storage: its bytes when last read, and whether autograd saved a tensor in it."""

    ref: weakref.ref[Any]
    size: int
    number: int
    saved: bool = False


class LiveBytes(TorchDispatchMode):
    """Counts storages that are created while the mode is active; each counts until it is freed,
    even after exit.

    ``live``: current bytes, ``peak``: maximum since :meth:`restart`. Views of one storage count
    once; a resized storage counts with its new size immediately. Does not count memory outside
    tensors (libraries, kernel workspaces, allocator caches), and tensors whose memory no operation
    allocated (shared memory, files) unless passed to :meth:`hold`.

    Args:
        only: the type of the device whose memory counts; None for all devices.
    """

    def __init__(self, only: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._only = only
        self._storages: dict[int, _Storage] = {}
        self._followed: Callable[[], Iterable[torch.Tensor]] = tuple
        self._made = 0
        self._saved_from = 0
        self.live = 0
        self.peak = 0
        self.saved = 0
        self.saved_peak = 0

    def __enter__(self) -> LiveBytes:
        """Start counting. Patches resize_, because resizing a storage is not dispatched."""
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
        """Also count tensors that were created earlier or elsewhere."""
        for tensor in tensors:
            self._see(tensor)
        self.peak = max(self.peak, self.live)

    def follow(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Check ``tensors()`` at every operation, because their storages change without one."""
        self._followed = tensors
        self.hold(tensors())

    def restart(self) -> None:
        """Reset the peaks."""
        self._look_again()
        self.peak, self.saved_peak = self.live, self.saved

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count as ``saved`` the storages created in the block that autograd saves for backward,
        while they live.

        Storages from before (parameters, buffers, the batch) do not count: they would live without
        backward, too.
        """
        self._saved_from = self._made
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
            yield

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. Otherwise torch would import its compiler, which takes a second, to exclude
        the method below from compilation, but nothing is compiled there."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _ATEN._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return _fake_number(args[0])
        out = func(*args, **(kwargs or {}))
        if func in _VIEWS or func is _DEVICE:  # most operations, and they allocate no memory
            return out
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
        self.peak = max(self.peak, self.live)
        return out

    def _knows(self, tensor: torch.Tensor) -> bool:
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return known is not None and known.ref() is not None

    def _look_again(self) -> None:
        for tensor in self._followed():
            self._see(tensor)

    def _see(self, tensor: torch.Tensor) -> None:
        if self._only is not None and tensor.device.type != self._only:
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
        self._storages[key] = _Storage(weakref.ref(storage, partial(self._gone, key, self._made)), size, self._made)
        self._add(self._storages[key], size)

    def _measure(self, known: _Storage, size: int) -> None:
        if size != known.size:
            self._add(known, size - known.size)
            known.size = size

    def _add(self, known: _Storage, more: int) -> None:
        self.live += more
        if known.saved:
            self.saved += more

    def _gone(self, key: int, number: int, _: Any = None) -> None:
        known = self._storages.get(key)
        # another storage has reused the address
        if known is None or known.number != number:
            return
        del self._storages[key]
        self._add(known, -known.size)

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            known = self._storages.get(tensor.untyped_storage()._cdata)
            if known is not None and not known.saved and known.number > self._saved_from:
                known.saved = True
                self.saved += known.size
                self.saved_peak = max(self.saved_peak, self.saved)
            if tensor.grad_fn is not None:
                # If a node's hook referenced the node's own output, the cycle would keep a graph
                # that is only partly run alive forever.
                return tensor.detach()
        return tensor


def _storages(args: tuple[Any, ...]) -> set[int]:
    """Return the storages of the tensors among an operation's arguments, also in lists."""
    found: set[int] = set()
    for value in args:
        for leaf in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(leaf, torch.Tensor):
                found.add(leaf.untyped_storage()._cdata)
    return found


def _fake_number(tensor: torch.Tensor) -> float | bool:
    """Return the result of ``item()`` for a tensor without values: 1.0 for losses and norms, False
    for conditions.

    Raises LookupError for an integer, which could determine a shape and make the plan wrong.
    """
    if tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point():
        return 1.0
    raise LookupError("an integer is read from a tensor, and this one has no values")
