"""One rank's swap file for state that does not fit into memory: unnamed, allocated in advance, past
the page cache where that works.

requests   a transfer is cut into blocks; ``depth`` threads pread and pwrite them (the calls release
           the interpreter lock)
direct     whole 4096-byte blocks go with O_DIRECT where the file system has it; what begins or ends
           inside a block goes through the page cache
unnamed    the name is removed as soon as the file is open: whatever ends the process, also SIGKILL,
           gives the space back
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from zero_trial.errors import ConfigError, DoesNotFit, StorageError
from zero_trial.sharding.layout import round_up
from zero_trial.util.text import format_bytes

# O_DIRECT takes offsets, lengths and addresses that are multiples of it, on every disk we know of
BLOCK = 4096
# elements: pieces are cut at multiples of it, so that for every dtype cuts are between blocks of
# the disk
CUT = BLOCK
MOST = 1 << 22  # elements of a buffer: 16 MiB of fp32; disks reach their best rate with less

Transfer = Callable[[int, memoryview, int], int]


class DiskTransfer:
    """A transfer under way. The tensor must be neither written nor read until :meth:`wait` has
    returned."""

    def __init__(self, where: str, futures: list[Future[None]], memory: list[Any] | None = None) -> None:
        self._where = where
        self._futures = futures
        # The threads hold it, too, so that the memory outlives a transfer that is dropped. They let
        # go of it a little later than the transfer ends, which would leave freed memory beside what
        # is allocated next: after a wait it is free.
        self._memory = memory if memory is not None else []
        self._fault: BaseException | None = None

    def done(self) -> bool:
        return all(future.done() for future in self._futures)

    def wait(self) -> None:
        """Wait until all of it is transferred. Raises StorageError if the disk failed, at every
        call: several may wait for one transfer."""
        faults = [fault for future in self._futures if (fault := future.exception()) is not None]
        self._fault = self._fault or next(iter(faults), None)
        self._futures = []
        self._memory.clear()
        if self._fault is not None:
            raise StorageError(
                "offloaded state could not be read or written",
                where=self._where,
                got=str(self._fault),
                fix="Mend the disk or name another one in nvme_path, and go on from the last checkpoint.",
            ) from self._fault


class SwapSpace(Protocol):
    """Where a store puts bytes: a file, or nothing in a dry run."""

    bytes_read: int
    bytes_written: int

    def reserve(self, nbytes: int) -> int: ...

    def buffer(self, nbytes: int) -> torch.Tensor: ...

    def read(self, offset: int, into: torch.Tensor) -> DiskTransfer: ...

    def write(self, offset: int, source: torch.Tensor) -> DiskTransfer: ...

    def mapped(self) -> AbstractContextManager[torch.Tensor]: ...

    def close(self) -> None: ...


class SwapFile:
    """An unnamed file in ``folder`` of at least ``nbytes``. ``bytes_read`` and ``bytes_written``
    count what was asked for.

    Raises ConfigError for a folder that cannot be used, and DoesNotFit where the disk has not so
    much room.
    """

    def __init__(
        self,
        folder: Path,
        nbytes: int = 0,
        *,
        block_size: int = 1 << 20,
        depth: int = 8,
        direct: bool = True,
        where: str = "zero_optimization.offload_optimizer.nvme_path",
    ) -> None:
        self.folder = folder
        self.bytes_read = 0
        self.bytes_written = 0
        self._block = max(round_up(block_size, BLOCK), BLOCK)
        self._end = self._size = 0
        self._cached, self._direct = _open(folder, direct, where)
        self._pool = ThreadPoolExecutor(depth, thread_name_prefix="zero_trial-disk")
        self._descriptors = _Descriptors(self._cached, self._direct)
        # Not a wait: the garbage collector may run while a thread is starting, which then holds the
        # lock that joining another thread needs.
        self._finalizer = weakref.finalize(self, self._pool.shutdown, wait=False)
        self._allocate(nbytes)
        if self._direct is not None and not self._direct_works():
            self._direct = None

    @property
    def direct(self) -> bool:
        """Whether transfers go past the page cache."""
        return self._direct is not None

    @property
    def size(self) -> int:
        """Bytes that are allocated on the disk."""
        return self._size

    def reserve(self, nbytes: int) -> int:
        """Reserve ``nbytes`` (rounded up to whole blocks) and return their offset; the file grows
        where it must."""
        offset = self._end
        self._end += round_up(nbytes, BLOCK)
        self._allocate(self._end)
        return offset

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return memory that transfers can reach past the page cache: (nbytes,) uint8 of zeros, at
        the start of a page."""
        return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)

    def read(self, offset: int, into: torch.Tensor) -> DiskTransfer:
        """Start to fill ``into`` (contiguous, on the host) with the bytes from ``offset`` on."""
        self.bytes_read += into.numel() * into.element_size()
        return self._start(offset, into, _pread)

    def write(self, offset: int, source: torch.Tensor) -> DiskTransfer:
        """Start to write ``source`` (contiguous, on the host) at ``offset``."""
        self.bytes_written += source.numel() * source.element_size()
        return self._start(offset, source, _pwrite)

    @contextmanager
    def mapped(self) -> Iterator[torch.Tensor]:
        """Map the whole file as (size,) uint8, to read and to write inside the block; no transfer
        may be under way.

        The kernel loads pages as they are touched and may drop them again, so they do not count as
        the process's own memory.
        """
        self._require_open()
        try:
            area = mmap.mmap(self._cached, self._size)
        except (OSError, ValueError) as fault:
            raise StorageError(
                "offloaded state cannot be mapped into memory",
                where=str(self.folder),
                got=str(fault),
                fix="Name a local disk in nvme_path.",
            ) from fault
        try:
            yield torch.frombuffer(area, dtype=torch.uint8)
        finally:
            try:
                area.flush()
            except OSError as fault:
                raise StorageError(
                    "offloaded state could not be read or written",
                    where=str(self.folder),
                    got=str(fault),
                    fix="Mend the disk or name another one in nvme_path, and go on from the last checkpoint.",
                ) from fault
            os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give the disk space back. Transfers must be waited for before."""
        self._finalizer()
        self._pool.shutdown(wait=True)
        self._descriptors.close()

    def _require_open(self) -> None:
        """Refuse a closed file: the numbers of its descriptors may be another file's by now."""
        if not self._finalizer.alive:
            raise StorageError(
                "offloaded state is gone",
                where=str(self.folder),
                got="an engine that was destroyed",
                fix="Build a new one.",
            )

    def _allocate(self, nbytes: int) -> None:
        """Make the file at least so large, with blocks on the disk: afterwards no write can find it
        full."""
        self._require_open()
        wanted = round_up(nbytes, BLOCK)
        if wanted <= self._size:
            return
        try:
            os.posix_fallocate(self._cached, self._size, wanted - self._size)
        except OSError as fault:
            if fault.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StorageError(
                    "no space could be allocated for offloaded state", where=str(self.folder), got=str(fault)
                ) from fault
            raise DoesNotFit(
                "the disk has not enough room for offloaded state",
                where=str(self.folder),
                got=f"{format_bytes(_free(self.folder))} free ({fault.strerror})",
                expected=f"{format_bytes(wanted)} for this rank",
                fix="Free some space, name another disk in nvme_path, or use more ranks: each keeps its part only.",
            ) from fault
        self._size = wanted

    def _direct_works(self) -> bool:
        """Write and read one block: some file systems open a file with O_DIRECT and then refuse to
        transfer."""
        if self._direct is None or self._size < BLOCK:
            return self._direct is not None
        try:
            page = memoryview(mmap.mmap(-1, BLOCK))
            return os.pwritev(self._direct, [page], 0) == BLOCK and os.preadv(self._direct, [page], 0) == BLOCK
        except OSError:
            return False

    def _start(self, offset: int, tensor: torch.Tensor, transfer: Transfer) -> DiskTransfer:
        self._require_open()
        memory, held = _bytes_of(tensor), [tensor, self._descriptors]
        futures = [
            self._pool.submit(_all_of, transfer, fd, memory[low:high], offset + low, held)
            for fd, low, high in self._requests(offset, tensor.data_ptr(), len(memory))
        ]
        return DiskTransfer(str(self.folder), futures, held)

    def _requests(self, offset: int, address: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (descriptor, low, high) of the blocks of one transfer: the middle direct where that
        is possible, the edges not."""
        low, high = min(round_up(offset, BLOCK) - offset, nbytes), nbytes
        if self._direct is None or (address + low) % BLOCK:
            yield from ((self._cached, *span) for span in _spans(0, nbytes, self._block))
            return
        high = max(low, (offset + nbytes) // BLOCK * BLOCK - offset)
        yield from ((self._cached, *span) for span in _spans(0, low, BLOCK))
        yield from ((self._direct, *span) for span in _spans(low, high, self._block))
        yield from ((self._cached, *span) for span in _spans(high, nbytes, BLOCK))


def _open(folder: Path, direct: bool, where: str) -> tuple[int, int | None]:
    """Open one unnamed file twice: through the page cache, and past it (None where that is not
    possible)."""
    path = folder / f"zero_trial-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    if not os.path.isdir(folder):  # Path.is_dir raises where it may not look
        fix = "Make it, or name another one."
        raise ConfigError("there is no such folder", where=where, got=str(folder), expected="a folder", fix=fix)
    try:
        cached = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as fault:
        raise ConfigError(
            "nothing can be written to this folder", where=where, got=f"{folder}: {fault.strerror}", fix="Name another."
        ) from fault
    try:
        past = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT) if direct and hasattr(os, "O_DIRECT") else None
    except OSError:
        past = None
    os.unlink(path)
    return cached, past


class _Descriptors:
    """Descriptors that are closed with their last holder: a file, or a transfer of one that was
    forgotten."""

    def __init__(self, *descriptors: int | None) -> None:
        self._open = [descriptor for descriptor in descriptors if descriptor is not None]

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())

    def __del__(self) -> None:
        self.close()


def _spans(low: int, high: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + step, high)) for start in range(low, high, step))


def _pread(fd: int, memory: memoryview, offset: int) -> int:
    return os.preadv(fd, [memory], offset)


def _pwrite(fd: int, memory: memoryview, offset: int) -> int:
    return os.pwritev(fd, [memory], offset)


def _all_of(transfer: Transfer, fd: int, memory: memoryview, offset: int, held: list[Any]) -> None:
    """Repeat a call that did only part of its work; no progress is an error. ``held`` keeps the
    memory alive."""
    done = 0
    while done < len(memory):
        now = transfer(fd, memory[done:], offset + done)
        if now <= 0:
            raise OSError(errno.EIO, f"{done} of {len(memory)} bytes at offset {offset}")
        done += now


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's own memory."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def buffer_elements(total: int, wanted: int, count: int, most: int = MOST) -> int:
    """Return the elements of a buffer: at least CUT, else at most ``wanted`` and ``most``, and a
    quarter of ``total`` in ``count`` buffers."""
    return max(min(wanted, most, total // (4 * count)) // CUT, 1) * CUT


class DiskFailure:
    """The first failure of a disk, after which nothing that lives there is used again.

    All stores of a rank share it: half a step in one of its files is half a step in all.
    """

    def __init__(self) -> None:
        self.first: StorageError | None = None

    def wait(self, transfers: Sequence[DiskTransfer]) -> None:
        """Wait for all of them. Raises StorageError, and remembers it: values that did not reach
        the disk are lost."""
        fault: StorageError | None = None
        for transfer in transfers:
            try:
                transfer.wait()
            except StorageError as found:
                fault = fault or found
        if fault is not None:
            self.remember(fault)
            raise fault

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Remember a StorageError of the block: to start a transfer may wait for others."""
        try:
            yield
        except StorageError as fault:
            self.remember(fault)
            raise

    def remember(self, fault: StorageError) -> None:
        self.first = self.first or fault

    def require_none(self) -> None:
        """Raise StorageError after a failure: a checkpoint of half a step, or a step from it, would
        be silently wrong."""
        if self.first is not None:
            raise StorageError(
                "the disk has failed, and offloaded state is lost",
                where=self.first.where,
                got=self.first.got,
                fix="Mend the disk or name another one in nvme_path, and go on from the last checkpoint in a new engine.",
            ) from self.first


class MappedAccess:
    """Lets everything in a file be read and edited inside a block, in pages of a mapping; nested
    blocks share the outermost one.

    Args:
        mapped: gives the file's bytes inside a block; None where there is no file.
        failure: of the disk.
        drain: waits for all transfers.
        map_: puts tensors over the bytes.
        unmap: takes them away again.
    """

    def __init__(
        self,
        mapped: Callable[[], AbstractContextManager[torch.Tensor | None]],
        failure: DiskFailure,
        drain: Callable[[], None],
        map_: Callable[[torch.Tensor | None], None],
        unmap: Callable[[torch.Tensor | None], None],
    ) -> None:
        self._mapped = mapped
        self._failure = failure
        self._drain = drain
        self._map = map_
        self._unmap = unmap
        self._depth = 0

    @property
    def is_open(self) -> bool:
        return self._depth > 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter the block. Raises StorageError, also if the disk has failed before."""
        self._depth += 1
        try:
            if self._depth > 1:
                yield
                return
            edited = False
            try:
                self._failure.require_none()
                self._drain()
                with self._mapped() as area:
                    self._map(area)
                    try:
                        yield
                    finally:
                        self._unmap(area)
                        edited = True
            except StorageError as fault:
                if edited:  # what was edited may not have reached the disk
                    self._failure.remember(fault)
                raise
        finally:
            self._depth -= 1
