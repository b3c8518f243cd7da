"""Regions for offloaded state: files, host memory, and the rings of buffers in front of them."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.device import device
from tests.support.pool import Pools, server
from zero_trial.errors import ConfigError, DoesNotFit, StorageError
from zero_trial.sharding.offload.copies import Copier
from zero_trial.sharding.offload.region_file import BLOCK, DiskFailure, RegionFile, transfer_buffer
from zero_trial.sharding.offload.regions import (
    CUT,
    MOST,
    Buffer,
    HostRegion,
    Ring,
    buffer_elements,
    shard_buffer_bytes,
    wait_for,
)

WHERE = "zero_optimization.offload_param.nvme_path"


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def placed(values: torch.Tensor, offset: int) -> torch.Tensor:
    """The values in a buffer that starts in a page where the range starts in a block."""
    area = transfer_buffer(values.numel() + BLOCK)[offset % BLOCK :][: values.numel()]
    area.copy_(values)
    return area


def opened(folder: Path, count: int = 1, nbytes: int = 1 << 20, *, direct: bool = True, **more: Any) -> RegionFile:
    """``direct`` False: on a file system that opens files with O_DIRECT, and transfers nothing."""

    def refuse(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    folders = [folder / str(number) for number in range(count)]
    for each in folders:
        each.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patched:
        if not direct:
            patched.setattr(os, "pwritev", refuse)
        return RegionFile(folders, nbytes, where=WHERE, **more)


@pytest.mark.parametrize(
    ("count", "more"), [(1, {}), (3, {"direct": False}), (1, {"block": 1, "threads": 3}), (3, {"block": 3 * BLOCK})]
)
def test_what_is_written_is_read_and_mapped(tmp_path: Path, count: int, more: dict[str, Any]) -> None:
    """In parts that begin and end anywhere, from memory that does, in files that have grown."""
    file = opened(tmp_path, count, 1 << 16, **more)
    assert file.direct or "direct" in more
    sizes = (200 * BLOCK + 99, 7, 20 * BLOCK)
    offsets, written = [file.reserve(size) for size in sizes], 0
    wholes = [numbers(size, seed=size) for size in sizes]
    for offset, whole in zip(offsets, wholes, strict=True):
        file.write(offset, placed(whole, offset)).wait()
        written += len(whole)
        for low, high in ((0, BLOCK), (128, 5000), (BLOCK, 9 * BLOCK + 1), (77, 80)):
            if high <= len(whole):
                whole[low:high] = numbers(high - low, seed=low)
                found = placed(whole[low:high], low) if low % 2 else whole[low:high].clone()
                file.write(offset + low, found).wait()
                transfer = file.read(offset + low, found.zero_())
                transfer.wait()
                assert transfer.done() and torch.equal(found, whole[low:high]), (low, high)
                written += high - low
    assert file.bytes_written == written
    with file.mapped():
        for offset, whole in zip(offsets, wholes, strict=True):
            area = file.view(offset, len(whole))
            assert torch.equal(area, whole), "neighbors are unchanged"
            area[3:6] = whole[3:6] = 9
    for offset, whole in zip(offsets, wholes, strict=True):
        found = transfer_buffer(len(whole))
        file.read(offset, found).wait()
        assert torch.equal(found, whole)
    file.close()


def test_each_folder_has_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reservation is where the least is; terabytes, more than memory, can be mapped."""
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, nbytes: os.ftruncate(fd, offset + nbytes))
    file = opened(tmp_path, 3, 3 << 20)
    assert [each.size for each in file._files] == [1 << 20] * 3
    offsets = [file.reserve(nbytes) for nbytes in (1 << 40, 1 << 30, 1 << 30, 1 << 30, BLOCK)]
    assert [each.end for each in file._files] == [1 << 40, 2 << 30, (1 << 30) + BLOCK]
    assert file.size == sum(each.end for each in file._files)
    with file.mapped():
        for number, offset in enumerate(offsets):
            file.view(offset, 9)[:] = number
    into = torch.zeros(9, dtype=torch.uint8)
    for number, offset in enumerate(offsets):
        file.read(offset, into).wait()
        assert (into == number).all()


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


def test_systems_without_its_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    with pytest.raises(ConfigError, match=r"nvme_path: files of offloaded state need Linux: got linux. Offload to"):
        RegionFile([tmp_path])


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        RegionFile([tmp_path / "none"])
    assert str(error.value) == (
        "zero_optimization.offload_optimizer.nvme_path: the folder does not exist: "
        f"got {tmp_path / 'none'}, expected a folder. Create it, or use another folder."
    )
    with pytest.raises(ConfigError, match="the folder is not writable"):
        RegionFile([Path("/proc/self")])
    with pytest.raises(ConfigError, match="the folder does not exist"):
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

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(os, "posix_fallocate", take_all)
    with pytest.raises(DoesNotFit, match=r"got 9\.0 MiB free \(No space left on device\), expected 64\.0 MiB"):
        RegionFile([tmp_path], 64 << 20)


def test_a_file_that_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    file = opened(tmp_path)
    monkeypatch.setattr(mmap, "mmap", full)
    with (
        pytest.raises(
            StorageError, match=r"got .*Cannot allocate memory.* raise the limit of virtual memory .ulimit -v"
        ),
        file.mapped(),
    ):
        pass


def test_a_closed_file_is_never_mistaken_for_another(tmp_path: Path) -> None:
    """The system gives the numbers of closed descriptors to the next files."""
    old = opened(tmp_path)
    old.close()
    new = opened(tmp_path)
    new.reserve(1 << 16)
    new.write(0, numbers(1 << 16)).wait()
    with (
        pytest.raises(StorageError, match="offloaded state no longer exists: got an engine that was destroyed"),
        old.mapped(),
    ):
        pass
    for act in (lambda: old.read(0, numbers(BLOCK)), lambda: old.write(0, numbers(BLOCK)), lambda: old.reserve(1)):
        with pytest.raises(StorageError, match="offloaded state no longer exists"):
            act()
    old.close()
    with new.mapped():
        assert torch.equal(new.view(0, 1 << 16), numbers(1 << 16))


def test_a_fault_is_raised_by_every_wait_and_names_the_folder(tmp_path: Path) -> None:
    """Several wait for one transfer: who needs its buffer, and who needs its values."""
    file, buffer = opened(tmp_path, 2), numbers(1 << 16)
    file.reserve(1 << 16)
    offset, broken = file.reserve(1 << 16), file._files[1]
    descriptors = [each for each in (broken.direct, broken.cached) if each is not None]
    kept, only_read = [os.dup(each) for each in descriptors], os.open("/proc/self/cmdline", os.O_RDONLY)
    for descriptor in descriptors:
        os.dup2(only_read, descriptor)
    transfer = file.write(offset, buffer)
    for _ in range(2):
        with pytest.raises(StorageError) as error:
            transfer.wait()
        assert str(error.value) == (
            f"{tmp_path / '1'}: offloaded state could not be read or written: got [Errno 9] Bad file descriptor. "
            "Fix the disk or set nvme_path to another one, and continue from the last checkpoint."
        )
        assert transfer.done()
    for descriptor, old in zip(descriptors, kept, strict=True):
        os.dup2(old, descriptor)
    with pytest.raises(StorageError, match="the disk failed, and offloaded state is lost"):
        file.read(0, buffer)
    with pytest.raises(StorageError, match="the disk failed, and offloaded state is lost"), file.mapped():
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
    file.write(0, placed(values, 0))
    del file
    gc.collect()
    for _ in range(200):
        if (found := os.pread(descriptor, 1 << 20, 0)) == bytes(values.numpy()):
            break
        threading.Event().wait(0.01)
    assert found == bytes(values.numpy())


def values_and_a_fork_during_a_read(folder: Path, nbytes: int) -> tuple[bool, int, int]:
    """Whether a read arrives while a process that was forked meanwhile writes to the same buffer;
    what that process saw there, and where in a large page the buffer starts."""
    file, values = opened(folder, nbytes=nbytes), numbers(nbytes)
    file.write(0, placed(values, 0)).wait()
    buffer = transfer_buffer(nbytes).fill_(7)
    reading = file.read(0, buffer)
    if not (child := os.fork()):
        found = int(buffer.numpy().any())
        buffer.numpy()[:] = 9
        os._exit(found)
    seen = os.waitpid(child, 0)[1]
    reading.wait()
    return torch.equal(buffer, values), os.waitstatus_to_exitcode(seen), buffer.data_ptr() % (2 << 20)


@pytest.mark.parametrize("nbytes", [BLOCK, 5 << 20])
def test_a_fork_during_a_read_takes_no_bytes(tmp_path: Path, nbytes: int) -> None:
    with server().Pool(1) as pool:
        arrived, seen, start = pool.apply(values_and_a_fork_during_a_read, (tmp_path, nbytes))
    assert arrived and seen == 0, "the other process has zeros"
    assert nbytes == BLOCK or start == 0, "large pages hold it"


class Transfer:
    """A transfer that is over when it was waited for."""

    def __init__(self, fault: str | None = None, *, over: bool = False) -> None:
        self.fault = fault
        self.over = over

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.over = True
        if self.fault is not None:
            raise StorageError("could not be written", where="/disk", got=self.fault)


def buffers(count: int) -> list[Buffer]:
    return [Buffer(torch.zeros(8, dtype=torch.uint8)) for _ in range(count)]


def test_a_ring_waits_only_if_it_must() -> None:
    one, two = made = buffers(2)
    ring, slow, fast = Ring(made), Transfer(), Transfer(over=True)
    assert ring.take() is one and ring.take() is two and ring.take() is None
    ring.give(one, [slow])
    assert ring.take() is None and not slow.over
    ring.give(two)
    assert ring.take(wait=True) is two and not slow.over, "one is free"
    ring.give(two, [fast])
    assert ring.take(wait=True) is one and slow.over
    assert ring.take() is two, "its transfer was over"
    ring.give(one, [Transfer()])
    ring.give(two, [last := Transfer()])
    ring.drain()
    assert last.over and ring.buffers == [one, two]


def test_a_buffer_whose_transfer_failed_is_not_used_again() -> None:
    ring = Ring(buffers(1))
    buffer = ring.take()
    assert buffer is not None
    ring.give(buffer, [Transfer("one")])
    for _ in range(3):
        with pytest.raises(StorageError, match="got one"):
            ring.take(wait=True)


def test_all_are_waited_for() -> None:
    """Also those behind one that failed: their memory is free afterwards."""
    last = Transfer()
    with pytest.raises(StorageError, match="got one"):
        wait_for([Transfer("one"), Transfer("two"), last])
    assert last.over


def test_the_first_failure_is_recorded() -> None:
    failure = DiskFailure()
    failure.require_none()
    failure.record([Path("/disk"), Path("/more")], OSError("one"))
    failure.record([Path("/other")], OSError("two"))
    for _ in range(2):
        with pytest.raises(StorageError) as error:
            failure.require_none()
        assert str(error.value).startswith("/disk, /more: the disk failed, and offloaded state is lost: got one")
        assert "continue from the last checkpoint in a new engine" in str(error.value)


def grown() -> list[bool]:
    """Whether host memory of a device keeps its bytes where it grows."""
    here = device.use()
    region = HostRegion(BLOCK, Copier(torch.device("standin"), pinned=True))
    values = [torch.randn(count) for count in (3 * BLOCK, 7, BLOCK)]
    offsets = [region.reserve(value.nbytes) for value in values]
    for offset, value in zip(offsets, values, strict=True):
        source = value.view(torch.uint8).to("standin")
        region.write(offset, source).wait()
    same = [offsets == [0, 12 * BLOCK, 13 * BLOCK], region.reserve(100 * BLOCK) == 17 * BLOCK]
    for offset, value in zip(offsets, values, strict=True):
        found = torch.empty(value.nbytes, dtype=torch.uint8, device="standin")
        region.read(offset, found).wait()
        same.append(torch.equal(found.cpu().view(torch.float32), value))
    region.close()
    here.reset()
    return same


def test_host_memory_grows_and_keeps_its_bytes(devices: Pools) -> None:
    assert devices(1).run(grown) == [[True] * 5]


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


@pytest.mark.parametrize(
    ("shards", "wanted", "nbytes"),
    [
        ([(6 * MOST, 4)] * 50, 10**9, 24 * MOST),  # whole shards
        ([(6 * MOST, 2)] * 4, 10**9, 3 * MOST),  # a quarter
        ([(6 * MOST, 2)] * 50, 100_000, 2 * 24 * CUT),
        ([(MOST + 64, 1), (64, 4)] * 50, 10**9, MOST + CUT),  # 4-bit weights and few scales in fp32
        ([(CUT + 64, 1), (CUT, 2)] * 50, CUT, 2 * CUT),
        ([(64, 4), (64, 1)], 10**9, 4 * CUT),
        ([], 10**9, CUT),
    ],
)
def test_buffers_of_shards_hold_the_largest_one(shards: list[tuple[int, int]], wanted: int, nbytes: int) -> None:
    assert shard_buffer_bytes(shards, wanted, count=4) == nbytes
