"""The C library's heap: whether freed memory stays in the process, and in what pages it comes."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from typing import Any

import torch

from zero_trial.comm import AxisComm

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_LARGEST_HEAP_BLOCK = 32 << 20  # what glibc allows on 64-bit machines
_LARGE_PAGE = 2 << 20  # the smallest, of every processor that has them


def keep_freed_memory() -> bool:
    """Keep the memory of freed CPU buffers in the process, so that the next buffer does not pay for
    its pages again. Return whether that worked.

    glibc returns large freed blocks to the kernel and gets zeroed pages back at the next
    allocation: about 0.25 microseconds of CPU per KiB on each use. A plan that frees and revives
    whole groups in every step pays that for all its parameters and gradients. Blocks above 32 MiB
    are still mapped one by one.

    Process-wide and idempotent; the peak of memory in use is unchanged, but the process does not
    shrink after it.
    """
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def map_large_blocks() -> bool:
    """Map blocks of 1 MiB and more one by one, so that a freed one leaves the process at once;
    return whether this could be set.

    For parameters that come from a disk: memory is what they are offloaded for. Freed blocks that
    stay in the heap between those that live took 2.5 bytes per parameter at the peak. Process-wide
    and idempotent; replaces :func:`keep_freed_memory`.
    """
    mallopt = _glibc("mallopt")
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, 1 << 20))


def use_large_pages(tensor: torch.Tensor) -> None:
    """Ask the kernel for large pages for a tensor of the host that is written next, if it is worth
    a call. Where the kernel has none they are small.

    For memory that comes from the kernel at each use (:func:`map_large_blocks`): the first touch of
    8 MiB takes 2 ms instead of 8 on a virtual machine.
    """
    if tensor.device.type != "cpu":
        return
    page = mmap.PAGESIZE
    low, high = -(-tensor.data_ptr() // page) * page, (tensor.data_ptr() + tensor.nbytes) // page * page
    if high - low >= _LARGE_PAGE and (madvise := _glibc("madvise")) is not None:
        madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), getattr(mmap, "MADV_HUGEPAGE", 14))


def give_freed_memory_back() -> bool:
    """Return every unused page of the heap to the kernel; return whether there were any.

    For moments at which much is freed that is not needed again. A large block that is freed is
    seldom whole for the next one: something small is put into it, and the heap grows by another
    block.
    """
    trim = _glibc("malloc_trim")
    return trim is not None and bool(trim(0))


class FreedBytes:
    """Counts host memory that is freed piece by piece while a model is built, and gives it back to
    the kernel now and then.

    glibc does not put an aligned block into a hole of the same size, so what is freed between
    blocks that stay is not used again, and the process would keep all that it ever had.
    """

    def __init__(self, most: int = 16 << 20) -> None:
        self._most = most  # bytes that may wait: a call costs about a microsecond per hole
        self._bytes = 0
        self._comm: AxisComm | None = None

    def add(self, tensor: torch.Tensor, comm: AxisComm | None = None) -> None:
        """Count a tensor whose memory was freed, or is when the caller returns. ``comm``: it was
        sent there, so that its messages' memory goes as well."""
        if tensor.device.type != "cpu":
            return
        self._comm = comm if comm is not None else self._comm
        self._bytes += tensor.nbytes
        if self._bytes >= self._most:
            self.give_back()

    def give_back(self) -> None:
        """Give back what has been freed, if it is worth a call."""
        if self._bytes >= min(self._most, 1 << 20):
            give_freed_memory_back()
            if self._comm is not None:
                self._comm.free_kept()
        self._bytes = 0


@functools.cache
def _glibc(name: str) -> Any:
    """Return a function of glibc; None with another C library."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
