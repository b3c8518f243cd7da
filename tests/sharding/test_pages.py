"""Pages of the host that move between tensors: values, faults, what a forked process sees, and
kernels that refuse."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import resource
import sys
from typing import Any

import pytest
import torch

from tests.sharding.test_param_group import resident
from tests.support.pool import server
from zero_trial.sharding import heap
from zero_trial.sharding import pages as pages_module
from zero_trial.sharding.heap import keep_freed_memory, map_large_blocks
from zero_trial.sharding.pages import HostPages, empty_at_page, transfer_buffer

PAGES = 2048  # of 8 MiB
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are moved by Linux")
CPU = torch.device("cpu")


def faults_of_passing_pages(pages: HostPages) -> int:
    """Minor page faults of freeing and reviving an 8 MiB storage ten times, whose pages are passed
    on; its neighbors keep their values."""
    assert map_large_blocks()
    before, buffer, after = (torch.full((2 << 20,), value) for value in (1.0, 2.0, 3.0))
    storage = buffer.untyped_storage()
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for turn in range(10):
        pages.keep(buffer)
        storage.resize_(0)
        storage.resize_(8 << 20)
        pages.fill(buffer)
        buffer.fill_(turn)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start
    assert before.eq(1).all() and after.eq(3).all() and buffer.eq(9).all()
    return faults


@linux
def test_pages_of_a_freed_tensor_are_the_next_ones() -> None:
    with server().Pool(1) as pool:
        assert pool.apply(faults_of_passing_pages, (HostPages(),)) < PAGES


def fails(*_: object) -> Any:
    return pages_module._FAILED


def faults_where_pages_stay() -> int:
    pages_module.glibc = {"mremap": fails, "mallopt": pages_module.glibc("mallopt")}.get  # type: ignore[assignment]
    return faults_of_passing_pages(HostPages())


@linux
def test_a_kernel_that_moves_no_pages_gives_new_ones() -> None:
    with server().Pool(1) as pool:
        assert pool.apply(faults_where_pages_stay) >= 10 * PAGES


def values_where_moves_fail() -> tuple[bool, bool]:
    """Of a tensor whose pages are in several areas and are not kept, and of one that is written
    where pages did not arrive."""
    map_large_blocks()
    pages, split, whole = HostPages(), torch.ones(1 << 20), torch.ones(1 << 20)
    page = resource.getpagesize()
    middle = (split.data_ptr() + split.nbytes // 2) // page * page
    assert pages_module.glibc("madvise")(ctypes.c_void_p(middle), ctypes.c_size_t(page), mmap.MADV_DONTFORK) == 0
    pages.keep(split)
    kept = split.eq(1).all().item()
    pages.keep(whole)
    glibc, unmap = pages_module.glibc, pages_module.glibc("munmap")

    def unmap_and_fail(source: object, size: object, _: object, flags: int, target: object) -> Any:
        unmap(target, size)
        return fails()

    pages_module.glibc = lambda name: unmap_and_fail if name == "mremap" else glibc(name)  # type: ignore[assignment]
    pages.fill(whole)
    return bool(kept), bool(whole.fill_(2).eq(2).all())


@linux
def test_values_survive_where_the_kernel_fails_to_move_pages() -> None:
    with server().Pool(1) as pool:
        assert pool.apply(values_where_moves_fail) == (True, True)


def resident_with_kept_pages() -> list[int]:
    """With pages of 8, then of 16 and again of 8 MiB; and after 4 MiB have been taken."""
    map_large_blocks()
    torch.ones(8 << 20, dtype=torch.uint8)  # starts torch's threads
    pages, before, found = HostPages(), resident(), []
    for size in (8, 16, 8):
        tensor = torch.ones(size << 20, dtype=torch.uint8)
        pages.keep(tensor)
        del tensor
    found.append(resident() - before)
    small = torch.empty(4 << 20, dtype=torch.uint8)
    pages.fill(small)
    found.append(resident() - before)
    return found


@linux
def test_pages_are_kept_of_one_tensor_only() -> None:
    """Of the largest; what a smaller one does not need goes back."""
    with server().Pool(1) as pool:
        assert [round(each / 2**20) for each in pool.apply(resident_with_kept_pages)] == [16, 4]


def test_pages_of_small_tensors_of_the_heap_and_of_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a heap, where the way that was chosen last puts them, they would be cut out of it."""
    moved: list[int] = []
    calls = {"mallopt": lambda *_: 1, "mremap": lambda _, size, *__: moved.append(size.value)}
    monkeypatch.setattr(pages_module, "glibc", calls.get)
    monkeypatch.setattr(heap, "glibc", calls.get)
    monkeypatch.setattr(heap, "_CHOSEN", {})
    pages, tensor = HostPages(), torch.empty(1 << 20)
    for choose in (keep_freed_memory, map_large_blocks, keep_freed_memory):
        choose()
        pages.keep(tensor)
    map_large_blocks()
    pages.keep(torch.empty(1 << 20, device="meta"))
    pages.keep(torch.empty(1 << 18))
    assert len(moved) == 1 and tensor.nbytes - 2 * resource.getpagesize() < moved[0] <= tensor.nbytes


class Passing:
    """A tensor that is filled through buffers and freed, as often as asked."""

    def __init__(self, numel: int, dtype: torch.dtype = torch.int16) -> None:
        assert map_large_blocks()
        self.pages = HostPages()
        self.full = empty_at_page(numel, dtype, CPU)
        self.nbytes = self.full.untyped_storage().nbytes()
        self.free()

    def fill(self, buffer: torch.Tensor, low: int, values: torch.Tensor) -> None:
        source = buffer[: values.nbytes].view(values.dtype)
        source.copy_(values)
        self.pages.move(source, self.full[low : low + values.numel()])

    def revive(self) -> None:
        self.full.untyped_storage().resize_(self.nbytes)

    def free(self) -> None:
        self.pages.keep(self.full)
        self.full.untyped_storage().resize_(0)


def faults_of_moving() -> tuple[int, bool]:
    """Ten times 8 MiB and a few bytes through two buffers of 5 MiB: minor page faults after the
    first two times."""
    passing, buffers = Passing((4 << 20) + 3), [transfer_buffer(5 << 20) for _ in range(2)]
    values = torch.arange((4 << 20) + 3).to(torch.int16)
    part, start, same = 5 << 19, 0, True
    for turn in range(10):
        if turn == 2:
            start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        passing.revive()
        assert passing.pages.takes(passing.full)
        passing.fill(buffers[0], 0, values[:part])
        passing.fill(buffers[1], part, values[part:])
        same = same and torch.equal(passing.full, values)
        passing.free()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start, same


@linux
def test_pages_go_from_buffers_to_tensors_and_back() -> None:
    with server().Pool(1) as pool:
        faults, same = pool.apply(faults_of_moving)
    assert same and faults < PAGES


def turns_at_random(seed: int) -> None:
    """Tensors and buffers of any size, in any order, some freed without their pages being taken."""
    turn = random.Random(seed)
    sizes = [turn.randrange(1 << 19, 1 << 22) for _ in range(4)]
    fulls = [Passing(size) for size in sizes]
    for other in fulls[1:]:
        other.pages = fulls[0].pages
    buffers = [transfer_buffer(turn.randrange(1, 24) << 17) for _ in range(3)]
    live: dict[int, torch.Tensor] = {}
    for _ in range(60):
        index = turn.randrange(4)
        passing = fulls[index]
        if index in live:
            assert torch.equal(passing.full, live.pop(index))
            passing.free() if turn.random() < 0.9 else passing.full.untyped_storage().resize_(0)
        else:
            passing.revive()
            values = live[index] = torch.randint(-9, 9, passing.full.shape, dtype=torch.int16)
            low = 0
            while low < passing.full.numel():
                buffer = turn.choice(buffers)
                high = min(low + buffer.numel() // 2, passing.full.numel())
                passing.fill(buffer, low, values[low:high])
                low = high
        kept = sum(stop - start for start, stop in passing.pages._kept)
        assert kept <= 2 * max(sizes)
    assert all(torch.equal(fulls[index].full, values) for index, values in live.items())


@linux
def test_values_survive_any_order_of_moves() -> None:
    with server().Pool(1) as pool:
        pool.map(turns_at_random, range(6))


def seen_by_a_child() -> tuple[bool, bool]:
    """Whether a forked process reads a tensor whose pages were a buffer's, and zeros in the buffer
    that was given the pages of a tensor."""
    passing, buffer = Passing(4 << 20), transfer_buffer(8 << 20)
    values = torch.full((4 << 20,), 7, dtype=torch.int16)
    for _ in range(2):
        passing.revive()
        passing.fill(buffer, 0, values)
        passing.free()
    passing.revive()
    passing.fill(buffer, 0, values)
    buffer.fill_(5)
    child = os.fork()
    if child == 0:
        full = (ctypes.c_int16 * (4 << 20)).from_address(passing.full.data_ptr())
        area = (ctypes.c_char * (8 << 20)).from_address(buffer.data_ptr())
        os._exit(int(full[0] == full[-1] == 7) + 2 * int(not any(area.raw[:: 1 << 12])))
    found = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return bool(found & 1), bool(found & 2)


@linux
def test_forked_processes_see_tensors_and_no_buffers() -> None:
    with server().Pool(1) as pool:
        assert pool.apply(seen_by_a_child) == (True, True)


def values_where(way: str) -> bool:
    """Whether values arrive where the kernel refuses, at once or after the first area, and where a
    buffer is shared with forked processes."""
    passing, buffer = Passing(4 << 20), transfer_buffer(8 << 20)
    values = torch.randint(-9, 9, (4 << 20,), dtype=torch.int16)
    passing.revive()
    passing.fill(buffer, 0, values)
    passing.pages._cuts = [buffer.data_ptr() + (3 << 20)]  # as if it had come in two parts
    real, calls = pages_module._mremap, [0]

    def mremap(*given: int) -> int:
        calls[0] += 1
        return 0 if calls[0] > (way == "the second area is refused") else real(*given)

    if way == "shared memory":
        buffer = torch.frombuffer(mmap.mmap(-1, 8 << 20), dtype=torch.uint8)
    else:
        pages_module._mremap = mremap
    values += 1
    passing.fill(buffer, 0, values)
    pages_module._mremap = real
    return torch.equal(passing.full, values) and calls[0] == {"refused": 1, "shared memory": 0}.get(way, 2)


@linux
@pytest.mark.parametrize("way", ["refused", "the second area is refused", "shared memory"])
def test_values_are_copied_where_pages_do_not_move(way: str) -> None:
    with server().Pool(1) as pool:
        assert pool.apply(values_where, (way,))


def test_small_tensors_and_those_of_devices_are_ordinary() -> None:
    assert empty_at_page(100, torch.float32, CPU).storage_offset() == 0
    assert empty_at_page(1 << 22, torch.float32, torch.device("meta")).storage_offset() == 0
