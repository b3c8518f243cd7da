"""Memory of the host: whether what is freed stays in the process, and what goes back to the
kernel."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from zero_trial.comm import AxisComm
from zero_trial.ops.cpu_library import block_library

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_LARGEST_HEAP_BLOCK = 32 << 20  # what glibc allows on 64-bit machines
_MADV_PAGEOUT = 21  # of Linux 5.4
_SMALLEST_FILE = 1 << 20  # bytes of a mapping that is worth a call
_LARGE_BLOCK = 1 << 20  # bytes
# of freed large blocks, which wait for the next tensor of their size: above what lived at one time
KEPT_BYTES = 64 << 20


def keep_freed_memory() -> bool:
    """Keep the memory of freed CPU buffers in the process, so that the next buffer does not pay for
    its pages again. Return whether that worked.

    glibc returns large freed blocks to the kernel and gets zeroed pages back at the next
    allocation: about 0.25 microseconds of CPU per KiB on each use. A plan that frees and revives
    whole groups in every step pays that for all its parameters and gradients, and each plan for the
    gradients that autograd makes.

    Blocks of 1 MiB and more wait whole for tensors of their size (csrc/cpu/blocks.cpp), so that
    they cost what lived at one time and at most KEPT_BYTES. Smaller ones, and all up to 32 MiB
    where that library cannot be had, stay in the heap, where aligned blocks do not fit into their
    own holes: 3 bytes per parameter at stage 3. Process-wide and idempotent; the process does not
    shrink after its peak.
    """
    _keep_blocks()
    return _map_from(_LARGEST_HEAP_BLOCK) and bool(glibc("mallopt")(_M_TRIM_THRESHOLD, 2**31 - 1))


def map_large_blocks() -> bool:
    """Map blocks of 1 MiB and more one by one; those that tensors free wait as in
    :func:`keep_freed_memory`, or go back to the kernel where that library cannot be had. Return
    whether this could be set.

    For parameters that come from a disk: memory is what they are offloaded for. Freed blocks that
    stay in the heap between those that live took 2.5 bytes per parameter at the peak. Process-wide
    and idempotent; replaces :func:`keep_freed_memory`.
    """
    _keep_blocks()
    return _map_from(_LARGE_BLOCK)


def _map_from(size: int) -> bool:
    mallopt = glibc("mallopt")
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, size))


def _keep_blocks() -> None:
    library = block_library()
    if library is not None:
        library.zt_blocks_keep(_LARGE_BLOCK, KEPT_BYTES)


def give_freed_memory_back() -> bool:
    """Return every unused page of the heap and every block that is kept to the kernel; return
    whether there were any.

    For moments at which much is freed that is not needed again. A large block that is freed is
    seldom whole for the next one: something small is put into it, and the heap grows by another
    block.
    """
    # one that no choice has loaded has no blocks
    library = block_library() if block_library.cache_info().currsize else None
    trim = glibc("malloc_trim")
    dropped = library is not None and library.zt_blocks_drop() > 0
    return (trim is not None and bool(trim(0))) or dropped


def page_out_files() -> None:
    """Take the pages of mapped data files out of memory. Whatever is used again is read again, and
    nothing is lost: the kernel passes over those of files that belong to other users and, before
    Linux 5.4, over all. Private copies of pages that were written go to swap; without swap they
    stay.

    For files from which values are copied tensor by tensor, as libraries map safetensors (privately
    and writable, and they write nothing): every page that was touched once is resident until then.
    """
    advise = glibc("madvise")
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
def glibc(name: str) -> Any:
    """Return a function of glibc; None with another C library."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
