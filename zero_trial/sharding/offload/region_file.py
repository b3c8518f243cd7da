"""A region of one rank on disks: one unnamed file in each folder, read and written past the page
cache by threads.

    offset       0        stripe     2 stripe   3 stripe
    folder a     |--------|          |----------|
    folder b              |----------|          |--------

unnamed    the name is removed as soon as a file is open: whatever ends the process, also SIGKILL,
           frees the space
allocated  space is allocated before it is used: in training no write can find the disk full
direct     whole 4096-byte blocks use O_DIRECT if the file system has it; the bytes of a transfer
           that begin or end inside a block go through the page cache
threads    ``preadv`` and ``pwritev`` release the interpreter lock and run next to the caller
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import sys
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from zero_trial.errors import ConfigError, DoesNotFit, StorageError
from zero_trial.sharding.layout import round_up
from zero_trial.sharding.offload.regions import BLOCK, DiskFailure, Transfer
from zero_trial.util.text import format_bytes

STRIPE = 4 << 20  # bytes at least
# The kernel limits the mappings of a process (vm.max_map_count, usually 65530). Each stripe is one
# mapping, a file can grow to three times its first size, and a rank can have two files.
_STRIPES = 1 << 13
_MAP_FIXED, _MAP_NORESERVE, _MADV_WIPEONFORK = 0x10, 0x4000, 18
_LARGE_PAGE = 2 << 20


class RegionFile:
    """One unnamed file per folder, of at least ``nbytes`` together, which appear as one range of
    bytes. ``bytes_read`` and ``bytes_written`` count what callers asked for.

    Args:
        block: bytes of a request.
        threads: requests in flight for each folder.
        direct: use O_DIRECT if the file system allows it.
        where: the key that lists the folders.
        failure: shared by all regions of the rank.

    Raises ConfigError for a folder that cannot be used, and DoesNotFit if a disk is too small.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        nbytes: int = 0,
        *,
        block: int = 1 << 20,
        threads: int = 8,
        direct: bool = True,
        where: str = "zero_optimization.offload_optimizer.nvme_path",
        failure: DiskFailure | None = None,
    ) -> None:
        self.failure = failure if failure is not None else DiskFailure()
        self.folders = list(folders)
        self.bytes_read = self.bytes_written = 0
        many = len(self.folders) > 1
        # one folder: a single stripe of any length
        self._stripe = max(STRIPE, whole_pages(nbytes // _STRIPES)) if many else sys.maxsize // BLOCK * BLOCK
        self._block = max(round_up(block, BLOCK), BLOCK)
        self._end = 0
        self._closed = False
        self._process = os.getpid()
        keys = [f"{where}[{number}]" if many else where for number in range(len(self.folders))]
        self._files = [_File(folder, key, direct) for folder, key in zip(self.folders, keys, strict=True)]
        self._allocate(max(nbytes, BLOCK))
        for file in self._files:
            file.probe_direct()
        self._pool = ThreadPoolExecutor(threads * len(self._files), thread_name_prefix="zero_trial-disk")
        # The garbage collector must not wait here: a thread that is just starting can hold the lock
        # that joining another thread needs.
        self._finalizer = weakref.finalize(self, self._pool.shutdown, wait=False)

    @property
    def direct(self) -> bool:
        """Whether all transfers bypass the page cache."""
        return all(file.direct is not None for file in self._files)

    @property
    def size(self) -> int:
        """Bytes that are allocated on the disks."""
        return sum(file.size for file in self._files)

    def reserve(self, nbytes: int) -> int:
        """Reserve whole pages and return their offset; the files grow if necessary."""
        offset, self._end = self._end, self._end + whole_pages(nbytes)
        self._allocate(self._end)
        return offset

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return zeros at the start of a page, which O_DIRECT requires."""
        return transfer_buffer(nbytes)

    def read(self, offset: int, into: torch.Tensor) -> Transfer:
        self.bytes_read += into.nbytes
        return self._start(_pread, offset, into)

    def write(self, offset: int, source: torch.Tensor) -> Transfer:
        self.bytes_written += source.nbytes
        return self._start(_pwrite, offset, source)

    def in_memory(self, offset: int, nbytes: int) -> torch.Tensor | None:
        return None

    @contextmanager
    def mapped(self) -> Iterator[torch.Tensor]:
        """Map everything that is reserved. The kernel loads pages on access and can reclaim them,
        so they do not count as memory of the process."""
        area = self._map()
        try:
            yield torch.frombuffer(area, dtype=torch.uint8)
        finally:
            try:
                area.flush()
            except OSError as fault:
                raise self.failure.record(_lost(", ".join(map(str, self.folders)), fault)) from fault
            area.madvise(mmap.MADV_DONTNEED)
            for file in self._files:
                os.posix_fadvise(file.cached, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Wait for transfers in flight and free the disks' space."""
        self._closed = True
        self._finalizer()
        self._pool.shutdown(wait=True)
        for file in self._files:
            file.close()

    def _require_open(self) -> None:
        """Refuse a closed file, whose descriptors may belong to another file by now, and the file
        of a parent process."""
        where = ", ".join(map(str, self.folders))
        if self._closed:
            got = "an engine that was destroyed"
            raise StorageError("offloaded state is gone", where=where, got=got, fix="Build a new one.")
        if self._process != os.getpid():
            raise StorageError(
                "offloaded state is another process's",
                where=where,
                got="a process that was forked from it, which has no threads to transfer with",
                fix="Read and write it in the rank itself.",
            )

    def _allocate(self, nbytes: int) -> None:
        """Grow the files so that they hold the first ``nbytes`` bytes."""
        self._require_open()
        rounds, rest = divmod(round_up(nbytes, BLOCK), self._stripe * len(self._files))
        for number, file in enumerate(self._files):
            part = min(max(rest - number * self._stripe, 0), self._stripe)
            file.allocate(rounds * self._stripe + part)

    def _spans(self, offset: int, nbytes: int) -> Iterator[tuple[_File, int, int, int]]:
        """Yield (file, offset in that file, low, high) for the parts of a range."""
        low = 0
        while low < nbytes:
            stripe, inside = divmod(offset + low, self._stripe)
            high = min(low + self._stripe - inside, nbytes)
            turn, number = divmod(stripe, len(self._files))
            yield self._files[number], turn * self._stripe + inside, low, high
            low = high

    def _start(self, act: _Act, offset: int, tensor: torch.Tensor) -> Transfer:
        self._require_open()
        self.failure.require_none()
        held = [tensor, self._files]  # the pool's tasks hold it until they end, also if no one waits
        memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        transfer = _FileTransfer(held, self.failure)
        for file, place, low, high in self._spans(offset, tensor.nbytes):
            for descriptor, start, stop in file.cut(place, tensor.data_ptr() + low, high - low):
                for begin in range(start, stop, self._block):
                    part = memoryview(memory)[low + begin : low + min(begin + self._block, stop)].cast("B")
                    request = self._pool.submit(_transfer_all, act, descriptor, part, place + begin, held)
                    transfer.requests.append((file.folder, request))
        return transfer

    def _map(self) -> mmap.mmap:
        """Reserve addresses for all that is reserved, and map each stripe there."""
        self._require_open()
        self.failure.require_none()
        size = max(self._end, 1)
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        address = torch.frombuffer(area, dtype=torch.uint8).data_ptr()
        for file, place, low, high in self._spans(0, size):
            access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
            if _mmap()(address + low, high - low, access, flags, file.cached, place) != address + low:
                raise _unmappable(file.folder, ctypes.get_errno())
        return area


class _File:
    """The part of a region in one folder: a file that is open twice, through the page cache and
    (``direct``, None if that does not work) past it. It is closed with its last holder, the region
    or a transfer in flight."""

    def __init__(self, folder: Path, where: str, direct: bool) -> None:
        self.folder = folder
        self.size = 0
        self.direct: int | None = None
        path = folder / f"zero_trial-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        if not os.path.isdir(folder):  # Path.is_dir raises on a name that is too long
            fix = "Make it, or name another one."
            raise ConfigError("there is no such folder", where=where, got=str(folder), expected="a folder", fix=fix)
        try:
            self.cached = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as fault:
            what, got = "nothing can be written to this folder", f"{folder}: {fault.strerror}"
            raise ConfigError(what, where=where, got=got, fix="Name another.") from fault
        if direct and hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):
                self.direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        os.unlink(path)

    def probe_direct(self) -> None:
        """Write and read one block: some file systems open a file with O_DIRECT and then refuse to
        transfer."""
        if self.direct is not None:
            page = [memoryview(mmap.mmap(-1, BLOCK))]
            with contextlib.suppress(OSError):
                if os.pwritev(self.direct, page, 0) == os.preadv(self.direct, page, 0) == BLOCK:
                    return
            os.close(self.direct)
            self.direct = None

    def allocate(self, nbytes: int) -> None:
        """Grow to ``nbytes``, with blocks on the disk."""
        if nbytes <= self.size:
            return
        free = _free(self.folder)  # before: a failed allocation may have taken all of it
        try:
            os.posix_fallocate(self.cached, self.size, nbytes - self.size)
        except OSError as fault:
            if fault.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                what = "no space could be allocated for offloaded state"
                raise StorageError(what, where=str(self.folder), got=str(fault)) from fault
            raise DoesNotFit(
                "the disk has not enough room for offloaded state",
                where=str(self.folder),
                got=f"{format_bytes(free)} free ({fault.strerror})",
                expected=f"{format_bytes(nbytes)} for this rank",
                fix="Free some space, name another disk in nvme_path, or use more ranks: each keeps its part only.",
            ) from fault
        self.size = nbytes

    def cut(self, offset: int, address: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (descriptor, low, high): whole blocks bypass the page cache, the edges do not."""
        low, high = min(round_up(offset, BLOCK) - offset, nbytes), nbytes
        if self.direct is None or (address + low) % BLOCK:
            low = high
        else:
            high = max(low, (offset + nbytes) // BLOCK * BLOCK - offset)
        yield self.cached, 0, low
        yield self.direct if self.direct is not None else self.cached, low, high
        yield self.cached, high, nbytes

    def close(self) -> None:
        for name in ("cached", "direct"):
            if (descriptor := self.__dict__.pop(name, None)) is not None:
                os.close(descriptor)

    __del__ = close


class _FileTransfer:
    """The requests of one transfer, and the folder of each."""

    def __init__(self, held: list[Any], failure: DiskFailure) -> None:
        self.requests: list[tuple[Path, Future[None]]] = []
        self._held = held
        self._failure = failure
        self._fault: StorageError | None = None

    def done(self) -> bool:
        return all(request.done() for _, request in self.requests)

    def wait(self) -> None:
        for folder, request in self.requests:
            if (fault := request.exception()) is not None and self._fault is None:
                self._fault = self._failure.record(_lost(str(folder), fault))
                self._fault.__cause__ = fault
        self.requests = []
        # The pool releases a task's memory slightly after its end; after a wait it must be free, or
        # it would be next to what is allocated now.
        self._held.clear()
        if self._fault is not None:
            raise self._fault


_Act = Callable[[int, memoryview, int], int]


def _pread(descriptor: int, memory: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [memory], offset)


def _pwrite(descriptor: int, memory: memoryview, offset: int) -> int:
    return os.pwritev(descriptor, [memory], offset)


def _transfer_all(act: _Act, descriptor: int, memory: memoryview, offset: int, held: Any) -> None:
    """Repeat a call that did only part of its work; no progress is an error. ``held`` keeps the
    memory alive."""
    done = 0
    while done < len(memory):
        now = act(descriptor, memory[done:], offset + done)
        if now <= 0:
            raise OSError(errno.EIO, f"{done} of {len(memory)} bytes at offset {offset}")
        done += now


@functools.cache
def _mmap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mmap
    word, size = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes, function.restype = [word, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long], word
    return function


def _lost(where: str, fault: object) -> StorageError:
    return StorageError(
        "offloaded state could not be read or written",
        where=where,
        got=str(fault),
        fix="Fix the disk or name another one in nvme_path, and go on from the last checkpoint.",
    )


def _unmappable(folder: Path, number: int) -> StorageError:
    """Return the error for a refused mapping; ENOMEM also means too many mappings."""
    return StorageError(
        "offloaded state cannot be mapped into memory",
        where=str(folder),
        got=str(OSError(number, os.strerror(number))),
        fix="Raise vm.max_map_count (sysctl) or the limit of virtual memory (ulimit -v)."
        if number == errno.ENOMEM
        else "Name a local disk in nvme_path.",
    )


def transfer_buffer(nbytes: int) -> torch.Tensor:
    """Return zeros (nbytes,) uint8 at the start of a page, for transfers during which the process
    may fork.

    Uses large pages if the kernel has them: a transfer pins and describes each page, which for 96
    MiB takes 10 ms of CPU in small pages and 3 in large ones. A forked process sees zeros instead
    (Linux 4.14): with pages shared until one of both writes, a transfer's bytes could end up in the
    other process. Elsewhere the pages stay shared with it.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
    slack = 0
    if sys.platform.startswith("linux"):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        slack = _LARGE_PAGE if nbytes >= _LARGE_PAGE else 0
    area = mmap.mmap(-1, max(nbytes, 1) + slack, flags=flags)
    low = -torch.frombuffer(area, dtype=torch.uint8).data_ptr() % _LARGE_PAGE if slack else 0
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):
            area.madvise(_MADV_WIPEONFORK, low, max(nbytes, 1))
            area.madvise(mmap.MADV_HUGEPAGE, low, max(nbytes, 1))
    return torch.frombuffer(area, dtype=torch.uint8, count=max(nbytes, 1), offset=low)


def whole_pages(nbytes: int) -> int:
    """Round up to what can be mapped and transferred."""
    return round_up(nbytes, max(BLOCK, mmap.PAGESIZE))


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
