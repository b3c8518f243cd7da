"""Tests for zero_trial/sharding/offload/nvme_optimizer.py."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.sharding.late_swap_file import LateSwapFile, LateTransfer
from tests.sharding.parts import freeing, make_grad_buffer, make_group, parameters, run_update
from zero_trial.errors import StorageError
from zero_trial.ops.optimizers import FusedAdam, Lion
from zero_trial.sharding.guards.freed import is_absent
from zero_trial.sharding.offload.nvme_optimizer import (
    MASTER,
    ROUNDED,
    MasterSwapper,
    StateColumn,
    SwappedStore,
    regions_of,
    slots_of,
    state_columns,
)
from zero_trial.sharding.offload.nvme_params import ParamSwapper, RoundedBuffers, SwappedPiece
from zero_trial.sharding.offload.region_file import RegionFile
from zero_trial.sharding.offload.swap_space import BLOCK, CUT
from zero_trial.sharding.optimizer import ShardedOptimizer
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.pieces import ShardPiece, cut_pieces
from zero_trial.sharding.plan import Home
from zero_trial.sharding.publication import ParamPublisher

SIZES = [(3 * CUT + 100,), (7,), (2 * CUT, 2)]


def groups(dtype: torch.dtype, opt_groups: int = 1) -> list[ParamGroup]:
    """Two groups; with two groups the first ends inside a block of the disk."""
    found = []
    for seed in (1, 2):
        params = parameters(SIZES, seed=seed)
        first = -(-SIZES[0][0] // 32) * 32
        group = make_group(params, stage=2, dtype=dtype)
        if opt_groups == 2:
            group.runs = {0: (0, first), 1: (first, group.layout.numel)}  # type: ignore[assignment]
        found.append(group)
    return found


class Training:
    """Some steps of an optimizer on groups, in memory or through a file."""

    def __init__(
        self,
        build: Any,
        dtype: torch.dtype,
        folder: Path | LateSwapFile | None = None,
        *,
        buffers: int = 3,
        opt_groups: int = 1,
    ) -> None:
        self.groups = groups(dtype, opt_groups)
        self.grad_buffers = [make_grad_buffer(group)[0] for group in self.groups]
        self.file: Any = None
        if folder is not None:
            late = isinstance(folder, LateSwapFile)
            self.file = folder if late else RegionFile([folder], 1 << 16, block=1 << 14)
            masters = MasterSwapper(self.file)
            for group in self.groups:
                masters.swap_out(group)
        pieces = cut_pieces(self.grad_buffers, most=CUT if folder is not None else None)
        self.base = build(
            [
                {
                    "params": [piece.weight for piece in pieces if piece.opt_group == opt_group],
                    "lr": 0.01 * (1 + opt_group),
                }
                for opt_group in range(opt_groups)
            ]
        )
        store = None
        if self.file is not None:
            columns = {torch.float32: state_columns(self.base)}
            store = SwappedStore(masters, pieces, self.base.state, columns, buffer_numel=CUT, buffer_count=buffers)
        self.store = store
        self.optimizer = ShardedOptimizer(self.base, pieces, store=store)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for grad_buffer in self.grad_buffers:
            grad_buffer.reduced().copy_(torch.randn(grad_buffer.shard.shape, generator=generator))
        ParamPublisher(self.groups, freeing()).publish(self.optimizer.pieces, self.optimizer.update(0.5))

    def values(self) -> list[torch.Tensor]:
        with self.optimizer.state_by_tensor.lent():
            states = [
                state.clone()
                for group in self.groups
                for kind in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum")
                if (state := self.optimizer.state_by_tensor.state_shard(group, kind)) is not None
            ]
            return (
                [group.shard.clone() for group in self.groups]
                + [group.master.clone() for group in self.groups]
                + states
            )


def equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) > 4 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


BUILDS = {
    "torch": lambda opt_groups: torch.optim.AdamW(opt_groups, weight_decay=0.1),
    "fused": lambda opt_groups: FusedAdam(opt_groups, weight_decay=0.1),
    "momentum": lambda opt_groups: torch.optim.SGD(opt_groups, momentum=0.9),
    "eager": torch.optim.Adagrad,
}


@pytest.mark.parametrize("opt_groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", BUILDS)
def test_the_same_bits_as_in_memory(tmp_path: Path, name: str, dtype: torch.dtype, opt_groups: int) -> None:
    here = Training(BUILDS[name], dtype, opt_groups=opt_groups)
    away = Training(BUILDS[name], dtype, tmp_path, opt_groups=opt_groups)
    for number in range(3):
        here.step(number)
        away.step(number)
    assert equal(here.values(), away.values())
    assert len(away.optimizer.pieces) == (16 if opt_groups == 1 else 18)


@pytest.mark.parametrize("buffers", [1, 2, 4, 40])
def test_any_number_of_buffers(tmp_path: Path, buffers: int) -> None:
    here = Training(BUILDS["fused"], torch.bfloat16)
    away = Training(BUILDS["fused"], torch.bfloat16, tmp_path, buffers=buffers)
    for number in range(3):
        here.step(number)
        away.step(number)
        assert away.store is not None and len(away.store.buffers) == buffers
    assert equal(here.values(), away.values())


@pytest.mark.parametrize("buffers", [1, 2, 3, 40])
@pytest.mark.parametrize("name", ["fused", "torch"])
def test_nothing_is_used_before_it_is_there(name: str, buffers: int) -> None:
    """With a disk that is as late as it may be: what was written is waited for before it is read,
    and before its buffer is used again."""
    here, away = (
        Training(BUILDS[name], torch.bfloat16),
        Training(BUILDS[name], torch.bfloat16, LateSwapFile(), buffers=buffers),
    )
    for number in range(4):
        here.step(number)
        away.step(number)
    assert equal(here.values(), away.values())


@pytest.mark.parametrize(("dtype", "masters"), [(torch.float32, 0), (torch.bfloat16, 4)])
def test_what_a_step_reads_and_writes(tmp_path: Path, dtype: torch.dtype, masters: int) -> None:
    """Adam: 2 x 8 bytes per fp32 parameter, 2 x 12 per 16-bit one; there are no moments to read in
    the first step."""
    away = Training(BUILDS["fused"], dtype, tmp_path)
    count = sum(group.layout.shard_numel for group in away.groups)
    file = away.file
    assert file is not None
    assert (file.bytes_read, file.bytes_written) == (0, masters * count)
    away.step(0)
    assert (file.bytes_read, file.bytes_written) == (masters * count, (2 * masters + 8) * count)
    before = file.bytes_read, file.bytes_written
    away.step(1)
    moved = file.bytes_read - before[0], file.bytes_written - before[1]
    assert moved == ((8 + masters) * count, (8 + masters) * count)


def test_between_steps_nothing_but_the_buffers_is_in_memory(tmp_path: Path) -> None:
    away = Training(BUILDS["torch"], torch.bfloat16, tmp_path, buffers=2)
    away.step(0)
    assert all(is_absent(group.master) and group.master.isnan().all() for group in away.groups)
    states = [value for state in away.base.state.values() for value in state.values() if value.dim()]
    assert len(states) == 2 * 16 and all(is_absent(value) and value.isnan().all() for value in states)
    store = away.store
    assert store is not None and away.optimizer.state_by_tensor.persistent_bytes() == store.buffer_bytes == 2 * 3 * (
        4 * CUT + 4096
    )
    full = sum(group.full.numel() * 2 for group in away.groups)
    assert sum(group.persistent_bytes() for group in away.groups) == full


def test_lent_values_can_be_edited_and_nested(tmp_path: Path) -> None:
    here, away = Training(BUILDS["torch"], torch.bfloat16), Training(BUILDS["torch"], torch.bfloat16, tmp_path)
    for training in (here, away):
        training.step(0)
        with training.optimizer.state_by_tensor.lent():
            training.groups[0].master[5:9] = 3.0
            shard = training.optimizer.state_by_tensor.state_shard(training.groups[1], "exp_avg")
            assert shard is not None
            training.optimizer.state_by_tensor.set_state_shard(training.groups[1], "exp_avg", shard * 2)
            assert training.groups[0].master[5] == 3.0, "still at hand"
        training.step(1)
    assert equal(here.values(), away.values())


def test_state_is_replaced_where_it_lives(tmp_path: Path) -> None:
    here, away = Training(BUILDS["torch"], torch.float32), Training(BUILDS["torch"], torch.float32, tmp_path)
    for training in (here, away):
        training.step(0)
        with training.optimizer.state_by_tensor.lent():
            training.optimizer.state_by_tensor.make_state(
                ["exp_avg", "exp_avg_sq"], {"0": {"step": 4.0}}, lambda kind, name: (1,)
            )
        training.step(1)
    assert equal(here.values(), away.values())
    with away.optimizer.state_by_tensor.lent():
        away.optimizer.state_by_tensor.make_state([], {}, lambda kind, name: None)
    assert away.optimizer.state_by_tensor.state_shard(away.groups[0], "exp_avg") is None
    away.step(2)


def test_state_that_no_column_foresees_stays_in_memory(tmp_path: Path) -> None:
    here, away = Training(BUILDS["torch"], torch.bfloat16), Training(BUILDS["torch"], torch.bfloat16, tmp_path)
    for training in (here, away):
        training.step(0)
        for piece in training.optimizer.pieces:
            training.base.state[piece.weight]["own"] = torch.full_like(piece.weight, 2.0)
        training.step(1)
    assert equal(here.values(), away.values())
    own = sum(piece.numel * 4 for piece in away.optimizer.pieces)
    assert away.store is not None and away.optimizer.state_by_tensor.persistent_bytes() == away.store.buffer_bytes + own


def test_a_step_that_is_broken_off_can_be_looked_at_and_repeated(tmp_path: Path) -> None:
    away = Training(BUILDS["fused"], torch.bfloat16, tmp_path)
    away.step(0)
    before = away.values()
    seen: list[int] = []

    def stop(pieces: Any, rounded: bool) -> None:
        seen.append(1)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_update(away.optimizer, 1.0, stop)
    after = away.values()
    assert len(after) == len(before) and all(value.isfinite().all() for value in after)
    away.step(1)


@pytest.mark.parametrize("name", ["fused", "torch"])
@pytest.mark.parametrize("buffers", [1, 3])
def test_a_step_that_is_broken_off_is_followed_by_a_whole_one(tmp_path: Path, buffers: int, name: str) -> None:
    """An exception, or Ctrl-C, between borrow and give_back: nothing that was read ahead for the
    old step is taken for the new one's."""
    here, away = (
        Training(BUILDS[name], torch.bfloat16),
        Training(BUILDS[name], torch.bfloat16, tmp_path, buffers=buffers),
    )
    for training in (here, away):
        training.step(0)
    assert away.store is not None
    batches = away.store.batches()
    away.store.borrow(next(batches))
    for training in (here, away):
        training.step(1)
    assert equal(here.values(), away.values())


@pytest.mark.parametrize("buffers", [1, 2])
def test_a_wait_that_is_interrupted_loses_no_buffer_and_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffers: int
) -> None:
    here = Training(BUILDS["fused"], torch.bfloat16)
    away = Training(BUILDS["fused"], torch.bfloat16, LateSwapFile(), buffers=buffers)
    for training in (here, away):
        training.step(0)
    once = LateTransfer.wait

    def interrupt(transfer: LateTransfer) -> None:
        monkeypatch.setattr(LateTransfer, "wait", once)
        raise KeyboardInterrupt

    monkeypatch.setattr(LateTransfer, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        away.step(1)
    for training in (here, away):
        training.step(1)
    assert equal(here.values(), away.values())


@pytest.mark.parametrize("between", ["nothing", "skipped", "looked at", "edited", "broken off", "cleared"])
@pytest.mark.parametrize("buffers", [1, 3])
def test_what_is_read_ahead_of_a_step(tmp_path: Path, buffers: int, between: str) -> None:
    """It is read once, also where the step is skipped; what is edited or forgotten meanwhile is not
    taken from before."""
    here, away = (
        Training(BUILDS["torch"], torch.bfloat16),
        Training(BUILDS["torch"], torch.bfloat16, tmp_path, buffers=buffers),
    )
    each = [12 * piece.numel for piece in away.optimizer.pieces]
    for training in (here, away):
        training.step(0)
        before = training.file.bytes_read if training.file is not None else 0
        if training.store is not None:
            training.store.wait()  # else it might find buffers that are being written
        training.optimizer.store.prefetch()
        if between == "skipped":
            training.optimizer.store.prefetch()
        if training.file is not None:
            assert training.file.bytes_read - before == sum(each[:buffers])
        if between in ("looked at", "edited"):
            with training.optimizer.state_by_tensor.lent():
                training.groups[0].master.add_(1.0 if between == "edited" else 0.0)
        if between == "broken off":
            batches = training.store.batches() if training.store is not None else iter(())
            if training.store is not None:
                training.store.borrow(next(batches))
            training.optimizer.store.prefetch()
        if between == "cleared":
            training.base.state.clear()
        training.step(1)
        if training.file is not None and between in ("nothing", "skipped"):
            assert training.file.bytes_read - before == sum(each)
    assert equal(here.values(), away.values())


def test_state_that_is_cleared_begins_anew(tmp_path: Path) -> None:
    here, away = Training(BUILDS["torch"], torch.bfloat16), Training(BUILDS["torch"], torch.bfloat16, tmp_path)
    for training in (here, away):
        training.step(0)
        training.base.state.clear()
        training.step(1)
        training.step(2)
    assert equal(here.values(), away.values())


def test_a_disk_that_has_failed_gives_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write fails behind the step's back. A second request must not return half a step."""
    away = Training(BUILDS["torch"], torch.bfloat16, tmp_path)
    away.step(0)

    def broken(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", broken)
        with pytest.raises(StorageError, match="could not be read or written"):
            away.step(1)
            away.values()
    for _ in range(2):
        with pytest.raises(StorageError, match=r"state is lost: .* in a new engine"):
            away.values()
        with pytest.raises(StorageError, match="the disk has failed, and offloaded state is lost"):
            away.step(2)
    away.optimizer.close()


def test_edits_that_do_not_reach_the_disk_are_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = Training(BUILDS["torch"], torch.bfloat16, tmp_path)

    class Broken(mmap.mmap):
        def flush(self, *span: int) -> None:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", Broken)
        with pytest.raises(StorageError, match=r"could not be read or written: got .*Input/output error"):
            away.values()
    with pytest.raises(StorageError, match="the disk has failed, and offloaded state is lost"):
        away.step(1)


def test_columns_of_one_byte(tmp_path: Path) -> None:
    away = Training(BUILDS["momentum"], torch.bfloat16)
    file = RegionFile([tmp_path], 1 << 16)
    masters = MasterSwapper(file)
    for group in away.groups:
        masters.swap_out(group)
    pieces = cut_pieces(away.grad_buffers, most=CUT)
    state: dict[torch.Tensor, dict[str, Any]] = {piece.weight: {} for piece in pieces}
    store = SwappedStore(
        masters, pieces, state, {torch.float32: [StateColumn("q", torch.uint8)]}, buffer_numel=CUT, buffer_count=2
    )
    for number in range(3):
        for batch in store.batches():
            store.borrow(batch)
            (piece,) = batch
            if number == 0:
                state[piece.weight]["q"] = torch.zeros(piece.numel, dtype=torch.uint8)
            state[piece.weight]["q"].add_(3)
            assert store.give_back(batch, False) is True
    with store.lent():
        assert all((state[piece.weight]["q"] == 9).all() for piece in pieces)
    store.close()


def group(numel: int, dtype: torch.dtype = torch.bfloat16, trainable: bool = True) -> ParamGroup:
    return make_group(parameters([(numel,)]), dtype=dtype, trainable=trainable)


def test_a_master_goes_and_an_fp32_parameter_stays(tmp_path: Path) -> None:
    masters = MasterSwapper(RegionFile([tmp_path]))
    narrow, wide, frozen = group(64), group(64, torch.float32), group(64, trainable=False)
    values = narrow.master.clone()
    for each in (narrow, wide, frozen):
        masters.swap_out(each)
    assert is_absent(narrow.master) and wide.master is wide.shard and frozen.master is frozen.shard
    assert list(masters.offsets) == [id(narrow)]
    assert [masters.keeps_state_of(each) for each in (narrow, wide, frozen)] == [True, True, False]
    back = torch.empty_like(values)
    masters.space.read(masters.offsets[id(narrow)], back).wait()
    assert torch.equal(back, values)


@pytest.mark.parametrize(
    ("budget", "chosen"), [(None, [0, 1, 2]), (0, []), (96, [0, 2]), (127, [0, 2]), (160, [0, 1]), (1000, [0, 1, 2])]
)
def test_groups_go_while_they_fit(tmp_path: Path, budget: int | None, chosen: list[int]) -> None:
    masters = MasterSwapper(RegionFile([tmp_path]), budget)
    groups = [group(64), group(96), group(32)]
    for each in groups:
        masters.swap_out(each)
    assert [index for index, each in enumerate(groups) if masters.keeps_state_of(each)] == chosen
    assert [index for index, each in enumerate(groups) if is_absent(each.master)] == chosen


def test_what_is_not_trained_takes_nothing_of_the_budget(tmp_path: Path) -> None:
    masters = MasterSwapper(RegionFile([tmp_path]), 64)
    masters.swap_out(group(64, trainable=False))
    trained = group(64)
    masters.swap_out(trained)
    assert masters.keeps_state_of(trained)


def piece_of(rounded_buffers: RoundedBuffers, away: Any = None) -> SwappedPiece:
    group = make_group(parameters([(64,)]), dtype=torch.bfloat16)
    group.offloaded = away
    return SwappedPiece(
        group, make_grad_buffer(group)[0], 0, 32, 64, nn.Parameter(group.master[32:64]), rounded_buffers
    )


def test_new_values_lie_in_the_outbox_during_the_update() -> None:
    rounded_buffers = RoundedBuffers()
    piece, other = piece_of(rounded_buffers, away=object()), piece_of(rounded_buffers, away=object())
    assert piece.rounded is None
    buffer = torch.zeros(32, dtype=torch.bfloat16)
    rounded_buffers.assign(piece, buffer)
    assert piece.rounded is buffer and other.rounded is None
    assert rounded_buffers.release(piece) is buffer and piece.rounded is None
    with pytest.raises(KeyError):
        rounded_buffers.release(piece)


def test_a_shard_in_memory_takes_them_itself() -> None:
    piece = piece_of(RoundedBuffers())
    rounded = piece.rounded
    assert rounded is not None and rounded.data_ptr() == piece.group.shard[32:].data_ptr()


def test_a_step_that_was_broken_off_leaves_nothing() -> None:
    rounded_buffers = RoundedBuffers()
    piece = piece_of(rounded_buffers, away=object())
    rounded_buffers.assign(piece, torch.zeros(32))
    rounded_buffers.clear()
    assert piece.rounded is None


COLUMNS = {torch.float32: [StateColumn("exp_avg", torch.float32), StateColumn("exp_avg_sq", torch.float32)]}


def regions(
    dtype: torch.dtype, *, state: bool, params: bool, budget: int | None = None
) -> tuple[ParamGroup, dict[str, Any], list[Any]]:
    """Of a group of 5000 elements; with the spaces of state and of parameters."""
    home = Home.NVME if params else Home.DEVICE
    group = make_group(parameters([(5000,)]), stage=3, dtype=dtype, home=home)
    masters = MasterSwapper(LateSwapFile(), budget) if state else None
    shards = ParamSwapper(LateSwapFile(), most=CUT, count=1) if params else None
    for keeper in (masters, shards):
        if keeper is not None:
            keeper.swap_out(group)
    spaces = [keeper.space if keeper is not None else None for keeper in (masters, shards)]
    return group, regions_of(group, COLUMNS if state else {}, masters, shards), spaces


@pytest.mark.parametrize(
    ("dtype", "state", "params", "expected"),
    [
        (torch.bfloat16, True, False, {MASTER: 0, "exp_avg": 0, "exp_avg_sq": 0}),
        (torch.bfloat16, False, True, {ROUNDED: 1}),
        (torch.bfloat16, True, True, {MASTER: 0, ROUNDED: 1, "exp_avg": 0, "exp_avg_sq": 0}),
        (torch.float32, True, False, {"exp_avg": 0, "exp_avg_sq": 0}),
        (torch.float32, False, True, {MASTER: 1}),
        (torch.float32, True, True, {MASTER: 1, "exp_avg": 0, "exp_avg_sq": 0}),
    ],
)
def test_what_is_in_which_file(dtype: torch.dtype, state: bool, params: bool, expected: dict[str, int]) -> None:
    """0 is the file of masters and state, 1 that of parameters: an fp32 parameter is its own
    master."""
    _, found, spaces = regions(dtype, state=state, params=params)
    assert {kind: spaces.index(space) for kind, (space, _, _) in found.items()} == expected
    assert all(offset % BLOCK == 0 for _, offset, _ in found.values())
    assert {kind: width for kind, (_, _, width) in found.items() if kind in (MASTER, ROUNDED)} == {
        kind: (torch.float32 if kind == MASTER else dtype) for kind in expected if kind in (MASTER, ROUNDED)
    }


def test_state_beyond_the_budget_is_in_no_file() -> None:
    assert regions(torch.bfloat16, state=True, params=False, budget=100)[1] == {}


def test_a_piece_that_begins_inside_a_block() -> None:
    """Files and buffers agree about where in a block it begins, so that the middle of a transfer
    goes past the page cache."""
    group, found, _ = regions(torch.bfloat16, state=True, params=True)
    piece = ShardPiece(group, make_grad_buffer(group)[0], 0, 100, 4500, nn.Parameter(torch.zeros(4400)))
    slots, size = slots_of(piece, found, 2 * CUT)
    assert all(slot.offset % BLOCK == slot.start % BLOCK == 100 * slot.dtype.itemsize for slot in slots.values())
    ends = [slot.start + slot.numel * slot.dtype.itemsize for slot in slots.values()]
    starts = [slot.start for slot in slots.values()]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False)) and ends[-1] <= size
    assert size == 3 * (8 * CUT + BLOCK) + (4 * CUT + BLOCK)
    area = torch.arange(size, dtype=torch.uint8)
    slot = slots[ROUNDED]
    assert slot.of_buffer(area).numel() == 4400 and slot.of_buffer(area).dtype == torch.bfloat16
    assert torch.equal(slot.of_buffer(area).view(torch.uint8), area[slot.start : slot.start + 8800])


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(7))]


@pytest.mark.parametrize(
    ("build", "kinds"),
    [
        (torch.optim.AdamW, ["exp_avg", "exp_avg_sq"]),
        (lambda params: torch.optim.Adam(params, amsgrad=True), ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        (lambda params: torch.optim.AdamW(params, fused=True), ["exp_avg", "exp_avg_sq"]),
        (lambda params: torch.optim.SGD(params, momentum=0.9), ["momentum_buffer"]),
        (torch.optim.SGD, []),
        (torch.optim.Adagrad, ["sum"]),
        (FusedAdam, ["exp_avg", "exp_avg_sq"]),
        (Lion, ["exp_avg"]),
    ],
)
def test_the_state_that_an_optimizer_will_have(build: Any, kinds: list[str]) -> None:
    base = build(weights())
    state, values = (
        dict(base.state),
        [weight.clone() for opt_group in base.param_groups for weight in opt_group["params"]],
    )
    assert state_columns(base) == [StateColumn(kind, torch.float32) for kind in kinds]
    assert dict(base.state) == state, "nothing is left behind"
    after = [weight for opt_group in base.param_groups for weight in opt_group["params"]]
    assert all(torch.equal(a, b) for a, b in zip(after, values, strict=True))


def test_groups_may_differ() -> None:
    one, two = weights()
    base = torch.optim.SGD([{"params": [one], "momentum": 0.0}, {"params": [two], "momentum": 0.9}], lr=0.1)
    assert state_columns(base) == [StateColumn("momentum_buffer", torch.float32)]


def test_the_probe_calls_no_hook_and_moves_no_schedule() -> None:
    base = torch.optim.AdamW(weights())
    schedule = torch.optim.lr_scheduler.StepLR(base, 1)
    heard: list[Any] = []
    base.register_step_post_hook(lambda *_: heard.append(1))
    state_columns(base)
    assert heard == [] and schedule.last_epoch == 0 and getattr(base, "_opt_called", False) is False


def test_state_of_another_width() -> None:
    class Small(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:
            for opt_group in self.param_groups:
                for weight in opt_group["params"]:
                    self.state[weight] = {"q": torch.zeros_like(weight, dtype=torch.uint8), "rows": torch.zeros(3)}

    assert state_columns(Small(weights())) == [StateColumn("q", torch.uint8)]
