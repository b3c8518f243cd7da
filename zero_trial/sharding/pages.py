"""Whole pages of the host's memory, which move between tensors in place of their bytes.

    buffer 0   read h3 .. |~~~| read h1 ....         pages go to the full parameters
    full h3               |~~~| computes |~~~|       and, when these are freed,
    buffer 1   read h2 ..................|~~~|       to the next buffer that gives its own

To copy 8 MiB from a buffer into new memory takes 2.1 ms of CPU time, most of it for pages that are
zeroed in faults and then overwritten; to move the pages takes 0.2 ms (on a virtual machine).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import sys
from bisect import bisect_left, bisect_right

import torch

from zero_trial.sharding.heap import glibc, maps_blocks_of

_FEWEST = 2 << 20  # bytes of a tensor whose pages are worth the calls
_FEWEST_MOVED = 1 << 17  # bytes of a part of one
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4  # of mremap, the last of Linux 5.7
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_MADV_WIPEONFORK, _MADV_KEEPONFORK = 18, 19  # of Linux 4.14
_LARGE_PAGE = 2 << 20


class HostPages:
    """Pages of tensors of the host that were freed, for buffers and tensors that are filled next.

    For memory that comes from the kernel at each use
    (:func:`zero_trial.sharding.heap.map_large_blocks`). Keeps at most as many as the largest tensor
    of those that it was given has. Where the kernel does not move pages (before Linux 5.7), or may
    not (those of the heap, of small tensors, of areas that differ), values are copied and nothing
    is kept.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[int, int]] = []  # [start, stop) of areas
        self._most = 0
        # Where areas of living tensors begin and end that have come here one by one: the kernel
        # moves each alone. Sorted.
        self._cuts: list[int] = []

    def keep(self, tensor: torch.Tensor) -> None:
        """Take the pages of a tensor that is freed next, whose values are lost with them."""
        low, high = _pages_of(tensor)
        self._most = max(self._most, high - low)
        room = self._most - sum(stop - start for start, stop in self._kept)
        for start, stop in self._areas(low, high):
            nbytes = min(stop - start, room)
            if nbytes >= _FEWEST_MOVED and (moved := _mremap(start, nbytes, _MAYMOVE | _DONTUNMAP)):
                self._kept.append((moved, moved + nbytes))
                room -= nbytes

    def fill(self, tensor: torch.Tensor) -> None:
        """Give pages, as far as there are any, to a tensor that has none yet, and is written next.
        What it does not need goes back to the kernel."""
        low, high = _pages_of(tensor)
        if low < high:
            self._fill(low, high)
            self.drop()

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether :meth:`move` moves pages to ``tensor``, which then needs none before."""
        low, high = _pages_of(tensor)
        return low < high and tensor.data_ptr() == low

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Move the values of ``source``, a :func:`transfer_buffer`, to ``target``, a part of a
        tensor that takes them. Those of ``source`` are lost; it gets pages that are kept."""
        start, low = source.data_ptr(), target.data_ptr()
        stop = start + source.nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        if stop - start < _FEWEST_MOVED or (start | low) % mmap.PAGESIZE:
            target.copy_(source)
            return
        moved = start
        # Memory that a forked process shares is not private any more: it stays where it is.
        if _advise(start, stop, _MADV_WIPEONFORK):
            for begin, end in self._areas(start, stop):
                if not self._move(begin, end, low + begin - start, _MAYMOVE | _FIXED | _DONTUNMAP):
                    break
                moved = end
        _advise(low, low + moved - start, _MADV_KEEPONFORK)
        if (done := (moved - start) // source.element_size()) < source.numel():
            target[done:].copy_(source[done:])
        self._fill(start, moved)
        _advise(start, moved, _MADV_WIPEONFORK)

    def drop(self) -> None:
        """Give the pages that are kept back to the kernel."""
        while self._kept:
            _unmap(*self._kept.pop())

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.drop()

    def _fill(self, low: int, high: int) -> None:
        """Give kept pages to [low, high): an area that has its size, the smallest larger one, or
        the largest of all, and so on."""
        while low < high and self._kept:
            wanted = high - low
            start, stop = min(
                self._kept, key=lambda area: (area[1] - area[0] < wanted, abs(area[1] - area[0] - wanted))
            )
            self._kept.remove((start, stop))
            end = min(stop, start + wanted)
            if end < stop:
                self._kept.append((end, stop))
            if not self._move(start, end, low, _MAYMOVE | _FIXED):
                _unmap(start, end)
            low += end - start

    def _move(self, start: int, stop: int, target: int, flags: int) -> bool:
        """Move pages to ``target``, which has none if that fails."""
        # What lies at the target is unmapped first, also if the rest fails.
        moved = bool(_mremap(start, stop - start, flags, target))
        if not moved:
            _map_anew(target, stop - start)
        for cut in (target, target + stop - start):
            place = bisect_left(self._cuts, cut)
            if self._cuts[place : place + 1] != [cut]:
                self._cuts.insert(place, cut)
        return moved

    def _areas(self, low: int, high: int) -> list[tuple[int, int]]:
        """List the areas of [low, high), and forget where they begin."""
        first, last = bisect_left(self._cuts, low), bisect_right(self._cuts, high)
        edges = sorted({low, *self._cuts[first:last], high})
        del self._cuts[first:last]
        return list(itertools.pairwise(edges))


def empty_at_page(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor (numel,) to which :meth:`HostPages.move` can move pages, also when its
    storage has been freed and is there again: it begins at a page. An ordinary one where it is
    small, or not the host's.

    A block that is a mapping of its own begins 64 bytes after the start of a page: 16 are glibc's,
    and torch aligns to 64.
    """
    if device.type != "cpu" or numel * dtype.itemsize < _FEWEST:
        return torch.empty(numel, dtype=dtype, device=device)
    skipped = (mmap.PAGESIZE - 64) // dtype.itemsize
    return torch.empty(skipped + numel, dtype=dtype, device=device)[skipped:]


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
    """Return [start, stop) of the whole pages of a tensor that belong to no other one; none where
    it is small, or blocks of its size stay in the heap."""
    real = type(tensor) is torch.Tensor and tensor.device.type == "cpu"  # no dry run's
    if not real or tensor.nbytes < _FEWEST or not maps_blocks_of(tensor.nbytes):
        return 0, 0
    page = mmap.PAGESIZE
    return -(-tensor.data_ptr() // page) * page, (tensor.data_ptr() + tensor.nbytes) // page * page


def _mremap(source: int, nbytes: int, flags: int, target: int = 0) -> int:
    """Move pages; return where they are now, or 0 if the kernel has not moved them: they lie in
    several of its areas, or it is an old one."""
    mremap = glibc("mremap")
    if mremap is None:
        return 0
    mremap.restype = ctypes.c_void_p
    word, size = ctypes.c_void_p, ctypes.c_size_t(nbytes)
    moved = mremap(word(source), size, size, flags, word(target))
    return 0 if moved in (None, _FAILED) else int(moved)


def _map_anew(low: int, nbytes: int) -> None:
    map_ = glibc("mmap")
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    map_.restype = ctypes.c_void_p
    if map_(ctypes.c_void_p(low), ctypes.c_size_t(nbytes), access, kind, -1, ctypes.c_long(0)) != low:
        raise MemoryError(f"{nbytes} bytes could not be mapped again: vm.max_map_count, or the limit of memory")


def _unmap(start: int, stop: int) -> None:
    glibc("munmap")(ctypes.c_void_p(start), ctypes.c_size_t(stop - start))


def _advise(low: int, high: int, advice: int) -> bool:
    madvise = glibc("madvise")
    return madvise is not None and not madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), advice)
