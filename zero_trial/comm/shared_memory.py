"""Shared memory of the ranks of a host: each rank has one arena, maps its peers' arenas, and waits
for numbers that peers write there.

    blocks of axes | tensors that are sent in each step | copies of others | unused ......

An arena is a memfd: it has no file name, so nothing is left behind when its rank ends, however it
ends. Peers open it through ``/proc/<pid>/fd/<fd>``, which the kernel permits to processes of the
same user. Its address range is as large as the host's memory; pages are allocated at their first
use. A rank only allocates in its own arena; peers get the offset of a tensor from the call in which
they read it (:class:`zero_trial.comm.backends.SharedTransport`).
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import mmap
import os
import platform
import select
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from zero_trial.errors import DoesNotFit

PAGE = 4096
MOST_ADDRESSES = 1 << 45  # bytes that all arenas of a host together may span in each rank


def map_peer(process: int, descriptor: int, size: int) -> mmap.mmap:
    """Map the arena of another rank."""
    own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(own, size)
    finally:
        os.close(own)


class Arena:
    """This rank's arena. Raises OSError or AttributeError if the system does not support it.

    A range belongs to the tensor that :meth:`tensor` returns, and is freed with the tensor's last
    view. Freed ranges keep their pages for the next tensor, until :meth:`trim`.
    """

    def __init__(self, ranks: int) -> None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.size = min(memory, MOST_ADDRESSES // ranks) // PAGE * PAGE
        self.process = os.getpid()
        self.descriptor = os.memfd_create("zero_trial", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, self.size)
            self._area = mmap.mmap(self.descriptor, self.size)
        except (OSError, ValueError) as trouble:
            os.close(self.descriptor)
            raise OSError(str(trouble)) from trouble
        weakref.finalize(self, os.close, self.descriptor)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._area))
        self._free = [(0, self.size)]  # [start, stop), in order; the last one reaches the end
        self._backed = 0  # below, pages have been allocated
        # Ranges whose tensors were freed. Python may free a tensor at any time, even inside
        # :meth:`_allocate`, which therefore reclaims the ranges itself.
        self._returned: deque[tuple[int, int]] = deque()

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized flat tensor. Raises DoesNotFit if the host has no memory."""
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.empty(numel, dtype=dtype)
        start, stop = self._allocate(nbytes)
        lease = memoryview(self._area)[start : start + nbytes]
        weakref.finalize(lease, self._returned.append, (start, stop)).atexit = False
        return torch.frombuffer(lease, dtype=dtype)

    def block(self, nbytes: int) -> tuple[int, memoryview]:
        """Return the offset of ``nbytes`` zeros, and the bytes; they are never freed."""
        start, _ = self._allocate(nbytes)
        block = memoryview(self._area)[start : start + nbytes]
        block[:] = bytes(nbytes)
        return start, block

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return where a contiguous ``tensor`` begins; None if it is not in this arena."""
        offset = tensor.data_ptr() - self._start
        return offset if offset >= 0 and offset + tensor.nbytes <= self.size else None

    @property
    def in_use(self) -> int:
        """Return the number of bytes in tensors and blocks."""
        self._take_back()
        return self.size - sum(stop - start for start, stop in self._free)

    def trim(self) -> None:
        """Return the pages of free ranges to the system, for all ranks that map them."""
        self._take_back()
        if self.process != os.getpid():  # a forked process: the pages are its parent's
            return
        for start, stop in self._free:
            if start < self._backed:
                self._area.madvise(mmap.MADV_REMOVE, start, min(stop, self._backed) - start)
        self._backed = min(self._backed, self._free[-1][0])

    def _allocate(self, nbytes: int) -> tuple[int, int]:
        """Take pages from the first free range that is large enough; return their [start, stop)."""
        self._take_back()
        need, at = -(-nbytes // PAGE) * PAGE, 0
        last = len(self._free) - 1  # which always stays
        start, stop = self._free[at]
        while stop - start < need + (at == last):
            if at == last:
                raise self._no_room(nbytes, os.strerror(errno.ENOMEM))
            at += 1
            start, stop = self._free[at]
        if start + need > self._backed:
            # Allocate pages now: without memory this raises, instead of killing the first process
            # that writes.
            try:
                os.posix_fallocate(self.descriptor, self._backed, start + need - self._backed)
            except OSError as trouble:
                raise self._no_room(nbytes, str(trouble)) from trouble
            self._backed = start + need
        self._free[at : at + 1] = [(start + need, stop)] if start + need < stop else []
        return start, start + need

    def _take_back(self) -> None:
        """Add returned ranges to the free list, and merge neighbors."""
        while self._returned:
            start, stop = self._returned.popleft()
            at = bisect.bisect(self._free, (start, stop))
            if self._free[at][0] == stop:  # there is one behind: the last range reaches the end
                stop = self._free.pop(at)[1]
            if at and self._free[at - 1][1] == start:
                start = self._free.pop(at - 1)[0]
                at -= 1
            self._free.insert(at, (start, stop))

    def _no_room(self, nbytes: int, why: str) -> DoesNotFit:
        return DoesNotFit(
            "the host has no memory left for tensors that its ranks share",
            where="shared memory",
            got=f"{nbytes} bytes more: {why}",
            fix="Use fewer ranks on this host, a higher ZeRO stage, or offload.",
        )


# --- waits for peers ------------------------------------------------------------------------------

ELSEWHERE = "is at another operation"  # in an error's text: a rank has arrived with another call
CROSSED = "the ranks wait for each other"  # in an error's text: each in another collective

# spin for this long, which is enough if ranks arrive together; then yield the core
_SPIN_SECONDS = 1e-4
_LONGEST_NAP_SECONDS = 1e-3
_LOOK_SECONDS = 0.05  # how often a waiting rank checks that its peers are alive


def why_not_shared() -> str:
    """Return why ranks cannot wait for each other in shared memory here; empty if they can.

    Other ranks must see a number only after the data written before it, which x86 guarantees, and
    a waiting rank must detect that a peer has ended.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"{platform.machine()} does not preserve the order of writes as x86 does"
    return "" if hasattr(os, "pidfd_open") else f"{sys.platform} has no pidfd_open"


def close_all(*descriptors: int) -> None:
    """Close the descriptors that are still open."""
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)


class PeerProcesses:
    """The other ranks of an axis as processes: axis index -> process id.

    ``crossed`` returns whether the current wait can never end because ranks wait for each other.
    ``go_on`` is called repeatedly while this rank waits, to advance other collectives.
    """

    def __init__(
        self,
        processes: Mapping[int, int],
        crossed: Callable[[], bool] = lambda: False,
        go_on: Callable[[], None] = lambda: None,
    ) -> None:
        self._watches = {index: os.pidfd_open(process) for index, process in processes.items()}
        self._crossed = crossed
        self._go_on = go_on
        weakref.finalize(self, close_all, *self._watches.values())

    def wait_for(self, index: int, numbers: memoryview, at: int, least: int, timeout: float) -> None:
        """Wait until axis index ``index`` has written ``least`` or more at ``numbers[at]``
        (int64).

        Raises RuntimeError if its process has ended (``closed``), if the ranks wait for each other,
        or after ``timeout`` seconds (``timed out``). Spins for a moment, then sleeps: a rank that
        waits long leaves its core to the rank that it waits for.
        """
        if numbers[at] >= least:
            return
        begun = time.monotonic()
        nap, look, deadline = 0.0, begun + _LOOK_SECONDS, begun + timeout
        while numbers[at] < least:
            now = time.monotonic()
            if now - begun < _SPIN_SECONDS:
                os.sched_yield()
                continue
            self._go_on()
            if now >= look:
                look = now + _LOOK_SECONDS
                poll = select.poll()  # it has ended, also if its exit status has not been read yet
                poll.register(self._watches[index], select.POLLIN)
                if poll.poll(0) and numbers[at] < least:
                    raise RuntimeError(f"closed: the process of axis index {index} has ended")
                if self._crossed():
                    raise RuntimeError(CROSSED)
            if now >= deadline:
                raise RuntimeError("timed out")
            nap = min(nap + 2e-5, _LONGEST_NAP_SECONDS)
            time.sleep(nap)
