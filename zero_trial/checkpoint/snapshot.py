"""Copy a rank's slices into host memory, most of them while training goes on.

    call         copies what user code can write to at any time, such as parameters and buffers
    background   a thread copies the rest, part by part, in the order in which parts are updated
    an update    waits for the part that it writes, and copies what the thread has not begun of it

A part is what is written together: masters and optimizer state of a group of parameters. Its owner
calls :meth:`Snapshot.copied` before every write. Of an accelerator, a stream of its own copies the
parts, and what the device writes later waits for it there; the host does not wait.

Host memory: the bytes of all slices, kept from save to save.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch

from zero_trial.checkpoint.format import Slice
from zero_trial.device import is_accelerator, torch_module
from zero_trial.errors import CheckpointError
from zero_trial.util.memory import available_memory
from zero_trial.util.text import format_bytes

_ALIGNED = 64  # bytes: where a copy of a tensor may begin
_BLOCK = 1 << 23  # bytes that one thread copies at a time
_SMALL = 1 << 14  # bytes: a smaller tensor is copied at once
_ASKED = 1 << 28  # bytes that are taken before the machine is asked again what is left


class PartOwner(Protocol):
    """Who writes to the tensors of a part."""

    def copy_before_write(self, copy: Callable[[], None]) -> None:
        """Call ``copy`` before the next write to any of them, once."""
        ...


class CopyOrder:
    """Which blocks of which parts are still to be copied. Pure: neither memory nor locks.

    Args:
        blocks: how many blocks each part has.
    """

    def __init__(self, blocks: Sequence[int]) -> None:
        self._blocks = list(blocks)
        self._taken = [0] * len(self._blocks)
        self._done = [0] * len(self._blocks)
        self._next = 0  # all parts before it are taken

    def take(self, part: int | None = None) -> tuple[int, int] | None:
        """Take the next block to copy, as (part, block); None where nothing is left of ``part``, or
        of all parts."""
        if part is None:
            while self._next < len(self._blocks) and self._taken[self._next] == self._blocks[self._next]:
                self._next += 1
            part = self._next
        if part >= len(self._blocks) or self._taken[part] == self._blocks[part]:
            return None
        self._taken[part] += 1
        return part, self._taken[part] - 1

    def finish(self, part: int) -> bool:
        """Note that a block which was taken is copied; return whether it was the part's last."""
        self._done[part] += 1
        return self.complete(part)

    def complete(self, part: int) -> bool:
        """Return whether all of ``part`` is copied."""
        return self._done[part] == self._blocks[part]

    def drop(self) -> None:
        """Drop copies that have not begun."""
        self._blocks = list(self._taken)


class _Block(NamedTuple):
    """Bytes that one thread copies."""

    target: int  # address
    source: int
    nbytes: int


@dataclass
class _Part:
    """What is copied together.

    Attributes:
        sources: what is copied after the call, with its version then; it must exist until it is
            copied, and is compared once.
        arrival: for each device, what marks that its copies are made.
    """

    sources: list[tuple[Slice, int]]
    blocks: list[_Block]
    arrival: dict[torch.device, torch.Event]


class Snapshot:
    """Copies of slices as they are when it is made; see the top of this file.

    Attributes:
        slices: with copies as their tensors. They hold the values after :meth:`finish`.
        waited: seconds for which writes were held back.
        fault: why the copies are not what they should be; None where they are.
    """

    def __init__(self, slices: Sequence[Slice], parts: Sequence[_Part]) -> None:
        self.slices = slices
        self.waited = 0.0
        self.fault: str | None = None
        self._parts = list(parts)
        self._order = CopyOrder([len(part.blocks) for part in parts])
        self._changed = threading.Condition()

    def copied(self, part: int) -> None:
        """Return when nothing of ``part`` is needed any more, or when what the device is given from
        now on comes after that. Copies what is not begun, in as many threads as torch uses: those
        of torch wait for each other at the end of every tensor, 16 ms on a busy machine."""
        begin = time.perf_counter()
        self._help(part)
        with self._changed:
            self._changed.wait_for(lambda: self._order.complete(part))
            self._compare_versions(self._parts[part])
        for device, event in self._parts[part].arrival.items():
            torch_module(device).current_stream(device).wait_event(event)
        self.waited += time.perf_counter() - begin

    def finish(self) -> None:
        """Copy what is left, wait for all of it, and let go of the sources."""
        self._work(None)
        with self._changed:
            self._changed.wait_for(lambda: all(map(self._order.complete, range(len(self._parts)))))
        for part in self._parts:
            for event in part.arrival.values():
                event.synchronize()
            with self._changed:
                self._compare_versions(part)

    def give_up(self) -> None:
        """Copy no more; writes wait for nothing but the blocks that are being copied."""
        with self._changed:
            self._order.drop()
            self._changed.notify_all()

    def _help(self, part: int) -> None:
        count = min(torch.get_num_threads(), len(self._parts[part].blocks)) - 1
        helpers = [threading.Thread(target=self._work, args=(part,)) for _ in range(count)]
        for helper in helpers:
            helper.start()
        self._work(part)
        for helper in helpers:
            helper.join()

    def _work(self, only: int | None) -> None:
        """Copy block after block. The C library writes large blocks past the caches, which saves a
        third of the memory's traffic."""
        while True:
            with self._changed:
                taken = self._order.take(only)
            if taken is None:
                return
            part, block = self._parts[taken[0]], taken[1]
            ctypes.memmove(*part.blocks[block])
            with self._changed:
                if self._order.finish(taken[0]):
                    self._compare_versions(part)
                    self._changed.notify_all()

    def _compare_versions(self, part: _Part) -> None:
        """Note a fault where the part was written to without a call of :meth:`copied`; let go of
        its sources."""
        sources, part.sources = part.sources, []
        for source, version in sources:
            if source.tensor._version != version and self.fault is None:
                self.fault = (
                    f"{source.name} was changed in place after the call of save_checkpoint, before it was copied. "
                    "Change it through optimizer.state or safe_set_full_optimizer_state after that call, "
                    "or save with asynchronous=False."
                )


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
        are asked to wait. :meth:`Snapshot.finish` must follow, in any thread. Copies of ``slices``
        from an accelerator come in its current stream's order."""
        everything = [list(slices), *(list(own) for _, own in later)]
        offsets, end = [], 0
        for part in (part for own in everything for part in own):
            offsets.append(end)
            end += -(-_size(part.tensor) // _ALIGNED) * _ALIGNED
        tensors = [part.tensor for own in everything for part in own]
        area = self.reserve(end, pinned=any(is_accelerator(tensor.device) for tensor in tensors))
        targets = [
            area[offset : offset + _size(tensor)].view(tensor.dtype)
            for tensor, offset in zip(tensors, offsets, strict=True)
        ]
        copies = iter(targets)
        parts = [self._part(own, copies, beside=index > 0) for index, own in enumerate(everything)]
        flat = (part for own in everything for part in own)
        copied = [replace(part, tensor=target) for part, target in zip(flat, targets, strict=True)]
        snapshot = Snapshot(copied, parts)
        snapshot.copied(0)
        snapshot.waited = 0.0
        for index, (owner, _) in enumerate(later, start=1):
            owner.copy_before_write(partial(snapshot.copied, index))
        return snapshot

    def _part(self, slices: list[Slice], targets: Iterator[torch.Tensor], *, beside: bool) -> _Part:
        """Copy what is small or on an accelerator; cut the rest into blocks. ``beside``: on a
        stream of its own."""
        blocks: list[_Block] = []
        sources: list[tuple[Slice, int]] = []
        devices: dict[torch.device, torch.Event] = {}
        for part in slices:
            source, target = part.flat, next(targets)
            size = _size(source)
            if is_accelerator(source.device) or size >= _SMALL:
                sources.append((part, part.tensor._version))
            if source.is_cpu and size >= _SMALL:
                for at in range(0, size, _BLOCK):
                    blocks.append(_Block(target.data_ptr() + at, source.data_ptr() + at, min(_BLOCK, size - at)))
            elif not is_accelerator(source.device):
                target.copy_(source)
            else:
                device, module = source.device, torch_module(source.device)
                stream = current = module.current_stream(device)
                if beside:
                    if device not in self._streams:
                        self._streams[device] = module.Stream(device)
                    stream = self._streams[device]
                    if device not in devices:
                        stream.wait_stream(current)
                with module.stream(stream):
                    target.copy_(source, non_blocking=True)
                devices.setdefault(device, module.Event()).record(stream)
        return _Part(sources, blocks, devices)


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
