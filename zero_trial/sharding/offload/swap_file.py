"""One rank's swap file for state that does not fit into memory: unnamed, allocated in advance, past
the page cache where that works.

requests   a transfer is cut into blocks, which go to the disk through io_uring, libaio or threads:
           the first of them that works (:mod:`zero_trial.ops.disk_io`)
direct     whole 4096-byte blocks go with O_DIRECT where the file system has it; what begins or ends
           inside a block goes through the page cache
unnamed    the name is removed as soon as the file is open: whatever ends the process, also SIGKILL,
           gives the space back
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from zero_trial.errors import ConfigError, DoesNotFit, StorageError
from zero_trial.ops.disk_io import ENGINES, DiskEngine, DiskPart, DiskRequest, DiskTuning, first_that_works
from zero_trial.sharding.heap import transfer_buffer
from zero_trial.sharding.layout import round_up
from zero_trial.sharding.offload.swap_space import BLOCK, MOST, SwapSpace, Transfer
from zero_trial.util.text import format_bytes

_TUNING = DiskTuning()
_MAP_FIXED, _MS_SYNC = 0x10, 4


class DiskTransfer:
    """The requests of one transfer."""

    def __init__(self, where: str, requests: Sequence[DiskRequest], memory: list[Any] | None = None) -> None:
        self._where = where
        self._requests = requests
        # The engine holds it, too, so that the memory outlives a transfer that is dropped. It lets
        # go of it a little later than the transfer ends, which would leave freed memory beside what
        # is allocated next: after a wait it is free.
        self._memory = memory if memory is not None else []
        self._fault: BaseException | None = None

    def done(self) -> bool:
        return all(request.done() for request in self._requests)

    def wait(self) -> None:
        faults = [fault for request in self._requests if (fault := request.exception()) is not None]
        self._fault = self._fault or next(iter(faults), None)
        self._requests = []
        self._memory.clear()
        if self._fault is not None:
            raise _lost(self._where, self._fault) from self._fault


class MappedSpace(SwapSpace, Protocol):
    """A space on disks."""

    @property
    def folders(self) -> list[Path]: ...

    @property
    def files(self) -> list[SwapFile]: ...

    @property
    def size(self) -> int: ...

    def map_range(self, offset: int, nbytes: int) -> torch.Tensor: ...


class SwapFile:
    """An unnamed file in ``folder`` of at least ``nbytes``. ``bytes_read`` and ``bytes_written``
    count what was asked for.

    Args:
        direct: whether to go past the page cache where the file system allows it.
        engines: the ways to transfer that may be tried, in this order.
        where: the key that names the folder.

    Raises ConfigError for a folder that cannot be used, and DoesNotFit where the disk has not so
    much room.
    """

    def __init__(
        self,
        folder: Path,
        nbytes: int = 0,
        *,
        tuning: DiskTuning = _TUNING,
        direct: bool = True,
        engines: Sequence[str] = ENGINES,
        where: str = "zero_optimization.offload_optimizer.nvme_path",
    ) -> None:
        self.folder = folder
        self.bytes_read = 0
        self.bytes_written = 0
        self.tuning = replace(tuning, block=max(round_up(tuning.block, BLOCK), BLOCK))
        self._end = self._size = 0
        self._closed = False
        self._owner = os.getpid()
        self._cached, self._direct = _open(folder, direct, where)
        self._descriptors = _Descriptors(self._cached, self._direct)
        self._allocate(max(nbytes, BLOCK))
        if self._direct is not None and not self._direct_works():
            self._direct = None
        if self._direct is None:  # libaio waits there
            engines = [name for name in engines if name != "libaio" or len(engines) == 1]
        self._engine, self.refused = first_that_works(engines, self.tuning, self._fault_of)

    @property
    def folders(self) -> list[Path]:
        return [self.folder]

    @property
    def files(self) -> list[SwapFile]:
        return [self]

    @property
    def engine(self) -> str:
        """How requests go to the disk: io_uring, libaio or threads."""
        return self._engine.name

    @property
    def direct(self) -> bool:
        """Whether transfers go past the page cache."""
        return self._direct is not None

    @property
    def size(self) -> int:
        """Bytes that are allocated on the disk."""
        return self._size

    @property
    def reserved(self) -> int:
        """Bytes that :meth:`reserve` has given."""
        return self._end

    def reserve(self, nbytes: int) -> int:
        """Reserve whole blocks; the file grows where it must."""
        offset = self._end
        self._end += round_up(nbytes, BLOCK)
        self._allocate(self._end)
        return offset

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return zeros at the start of a page, which transfers reach past the page cache."""
        return transfer_buffer(nbytes)

    def read(self, offset: int, into: torch.Tensor) -> Transfer:
        self.bytes_read += into.nbytes
        return self._start(offset, into, write=False)

    def write(self, offset: int, source: torch.Tensor) -> Transfer:
        self.bytes_written += source.nbytes
        return self._start(offset, source, write=True)

    @contextmanager
    def mapped(self) -> Iterator[torch.Tensor]:
        """Map the whole file. The kernel loads pages as they are touched and may drop them again,
        so they do not count as the process's own memory."""
        area = self._mapping()
        try:
            yield torch.frombuffer(area, dtype=torch.uint8)
        finally:
            try:
                area.flush()
            except OSError as fault:
                raise _lost(self.folder, fault) from fault
            os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_DONTNEED)

    def in_memory(self, offset: int, nbytes: int) -> torch.Tensor | None:
        return None

    def map_range(self, offset: int, nbytes: int) -> torch.Tensor:
        """Map a range that was reserved in whole pages as (nbytes,) uint8 until the tensor is gone,
        also after :meth:`close`. What transfers write is seen there."""
        area = addresses(nbytes)
        self.map_at(area.data_ptr(), offset, nbytes)
        return area

    def _mapping(self) -> mmap.mmap:
        self._require_open()
        try:
            return mmap.mmap(self._cached, self._size)
        except (OSError, ValueError) as fault:
            raise _unmappable(self.folder, fault) from fault

    def map_at(self, address: int, offset: int, nbytes: int) -> None:
        """Map bytes of the file over what is mapped at ``address``, to read and to write."""
        self._require_open()
        flags = mmap.MAP_SHARED | _MAP_FIXED
        found = _libc().mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, self._cached, offset)
        if found != address:
            fault = OSError(number := ctypes.get_errno(), os.strerror(number))
            raise _unmappable(self.folder, fault) from fault

    def flush(self, address: int, nbytes: int) -> StorageError | None:
        """Write what was changed in a mapping of :meth:`map_at`, and drop its pages; return what
        went wrong."""
        if _libc().msync(address, nbytes, _MS_SYNC):
            return _lost(self.folder, os.strerror(ctypes.get_errno()))
        _libc().madvise(address, nbytes, mmap.MADV_DONTNEED)
        os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_DONTNEED)
        return None

    def close(self) -> None:
        self._closed = True
        self._engine.close()
        self._descriptors.close()

    def _require_open(self) -> None:
        """Refuse a closed file, the numbers of whose descriptors may be another file's by now, and
        that of a parent."""
        if self._closed:
            raise StorageError(
                "offloaded state is gone",
                where=str(self.folder),
                got="an engine that was destroyed",
                fix="Build a new one.",
            )
        if self._owner != os.getpid():
            raise StorageError(
                "offloaded state is another process's",
                where=str(self.folder),
                got="a process that was forked from it, which has no threads to transfer with",
                fix="Read and write it in the rank itself.",
            )

    def _allocate(self, nbytes: int) -> None:
        """Make the file at least so large, with blocks on the disk: afterwards no write can find it
        full."""
        self._require_open()
        wanted = round_up(nbytes, BLOCK)
        if wanted <= self._size:
            return
        free = _free(self.folder)  # before: an allocation that fails may have taken all of it
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
                got=f"{format_bytes(free)} free ({fault.strerror})",
                expected=f"{format_bytes(wanted)} for this rank",
                fix="Free some space, name another disk in nvme_path, or use more ranks: each keeps its part only.",
            ) from fault
        self._size = wanted

    def _direct_works(self) -> bool:
        """Write and read one block: some file systems open a file with O_DIRECT and then refuse to
        transfer."""
        if self._direct is None:
            return False
        try:
            page = memoryview(mmap.mmap(-1, BLOCK))
            return os.pwritev(self._direct, [page], 0) == BLOCK and os.preadv(self._direct, [page], 0) == BLOCK
        except OSError:
            return False

    def _fault_of(self, engine: DiskEngine) -> BaseException | None:
        """Write and read one block through ``engine``."""
        page = self.buffer(BLOCK)
        for write in (True, False):
            parts = list(self._parts(0, page.data_ptr(), BLOCK))
            for request in engine.start(parts, page.data_ptr(), write, page):
                if (fault := request.exception()) is not None:
                    return fault
        return None

    def _start(self, offset: int, tensor: torch.Tensor, *, write: bool) -> Transfer:
        self._require_open()
        address, held = tensor.data_ptr(), [tensor, self._descriptors]
        parts = list(self._parts(offset, address, tensor.nbytes))
        return DiskTransfer(str(self.folder), self._engine.start(parts, address, write, held), held)

    def _parts(self, offset: int, address: int, nbytes: int) -> Iterator[DiskPart]:
        """Cut one transfer: the middle goes direct where that is possible, the edges do not."""
        low, high = min(round_up(offset, BLOCK) - offset, nbytes), nbytes
        if self._direct is None or (address + low) % BLOCK:
            low = high
        else:
            high = max(low, (offset + nbytes) // BLOCK * BLOCK - offset)
        for descriptor, start, end in (
            (self._cached, 0, low),
            (self._direct or self._cached, low, high),
            (self._cached, high, nbytes),
        ):
            if start < end:
                yield DiskPart(descriptor, start, end, offset + start)


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    word, size = ctypes.c_void_p, ctypes.c_size_t
    library.mmap.argtypes = [word, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    library.mmap.restype = word
    library.msync.argtypes = library.madvise.argtypes = [word, size, ctypes.c_int]
    return library


def _lost(where: object, fault: object) -> StorageError:
    return StorageError(
        "offloaded state could not be read or written",
        where=str(where),
        got=str(fault),
        fix="Mend the disk or name another one in nvme_path, and go on from the last checkpoint.",
    )


def _unmappable(folder: Path, fault: Exception) -> StorageError:
    """Return what a refused mapping means: ENOMEM stands for too many of them, too."""
    scarce = isinstance(fault, OSError) and fault.errno == errno.ENOMEM
    return StorageError(
        "offloaded state cannot be mapped into memory",
        where=str(folder),
        got=str(fault),
        fix="Raise vm.max_map_count (sysctl) or the limit of virtual memory (ulimit -v)."
        if scarce
        else "Name a local disk in nvme_path.",
    )


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


_SMALL = 1 << 20  # bytes: less is not worth a place in a file


def move_into(file: MappedSpace) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that writes a tensor of the host into ``file`` and returns a mapping of it:
    memory that the kernel may drop, and reads again. The mapping lasts as long as the tensor; the
    file may be closed before. Small tensors stay."""
    buffer = file.buffer(4 * MOST)

    def move(values: torch.Tensor) -> torch.Tensor:
        nbytes = values.nbytes
        if nbytes < _SMALL:
            return values
        source, offset = values.detach().contiguous().view(-1).view(torch.uint8), file.reserve(whole_pages(nbytes))
        for low in range(0, nbytes, buffer.numel()):  # past the page cache
            part = buffer[: min(buffer.numel(), nbytes - low)]
            part.copy_(source[low : low + part.numel()])
            file.write(offset + low, part).wait()
        return file.map_range(offset, nbytes).view(values.dtype).view(values.shape)

    return move


def addresses(nbytes: int) -> torch.Tensor:
    """Return a range of addresses over which a file may be mapped."""
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)


def whole_pages(nbytes: int) -> int:
    """Round up to what can be mapped and transferred."""
    return round_up(nbytes, max(BLOCK, mmap.PAGESIZE))


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
