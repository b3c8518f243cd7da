"""Tests for zero_trial/sharding/offload/swap_file.py."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.kernel_engines import skip_where_refused
from tests.support.pool import server
from zero_trial.errors import ConfigError, DoesNotFit, KernelUnavailable, StorageError
from zero_trial.ops.disk_io import ENGINES, DiskTuning
from zero_trial.sharding.offload.swap_file import DiskTransfer, SwapFile
from zero_trial.sharding.offload.swap_space import BLOCK, CUT, MOST, DiskFailure, MappedAccess, buffer_elements


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def placed(file: SwapFile, values: torch.Tensor, offset: int) -> torch.Tensor:
    """The values in a buffer that starts in a page where the range starts in a block."""
    area = file.buffer(values.numel() + BLOCK)[offset % BLOCK :][: values.numel()]
    area.copy_(values)
    return area


def opened(folder: Path, engine: str, nbytes: int, *, direct: bool = True, **tuning: Any) -> SwapFile:
    """A file with one engine and no other."""
    try:
        file = SwapFile(folder, nbytes, tuning=DiskTuning(**tuning), direct=direct, engines=(engine,))
    except (OSError, KernelUnavailable) as fault:
        skip_where_refused(engine, fault)
    assert file.engine == engine
    return file


TUNINGS: list[dict[str, Any]] = [
    {"block": 1, "depth": 3, "workers": 2},
    {"block": 3 * BLOCK, "depth": 5, "single_submit": True},
    {"block": 3 * BLOCK, "depth": 5, "overlap": False, "workers": 2},
    {},
]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_written_is_read(tmp_path: Path, direct: bool, tuning: dict[str, Any], engine: str) -> None:
    file = opened(tmp_path, engine, 1 << 20, direct=direct, **tuning)
    whole = numbers(1 << 20)
    file.write(0, placed(file, whole, 0)).wait()
    for low, high in ((0, BLOCK), (128, 5000), (BLOCK, 9 * BLOCK + 1), (3 * BLOCK - 64, 70 * BLOCK + 7), (77, 80)):
        whole[low:high] = numbers(high - low, seed=low)
        file.write(low, placed(file, whole[low:high], low)).wait()
        found = placed(file, torch.zeros(high - low, dtype=torch.uint8), low)
        file.read(low, found).wait()
        assert torch.equal(found, whole[low:high]), (low, high)
    back = file.buffer(1 << 20)
    file.read(0, back).wait()
    assert torch.equal(back, whole), "neighbours are as they were"
    file.close()


def test_a_forked_process_does_not_use_its_parents_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has none of the threads that would transfer: it would wait for ever."""
    file = SwapFile(tmp_path, BLOCK)
    buffer = file.buffer(BLOCK)
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        with pytest.raises(StorageError, match="another process's"):
            file.read(0, buffer)
    file.read(0, buffer).wait()


def values_and_a_fork_during_a_read(folder: Path, engine: str, nbytes: int) -> tuple[bool, int, int]:
    """Whether a read arrives while a process that was forked meanwhile writes to the same buffer;
    what that process saw there, and where in a large page the buffer starts."""
    file, values = opened(folder, engine, nbytes), numbers(nbytes)
    file.write(0, placed(file, values, 0)).wait()
    buffer = file.buffer(nbytes).fill_(7)
    reading = file.read(0, buffer)
    if not (child := os.fork()):
        found = int(buffer.numpy().any())
        buffer.numpy()[:] = 9
        os._exit(found)
    seen = os.waitpid(child, 0)[1]
    reading.wait()
    return torch.equal(buffer, values), os.waitstatus_to_exitcode(seen), buffer.data_ptr() % (2 << 20)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are kept from forks by Linux")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nbytes", [BLOCK, 5 << 20])
def test_a_fork_during_a_read_takes_no_bytes(tmp_path: Path, engine: str, nbytes: int) -> None:
    with server().Pool(1) as pool:
        arrived, seen, start = pool.apply(values_and_a_fork_during_a_read, (tmp_path, engine, nbytes))
    assert arrived and seen == 0, "the other process has zeros"
    assert nbytes == BLOCK or start == 0, "large pages hold it"


def test_memory_that_starts_anywhere_goes_through_the_page_cache(tmp_path: Path) -> None:
    file = SwapFile(tmp_path, 1 << 16)
    values = numbers(3 * BLOCK + 1)
    file.write(BLOCK, values[1:]).wait()
    found = torch.zeros(3 * BLOCK + 1, dtype=torch.uint8)[1:]
    file.read(BLOCK, found).wait()
    assert torch.equal(found, values[1:])
    assert (file.bytes_read, file.bytes_written) == (3 * BLOCK, 3 * BLOCK)


def test_the_file_has_no_name_and_its_space_is_there(tmp_path: Path) -> None:
    file = SwapFile(tmp_path, 5 * BLOCK + 1)
    assert list(tmp_path.iterdir()) == [], "also a killed process leaves nothing"
    assert file.size == 6 * BLOCK
    assert [file.reserve(nbytes) for nbytes in (1, BLOCK, BLOCK + 1, 10)] == [0, BLOCK, 2 * BLOCK, 4 * BLOCK]
    assert file.size == 6 * BLOCK
    assert file.reserve(2 * BLOCK) == 5 * BLOCK and file.size == 7 * BLOCK, "it grows where it must"
    descriptor = file._cached
    assert os.fstat(descriptor).st_blocks * 512 >= 7 * BLOCK
    file.close()
    with pytest.raises(OSError):
        os.fstat(descriptor)


@pytest.mark.parametrize("direct", [True, False])
def test_mapped_and_transferred_bytes_are_the_same(tmp_path: Path, direct: bool) -> None:
    file = SwapFile(tmp_path, 8 * BLOCK, direct=direct)
    values = numbers(8 * BLOCK)
    file.write(0, placed(file, values, 0)).wait()
    with file.mapped() as area:
        assert torch.equal(area, values)
        area[100:9000] = 7
    values[100:9000] = 7
    found = file.buffer(8 * BLOCK)
    file.read(0, found).wait()
    assert torch.equal(found, values)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        SwapFile(tmp_path / "none")
    assert str(error.value) == (
        "zero_optimization.offload_optimizer.nvme_path: there is no such folder: "
        f"got {tmp_path / 'none'}, expected a folder. Make it, or name another one."
    )
    with pytest.raises(ConfigError, match="nothing can be written to this folder"):
        SwapFile(Path("/proc/self"))
    with pytest.raises(ConfigError, match="there is no such folder"):
        SwapFile(tmp_path / ("x" * 300))  # where the system refuses to look


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path) -> None:
    with largest_file(1 << 20), pytest.raises(DoesNotFit) as error:
        SwapFile(tmp_path, 3 << 20)
    text = str(error.value)
    assert text.startswith(f"{tmp_path}: the disk has not enough room for offloaded state: got ")
    assert "free (File too large), expected 3.0 MiB for this rank. Free some space" in text
    assert error.value.exit_code == 3


def test_a_full_disk_had_what_was_free_before_the_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 9 << 20

    def take_all(*_: int) -> None:
        nonlocal free
        free = 0
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("zero_trial.sharding.offload.swap_file._free", lambda _: free)
    monkeypatch.setattr(os, "posix_fallocate", take_all)
    with pytest.raises(DoesNotFit, match=r"got 9\.0 MiB free \(No space left on device\), expected 64\.0 MiB"):
        SwapFile(tmp_path, 64 << 20)


def test_a_fault_in_the_middle_is_raised_by_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(tmp_path, "threads", 1 << 20, block=BLOCK, depth=2)
    into, once = file.buffer(1 << 16), os.preadv

    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 5 * BLOCK:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return once(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    transfer = file.read(0, into)
    with pytest.raises(StorageError) as error:
        transfer.wait()
    assert str(error.value) == (
        f"{tmp_path}: offloaded state could not be read or written: got [Errno 5] Input/output error. "
        "Mend the disk or name another one in nvme_path, and go on from the last checkpoint."
    )
    monkeypatch.setattr(os, "preadv", once)
    file.read(0, into).wait()


def test_calls_that_do_a_part_are_repeated_and_the_end_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, once = opened(tmp_path, "threads", 1 << 16, direct=False), os.pwritev
    values = numbers(1 << 16)
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: once(fd, [buffers[0][:1000]], offset))
    file.write(0, values).wait()
    found = torch.zeros_like(values)
    file.read(0, found).wait()
    assert torch.equal(found, values)
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
    with pytest.raises(StorageError, match="0 of 65536 bytes at offset 0"):
        file.write(0, values).wait()


@pytest.mark.parametrize("engine", ["io_uring", "libaio"])
def test_a_fault_of_the_kernels_engines(tmp_path: Path, engine: str) -> None:
    """What the kernel answers arrives with the wait; the file works again afterwards."""
    file = opened(tmp_path, engine, 1 << 16, block=BLOCK, depth=4)
    assert file._direct is not None
    values, into = placed(file, numbers(1 << 16), 0), file.buffer(1 << 16)
    file.write(0, values).wait()
    kept, only_read = os.dup(file._direct), os.open("/proc/self/cmdline", os.O_RDONLY)
    os.dup2(only_read, file._direct)
    for _ in range(2):
        transfer = file.write(0, values)
        with pytest.raises(StorageError, match=r"got \[Errno 9\] Bad file descriptor"):
            transfer.wait()
        assert transfer.done()
    short = tmp_path / "short"
    short.write_bytes(b"1" * (3 * BLOCK))
    os.dup2(os.open(short, os.O_RDONLY), file._direct)
    with pytest.raises(StorageError, match=rf"got \[Errno 5\] 0 of {BLOCK} bytes at offset "):
        file.read(0, into).wait()
    os.dup2(kept, file._direct)
    file.read(0, into).wait()
    assert torch.equal(into, values)


@pytest.mark.parametrize("engine", ENGINES)
def test_memory_of_a_dropped_transfer_is_kept(tmp_path: Path, engine: str) -> None:
    """Also where the file is dropped with it: what was asked for is written."""
    file, values = opened(tmp_path, engine, 1 << 20, block=BLOCK, depth=2), numbers(1 << 20)
    descriptor = os.dup(file._cached)
    kept = weakref.ref(buffer := placed(file, values, 0))
    transfer = file.write(0, buffer)
    del buffer
    assert transfer.done() or kept() is not None
    del transfer, file
    for _ in range(200):
        if kept() is None:
            break
        threading.Event().wait(0.01)
    assert kept() is None and os.pread(descriptor, 1 << 20, 0) == bytes(values.numpy())


@pytest.mark.parametrize("engine", ENGINES)
def test_several_threads_wait_for_one(tmp_path: Path, engine: str) -> None:
    file, into = opened(tmp_path, engine, 1 << 22, block=BLOCK, depth=2), []
    for _ in range(8):
        into.append(file.read(0, file.buffer(1 << 22)))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: into[number % 8].wait(), range(64)))
    assert all(transfer.done() for transfer in into)


REFUSED = """
import ctypes, struct, sys
from pathlib import Path
from zero_trial.sharding.offload.swap_file import SwapFile
import zero_trial.ops.cpu_library
zero_trial.ops.cpu_library.backend()
def code(*fields): return struct.pack("HBBI", *fields)
calls = [int(each) for each in sys.argv[2:]]
# load the call's number; an error (EPERM) for these calls, all others are allowed
filter = code(0x20, 0, 0, 0) + b"".join(code(0x15, len(calls) - at, 0, call) for at, call in enumerate(calls))
filter += code(0x06, 0, 0, 0x7FFF0000) + code(0x06, 0, 0, 0x00050001)
body = ctypes.create_string_buffer(filter, len(filter))
program = struct.pack("HxxxxxxP", len(filter) // 8, ctypes.addressof(body))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, "no seccomp here"
file = SwapFile(Path(sys.argv[1]), 1 << 16)
buffer = file.buffer(1 << 16).fill_(7)
file.write(0, buffer).wait()
buffer.zero_()
file.read(0, buffer).wait()
print(file.engine, file.refused, int(buffer.min()))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls")
def test_what_the_kernel_refuses_is_passed_over(tmp_path: Path) -> None:
    """As a container does: io_uring_setup, then io_setup too."""
    said = []
    for calls in (["425"], ["425", "206"]):
        command = [sys.executable, "-c", REFUSED, str(tmp_path), *calls]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if "no seccomp here" in done.stderr:
            pytest.skip("this kernel has no filters")
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.strip())
    no, nor = "'io_uring': 'Operation not permitted'", "'libaio': 'Operation not permitted'"
    assert said == [f"libaio {{{no}}} 7", f"threads {{{no}, {nor}}} 7"]


def test_where_direct_transfers_fail_the_page_cache_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    once = os.pwritev
    monkeypatch.setattr(os, "pwritev", refuse)
    file = SwapFile(tmp_path, 1 << 16)
    monkeypatch.setattr(os, "pwritev", once)
    assert not file.direct
    values = numbers(1 << 16)
    file.write(0, values).wait()
    found = file.buffer(1 << 16)
    file.read(0, found).wait()
    assert torch.equal(found, values)


def test_a_closed_file_is_never_mistaken_for_another(tmp_path: Path) -> None:
    """The system gives the numbers of closed descriptors to the next files."""
    old = SwapFile(tmp_path, 1 << 16)
    old.close()
    new = SwapFile(tmp_path, 1 << 16)
    new.write(0, numbers(1 << 16)).wait()
    with pytest.raises(StorageError, match="offloaded state is gone: got an engine that was destroyed"), old.mapped():
        pass
    for act in (
        lambda: old.read(0, old.buffer(BLOCK)),
        lambda: old.write(0, old.buffer(BLOCK)),
        lambda: old.reserve(1),
    ):
        with pytest.raises(StorageError, match="offloaded state is gone"):
            act()
    old.close()
    with new.mapped() as area:
        assert torch.equal(area[: 1 << 16], numbers(1 << 16))


@pytest.mark.parametrize(
    ("total", "sub_group", "count", "elements"),
    [
        (1 << 30, 10**9, 4, MOST),
        (1 << 30, 100_000, 4, 24 * CUT),
        (1 << 20, 10**9, 2, 1 << 17),
        (1 << 20, 10**9, 4, 1 << 16),
        (1000, 10**9, 4, CUT),
        (1000, 1, 1, CUT),
    ],
)
def test_buffers_hold_a_quarter_at_most(total: int, sub_group: int, count: int, elements: int) -> None:
    assert buffer_elements(total, sub_group, count) == elements


def test_another_limit() -> None:
    """Parameters have buffers for whole shards."""
    assert buffer_elements(1 << 30, 6 * MOST, 4, 6 * MOST) == 6 * MOST
    assert buffer_elements(24 * MOST, 6 * MOST, 4, 6 * MOST) == 24 * MOST // 16


class Log:
    """An access that writes down what it is asked for; ``fails`` at the end of the mapping."""

    def __init__(self, *, fails: bool = False) -> None:
        self.said: list[str] = []
        self.failure = DiskFailure()
        self.fails = fails
        self.access = MappedAccess(
            self.mapped,
            self.failure,
            lambda: self.said.append("before"),
            lambda area: self.said.append(f"open {0 if area is None else area.numel()}"),
            lambda area: self.said.append("shut"),
        )

    @contextmanager
    def mapped(self) -> Iterator[torch.Tensor]:
        self.said.append("map")
        yield torch.zeros(8, dtype=torch.uint8)
        self.said.append("unmap")
        if self.fails:
            raise StorageError("full")


def test_nested_ones_share_the_outermost() -> None:
    log = Log()
    with log.access(), log.access():
        assert log.access.is_open
        assert log.said == ["before", "map", "open 8"]
    assert log.said == ["before", "map", "open 8", "shut", "unmap"] and not log.access.is_open
    with log.access():
        pass
    assert log.said.count("map") == 2


def test_it_shuts_when_the_block_raises() -> None:
    log = Log()
    with pytest.raises(KeyError), log.access():
        raise KeyError
    assert log.said[-1] == "shut" and not log.access.is_open
    log.failure.require_none()


def test_edits_that_may_be_lost_are_trouble() -> None:
    log = Log(fails=True)
    with pytest.raises(StorageError, match="full"), log.access():
        pass
    with pytest.raises(StorageError, match="is lost"), log.access():
        log.said.append("never")
    assert "never" not in log.said and not log.access.is_open


def test_a_fault_before_anything_was_edited_is_none() -> None:
    log = Log()
    log.access._drain = lambda: (_ for _ in ()).throw(StorageError("soon"))  # type: ignore[assignment]
    with pytest.raises(StorageError, match="soon"), log.access():
        pass
    log.failure.require_none()


def transfer(fault: OSError | None = None) -> DiskTransfer:
    future: Future[None] = Future()
    if fault is None:
        future.set_result(None)
    else:
        future.set_exception(fault)
    return DiskTransfer("/disk", [future])


def test_the_first_failure_is_remembered() -> None:
    failure = DiskFailure()
    failure.wait([transfer(), transfer()])
    failure.require_none()
    with pytest.raises(StorageError, match="/disk: offloaded state could not be read or written: got one"):
        failure.wait([transfer(), transfer(OSError("one")), transfer(OSError("two"))])
    with pytest.raises(StorageError):
        failure.wait([transfer(OSError("three"))])
    for _ in range(2):
        with pytest.raises(StorageError) as error:
            failure.require_none()
        assert str(error.value).startswith("/disk: the disk has failed, and offloaded state is lost: got one")
        assert "go on from the last checkpoint in a new engine" in str(error.value)


def test_every_wait_says_that_a_transfer_has_failed() -> None:
    """Several wait for one: who needs its buffer again, and who needs its values."""
    failed = transfer(OSError("one"))
    for _ in range(3):
        with pytest.raises(StorageError, match="got one"):
            failed.wait()


def test_all_are_waited_for() -> None:
    """Also those behind one that failed: their memory is free afterwards."""
    last = transfer()
    with pytest.raises(StorageError):
        DiskFailure().wait([transfer(OSError("one")), last])
    assert last._requests == []


@pytest.mark.parametrize("engine", ENGINES)
def test_a_forgotten_file_is_collected_while_a_thread_starts(tmp_path: Path, engine: str) -> None:
    """The collector may run under threading's own locks; a wait for the file's threads would be a
    deadlock."""
    file = opened(tmp_path, engine, 1 << 16)
    file.write(0, torch.ones(1 << 16, dtype=torch.uint8)).wait()
    descriptor = file._cached

    def forget() -> None:
        nonlocal file
        with threading._shutdown_locks_lock:  # type: ignore[attr-defined]
            del file

    forgetting = threading.Thread(target=forget, daemon=True)
    forgetting.start()
    forgetting.join(timeout=20)
    assert not forgetting.is_alive()
    with pytest.raises(OSError, match="Bad file descriptor"):
        for _ in range(200):  # its threads end by themselves
            os.fstat(descriptor)
            threading.Event().wait(0.01)
