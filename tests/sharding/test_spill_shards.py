"""Tests for zero_trial/sharding/offload/nvme_params.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.sharding.late_shelf import LateShelf, LateTicket
from tests.sharding.parts import make_group, parameters
from zero_trial.errors import StorageError
from zero_trial.sharding.offload.nvme_params import ParamSwapper, SwappedShard
from zero_trial.sharding.offload.swap_file import CUT
from zero_trial.sharding.param_group import ParamGroup, is_absent

SIZES = (2 * CUT + 100, 10, 3 * CUT, CUT)


class Shelves:
    """Groups of SIZES whose shards lie on a disk that is as late as it may be, and what they were."""

    def __init__(self, *, count: int = 2, most: int = CUT, dtype: torch.dtype = torch.bfloat16, keep: int = 0) -> None:
        self.groups = [
            make_group(parameters([(size,)], seed=seed), stage=3, dtype=dtype, name=f"u{seed}", trainable=seed != 3)
            for seed, size in enumerate(SIZES)
        ]
        self.values = [group.shard.clone() for group in self.groups]
        self.disk = LateShelf()
        self.shelf = ParamSwapper(self.disk, most=most, count=count, keep=keep)
        for group in self.groups:
            self.shelf.take(group)

    def gather(self, index: int) -> bool:
        """Whether the group's full copy is what its shard was; it is freed again."""
        group = self.groups[index]
        group.unshard_async()
        group.finish_unshard()
        same = torch.equal(group.full, self.values[index])
        group.reshard()
        return same

    def parts(self, index: int) -> list[tuple[int, int]]:
        return [(part.low, part.high) for part in shard_of(self.groups[index]).parts]


def shard_of(group: ParamGroup) -> SwappedShard:
    assert isinstance(group.offloaded, SwappedShard)
    return group.offloaded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shards_leave_memory_and_are_gathered_from_the_file(dtype: torch.dtype) -> None:
    shelves = Shelves(dtype=dtype)
    for group in shelves.groups:
        assert is_absent(group.shard) and group.shard.isnan().all()
        assert (group.master is group.shard) == (dtype == torch.float32 or not group.trainable)
    assert [shelves.gather(index) for index in (2, 0, 1, 3, 0)] == [True] * 5
    assert shelves.shelf.numel == sum(group.layout.shard_numel for group in shelves.groups)


@pytest.mark.parametrize("count", [1, 2, 3, 12])
@pytest.mark.parametrize("ahead", [(), (0,), (0, 1, 2, 3), (3, 2), (1, 1, 2)])
def test_any_number_of_buffers_and_any_order(count: int, ahead: tuple[int, ...]) -> None:
    """Buffers that others have read ahead into are taken back where there is no other."""
    shelves = Shelves(count=count)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        for index in ahead:
            shelves.groups[index].expect()
        assert [shelves.gather(index) for index in order] == [True] * 4
    assert len(shelves.shelf.buffers) == count
    assert not any(shelves.parts(index) for index in range(4))


def test_reading_ahead_goes_as_far_as_there_are_buffers() -> None:
    shelves = Shelves(count=4)
    assert [group.expect() for group in shelves.groups] == [False] * 4
    assert [shelves.parts(index) for index in range(4)] == [
        [(0, CUT), (CUT, 2 * CUT), (2 * CUT, 2 * CUT + 128)],
        [(0, 32)],
        [],
        [],
    ]
    assert [group.expect() for group in shelves.groups] == [True, True, False, False], "time to gather"
    assert shelves.gather(0)
    assert not shelves.groups[2].expect() and shelves.parts(2) == [(0, CUT), (CUT, 2 * CUT), (2 * CUT, 3 * CUT)]


def test_whoever_takes_back_takes_from_the_last() -> None:
    shelves = Shelves(count=4)
    shelves.groups[1].expect()
    shelves.groups[2].expect()
    assert shelves.gather(0)
    assert shelves.parts(1) == [(0, 32)] and shelves.parts(2) == [(0, CUT), (CUT, 2 * CUT)]


def test_each_gather_reads_whole_blocks_once() -> None:
    shelves = Shelves()
    read: list[int] = []
    once = shelves.disk.read
    shelves.disk.read = lambda offset, into: (read.append(into.numel()), once(offset, into))[1]  # type: ignore[method-assign]
    shelves.groups[0].expect()
    shelves.gather(0)
    assert sum(read) == 2 * 2 * CUT + 4096


@pytest.mark.parametrize(
    ("most", "count", "elements"), [(CUT, 2, CUT), (10**9, 1, 3 * CUT), (10**9, 5, CUT), (2 * CUT, 1, 2 * CUT)]
)
def test_buffers_hold_no_more_than_the_largest_shard_or_a_quarter(most: int, count: int, elements: int) -> None:
    shelves = Shelves(most=most, count=count)
    for seed in range(4, 12):  # more of the same
        group = make_group(parameters([(3 * CUT,)], seed=seed), stage=3, dtype=torch.bfloat16)
        shelves.shelf.take(group)
        shelves.groups.append(group)
    assert shelves.shelf.buffers == [] and shelves.gather(0)
    assert [buffer.numel() for buffer in shelves.shelf.buffers] == [2 * elements] * count


def test_new_values_are_waited_for_before_they_are_read() -> None:
    shelves = Shelves()
    group, new = shelves.groups[0], torch.full_like(shelves.values[0], 3.0)
    group.wait_before_writing()
    shelves.shelf.wrote(group, [shelves.disk.write(shelves.shelf.offset_of(group), new)])
    shelves.values[0] = new
    assert shelves.gather(0)


def test_what_was_read_ahead_is_forgotten_before_an_update() -> None:
    shelves = Shelves()
    group, new = shelves.groups[0], torch.full_like(shelves.values[0], 3.0)
    group.expect()
    group.wait_before_writing()
    shelves.disk.write(shelves.shelf.offset_of(group), new).wait()
    shelves.values[0] = new
    assert shelves.gather(0)


def test_lent_shards_can_be_edited_and_nested() -> None:
    shelves = Shelves()
    group = shelves.groups[3]
    group.expect()
    with shelves.shelf.lent(), group.materialized():
        assert group.master is group.shard
        assert all(torch.equal(each.shard, value) for each, value in zip(shelves.groups, shelves.values, strict=True))
        group.shard[:3] = 7.0
        assert not group.expect()
        group.unshard_async()
        assert group.full[0] == 7.0, "also gathered meanwhile"
        group.finish_unshard()
        group.reshard()
    assert is_absent(group.shard) and group.master is group.shard
    shelves.values[3][:3] = 7.0
    assert shelves.gather(3)


@pytest.mark.parametrize("count", [1, 4])
def test_a_rank_that_looks_into_its_shards_answers_as_those_that_do_not(count: int) -> None:
    """What was read ahead is read again, with its edits, and keeps its buffers: the answers of expect() decide over collectives."""
    looking, other = Shelves(count=count), Shelves(count=count)
    answers: list[list[Any]] = [[], []]
    for found, shelves in zip(answers, (looking, other), strict=True):
        for turn in range(3):
            found += [group.expect() for group in shelves.groups]
            if shelves is looking:
                with looking.shelf.lent():
                    looking.groups[0].shard[turn] = 7.0
                looking.values[0][turn] = 7.0
            found += [shelves.parts(index) for index in range(4)]
            found += [shelves.gather(index) for index in ((), (2, 0), (1, 3, 0))[turn]]
        assert len(shelves.shelf.buffers) == count
    assert answers[0] == answers[1] and False not in answers[0][-3:]


def test_some_stay_in_memory() -> None:
    shelves = Shelves(keep=CUT + 32)
    assert [group.offloaded is None for group in shelves.groups] == [False, True, False, True]
    assert shelves.shelf.kept == CUT + 32
    assert shelves.shelf.offset_of(shelves.groups[1]) is None
    assert [shelves.gather(index) for index in range(4)] == [True] * 4


def test_groups_that_always_live_stay() -> None:
    group = make_group(parameters([(100,)]), stage=2, dtype=torch.bfloat16)
    ParamSwapper(LateShelf(), most=CUT, count=1).take(group)
    assert group.offloaded is None and not is_absent(group.shard)


def interrupted(monkeypatch: pytest.MonkeyPatch, after: int, fault: Callable[[], BaseException]) -> None:
    """The wait after so many ends in a fault, the next ones do not."""
    once, seen = LateTicket.wait, []

    def wait(ticket: Any) -> None:
        seen.append(ticket)
        if len(seen) == after + 1:
            raise fault()
        once(ticket)

    monkeypatch.setattr(LateTicket, "wait", wait)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_fetch_that_is_interrupted_loses_no_buffer(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    shelves = Shelves()
    interrupted(monkeypatch, after, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        shelves.gather(0)
    fresh = torch.zeros_like(shelves.values[0])
    shard_of(shelves.groups[0]).fetch(fresh)
    assert torch.equal(fresh, shelves.values[0]), "all of it, and not what was left"
    assert [shelves.gather(index) for index in (0, 2, 0)] == [True] * 3
    assert len(shelves.shelf.buffers) == 2


def test_a_disk_that_fails_gives_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    shelves = Shelves()
    interrupted(monkeypatch, 1, lambda: StorageError("no", where="/disk"))
    with pytest.raises(StorageError, match="no"):
        shelves.gather(0)
    for _ in range(2):
        assert not shelves.groups[1].expect()
        with pytest.raises(StorageError, match="the disk has failed, and offloaded state is lost"):
            shelves.gather(1)
        with pytest.raises(StorageError, match="the disk has failed"), shelves.shelf.lent():
            pass
