"""Memory of the host: whether what is freed stays in the process, whose pages the next tensor gets,
what goes back to the kernel, and buffers for transfers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from zero_trial.comm import AxisComm

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_LARGEST_HEAP_BLOCK = 32 << 20  # what glibc allows on 64-bit machines
_FEWEST_PAGES = 2 << 20  # bytes of a tensor whose pages are worth two calls
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4  # of mremap, the last of Linux 5.7
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_MADV_WIPEONFORK, _MADV_PAGEOUT = 18, 21  # of Linux 4.14 and 5.4
_LARGE_PAGE = 2 << 20
_SMALLEST_FILE = 1 << 20  # bytes of a mapping that is worth a call
_CHOSEN: dict[int, int] = {}  # what mallopt was told last


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
    return _map_from(_LARGEST_HEAP_BLOCK) and bool(_glibc("mallopt")(_M_TRIM_THRESHOLD, 2**31 - 1))


def map_large_blocks() -> bool:
    """Map blocks of 1 MiB and more one by one, so that a freed one leaves the process at once;
    return whether this could be set.

    For parameters that come from a disk: memory is what they are offloaded for. Freed blocks that
    stay in the heap between those that live took 2.5 bytes per parameter at the peak. Process-wide
    and idempotent; replaces :func:`keep_freed_memory`.
    """
    return _map_from(1 << 20)


def _map_from(size: int) -> bool:
    mallopt = _glibc("mallopt")
    if mallopt is None or not mallopt(_M_MMAP_THRESHOLD, size):
        return False
    _CHOSEN[_M_MMAP_THRESHOLD] = size
    return True


class FreedPages:
    """Pages of a tensor of the host that was freed, for the next one of its size.

    For memory that comes from the kernel at each use (:func:`map_large_blocks`), which zeroes it at
    the first touch: 2048 faults for 8 MiB, 7 ms on a virtual machine. To move the pages from one
    address to another takes 0.1 ms. Has at most as many as the largest tensor of those that it was
    given. Where the kernel does not move pages (before Linux 5.7, or those of several areas),
    nothing is kept.
    """

    def __init__(self) -> None:
        self._low = self._nbytes = 0

    def keep(self, tensor: torch.Tensor) -> None:
        """Take the pages of a tensor that is freed next, whose values are lost with them."""
        low, nbytes = _pages_of(tensor)
        if nbytes > self._nbytes and (moved := _mremap(low, nbytes, _MAYMOVE | _DONTUNMAP)):
            self.drop()
            self._low, self._nbytes = moved, nbytes

    def fill(self, tensor: torch.Tensor) -> None:
        """Give pages to a tensor that has none yet, and is written next."""
        low, nbytes = _pages_of(tensor)
        if 0 < nbytes <= self._nbytes:
            # What lies at the target is unmapped first, also if the rest fails.
            if not _mremap(self._low, nbytes, _MAYMOVE | _FIXED, low):
                _map_anew(low, nbytes)
            else:
                self._low, self._nbytes = self._low + nbytes, self._nbytes - nbytes
            self.drop()

    def drop(self) -> None:
        """Give the pages back to the kernel."""
        if self._nbytes and (munmap := _glibc("munmap")) is not None:
            munmap(ctypes.c_void_p(self._low), ctypes.c_size_t(self._nbytes))
        self._low = self._nbytes = 0

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.drop()


def transfer_buffer(nbytes: int) -> torch.Tensor:
    """Return zeros (nbytes,) uint8 at the start of a page, which disks transfer to and from while
    the process may fork.

    Large pages where the kernel has them: a transfer pins and describes each page, which for 96 MiB
    takes 10 ms of CPU in small ones and 3 in large ones. A forked process gets zeros in their place
    (Linux 4.14): pages that it shared until one of both writes could take a transfer's bytes with
    them. Elsewhere the pages are shared with it for good.
    """
    if sys.platform.startswith("linux"):
        slack = _LARGE_PAGE if nbytes >= _LARGE_PAGE else 0
        area = mmap.mmap(-1, max(nbytes, 1) + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        low = -torch.frombuffer(area, dtype=torch.uint8).data_ptr() % _LARGE_PAGE if slack else 0
        with contextlib.suppress(OSError):
            area.madvise(_MADV_WIPEONFORK, low, max(nbytes, 1))
            with contextlib.suppress(OSError):  # a kernel without them
                area.madvise(mmap.MADV_HUGEPAGE, low, max(nbytes, 1))
            return torch.frombuffer(area, dtype=torch.uint8, count=max(nbytes, 1), offset=low)
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)


def _pages_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and the bytes of the whole pages of a tensor, whose pages belong to no
    other one; no bytes where it is small, or blocks of its size stay in the heap."""
    if tensor.device.type != "cpu" or _CHOSEN.get(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK) > _FEWEST_PAGES:
        return 0, 0
    page = mmap.PAGESIZE
    low, high = -(-tensor.data_ptr() // page) * page, (tensor.data_ptr() + tensor.nbytes) // page * page
    return (low, high - low) if high - low >= _FEWEST_PAGES else (0, 0)


def _mremap(source: int, nbytes: int, flags: int, target: int = 0) -> int:
    """Move pages; return where they are now, or 0 if the kernel has not moved them: they lie in
    several of its areas, or it is an old one."""
    mremap = _glibc("mremap")
    if mremap is None:
        return 0
    mremap.restype = ctypes.c_void_p
    word, size = ctypes.c_void_p, ctypes.c_size_t(nbytes)
    moved = mremap(word(source), size, size, flags, word(target))
    return 0 if moved in (None, _FAILED) else int(moved)


def _map_anew(low: int, nbytes: int) -> None:
    map_ = _glibc("mmap")
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    map_(ctypes.c_void_p(low), ctypes.c_size_t(nbytes), access, kind, -1, ctypes.c_long(0))


def give_freed_memory_back() -> bool:
    """Return every unused page of the heap to the kernel; return whether there were any.

    For moments at which much is freed that is not needed again. A large block that is freed is
    seldom whole for the next one: something small is put into it, and the heap grows by another
    block.
    """
    trim = _glibc("malloc_trim")
    return trim is not None and bool(trim(0))


def page_out_files() -> None:
    """Take the pages of mapped data files out of memory. Whatever is used again is read again, and
    nothing is lost: the kernel passes over those of files that belong to other users and, before
    Linux 5.4, over all. Private copies of pages that were written go to swap; without swap they
    stay.

    For files from which values are copied tensor by tensor, as libraries map safetensors (privately
    and writable, and they write nothing): every page that was touched once is resident until then.
    """
    advise = _glibc("madvise")
    try:
        lines = Path("/proc/self/maps").read_text().splitlines() if advise is not None else []
    except OSError:
        return
    for start, stop in mapped_data(lines):
        advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_PAGEOUT)


def mapped_data(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of each large mapping in the lines of ``/proc/self/maps`` that reads a
    file without code and does not write to it."""
    rows = [line.split(maxsplit=5) for line in lines]
    files = [row for row in rows if len(row) == 6 and row[5].startswith("/")]
    code = {row[5] for row in files if "x" in row[1]}
    for span, kind, _, _, _, path in files:
        start, stop = (int(address, 16) for address in span.split("-"))
        writes = kind[1] == "w" and kind[3] == "s"
        if path not in code and not writes and stop - start >= _SMALLEST_FILE:
            yield start, stop


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
        self._from_files = False

    def note_edit(self) -> None:
        """Note that user code has given a tensor new values, which may come from mapped files."""
        self._from_files = True

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
                self._comm.free_messages()
            if self._from_files:
                page_out_files()
                self._from_files = False
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
