"""A region of one rank on disks: one unnamed file in each folder, read and written past the page
cache by threads.

unnamed    the name is removed as soon as a file is open: its space is freed however the process
           ends, even by SIGKILL
allocated  space is allocated before it is used: in training no write can find the disk full
direct     whole 4096-byte blocks use O_DIRECT if the file system supports it; the bytes at the ends
           of a transfer that do not fill a block go through the page cache
threads    ``preadv`` and ``pwritev`` release the interpreter lock and run in parallel to the caller
folders    each reservation goes to the file with the least data, at ``_SPAN`` times its number
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from zero_trial.errors import ConfigError, DoesNotFit, StorageError
from zero_trial.sharding.layout import round_up
from zero_trial.util.text import format_bytes

# O_DIRECT requires offsets, lengths and addresses to be multiples of this, on every disk we know of
BLOCK = 4096
_SPAN = 1 << 48  # bytes: no file is this large
_MADV_WIPEONFORK = 18
_LARGE_PAGE = 2 << 20

_Act = Callable[[int, list[memoryview], int], int]


class Transfer(Protocol):
    """A transfer in flight: do not use the tensor until :meth:`wait` has returned."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Wait until everything is transferred. If the disk failed, every call raises StorageError:
        several callers may wait for one transfer."""
        ...


class DiskFailure:
    """The first failure of any disk of this rank, after which no region is read or written again:
    if one file has only half a step, no file is consistent. Regions record and check it."""

    def __init__(self) -> None:
        self.first: StorageError | None = None

    def record(self, folders: Sequence[Path], fault: BaseException) -> StorageError:
        """Return the error for a failure in one of ``folders``."""
        error = StorageError(
            "offloaded state could not be read or written",
            where=", ".join(map(str, folders)),
            got=str(fault),
            fix="Fix the disk or set nvme_path to another one, and continue from the last checkpoint.",
        )
        error.__cause__ = fault
        self.first = self.first or error
        return error

    def require_none(self) -> None:
        """Raise StorageError after a failure: half a step would be silently wrong."""
        if self.first is not None:
            raise StorageError(
                "the disk failed, and offloaded state is lost",
                where=self.first.where,
                got=self.first.got,
                fix="Fix the disk or set nvme_path to another one, and continue from the last checkpoint in a new engine.",
            ) from self.first


class RegionFile:
    """One unnamed file per folder, ``nbytes`` in total at first; files grow. ``bytes_read`` and
    ``bytes_written`` count the bytes that callers requested.

    Args:
        block: bytes per request.
        threads: requests in flight for each folder.
        where: the ds_config key that lists the folders, for messages.
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
        where: str = "zero_optimization.offload_optimizer.nvme_path",
        failure: DiskFailure | None = None,
    ) -> None:
        self.failure = failure if failure is not None else DiskFailure()
        self.folders = list(folders)
        self.bytes_read = self.bytes_written = 0
        self._block = max(round_up(block, BLOCK), BLOCK)
        many = len(self.folders) > 1
        keys = [f"{where}[{number}]" if many else where for number in range(len(self.folders))]
        self._files = [_File(folder, key) for folder, key in zip(self.folders, keys, strict=True)]
        for file in self._files:
            file.allocate(whole_pages(max(nbytes // len(self._files), BLOCK)))
        self._areas: list[torch.Tensor] = []  # of the files, while they are mapped
        self._pool = ThreadPoolExecutor(threads * len(self._files), thread_name_prefix="zero_trial-disk")

    @property
    def direct(self) -> bool:
        """Whether all transfers bypass the page cache."""
        return all(file.direct is not None for file in self._files)

    @property
    def size(self) -> int:
        """Bytes that are allocated on the disks."""
        return sum(file.size for file in self._files)

    def reserve(self, nbytes: int) -> int:
        """Reserve whole pages and return their offset; a file grows if necessary."""
        self._require_open()
        number, file = min(enumerate(self._files), key=lambda found: found[1].end)
        offset, file.end = file.end, file.end + whole_pages(nbytes)
        file.allocate(file.end)
        return number * _SPAN + offset

    def read(self, offset: int, into: torch.Tensor) -> Transfer:
        """Start to fill ``into`` with the bytes from ``offset`` on."""
        self.bytes_read += into.nbytes
        return self._start(os.preadv, offset, into)

    def write(self, offset: int, source: torch.Tensor) -> Transfer:
        """Start to write ``source`` at ``offset``."""
        self.bytes_written += source.nbytes
        return self._start(os.pwritev, offset, source)

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return the bytes from ``offset`` on, for reads and writes; only inside :meth:`mapped`."""
        number, place = divmod(offset, _SPAN)
        return self._areas[number][place : place + nbytes]

    @contextmanager
    def mapped(self) -> Iterator[None]:
        """Map the files inside the block. The kernel loads pages on access and can reclaim them, so
        they do not count as memory of the process."""
        self._require_open()
        self.failure.require_none()
        files = self._files
        try:
            maps = [mmap.mmap(file.cached, file.size) for file in files]
        except OSError as fault:
            fix = "Set nvme_path to a local disk, or raise the limit of virtual memory (ulimit -v)."
            where = ", ".join(map(str, self.folders))
            what = "offloaded state cannot be mapped into memory"
            raise StorageError(what, where=where, got=str(fault), fix=fix) from fault
        self._areas = [torch.frombuffer(each, dtype=torch.uint8) for each in maps]
        try:
            yield
        finally:
            self._areas = []
            try:
                for each in maps:
                    each.flush()
            except OSError as fault:
                raise self.failure.record(self.folders, fault) from fault
            for file, each in zip(files, maps, strict=True):
                each.madvise(mmap.MADV_DONTNEED)
                os.posix_fadvise(file.cached, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Wait for transfers in flight and free the disks' space."""
        self._pool.shutdown(wait=True)
        for file in self._files:
            file.close()
        self._files = []

    def _require_open(self) -> None:
        if not self._files:
            where, got = ", ".join(map(str, self.folders)), "an engine that was destroyed"
            raise StorageError("offloaded state no longer exists", where=where, got=got, fix="Build a new engine.")

    def _start(self, act: _Act, offset: int, tensor: torch.Tensor) -> Transfer:
        self._require_open()
        self.failure.require_none()
        number, start = divmod(offset, _SPAN)
        file = self._files[number]
        # The requests keep it and the tensor alive until they end, even if no one waits.
        memory = tensor.detach().view(torch.uint8).numpy().data
        requests = [
            self._pool.submit(file.transfer, act, direct, memory[begin : min(begin + self._block, high)], start + begin)
            for direct, low, high in file.cut(start, tensor.data_ptr(), tensor.nbytes)
            for begin in range(low, high, self._block)
        ]
        return _FileTransfer(requests, file.folder, self.failure)


class _File:
    """The part of a region in one folder: a file that is open twice, through the page cache and
    (``direct``, None if that does not work) past it. It is closed when neither the region nor a
    request in flight refers to it."""

    def __init__(self, folder: Path, where: str) -> None:
        self.folder = folder
        self.size = self.end = 0  # bytes that are allocated, and that are reserved
        self.direct: int | None = None
        if not hasattr(os, "posix_fallocate"):
            fix = "Offload to host memory instead (device: cpu)."
            raise ConfigError("files of offloaded state need Linux", where=where, got=sys.platform, fix=fix)
        if not os.path.isdir(folder):  # Path.is_dir raises on a name that is too long
            fix = "Create it, or use another folder."
            raise ConfigError("the folder does not exist", where=where, got=str(folder), expected="a folder", fix=fix)
        try:
            self.cached, path = tempfile.mkstemp(prefix="zero_trial-", dir=folder)
        except OSError as fault:
            what, got = "the folder is not writable", f"{folder}: {fault.strerror}"
            raise ConfigError(what, where=where, got=got, fix="Use another folder.") from fault
        # Some file systems open a file with O_DIRECT and then refuse to transfer: try one block.
        page = [memoryview(mmap.mmap(-1, BLOCK))]
        with contextlib.suppress(OSError):
            direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
            with contextlib.suppress(OSError):
                if os.pwritev(direct, page, 0) == os.preadv(direct, page, 0) == BLOCK:
                    self.direct = direct
            if self.direct is None:
                os.close(direct)
        os.unlink(path)

    def allocate(self, nbytes: int) -> None:
        """Grow to ``nbytes``, with blocks allocated on the disk."""
        if nbytes <= self.size:
            return
        free = shutil.disk_usage(self.folder).free  # before: a failed allocation may have taken all of it
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
                fix="Free some space, set nvme_path to another disk, or use more ranks: each stores only its own part.",
            ) from fault
        self.size = nbytes

    def cut(self, offset: int, address: int, nbytes: int) -> Iterator[tuple[bool, int, int]]:
        """Yield (direct, low, high): whole blocks bypass the page cache, the edges do not."""
        low, high = min(round_up(offset, BLOCK) - offset, nbytes), nbytes
        if self.direct is None or (address + low) % BLOCK:
            low = high
        else:
            high = max(low, (offset + nbytes) // BLOCK * BLOCK - offset)
        yield False, 0, low
        yield True, low, high
        yield False, high, nbytes

    def transfer(self, act: _Act, direct: bool, memory: memoryview, offset: int) -> None:
        """Repeat the call until everything is transferred; raise OSError without progress."""
        descriptor = self.direct if direct and self.direct is not None else self.cached
        done = 0
        while done < len(memory):
            now = act(descriptor, [memory[done:]], offset + done)
            if now <= 0:
                raise OSError(errno.EIO, f"{done} of {len(memory)} bytes at offset {offset}")
            done += now

    def close(self) -> None:
        for name in ("cached", "direct"):
            if (descriptor := self.__dict__.pop(name, None)) is not None:
                os.close(descriptor)

    __del__ = close


class _FileTransfer:
    """The requests of one transfer."""

    def __init__(self, requests: list[Future[None]], folder: Path, failure: DiskFailure) -> None:
        self._requests = requests
        self._folder = folder
        self._failure = failure
        self._fault: StorageError | None = None

    def done(self) -> bool:
        return all(request.done() for request in self._requests)

    def wait(self) -> None:
        for request in self._requests:
            if (fault := request.exception()) is not None and self._fault is None:
                self._fault = self._failure.record([self._folder], fault)
        if self._fault is not None:
            raise self._fault


def transfer_buffer(nbytes: int) -> torch.Tensor:
    """Return zeros (nbytes,) uint8 at the start of a page, which O_DIRECT requires.

    Uses large pages if the kernel has them: a transfer pins and describes each page, which for 96
    MiB takes 10 ms of CPU in small pages and 3 in large ones. A forked process sees zeros instead:
    with pages shared until either process writes, a transfer's bytes could end up in the other one.
    """
    size = max(nbytes, 1)
    slack = _LARGE_PAGE if size >= _LARGE_PAGE else 0
    area = mmap.mmap(-1, size + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    low = -torch.frombuffer(area, dtype=torch.uint8).data_ptr() % _LARGE_PAGE if slack else 0
    if sys.platform == "linux":
        area.madvise(_MADV_WIPEONFORK)
        with contextlib.suppress(OSError):
            area.madvise(mmap.MADV_HUGEPAGE, low, size)
    return torch.frombuffer(area, dtype=torch.uint8, count=size, offset=low)


def whole_pages(nbytes: int) -> int:
    """Round up to whole pages, which can be mapped and transferred."""
    return round_up(nbytes, max(BLOCK, mmap.PAGESIZE))
