"""Tests for zero_trial/ops/disk_io.py; the engines themselves are tested with the swap file that
uses them."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.ops.kernel_engines import skip_where_refused
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cpu_library, disk_io
from zero_trial.ops.cpu_library import backend
from zero_trial.ops.disk_io import ENGINES, DiskPart, DiskTuning, ThreadEngine, first_that_works, open_engine, report


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_reads_and_writes_at_offsets(tmp_path: Path, name: str) -> None:
    try:
        engine = open_engine(name, DiskTuning(block=1000, depth=2))
    except (OSError, KernelUnavailable) as fault:
        skip_where_refused(name, fault)
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    memory = ctypes.create_string_buffer(bytes(range(256)) * 20, 5120)
    for request in engine.start([DiskPart(descriptor, 0, 5120, 100)], ctypes.addressof(memory), True, memory):
        assert request.exception() is None and request.done()
    assert os.pread(descriptor, 6000, 100) == memory.raw
    into = ctypes.create_string_buffer(5120)
    parts = [
        DiskPart(descriptor, 0, 10, 110),
        DiskPart(descriptor, 10, 3000, 200),
        DiskPart(descriptor, 4000, 5120, 5000),
    ]
    (*_, last) = engine.start(parts, ctypes.addressof(into), False, into)
    assert "of 1000 bytes at offset" in str(last.exception()) or "of 120 bytes at offset" in str(last.exception())
    engine.close()
    assert into.raw[:3000] == memory.raw[10:20] + memory.raw[100:3090]


def test_the_first_that_works_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(name: str, tuning: DiskTuning) -> ThreadEngine:
        if name == "io_uring":
            raise PermissionError(1, "Operation not permitted")
        engine = ThreadEngine(tuning)
        engine.name = name
        return engine

    monkeypatch.setattr(disk_io, "open_engine", opened)
    fault = OSError(22, "Invalid argument")
    engine, refused = first_that_works(ENGINES, DiskTuning(), lambda each: fault if each.name == "libaio" else None)
    assert engine.name == "threads"
    assert refused == {"io_uring": "Operation not permitted", "libaio": "Invalid argument"}
    with pytest.raises(OSError, match="Invalid argument"):
        first_that_works(ENGINES[:2], DiskTuning(), lambda each: fault)


def test_one_works_here() -> None:
    name, refused = report()
    assert name in ENGINES and list(refused) == list(ENGINES[: ENGINES.index(name)])


def test_the_kernels_headers_are_not_needed(tmp_path: Path) -> None:
    """They may be older than the kernel: Linux 5.1 to 5.5 have io_uring without its reads."""
    (tmp_path / "linux").mkdir()
    (tmp_path / "linux" / "io_uring.h").write_text("#error old\n")
    try:
        compiler = cpu_library.find_compiler(os.environ)
    except KernelUnavailable as fault:
        pytest.skip(str(fault))
    source = cpu_library.SOURCES / "cpu" / "disk.cpp"
    flags = ["-E", "-o", os.devnull, "-std=c++17", "-fno-exceptions", "-fno-rtti", "-I", str(tmp_path)]
    subprocess.run([*compiler, *flags, str(source)], check=True, timeout=60)


_SCARCE = """
import ctypes, resource, sys
library = ctypes.CDLL(sys.argv[1])
library.zt_disk_open.restype = ctypes.c_void_p
def opened(threads):
    error = ctypes.c_int()
    args = int(sys.argv[2]), threads, 1, ctypes.c_long(4096), 0, 1, ctypes.byref(error)
    disk = library.zt_disk_open(*args)
    if disk:
        library.zt_disk_close(ctypes.c_void_p(disk))
    return error.value
if refused := opened(1):
    sys.exit(100 + refused)
pages = int(open("/proc/self/statm").read().split()[0])
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (40 << 20), hard))
sys.exit(opened(64))
"""


@pytest.mark.parametrize("kind", [1, 2])
def test_too_few_threads_are_an_error(kind: int) -> None:
    """The system gives some of 64 and no more: those that began end, and the process goes on."""
    native = backend().native
    if native is None:
        pytest.skip(backend().why)
    command = [sys.executable, "-c", _SCARCE, native.library._name, str(kind)]
    code = subprocess.run(command, timeout=60).returncode
    if code > 100:
        skip_where_refused(ENGINES[kind - 1], OSError(code - 100, os.strerror(code - 100)))
    assert code == errno.EAGAIN


class Library:
    """Transfers that never end."""

    def zt_disk_open(self, *args: Any) -> int:
        return 1

    zt_disk_start = zt_disk_open

    def zt_disk_wait(self, pointer: int, milliseconds: int) -> int:
        return 0

    def zt_disk_close(self, disk: int) -> None: ...


def endless(monkeypatch: pytest.MonkeyPatch) -> disk_io.KernelEngine:
    library: Any = Library()
    monkeypatch.setattr(disk_io, "backend", lambda: cpu_library.Backend(cpu_library.CPULibrary(library, 0)))
    return disk_io.KernelEngine("io_uring", DiskTuning())


def test_threads_may_start_transfers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is forgotten, with its memory, before it is over."""
    engine = endless(monkeypatch)
    others: list[threading.Thread] = []

    class Busy:
        """Another thread starts a transfer while this one is looked at."""

        def done(self) -> bool:
            if not others:
                others.append(threading.Thread(target=engine.start, args=([], 0, False, None)))
                others[0].start()
                others[0].join(0.1)
            return False

    class Over:
        def done(self) -> bool:
            return True

    (first,) = engine.start([], 0, False, None)
    engine._live[:] = [Over(), Busy(), first]  # type: ignore[list-item]
    (last,) = engine.start([], 0, False, None)
    others[0].join()
    assert first in engine._live and last in engine._live and len(engine._live) == 4


def test_a_forked_process_neither_waits_nor_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = endless(monkeypatch)
    (request,) = engine.start([], 0, False, None)
    assert not request.done()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    fault = request.exception()
    assert isinstance(fault, OSError) and fault.errno == errno.ECHILD and request.done()
    with pytest.raises(OSError) as refused:
        engine.start([], 0, False, None)
    assert refused.value.errno == errno.ECHILD
