"""Copy a rank's slices into host memory, most of them while training continues.

    call         copies what user code can write to at any time, such as parameters and buffers
    background   a thread copies the rest, tensor by tensor, in the order in which parts are updated
    an update    waits until the part that it writes is copied

A part is written together: masters and optimizer state of a group of parameters. Host memory: the
bytes of all slices, kept from save to save.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch

from zero_trial.checkpoint.format import Slice
from zero_trial.device import is_accelerator, torch_module
from zero_trial.errors import CheckpointError
from zero_trial.util.memory import available_memory
from zero_trial.util.text import format_bytes

_ALIGNED = 64  # bytes: where a copy of a tensor may begin
_ASKED = 1 << 28  # bytes that are taken before the machine is asked again what is left

Hold = Callable[[Callable[[], None]], None]
"""Takes what must be called, once, before the next write to the tensors of a part."""


class _Part(NamedTuple):
    """Tensors that are copied together: (target, source) that are still to be copied, and the event
    after the last."""

    copies: list[tuple[torch.Tensor, torch.Tensor]]
    copied: threading.Event


class Snapshot:
    """Copies of slices as they are when it is made; see the top of this file.

    Attributes:
        slices: with copies as their tensors. They hold the values after :meth:`finish`.
        waited: seconds for which writes were held back.
        given_up: copy no more tensors than the one in flight; writes wait for nothing else.
    """

    def __init__(self, slices: Sequence[Slice], parts: Sequence[_Part], stream: torch.Stream | None) -> None:
        self.slices = slices
        self.waited = 0.0
        self.given_up = False
        self._parts, self._stream = parts, stream

    def wait_for(self, part: int) -> None:
        """Wait until no source of ``part`` is needed any more."""
        begin = time.perf_counter()
        self._parts[part].copied.wait()
        self.waited += time.perf_counter() - begin

    def finish(self) -> None:
        """Copy the parts in their order. Exactly one thread calls this, and always: updates wait
        for it."""
        stream = self._stream
        try:
            with torch_module(stream.device).stream(stream) if stream is not None else nullcontext():
                # The order is that of the update, so that the first group waits least.
                for part in self._parts:
                    while part.copies and not self.given_up:
                        _copy(*part.copies.pop(0))
                    part.copied.set()
        finally:  # an update must not wait for a thread that has failed
            for part in self._parts:
                part.copied.set()


class SnapshotBuffer:
    """Host memory for copies of a rank's slices, kept from save to save."""

    def __init__(self) -> None:
        self._area = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._area.numel()

    def _reserve(self, nbytes: int, pinned: bool) -> torch.Tensor:
        """Make room for ``nbytes`` and touch it all.

        Raises CheckpointError where the machine, or our control group, has not so much left: the
        kernel would kill a process. Asks on the way too, since other ranks take memory beside us.
        """
        if nbytes <= self._area.numel():
            return self._area
        self._area = torch.empty(0, dtype=torch.uint8)  # first give back what is too small
        _require_room(nbytes)
        if pinned:
            self._area = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            return self._area
        pages = mmap.mmap(-1, nbytes)
        with suppress(OSError):  # a hint, which not every kernel takes
            pages.madvise(mmap.MADV_HUGEPAGE)
        area = torch.frombuffer(pages, dtype=torch.uint8)
        for start in range(0, nbytes, _ASKED):
            _require_room(nbytes - start)
            area[start : start + _ASKED].zero_()
        self._area = area
        return area

    def take(self, slices: Sequence[Slice], later: Sequence[tuple[Hold, Sequence[Slice]]] = ()) -> Snapshot:
        """Copy ``slices``, and begin a snapshot of them and of the parts ``later``, whose writers
        are asked to wait. :meth:`Snapshot.finish` must follow, in another thread."""
        everything = [*slices, *(part for _, own in later for part in own)]
        offsets, end = [], 0
        for part in everything:
            offsets.append(end)
            end += -(-_size(part.tensor) // _ALIGNED) * _ALIGNED
        devices = [part.tensor.device for part in everything if is_accelerator(part.tensor.device)]
        area = self._reserve(end, pinned=bool(devices))
        copied = [
            replace(part, tensor=area[offset : offset + _size(part.tensor)].view(part.dtype))
            for part, offset in zip(everything, offsets, strict=True)
        ]
        pairs = ((target.tensor, source.flat) for target, source in zip(copied, everything, strict=True))
        for target, source in islice(pairs, len(slices)):
            _copy(target, source)
        stream: Any = None
        if devices:  # of its own, after all that is enqueued: copies do not wait for the next forward
            stream = torch_module(devices[0]).Stream(devices[0])
            stream.wait_stream(torch_module(devices[0]).current_stream(devices[0]))
        parts = [_Part(list(islice(pairs, len(own))), threading.Event()) for _, own in later]
        snapshot = Snapshot(copied, parts, stream)
        for index, (hold, _) in enumerate(later):
            hold(partial(snapshot.wait_for, index))
        return snapshot


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into memory of the host. memmove releases the GIL and stays on this thread; torch's copy
    between tensors of the host waits for its pool of threads at the end of every tensor: 16 ms on a
    busy machine."""
    if source.is_cpu:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), _size(source))
    else:
        target.copy_(source)


def _require_room(nbytes: int) -> None:
    """Raise CheckpointError where fewer bytes of memory are left."""
    left = available_memory()
    if left is not None and nbytes > left:
        raise CheckpointError(
            "there is no memory for the copies of a checkpoint in the background",
            where="checkpoint.writer.decoupled",
            got=f"{format_bytes(max(left, 0))} left on this machine or in this process's control group",
            expected=f"{format_bytes(nbytes)} for this rank",
            fix="Give the ranks more memory, or save with asynchronous=False.",
        )


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
