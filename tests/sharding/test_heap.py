"""Large blocks of tensors that wait for the next tensor of their size: values, faults, how much is
kept, forks and threads; and buffers that disks transfer to and from."""

from __future__ import annotations

import os
import random
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.sharding.test_param_group import resident
from tests.support.pool import server
from zero_trial.ops.cpu_library import block_library
from zero_trial.sharding.heap import (
    KEPT_BYTES,
    give_freed_memory_back,
    keep_freed_memory,
    map_large_blocks,
)

PAGES = 2048  # of 8 MiB
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="blocks are mappings of Linux")
pytestmark = [linux, pytest.mark.skipif(block_library() is None, reason="there is no compiler")]


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def faults_of_blocks() -> int:
    """Minor page faults of ten turns of tensors of two sizes between which small ones stay, and of
    a storage that is freed and revived."""
    assert map_large_blocks()
    stays, storage = [], torch.empty(8 << 20, dtype=torch.uint8).untyped_storage()
    for turn in range(12):
        if turn == 2:
            before = faults()
        storage.resize_(0)
        first = torch.full((2 << 20,), float(turn))
        stays.append(torch.full((100,), turn))
        second = torch.full((3 << 20,), float(turn))
        storage.resize_(8 << 20)
        torch.empty(0, dtype=torch.uint8).set_(storage, 0, (8 << 20,)).fill_(turn)
        assert first.eq(turn).all() and second.eq(turn).all() and storage[12345] == turn
        del first, second
    return faults() - before


def test_the_next_tensor_of_a_size_has_the_pages_of_the_last() -> None:
    with server().Pool(1) as pool:
        assert pool.apply(faults_of_blocks) < PAGES


def resident_after_freeing(keep: Callable[[], bool]) -> list[int]:
    """MiB above the start: with 40 blocks of 8 MiB freed, with one freed that is as large as all of
    them, with one of each of 40 sizes freed, and after what is kept went back."""
    keep()
    torch.ones(8 << 20, dtype=torch.uint8)  # starts torch's threads
    give_freed_memory_back()
    found, start = [], resident()
    blocks = [torch.ones(8 << 20, dtype=torch.uint8) for _ in range(40)]
    del blocks
    found.append(resident() - start)
    large = torch.ones(320 << 20, dtype=torch.uint8)
    del large
    found.append(resident() - start)
    for size in range(8, 48):
        large = torch.ones(size << 20, dtype=torch.uint8)
        del large
    found.append(resident() - start)
    assert give_freed_memory_back()
    found.append(resident() - start)
    return [round(each / 2**20) for each in found]


@pytest.mark.parametrize("keep", [keep_freed_memory, map_large_blocks])
def test_as_much_is_kept_as_has_lived_and_a_few_more(keep: Callable[[], bool]) -> None:
    most = 320 + (KEPT_BYTES >> 20)
    with server().Pool(1) as pool:
        freed, other, sizes, given_back = pool.apply(resident_after_freeing, (keep,))
    assert (freed, other, given_back) == (320, most, 0) and most - 47 <= sizes <= most


def kept_after_a_tensor_without_room() -> int:
    """MiB that 40 blocks of 8 MiB, one after the other, leave after a tensor that no memory has
    room for: it has not lived."""
    assert no_room()
    start = resident()
    for size in range(40):
        torch.ones((8 << 20) + (size << 16), dtype=torch.uint8)
    return round((resident() - start) / 2**20)


def test_a_tensor_without_room_does_not_raise_what_is_kept() -> None:
    with server().Pool(1) as pool:
        assert pool.apply(kept_after_a_tensor_without_room) <= 11 + (KEPT_BYTES >> 20)


def tensors_at_random(seed: int) -> None:
    """Tensors of any size that live for any time, in four threads."""
    map_large_blocks()

    def turns(thread: int) -> None:
        turn, live = random.Random(10 * seed + thread), dict[int, torch.Tensor]()
        for number in range(200):
            place = turn.randrange(6)
            if place in live:
                assert live.pop(place).eq(place + 7 * thread).all()
            else:
                live[place] = torch.full((turn.randrange(1 << 18, 1 << 20),), place + 7 * thread)
            if number % 50 == 49:
                give_freed_memory_back()

    with ThreadPoolExecutor(4) as pool:
        for ended in [pool.submit(turns, thread) for thread in range(4)]:
            ended.result()


def test_values_survive_any_order_in_any_thread() -> None:
    with server().Pool(1) as pool:
        pool.map(tensors_at_random, range(3))


def take_and_free() -> None:
    for _ in range(300):
        torch.ones(1 << 20)


def seen_by_a_child() -> int:
    """A forked process reads a tensor, takes a kept block, writes it and frees both, while threads
    of its parent take and free blocks."""
    map_large_blocks()
    mine, kept = torch.full((4 << 20,), 7, dtype=torch.int16), torch.full((4 << 20,), 3, dtype=torch.int16)
    del kept
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(take_and_free) for _ in range(2)]
        found = 0
        for _ in range(5):
            child = os.fork()
            if child == 0:
                same = bool(mine.eq(7).all())
                other = torch.full((4 << 20,), 5, dtype=torch.int16)
                os._exit(0 if same and bool(other.eq(5).all()) and bool(mine.add_(1).eq(8).all()) else 1)
            found += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for each in running:
            each.result()
    return found + int(not mine.eq(7).all())


def test_a_forked_process_has_blocks_of_its_own() -> None:
    with server().Pool(1) as pool:
        assert pool.apply(seen_by_a_child) == 0


def profiled() -> list[int]:
    """Bytes that torch's profiler sees come and go."""
    map_large_blocks()
    with torch.profiler.profile(profile_memory=True) as profile:
        tensor = torch.empty(4 << 20, dtype=torch.uint8)
        del tensor
    return [event.cpu_memory_usage for event in profile.events() if abs(event.cpu_memory_usage) >= 4 << 20]


def test_torchs_profiler_sees_large_blocks() -> None:
    with server().Pool(1) as pool:
        assert sorted(pool.apply(profiled)) == [-(4 << 20), 4 << 20]


def no_room() -> str:
    map_large_blocks()
    try:
        torch.empty(1 << 46, dtype=torch.uint8)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_block_for_which_there_is_no_room_is_torchs_error() -> None:
    with server().Pool(1) as pool:
        assert "can't allocate memory" in pool.apply(no_room)
