"""Copy a rank's slices into host memory, most of them while training continues.

    call         copies what user code can write to at any time, such as parameters and buffers
    background   a thread copies the rest, tensor by tensor, in the order in which parts are updated
    an update    waits until the part that it writes is copied

A part is written together: masters and optimizer state of a group of parameters. Its owner calls
:meth:`Snapshot.wait_for` before every write. Parts on an accelerator are copied by a stream of
their own, and later writes on the device wait for its event; the host does not wait.

Host memory: the bytes of all slices, kept from save to save.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Protocol

import torch

from zero_trial.checkpoint.format import Slice
from zero_trial.device import is_accelerator, torch_module
from zero_trial.errors import CheckpointError
from zero_trial.util.memory import available_memory
from zero_trial.util.text import format_bytes

_ALIGNED = 64  # bytes: where a copy of a tensor may begin
_BLOCK = 1 << 23  # bytes that are touched at a time
_ASKED = 1 << 28  # bytes that are taken before the machine is asked again what is left


class PartOwner(Protocol):
    """The component that writes to the tensors of a part."""

    def copy_before_write(self, copy: Callable[[], None]) -> None:
        """Call ``copy`` before the next write to any of them, once."""
        ...


@dataclass
class _Part:
    """Tensors that are copied together.

    Attributes:
        copies: (target, source) on the host that are still to be made.
        arrival: for each device, the event after its copies.
        copied: is set when no source is needed any more.
    """

    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    arrival: dict[torch.device, torch.Event] = field(default_factory=dict)
    copied: threading.Event = field(default_factory=threading.Event)


class Snapshot:
    """Copies of slices as they are when it is made; see the top of this file.

    Attributes:
        slices: with copies as their tensors. They hold the values after :meth:`finish`.
        waited: seconds for which writes were held back.
    """

    def __init__(self, slices: Sequence[Slice], parts: Sequence[_Part]) -> None:
        self.slices = slices
        self.waited = 0.0
        self._parts = list(parts)
        self._given_up = False

    def wait_for(self, part: int) -> None:
        """Wait until no source of ``part`` is needed any more; on a device, order later work after
        its copies."""
        begin = time.perf_counter()
        self._parts[part].copied.wait()
        for device, event in self._parts[part].arrival.items():
            torch_module(device).current_stream(device).wait_event(event)
        self.waited += time.perf_counter() - begin

    def finish(self) -> None:
        """Copy the parts in their order, and wait for those on devices. Exactly one thread calls
        this, and always: updates wait for it."""
        try:
            # The order is that of the update, so that the first group waits least.
            for part in self._parts:
                while part.copies and not self._given_up:
                    _copy(*part.copies.pop(0))
                part.copied.set()
        finally:  # an update must not wait for a thread that has failed
            for part in self._parts:
                part.copied.set()
        for part in self._parts:
            for event in part.arrival.values():
                event.synchronize()

    def give_up(self) -> None:
        """Copy no more tensors than the one in flight; writes wait for nothing else."""
        self._given_up = True


class SnapshotBuffer:
    """Host memory for copies of a rank's slices, kept from save to save."""

    def __init__(self) -> None:
        self._area = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()
        self._streams: dict[torch.device, torch.Stream] = {}

    @property
    def nbytes(self) -> int:
        return self._area.numel()

    def reserve(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """Make room for ``nbytes``, touch it all and return it: the kernel takes longer to give
        fresh pages than to copy into them. ``pinned``: so that an accelerator copies without the
        host.

        Raises CheckpointError where the machine, or our control group, has not so much left: the
        kernel would kill a process. Asks on the way too, since other ranks take memory beside us.
        """
        with self._lock:
            if nbytes <= self._area.numel():
                return self._area
            self._area = torch.empty(0, dtype=torch.uint8)  # first give back what is too small
            _require_room(nbytes)
            if pinned:
                self._area = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
                return self._area
            pages = mmap.mmap(-1, nbytes)
            with suppress(OSError, AttributeError):  # a hint, which not every kernel takes
                pages.madvise(mmap.MADV_HUGEPAGE)
            area = torch.frombuffer(pages, dtype=torch.uint8)
            for start in range(0, nbytes, _BLOCK):
                if start % _ASKED == 0:
                    _require_room(nbytes - start)
                area[start : start + _BLOCK].zero_()
            self._area = area
            return area

    def take(self, slices: Sequence[Slice], later: Sequence[tuple[PartOwner, Sequence[Slice]]] = ()) -> Snapshot:
        """Copy ``slices``, and begin a snapshot of them and of the parts ``later``, whose owners
        are asked to wait. :meth:`Snapshot.finish` must follow, in another thread. Copies of
        ``slices`` from an accelerator are in its current stream's order."""
        everything = [*slices, *(part for _, own in later for part in own)]
        offsets, end = [], 0
        for part in everything:
            offsets.append(end)
            end += -(-_size(part.tensor) // _ALIGNED) * _ALIGNED
        area = self.reserve(end, pinned=any(is_accelerator(part.tensor.device) for part in everything))
        copied = [
            replace(part, tensor=area[offset : offset + _size(part.tensor)].view(part.dtype))
            for part, offset in zip(everything, offsets, strict=True)
        ]
        pairs = ((target.tensor, source.flat) for target, source in zip(copied, everything, strict=True))
        at_call = _Part()
        for target, source in islice(pairs, len(slices)):
            if is_accelerator(source.device):
                self._copy_from_device(target, source, at_call, beside=False)
            else:
                _copy(target, source)
        parts = [at_call]
        for _, own in later:
            parts.append(_Part())
            for target, source in islice(pairs, len(own)):
                if is_accelerator(source.device):
                    self._copy_from_device(target, source, parts[-1], beside=True)
                else:
                    parts[-1].copies.append((target, source))
        snapshot = Snapshot(copied, parts)
        for index, (owner, _) in enumerate(later, start=1):
            owner.copy_before_write(partial(snapshot.wait_for, index))
        return snapshot

    def _copy_from_device(self, target: torch.Tensor, source: torch.Tensor, part: _Part, *, beside: bool) -> None:
        """Enqueue a copy; ``beside``: on a stream of its own, which first waits for the current
        one."""
        device, module = source.device, torch_module(source.device)
        stream = current = module.current_stream(device)
        if beside:
            if device not in self._streams:
                self._streams[device] = module.Stream(device)
            stream = self._streams[device]
            if device not in part.arrival:
                stream.wait_stream(current)
        with module.stream(stream):
            target.copy_(source, non_blocking=True)
        part.arrival.setdefault(device, module.Event()).record(stream)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between tensors on the host. memmove releases the GIL and stays on this thread; torch's
    copy waits for its pool of threads at the end of every tensor: 16 ms on a busy machine."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), _size(source))


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
