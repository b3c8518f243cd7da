"""Tests for zero_trial/sharding/offload/region_file.py."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pool import server
from zero_trial.errors import ConfigError, DoesNotFit, StorageError
from zero_trial.sharding.offload import region_file
from zero_trial.sharding.offload.region_file import STRIPE, RegionFile, transfer_buffer
from zero_trial.sharding.offload.regions import BLOCK

WHERE = "zero_optimization.offload_param.nvme_path"


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def placed(values: torch.Tensor, offset: int) -> torch.Tensor:
    """The values in a buffer that starts in a page where the range starts in a block."""
    area = transfer_buffer(values.numel() + BLOCK)[offset % BLOCK :][: values.numel()]
    area.copy_(values)
    return area


def opened(folder: Path, count: int = 1, nbytes: int = 1 << 20, **more: Any) -> RegionFile:
    folders = [folder / str(number) for number in range(count)]
    for each in folders:
        each.mkdir(exist_ok=True)
    return RegionFile(folders, nbytes, where=WHERE, **more)


@pytest.mark.parametrize("more", [{}, {"direct": False}, {"block": 1, "threads": 3}, {"block": 3 * BLOCK}])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_is_written_is_read_and_mapped(tmp_path: Path, count: int, more: dict[str, Any]) -> None:
    """In parts that begin and end anywhere, across stripes, and after the files have grown."""
    file = opened(tmp_path, count, 1 << 16, **more)
    sizes = (2 * STRIPE + 5 * BLOCK, 7, STRIPE)
    offsets = [file.reserve(size) for size in sizes]
    assert offsets == [0, 2 * STRIPE + 5 * BLOCK, 2 * STRIPE + 6 * BLOCK]
    whole = torch.zeros(offsets[-1] + sizes[-1], dtype=torch.uint8)
    for offset, size in zip(offsets, sizes, strict=True):
        whole[offset : offset + size] = numbers(size)
        file.write(offset, placed(numbers(size), offset)).wait()
    parts = ((0, BLOCK), (128, 5000), (BLOCK, 9 * BLOCK + 1), (STRIPE - 100, 2 * STRIPE + 77), (77, 80))
    for low, high in parts:
        whole[low:high] = numbers(high - low, seed=low)
        file.write(low, placed(whole[low:high], low)).wait()
        found = placed(torch.zeros(high - low, dtype=torch.uint8), low)
        transfer = file.read(low, found)
        transfer.wait()
        assert transfer.done() and torch.equal(found, whole[low:high]), (low, high)
    with file.mapped() as area:
        assert torch.equal(area[: len(whole)], whole), "neighbors are unchanged"
        area[STRIPE - 50 : STRIPE + 50] = 9
    whole[STRIPE - 50 : STRIPE + 50] = 9
    found = file.buffer(len(whole))
    file.read(0, found).wait()
    assert torch.equal(found, whole)
    assert file.bytes_written == sum(sizes) + sum(high - low for low, high in parts)
    file.close()


def test_folders_have_equal_parts_and_few_mappings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terabyte, more than memory, can be mapped; three times its first size stays below the
    kernel's limit of mappings."""
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, nbytes: os.ftruncate(fd, offset + nbytes))
    file = opened(tmp_path, 3, 1 << 40)
    stripes = -(-(3 << 40) // file._stripe)
    assert stripes < 30_000 and file._stripe % BLOCK == 0
    sizes = [each.size for each in file._files]
    assert sum(sizes) == file.size == 1 << 40 and max(sizes) - min(sizes) <= file._stripe
    offset = file.reserve(1 << 40)
    with file.mapped() as area:
        area[offset + 12345] = 7
    into = torch.zeros(1, dtype=torch.uint8)
    file.read(offset + 12345, into).wait()
    assert into.item() == 7


def test_memory_that_starts_anywhere_goes_through_the_page_cache(tmp_path: Path) -> None:
    file, values = opened(tmp_path), numbers(3 * BLOCK + 1)
    file.write(BLOCK, values[1:]).wait()
    found = torch.zeros(3 * BLOCK + 1, dtype=torch.uint8)[1:]
    file.read(BLOCK, found).wait()
    assert torch.equal(found, values[1:])


def test_the_file_has_no_name_and_its_space_is_allocated(tmp_path: Path) -> None:
    file = RegionFile([tmp_path], 5 * BLOCK + 1)
    assert list(tmp_path.iterdir()) == [], "a killed process leaves nothing"
    assert [file.reserve(nbytes) for nbytes in (1, BLOCK, BLOCK + 1, 10)] == [0, BLOCK, 2 * BLOCK, 4 * BLOCK]
    assert file.size == 6 * BLOCK
    assert file.reserve(2 * BLOCK) == 5 * BLOCK and file.size == 7 * BLOCK, "it grows if necessary"
    descriptor = file._files[0].cached
    assert os.fstat(descriptor).st_blocks * 512 >= 7 * BLOCK
    file.close()
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_if_direct_transfers_fail_the_page_cache_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", refuse)
        file = opened(tmp_path)
    assert not file.direct
    file.write(0, numbers(1 << 16)).wait()
    found = file.buffer(1 << 16)
    file.read(0, found).wait()
    assert torch.equal(found, numbers(1 << 16))


# --- refusals -------------------------------------------------------------------------------------


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        RegionFile([tmp_path / "none"])
    assert str(error.value) == (
        "zero_optimization.offload_optimizer.nvme_path: there is no such folder: "
        f"got {tmp_path / 'none'}, expected a folder. Make it, or name another one."
    )
    with pytest.raises(ConfigError, match="nothing can be written to this folder"):
        RegionFile([Path("/proc/self")])
    with pytest.raises(ConfigError, match="there is no such folder"):
        RegionFile([tmp_path / ("x" * 300)])  # the system refuses to look
    with pytest.raises(ConfigError) as second:
        RegionFile([tmp_path, tmp_path / "none"], where=WHERE)
    assert second.value.where == f"{WHERE}[1]"


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with largest_file(1 << 20), pytest.raises(DoesNotFit) as error:
        RegionFile([tmp_path], 3 << 20)
    text = str(error.value)
    assert text.startswith(f"{tmp_path}: the disk has not enough room for offloaded state: got ")
    assert "free (File too large), expected 3.0 MiB for this rank. Free some space" in text
    assert error.value.exit_code == 3
    free = 9 << 20

    def take_all(*_: int) -> None:
        nonlocal free
        free = 0
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(region_file, "_free", lambda _: free)
    monkeypatch.setattr(os, "posix_fallocate", take_all)
    with pytest.raises(DoesNotFit, match=r"got 9\.0 MiB free \(No space left on device\), expected 64\.0 MiB"):
        RegionFile([tmp_path], 64 << 20)


def test_a_mapping_too_many_names_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(region_file, "_mmap", lambda: full)
    with pytest.raises(StorageError, match=r"vm\.max_map_count"), opened(tmp_path).mapped():
        pass


def test_a_closed_file_is_never_mistaken_for_another(tmp_path: Path) -> None:
    """The system gives the numbers of closed descriptors to the next files."""
    old = opened(tmp_path)
    old.close()
    new = opened(tmp_path)
    new.reserve(1 << 16)
    new.write(0, numbers(1 << 16)).wait()
    with pytest.raises(StorageError, match="offloaded state is gone: got an engine that was destroyed"), old.mapped():
        pass
    for act in (
        lambda: old.read(0, new.buffer(BLOCK)),
        lambda: old.write(0, new.buffer(BLOCK)),
        lambda: old.reserve(1),
    ):
        with pytest.raises(StorageError, match="offloaded state is gone"):
            act()
    old.close()
    with new.mapped() as area:
        assert torch.equal(area, numbers(1 << 16))


def test_a_forked_process_does_not_use_its_parents_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has none of the threads, so it would wait without end."""
    file = opened(tmp_path)
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        with pytest.raises(StorageError, match="another process's"):
            file.read(0, file.buffer(BLOCK))
    file.read(0, file.buffer(BLOCK)).wait()


# --- faults ---------------------------------------------------------------------------------------


def test_a_fault_is_raised_by_every_wait_and_names_the_folder(tmp_path: Path) -> None:
    """Several wait for one transfer: who needs its buffer, and who needs its values."""
    file = opened(tmp_path, 2)
    file.reserve(2 * STRIPE)
    buffer, broken = file.buffer(2 * STRIPE), file._files[1]
    file.write(0, buffer).wait()
    descriptors = [each for each in (broken.direct, broken.cached) if each is not None]
    kept, only_read = [os.dup(each) for each in descriptors], os.open("/proc/self/cmdline", os.O_RDONLY)
    for descriptor in descriptors:
        os.dup2(only_read, descriptor)
    transfer = file.write(0, buffer)
    for _ in range(2):
        with pytest.raises(StorageError) as error:
            transfer.wait()
        assert str(error.value) == (
            f"{tmp_path / '1'}: offloaded state could not be read or written: got [Errno 9] Bad file descriptor. "
            "Fix the disk or name another one in nvme_path, and go on from the last checkpoint."
        )
        assert transfer.done()
    for descriptor, old in zip(descriptors, kept, strict=True):
        os.dup2(old, descriptor)
    with pytest.raises(StorageError, match="the disk has failed, and offloaded state is lost"):
        file.read(0, buffer)
    with pytest.raises(StorageError, match="the disk has failed, and offloaded state is lost"), file.mapped():
        pass


def test_calls_that_do_a_part_are_repeated_and_the_end_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, once, values = opened(tmp_path, direct=False), os.pwritev, numbers(1 << 16)
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: once(fd, [buffers[0][:1000]], offset))
    file.write(0, values).wait()
    found = torch.zeros_like(values)
    file.read(0, found).wait()
    assert torch.equal(found, values)
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
    with pytest.raises(StorageError, match="0 of 65536 bytes at offset 0"):
        file.write(0, values).wait()


def test_memory_of_a_dropped_transfer_is_kept(tmp_path: Path) -> None:
    """Also if the file is dropped with it: the bytes are written."""
    file, values = opened(tmp_path, block=BLOCK, threads=2), numbers(1 << 20)
    descriptor = os.dup(file._files[0].cached)
    kept = weakref.ref(buffer := placed(values, 0))
    transfer = file.write(0, buffer)
    del buffer
    assert transfer.done() or kept() is not None
    del transfer, file
    for _ in range(200):
        if kept() is None:
            break
        threading.Event().wait(0.01)
    assert kept() is None and os.pread(descriptor, 1 << 20, 0) == bytes(values.numpy())


def test_several_threads_wait_for_one(tmp_path: Path) -> None:
    file = opened(tmp_path, block=BLOCK, threads=2)
    transfers = [file.read(0, file.buffer(1 << 20)) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: transfers[number % 8].wait(), range(64)))
    assert all(transfer.done() for transfer in transfers)


def test_a_forgotten_file_is_collected_while_a_thread_starts(tmp_path: Path) -> None:
    """The collector may run under threading's own locks; a wait for the file's threads would be a
    deadlock."""
    file = opened(tmp_path)
    file.write(0, torch.ones(1 << 16, dtype=torch.uint8)).wait()
    descriptor = file._files[0].cached

    def forget() -> None:
        nonlocal file
        with threading._shutdown_locks_lock:  # type: ignore[attr-defined]
            del file

    forgetting = threading.Thread(target=forget, daemon=True)
    forgetting.start()
    forgetting.join(timeout=20)
    assert not forgetting.is_alive()
    with pytest.raises(OSError, match="Bad file descriptor"):
        for _ in range(200):  # its threads end on their own
            os.fstat(descriptor)
            threading.Event().wait(0.01)


def values_and_a_fork_during_a_read(folder: Path, nbytes: int) -> tuple[bool, int, int]:
    """Whether a read arrives while a process that was forked meanwhile writes to the same buffer;
    what that process saw there, and where in a large page the buffer starts."""
    file, values = opened(folder, nbytes=nbytes), numbers(nbytes)
    file.write(0, placed(values, 0)).wait()
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
@pytest.mark.parametrize("nbytes", [BLOCK, 5 << 20])
def test_a_fork_during_a_read_takes_no_bytes(tmp_path: Path, nbytes: int) -> None:
    with server().Pool(1) as pool:
        arrived, seen, start = pool.apply(values_and_a_fork_during_a_read, (tmp_path, nbytes))
    assert arrived and seen == 0, "the other process has zeros"
    assert nbytes == BLOCK or start == 0, "large pages hold it"
