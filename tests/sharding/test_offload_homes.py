"""Tests for zero_trial/sharding/offload/homes.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sharding.late_region import LateRegion, LateTransfer
from tests.sharding.parts import make_group, parameters
from zero_trial.errors import StorageError
from zero_trial.sharding.guards.freed import is_absent
from zero_trial.sharding.offload.homes import Homes, OffloadedHome
from zero_trial.sharding.offload.region_file import DiskFailure
from zero_trial.sharding.offload.regions import CUT
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.plan import Home

SIZES = (2 * CUT + 100, 10, 3 * CUT, CUT)


class SwappedGroups:
    """Groups of SIZES whose shards lie on a disk that is as late as it may be, and what they
    were."""

    def __init__(
        self,
        *,
        count: int = 2,
        most: int = CUT,
        dtype: torch.dtype = torch.bfloat16,
        stage: int = 3,
        stay: Collection[int] = (),
        sizes: Sequence[int] = SIZES,
    ) -> None:
        self.groups = [
            make_group(
                parameters([(size,)], seed=seed),
                stage=stage,
                dtype=dtype,
                name=f"u{seed}",
                trainable=seed != 3,
                home=Home.DEVICE if seed in stay else Home.NVME,
            )
            for seed, size in enumerate(sizes)
        ]
        self.values = [group.home.clone() for group in self.groups]
        self.disk = LateRegion(max(1 << 21, 4 * sum(sizes)))
        self.homes = Homes(params=self.disk, failure=DiskFailure(), buffer_size=most, buffer_count=count)
        for group in self.groups:
            self.homes.swap_out(group)

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


def offset_of(away: SwappedGroups, group: ParamGroup) -> int:
    place = away.homes.shard_of(group)
    assert place is not None
    return place.offset


def shard_of(group: ParamGroup) -> OffloadedHome:
    assert isinstance(group.offloaded, OffloadedHome)
    return group.offloaded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shards_leave_memory_and_are_gathered_from_the_file(dtype: torch.dtype) -> None:
    away = SwappedGroups(dtype=dtype)
    for group in away.groups:
        assert is_absent(group.shard) and group.shard.isnan().all()
        assert (group.master is group.shard) == (dtype == torch.float32 or not group.trainable)
    assert [away.gather(index) for index in (2, 0, 1, 3, 0)] == [True] * 5
    assert sum(shard.numel for shard in away.homes.shards) == sum(group.layout.shard_numel for group in away.groups)


@pytest.mark.parametrize(
    ("count", "ahead"), [(1, (0, 1, 2, 3)), (2, ()), (2, (3, 2)), (3, (1, 1, 2)), (12, (0,)), (12, (0, 1, 2, 3))]
)
def test_any_number_of_buffers_and_any_order(count: int, ahead: tuple[int, ...]) -> None:
    """Buffers that others have read ahead into are taken back where there is no other."""
    away = SwappedGroups(count=count)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        for index in ahead:
            away.groups[index].start_read_or_ready()
        assert [away.gather(index) for index in order] == [True] * 4
    assert len(away.homes.buffers) == count and not any(away.parts(index) for index in range(4))


def test_reading_ahead_goes_as_far_as_there_are_buffers() -> None:
    away = SwappedGroups(count=4)
    assert [group.start_read_or_ready() for group in away.groups] == [False] * 4
    assert [away.parts(index) for index in range(4)] == [
        [(0, CUT), (CUT, 2 * CUT), (2 * CUT, 2 * CUT + 128)],
        [(0, 32)],
        [],
        [],
    ]
    assert [group.start_read_or_ready() for group in away.groups] == [True, True, False, False], "time to gather"
    assert away.gather(0)
    assert not away.groups[2].start_read_or_ready() and away.parts(2) == [(0, CUT), (CUT, 2 * CUT), (2 * CUT, 3 * CUT)]


def test_what_is_read_for_a_later_use_is_not_gathered_sooner() -> None:
    """The answer that starts collectives counts calls for a use that comes soon."""
    away = SwappedGroups(count=4)
    assert [shard_of(group).read_ahead() for group in away.groups] == [True, False, False, False]
    assert away.parts(0)[-1][1] == 2 * CUT + 128 and away.parts(1) == [(0, 32)]
    assert [group.start_read_or_ready() for group in away.groups[:2]] == [False, False]
    assert [group.start_read_or_ready() for group in away.groups[:2]] == [True, True]
    assert away.gather(0) and not away.groups[0].start_read_or_ready(), "it was used since"


def test_buffers_are_reclaimed_from_the_shard_needed_last() -> None:
    away = SwappedGroups(count=4)
    away.groups[1].start_read_or_ready()
    away.groups[2].start_read_or_ready()
    assert away.gather(0) and away.parts(1) == [(0, 32)] and away.parts(2) == [(0, CUT), (CUT, 2 * CUT)]


def test_each_gather_reads_whole_blocks_once() -> None:
    away = SwappedGroups()
    read: list[int] = []
    once = away.disk.read
    away.disk.read = lambda offset, into: (read.append(into.numel()), once(offset, into))[1]  # type: ignore[method-assign]
    away.groups[0].start_read_or_ready()
    away.gather(0)
    assert sum(read) == 2 * 2 * CUT + 4096


@pytest.mark.parametrize(
    ("most", "count", "elements"), [(CUT, 2, CUT), (10**9, 1, 3 * CUT), (10**9, 5, CUT), (2 * CUT, 1, 2 * CUT)]
)
def test_buffers_hold_no_more_than_the_largest_shard_or_a_quarter(most: int, count: int, elements: int) -> None:
    away = SwappedGroups(most=most, count=count)
    for seed in range(4, 12):  # more of the same
        group = make_group(parameters([(3 * CUT,)], seed=seed), stage=3, dtype=torch.bfloat16, home=Home.NVME)
        away.homes.swap_out(group)
        away.groups.append(group)
    assert away.homes.buffers == [] and away.gather(0)
    assert [buffer.near.numel() for buffer in away.homes.buffers] == [2 * elements] * count


@pytest.mark.parametrize("read_ahead", [False, True])
def test_new_values_are_waited_for_and_what_was_read_ahead_is_forgotten(read_ahead: bool) -> None:
    away = SwappedGroups()
    group, new = away.groups[0], torch.full_like(away.values[0], 3.0)
    if read_ahead:
        group.start_read_or_ready()
    group.wait_before_writing()
    away.homes.add_write(group, away.disk.write(offset_of(away, group), new))
    away.values[0] = new
    assert away.gather(0)


def test_lent_shards_can_be_edited_and_nested() -> None:
    away = SwappedGroups()
    group = away.groups[3]
    group.start_read_or_ready()
    with away.homes.lent(), group.materialized():
        assert group.master is group.shard
        assert all(torch.equal(each.shard, value) for each, value in zip(away.groups, away.values, strict=True))
        group.shard[:3] = 7.0
        assert not group.start_read_or_ready()
        group.unshard_async()
        assert group.full[0] == 7.0, "also gathered meanwhile"
        group.finish_unshard()
        group.reshard()
    assert is_absent(group.shard) and group.master is group.shard
    away.values[3][:3] = 7.0
    assert away.gather(3)


@pytest.mark.parametrize("count", [1, 4])
def test_a_rank_that_looks_into_its_shards_answers_as_those_that_do_not(count: int) -> None:
    """What was read ahead is read again, with its edits, and keeps its buffers: the answers of
    start_read_or_ready() decide over collectives."""
    looking, other = SwappedGroups(count=count), SwappedGroups(count=count)
    answers: list[list[Any]] = [[], []]
    for found, away in zip(answers, (looking, other), strict=True):
        for turn in range(3):
            found += [group.start_read_or_ready() for group in away.groups]
            if away is looking:
                with looking.homes.lent():
                    looking.groups[0].shard[turn] = 7.0
                looking.values[0][turn] = 7.0
            found += [away.parts(index) for index in range(4)]
            found += [away.gather(index) for index in ((), (2, 0), (1, 3, 0))[turn]]
        assert len(away.homes.buffers) == count
    assert answers[0] == answers[1] and False not in answers[0][-3:]


def test_some_stay_in_memory() -> None:
    away = SwappedGroups(stay=(1, 3))
    assert [group.offloaded is None for group in away.groups] == [False, True, False, True]
    assert away.homes.shard_of(away.groups[1]) is None and [away.gather(index) for index in range(4)] == [True] * 4


def test_groups_that_always_live_stay() -> None:
    group = make_group(parameters([(100,)]), stage=2, dtype=torch.bfloat16)
    Homes(params=LateRegion(), failure=DiskFailure()).swap_out(group)
    assert group.offloaded is None and not is_absent(group.shard)


@pytest.mark.parametrize("count", [1, 3])
def test_a_full_copy_is_replaced_through_the_buffers(count: int) -> None:
    """Between the reads of others, in pieces; a part of it is read alone."""
    away = SwappedGroups(stage=2, count=count)
    shard, new = shard_of(away.groups[0]), torch.arange(SIZES[0] + 28).to(torch.bfloat16)
    away.groups[2].start_read_or_ready()
    shard.store(new)
    new, kept = torch.zeros_like(new), new.clone()
    part = torch.zeros(CUT + 7, dtype=torch.bfloat16)
    shard.fetch_part(part, 40)
    assert torch.equal(part, kept[40 : CUT + 47])
    away.values[0] = kept
    assert [away.gather(index) for index in (2, 0, 1)] == [True] * 3
    with away.homes.lent():
        assert torch.equal(away.groups[0].home, kept)
        shard.store(new)
    away.values[0] = new
    assert away.gather(0) and len(away.homes.buffers) == count


def interrupted(monkeypatch: pytest.MonkeyPatch, after: int, fault: Callable[[], BaseException]) -> None:
    """The wait after so many ends in a fault, the next ones do not."""
    once, seen = LateTransfer.wait, []

    def wait(transfer: Any) -> None:
        seen.append(transfer)
        if len(seen) == after + 1:
            raise fault()
        once(transfer)

    monkeypatch.setattr(LateTransfer, "wait", wait)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_fetch_that_is_interrupted_loses_no_buffer(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    away = SwappedGroups()
    interrupted(monkeypatch, after, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        away.gather(0)
    fresh = torch.zeros_like(away.values[0])
    shard_of(away.groups[0]).fetch(fresh)
    assert torch.equal(fresh, away.values[0]), "all of it, and not what was left"
    assert [away.gather(index) for index in (0, 2, 0)] == [True] * 3 and len(away.homes.buffers) == 2


def test_a_failed_disk_is_not_read_again() -> None:
    away = SwappedGroups()
    away.homes.failure.record([Path("/disk")], OSError("no"))
    for _ in range(2):
        assert not away.groups[1].start_read_or_ready()
        with pytest.raises(StorageError, match="the disk failed, and offloaded state is lost"):
            away.gather(1)
        with pytest.raises(StorageError, match="the disk failed"), away.homes.lent():
            pass


def test_an_array_over_a_parameter_that_is_freed_keeps_its_values() -> None:
    (group,) = SwappedGroups(sizes=(4 << 20,)).groups
    group.unshard()
    values = group.params[0].detach().view(torch.int16).numpy()
    kept = values.copy()
    group.reshard()
    assert (values == kept).all()


def group_of(numel: int, dtype: torch.dtype = torch.bfloat16, trainable: bool = True) -> ParamGroup:
    return make_group(parameters([(numel,)]), dtype=dtype, trainable=trainable)


def test_a_master_goes_and_an_fp32_parameter_stays() -> None:
    homes = Homes(masters=LateRegion(), failure=DiskFailure())
    narrow, wide, frozen = group_of(64), group_of(64, torch.float32), group_of(64, trainable=False)
    values = narrow.master.clone()
    for each in (narrow, wide, frozen):
        homes.swap_out(each)
    assert is_absent(narrow.master) and wide.master is wide.shard and frozen.master is frozen.shard
    assert [homes.master_of(each) is not None for each in (narrow, wide, frozen)] == [True, False, False]
    assert [homes.keeps_state_of(each) for each in (narrow, wide, frozen)] == [True, True, False]
    with narrow.materialized():
        assert torch.equal(narrow.master, values)
    assert is_absent(narrow.master)


@pytest.mark.parametrize(
    ("budget", "chosen"), [(None, [0, 1, 3]), (0, []), (96, [0, 3]), (127, [0, 3]), (160, [0, 1]), (1000, [0, 1, 3])]
)
def test_groups_go_while_they_fit(budget: int | None, chosen: list[int]) -> None:
    """What is not trained takes nothing of the budget."""
    homes = Homes(masters=LateRegion(), failure=DiskFailure(), budget=budget)
    groups = [group_of(64), group_of(96), group_of(64, trainable=False), group_of(32)]
    for each in groups:
        homes.swap_out(each)
    assert [index for index, each in enumerate(groups) if homes.keeps_state_of(each)] == chosen
    assert [index for index, each in enumerate(groups) if is_absent(each.master)] == chosen
