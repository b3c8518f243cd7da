"""Tests for zero_trial/sharding/offload/nvme_optimizer.py."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sharding.late_shelf import LateShelf, LateTicket
from tests.sharding.parts import make_grad_buffer, make_group, parameters, run_update
from zero_trial.errors import StorageError
from zero_trial.ops.optimizers import FusedAdam
from zero_trial.sharding.offload.nvme_optimizer import MasterSwap, StateColumn, SwappedStore, state_columns
from zero_trial.sharding.offload.swap_file import CUT, SwapFile
from zero_trial.sharding.optimizer import ShardedOptimizer, cut_pieces
from zero_trial.sharding.param_group import ParamGroup, ParamPublisher, is_absent

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
        folder: Path | LateShelf | None = None,
        *,
        slots: int = 3,
        opt_groups: int = 1,
    ) -> None:
        self.groups = groups(dtype, opt_groups)
        self.grad_buffers = [make_grad_buffer(group)[0] for group in self.groups]
        self.file: Any = None
        if folder is not None:
            late = isinstance(folder, LateShelf)
            self.file = folder if late else SwapFile(folder, 1 << 16, block_size=1 << 14)
            masters = MasterSwap(self.file)
            for group in self.groups:
                masters.take(group)
        pieces = cut_pieces(self.grad_buffers, whole_tensors=False, most=CUT if folder is not None else None)
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
            store = SwappedStore(masters, pieces, self.base.state, columns, slot_numel=CUT, slots=slots)
        self.store = store
        self.optimizer = ShardedOptimizer(self.base, pieces, store=store)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for grad_buffer in self.grad_buffers:
            grad_buffer.shard.copy_(torch.randn(grad_buffer.shard.shape, generator=generator))
        publication = ParamPublisher(torch.nn.Module(), self.groups)
        publication.begin(self.optimizer.pieces)
        run_update(self.optimizer, 0.5, publication.updated)
        publication.finish()

    def values(self) -> list[torch.Tensor]:
        with self.optimizer.lent():
            states = [
                state.clone()
                for group in self.groups
                for kind in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum")
                if (state := self.optimizer.state_shard(group, kind)) is not None
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


@pytest.mark.parametrize("slots", [1, 2, 4, 40])
def test_any_number_of_buffers(tmp_path: Path, slots: int) -> None:
    here = Training(BUILDS["fused"], torch.bfloat16)
    away = Training(BUILDS["fused"], torch.bfloat16, tmp_path, slots=slots)
    for number in range(3):
        here.step(number)
        away.step(number)
        assert away.store is not None and len(away.store.buffers) == slots
    assert equal(here.values(), away.values())


@pytest.mark.parametrize("slots", [1, 2, 3, 40])
@pytest.mark.parametrize("name", ["fused", "torch"])
def test_nothing_is_used_before_it_is_there(name: str, slots: int) -> None:
    """With a disk that is as late as it may be: what was written is waited for before it is read, and before its buffer is used again."""
    here, away = (
        Training(BUILDS[name], torch.bfloat16),
        Training(BUILDS[name], torch.bfloat16, LateShelf(), slots=slots),
    )
    for number in range(4):
        here.step(number)
        away.step(number)
    assert equal(here.values(), away.values())


@pytest.mark.parametrize(("dtype", "masters"), [(torch.float32, 0), (torch.bfloat16, 4)])
def test_what_a_step_reads_and_writes(tmp_path: Path, dtype: torch.dtype, masters: int) -> None:
    """Adam: 2 x 8 bytes per fp32 parameter, 2 x 12 per 16-bit one; there are no moments to read in the first step."""
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
    away = Training(BUILDS["torch"], torch.bfloat16, tmp_path, slots=2)
    away.step(0)
    assert all(is_absent(group.master) and group.master.isnan().all() for group in away.groups)
    states = [value for state in away.base.state.values() for value in state.values() if value.dim()]
    assert len(states) == 2 * 16 and all(is_absent(value) and value.isnan().all() for value in states)
    store = away.store
    assert store is not None and away.optimizer.persistent_bytes() == store.buffer_bytes == 2 * 3 * (4 * CUT + 4096)
    full = sum(group.full.numel() * 2 for group in away.groups)
    assert sum(group.persistent_bytes() for group in away.groups) == full


def test_lent_values_can_be_edited_and_nested(tmp_path: Path) -> None:
    here, away = Training(BUILDS["torch"], torch.bfloat16), Training(BUILDS["torch"], torch.bfloat16, tmp_path)
    for training in (here, away):
        training.step(0)
        with training.optimizer.lent():
            training.groups[0].master[5:9] = 3.0
            shard = training.optimizer.state_shard(training.groups[1], "exp_avg")
            assert shard is not None
            training.optimizer.set_state_shard(training.groups[1], "exp_avg", shard * 2)
            assert training.groups[0].master[5] == 3.0, "still at hand"
        training.step(1)
    assert equal(here.values(), away.values())


def test_state_is_replaced_where_it_lives(tmp_path: Path) -> None:
    here, away = Training(BUILDS["torch"], torch.float32), Training(BUILDS["torch"], torch.float32, tmp_path)
    for training in (here, away):
        training.step(0)
        with training.optimizer.lent():
            training.optimizer.make_state(["exp_avg", "exp_avg_sq"], {"0": {"step": 4.0}}, lambda kind, name: (1,))
        training.step(1)
    assert equal(here.values(), away.values())
    with away.optimizer.lent():
        away.optimizer.make_state([], {}, lambda kind, name: None)
    assert away.optimizer.state_shard(away.groups[0], "exp_avg") is None
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
    assert away.store is not None and away.optimizer.persistent_bytes() == away.store.buffer_bytes + own


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
@pytest.mark.parametrize("slots", [1, 3])
def test_a_step_that_is_broken_off_is_followed_by_a_whole_one(tmp_path: Path, slots: int, name: str) -> None:
    """An exception, or Ctrl-C, between borrow and give_back: nothing that was read ahead for the old step is taken for the new one's."""
    here, away = Training(BUILDS[name], torch.bfloat16), Training(BUILDS[name], torch.bfloat16, tmp_path, slots=slots)
    for training in (here, away):
        training.step(0)
    assert away.store is not None
    batches = away.store.batches()
    away.store.borrow(next(batches))
    for training in (here, away):
        training.step(1)
    assert equal(here.values(), away.values())


@pytest.mark.parametrize("slots", [1, 2])
def test_a_wait_that_is_interrupted_loses_no_buffer_and_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    here = Training(BUILDS["fused"], torch.bfloat16)
    away = Training(BUILDS["fused"], torch.bfloat16, LateShelf(), slots=slots)
    for training in (here, away):
        training.step(0)
    once = LateTicket.wait

    def interrupt(ticket: LateTicket) -> None:
        monkeypatch.setattr(LateTicket, "wait", once)
        raise KeyboardInterrupt

    monkeypatch.setattr(LateTicket, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        away.step(1)
    for training in (here, away):
        training.step(1)
    assert equal(here.values(), away.values())


@pytest.mark.parametrize("between", ["nothing", "skipped", "looked at", "edited", "broken off", "cleared"])
@pytest.mark.parametrize("slots", [1, 3])
def test_what_is_read_ahead_of_a_step(tmp_path: Path, slots: int, between: str) -> None:
    """It is read once, also where the step is skipped; what is edited or forgotten meanwhile is not taken from before."""
    here, away = (
        Training(BUILDS["torch"], torch.bfloat16),
        Training(BUILDS["torch"], torch.bfloat16, tmp_path, slots=slots),
    )
    each = [12 * piece.numel for piece in away.optimizer.pieces]
    for training in (here, away):
        training.step(0)
        before = training.file.bytes_read if training.file is not None else 0
        if training.store is not None:
            training.store.wait()  # else it might find buffers that are being written
        training.optimizer.expect()
        if between == "skipped":
            training.optimizer.expect()
        if training.file is not None:
            assert training.file.bytes_read - before == sum(each[:slots])
        if between in ("looked at", "edited"):
            with training.optimizer.lent():
                training.groups[0].master.add_(1.0 if between == "edited" else 0.0)
        if between == "broken off":
            batches = training.store.batches() if training.store is not None else iter(())
            if training.store is not None:
                training.store.borrow(next(batches))
            training.optimizer.expect()
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
    """A write fails behind the step's back. Whoever asks twice must not get half a step the second time."""
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
    file = SwapFile(tmp_path, 1 << 16)
    masters = MasterSwap(file)
    for group in away.groups:
        masters.take(group)
    pieces = cut_pieces(away.grad_buffers, whole_tensors=False, most=CUT)
    state: dict[torch.Tensor, dict[str, Any]] = {piece.weight: {} for piece in pieces}
    store = SwappedStore(
        masters, pieces, state, {torch.float32: [StateColumn("q", torch.uint8)]}, slot_numel=CUT, slots=2
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
