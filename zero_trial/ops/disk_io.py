"""Ways to read and write a file beside other work: io_uring, libaio, or threads with plain calls.

    io_uring   requests go to the kernel through shared rings
    libaio     Linux's older asynchronous I/O: asynchronous past the page cache only
    threads    ``preadv`` and ``pwritev``, which release the interpreter lock; works everywhere

The first two are in the CPU library (csrc/cpu/disk.cpp), which speaks to the kernel by system
calls. Which works is found out by trying: containers and old kernels refuse io_uring, and some file
systems refuse either.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from zero_trial.errors import KernelUnavailable
from zero_trial.ops.cpu_library import backend

ENGINES = ("io_uring", "libaio", "threads")
_END = -1  # of csrc/cpu/disk.cpp
_TICK = 100  # milliseconds: how soon a wait sees that the interpreter has a signal to handle


class DiskPart(NamedTuple):
    """Bytes [low, high) of a transfer's memory, at ``offset`` of a file."""

    descriptor: int
    low: int
    high: int
    offset: int


class DiskRequest(Protocol):
    """Something that is under way. A future is one."""

    def done(self) -> bool: ...

    def exception(self) -> BaseException | None:
        """Wait for the end, and return what went wrong."""
        ...


class DiskEngine(Protocol):
    """Starts transfers between memory and files."""

    name: str

    def start(self, parts: Sequence[DiskPart], address: int, write: bool, held: Any) -> Sequence[DiskRequest]:
        """Start to move all ``parts`` of the memory at ``address``; ``held`` is kept until they
        are over. Threads may call it at the same time, processes forked from its own not."""
        ...

    def close(self) -> None:
        """Return when all that was started is over, and end."""
        ...


@dataclass(frozen=True)
class DiskTuning:
    """How requests are made.

    Args:
        block: bytes of a request.
        depth: requests of a worker under way at once.
        workers: threads that give requests to the kernel, each with ``depth`` of them.
        single_submit: one request for each system call.
        overlap: a new request starts as soon as one has ended; else when all have.
    """

    block: int = 1 << 20
    depth: int = 8
    workers: int = 1
    single_submit: bool = False
    overlap: bool = True


def open_engine(name: str, tuning: DiskTuning) -> DiskEngine:
    """Open the engine of that name. Raises KernelUnavailable or OSError where it is not possible
    here."""
    return ThreadEngine(tuning) if name == "threads" else KernelEngine(name, tuning)


def first_that_works(
    names: Sequence[str], tuning: DiskTuning, works: Callable[[DiskEngine], BaseException | None]
) -> tuple[DiskEngine, dict[str, str]]:
    """Open the first engine with which ``works`` finds no fault; also return why those before it
    were passed over. Raises the fault of the last one."""
    refused: dict[str, str] = {}
    for name in names:
        engine: DiskEngine | None = None
        try:
            engine = open_engine(name, tuning)
            fault = works(engine)
            if fault is None:
                return engine, refused
        except (KernelUnavailable, OSError) as found:
            fault = found
        if engine is not None:
            engine.close()
        if name == names[-1]:
            raise fault
        refused[name] = fault.what if isinstance(fault, KernelUnavailable) else getattr(fault, "strerror", str(fault))
    raise ValueError("no engines were named")


def report() -> tuple[str, dict[str, str]]:
    """Return the engine that works in the folder for temporary files, and why others do not."""
    with tempfile.TemporaryFile() as file:
        file.write(b"\0" * 4096)
        file.flush()

        def works(engine: DiskEngine) -> BaseException | None:
            memory = ctypes.create_string_buffer(4096)
            request = engine.start([DiskPart(file.fileno(), 0, 4096, 0)], ctypes.addressof(memory), False, memory)
            return next((fault for each in request if (fault := each.exception()) is not None), None)

        engine, refused = first_that_works(ENGINES, DiskTuning(), works)
        engine.close()
    return engine.name, refused


class ThreadEngine:
    """Requests are plain calls in threads."""

    name = "threads"

    def __init__(self, tuning: DiskTuning) -> None:
        self._block = tuning.block
        self._pool = ThreadPoolExecutor(tuning.depth * tuning.workers, thread_name_prefix="zero_trial-disk")
        # Not a wait: the garbage collector may run while a thread is starting, which then holds the
        # lock that joining another thread needs.
        self._finalizer = weakref.finalize(self, self._pool.shutdown, wait=False)

    def start(self, parts: Sequence[DiskPart], address: int, write: bool, held: Any) -> Sequence[DiskRequest]:
        transfer = _pwrite if write else _pread
        found = []
        for descriptor, low, high, offset in parts:
            memory = memoryview((ctypes.c_char * (high - low)).from_address(address + low)).cast("B")
            for start, end in _spans(high - low, self._block):
                part = memory[start:end]
                found.append(self._pool.submit(_all_of, transfer, descriptor, part, offset + start, held))
        return found

    def close(self) -> None:
        self._finalizer()
        self._pool.shutdown(wait=True)


class _Part(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("descriptor", "address", "bytes", "offset")]


class _Outcome(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("error", "offset", "done", "wanted")]


class _KernelRequest:
    """A transfer of a :class:`KernelEngine`."""

    def __init__(self, library: ctypes.CDLL, pointer: int, held: Any) -> None:
        self._library = library
        self._pointer: int | None = pointer
        self._held = held
        self._owner = os.getpid()
        self._fault: OSError | None = None
        self._turn = threading.Lock()  # several threads may wait for one

    def __del__(self) -> None:
        self.done()

    def done(self) -> bool:
        return self._ended(0)

    def exception(self) -> OSError | None:
        while not self._ended(_TICK):
            pass
        return self._fault

    def _ended(self, milliseconds: int) -> bool:
        if self._owner != os.getpid():  # the end comes in the parent, and so does that of who holds a lock
            if self._pointer is not None:
                self._fault = _foreign()
                self._pointer = self._held = None
            return True
        with self._turn:
            if self._pointer is None:
                return True
            if not self._library.zt_disk_wait(self._pointer, milliseconds):
                return False
            outcome = _Outcome()
            self._library.zt_disk_finish(self._pointer, ctypes.byref(outcome))
            if outcome.error == _END:
                self._fault = _short(outcome.done, outcome.wanted, outcome.offset)
            elif outcome.error:
                self._fault = OSError(outcome.error, os.strerror(outcome.error))
            self._pointer = self._held = None
        return True


class KernelEngine:
    """Requests go to the kernel through io_uring or libaio."""

    def __init__(self, name: str, tuning: DiskTuning) -> None:
        self.name = name
        native = backend().native
        if native is None:
            raise KernelUnavailable(f"there is no CPU library: {backend().why}")
        self._library = native.library
        error = ctypes.c_int()
        disk = self._library.zt_disk_open(
            1 + ENGINES.index(name),
            tuning.workers,
            tuning.depth,
            tuning.block,
            tuning.single_submit,
            tuning.overlap,
            ctypes.byref(error),
        )
        if not disk:
            raise OSError(error.value, os.strerror(error.value))
        self._disk = disk
        self._owner = os.getpid()
        self._starting = threading.Lock()
        self._live: list[_KernelRequest] = []  # keeps memory of transfers that were dropped
        self._finalizer = weakref.finalize(self, _close, self._library, disk, self._live)

    def start(self, parts: Sequence[DiskPart], address: int, write: bool, held: Any) -> Sequence[DiskRequest]:
        if self._owner != os.getpid():
            raise _foreign()
        array = (_Part * len(parts))(
            *(_Part(each.descriptor, address + each.low, each.high - each.low, each.offset) for each in parts)
        )
        with self._starting:
            self._live[:] = [request for request in self._live if not request.done()]
            pointer = self._library.zt_disk_start(self._disk, array, len(parts), write)
            request = _KernelRequest(self._library, pointer, held)
            self._live.append(request)
        return [request]

    def close(self) -> None:
        self._finalizer()


def _close(library: ctypes.CDLL, disk: int, live: list[_KernelRequest]) -> None:
    """End the workers, which need no lock of the interpreter, so that the garbage collector may do
    it, too."""
    library.zt_disk_close(disk)
    live.clear()


def _spans(nbytes: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + step, nbytes)) for start in range(0, nbytes, step))


def _pread(fd: int, memory: memoryview, offset: int) -> int:
    return os.preadv(fd, [memory], offset)


def _pwrite(fd: int, memory: memoryview, offset: int) -> int:
    return os.pwritev(fd, [memory], offset)


def _all_of(
    transfer: Callable[[int, memoryview, int], int], fd: int, memory: memoryview, offset: int, held: Any
) -> None:
    """Repeat a call that did only part of its work; no progress is an error. ``held`` keeps the
    memory alive."""
    done = 0
    while done < len(memory):
        now = transfer(fd, memory[done:], offset + done)
        if now <= 0:
            raise _short(done, len(memory), offset)
        done += now


def _foreign() -> OSError:
    return OSError(errno.ECHILD, "a forked process has no part in its parent's transfers")


def _short(done: int, wanted: int, offset: int) -> OSError:
    return OSError(errno.EIO, f"{done} of {wanted} bytes at offset {offset}")
