"""Tests for zero_trial/sharding/offload/update_store.py."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.sharding.late_region import LateRegion, LateTransfer
from tests.sharding.parts import freeing, make_grad_buffer, make_group, parameters, run_update
from zero_trial.errors import StorageError
from zero_trial.ops.optimizers.fused import FusedAdam, FusedLion
from zero_trial.sharding.offload.copies import Copier
from zero_trial.sharding.offload.homes import Homes
from zero_trial.sharding.offload.region_file import BLOCK, DiskFailure, RegionFile
from zero_trial.sharding.offload.regions import CUT
from zero_trial.sharding.offload.update_store import OffloadedPiece, StateColumn, UpdateStore, state_columns
from zero_trial.sharding.optimizer import ShardedOptimizer
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.pieces import cut_pieces
from zero_trial.sharding.plan import Home

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
    """Some steps of an optimizer on groups, in memory or through a file (``folder``)."""

    def __init__(
        self,
        build: Any,
        dtype: torch.dtype,
        folder: Path | LateRegion | None = None,
        *,
        buffers: int = 3,
        opt_groups: int = 1,
    ) -> None:
        self.groups = groups(dtype, opt_groups)
        self.grad_buffers = [make_grad_buffer(group)[0] for group in self.groups]
        self.file: Any = None
        failure = DiskFailure()
        if folder is not None:
            late = isinstance(folder, LateRegion)
            self.file = folder if late else RegionFile([folder], 1 << 16, block=1 << 14, failure=failure)
        homes = Homes(masters=self.file, failure=failure)
        for group in self.groups if folder is not None else ():
            homes.swap_out(group)
        pieces: Any = cut_pieces(
            self.grad_buffers, **({"most": CUT, "make": OffloadedPiece} if folder is not None else {})
        )
        self.base = build(
            [
                {
                    "params": [piece.weight for piece in pieces if piece.opt_group == opt_group],
                    "lr": 0.01 * (1 + opt_group),
                }
                for opt_group in range(opt_groups)
            ]
        )
        self.store: UpdateStore | None = None
        if folder is not None:
            columns = {torch.float32: state_columns(self.base)}
            self.store = UpdateStore(homes, pieces, self.base.state, columns, buffer_numel=CUT, buffer_count=buffers)
        self.optimizer = ShardedOptimizer(self.base, pieces, store=self.store)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for grad_buffer in self.grad_buffers:
            grad_buffer.reduced().copy_(torch.randn(grad_buffer.shard.shape, generator=generator))
        freeing().publish(self.groups, self.optimizer.updated, self.optimizer.update(0.5))

    def values(self) -> list[torch.Tensor]:
        states: dict[tuple[str, str], list[torch.Tensor]] = {}
        with self.optimizer.state_by_tensor.lent():
            for view in self.optimizer.state_by_tensor.views():
                states.setdefault((view.name, view.kind), []).append(view.tensor)
            return (
                [group.shard.clone() for group in self.groups]
                + [group.master.clone() for group in self.groups]
                + [torch.cat(parts) for _, parts in sorted(states.items())]
            )


def equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) > 4 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


BUILDS = {
    "torch": lambda opt_groups: torch.optim.AdamW(opt_groups, weight_decay=0.1),
    "fused": lambda opt_groups: FusedAdam(opt_groups, weight_decay=0.1),
    "momentum": lambda opt_groups: torch.optim.SGD(opt_groups, momentum=0.9),
    "eager": torch.optim.Adagrad,
}


def pair(name: str, folder: Path | LateRegion, buffers: int) -> tuple[Training, Training]:
    """The same training in memory and through a file."""
    away = Training(BUILDS[name], torch.bfloat16, folder, buffers=buffers)
    return Training(BUILDS[name], torch.bfloat16), away


@pytest.mark.parametrize(
    ("name", "dtype", "opt_groups"),
    [
        ("torch", torch.float32, 2),
        ("torch", torch.bfloat16, 1),
        ("fused", torch.float32, 1),
        ("fused", torch.bfloat16, 2),
        ("momentum", torch.bfloat16, 2),
        ("eager", torch.float32, 1),
    ],
    ids=str,
)
def test_the_same_bits_as_in_memory(tmp_path: Path, name: str, dtype: torch.dtype, opt_groups: int) -> None:
    here = Training(BUILDS[name], dtype, opt_groups=opt_groups)
    away = Training(BUILDS[name], dtype, tmp_path, opt_groups=opt_groups)
    for number in range(3):
        here.step(number)
        away.step(number)
    assert equal(here.values(), away.values()) and len(away.optimizer.pieces) == (16 if opt_groups == 1 else 18)


@pytest.mark.parametrize(("name", "buffers"), [("fused", 1), ("torch", 2), ("fused", 3), ("torch", 40)])
def test_nothing_is_used_before_it_is_there(name: str, buffers: int) -> None:
    """With a disk that is as late as it may be: what was written is waited for before it is read,
    and before its buffer is used again."""
    here, away = pair(name, LateRegion(), buffers)
    for number in range(4):
        here.step(number)
        away.step(number)
        assert away.store is not None and len(away.store.buffers) == buffers
    assert equal(here.values(), away.values())


def lent_and_edited(training: Training) -> None:
    with training.optimizer.state_by_tensor.lent():
        training.groups[0].master[5:9] = 3.0
        group = training.groups[1]
        with training.optimizer.state_by_tensor.slices(group, group.layout.slots[0], "exp_avg") as slices:
            for each in slices:
                each.tensor.mul_(2)
        assert slices and training.groups[0].master[5] == 3.0, "still at hand"


def state_replaced(training: Training) -> None:
    with training.optimizer.state_by_tensor.lent():
        training.optimizer.state_by_tensor.make_state(
            ["exp_avg", "exp_avg_sq"], {"0": {"step": 4.0}}, lambda kind, name: (1,)
        )


def state_without_a_column(training: Training) -> None:
    """It stays in memory."""
    for piece in training.optimizer.pieces:
        training.base.state[piece.weight]["own"] = torch.full_like(piece.weight, 2.0)


def step_broken_off(training: Training) -> None:
    """An exception, or Ctrl-C, between borrow and give_back: nothing that was read ahead for the
    old step is taken for the new one's."""
    if training.store is not None:
        training.store.borrow(next(training.store.batches()))


@pytest.mark.parametrize("buffers", [1, 3])
@pytest.mark.parametrize("between", [lent_and_edited, state_replaced, state_without_a_column, step_broken_off])
def test_between_two_steps(tmp_path: Path, between: Callable[[Training], None], buffers: int) -> None:
    here, away = pair("torch", tmp_path, buffers)
    for training in (here, away):
        training.step(0)
        between(training)
        training.step(1)
    assert equal(here.values(), away.values()) and away.store is not None
    states = away.optimizer.state_by_tensor
    own = sum(piece.numel * 4 for piece in away.optimizer.pieces) if between is state_without_a_column else 0
    assert states.persistent_bytes() == sum(buffer.numel() for buffer in away.store.buffers) + own
    with states.lent():
        states.make_state([], {}, lambda kind, name: None)
    assert not states.has("exp_avg")
    away.step(2)


@pytest.mark.parametrize("buffers", [1, 2])
def test_a_wait_that_is_interrupted_loses_no_buffer_and_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffers: int
) -> None:
    here, away = pair("fused", LateRegion(), buffers)
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


@pytest.mark.parametrize(
    ("between", "buffers"),
    [("nothing", 1), ("skipped", 3), ("looked at", 3), ("edited", 1), ("edited", 3), ("broken off", 3), ("cleared", 1)],
)
def test_what_is_read_ahead_of_a_step(tmp_path: Path, buffers: int, between: str) -> None:
    """It is read once, also where the step is skipped; what is edited or forgotten meanwhile is not
    taken from before."""
    here, away = pair("torch", tmp_path, buffers)
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


def test_edits_that_do_not_reach_the_disk_are_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = Training(BUILDS["torch"], torch.bfloat16, tmp_path)

    class Broken(mmap.mmap):
        def flush(self, *span: int) -> None:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", Broken)
        with pytest.raises(StorageError, match=r"could not be read or written: got .*Input/output error"):
            away.values()
    with pytest.raises(StorageError, match="the disk failed, and offloaded state is lost"):
        away.step(1)


def test_columns_of_one_byte(tmp_path: Path) -> None:
    away = Training(BUILDS["momentum"], torch.bfloat16)
    homes = Homes(masters=RegionFile([tmp_path], 1 << 16), failure=DiskFailure())
    for group in away.groups:
        homes.swap_out(group)
    pieces: Any = cut_pieces(away.grad_buffers, most=CUT, make=OffloadedPiece)
    state: dict[torch.Tensor, dict[str, Any]] = {piece.weight: {} for piece in pieces}
    columns = {torch.float32: [StateColumn("q", torch.uint8)]}
    store = UpdateStore(homes, pieces, state, columns, buffer_numel=CUT, buffer_count=2)
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


@pytest.mark.parametrize(
    ("dtype", "state", "params", "expected"),
    [
        (torch.bfloat16, True, False, (12, 12, 0, 0)),
        (torch.bfloat16, False, True, (0, 0, 0, 2)),
        (torch.bfloat16, True, True, (12, 12, 0, 2)),
        (torch.float32, True, False, (8, 8, 0, 0)),
        (torch.float32, False, True, (0, 0, 4, 4)),
        (torch.float32, True, True, (8, 8, 4, 4)),
    ],
)
def test_what_passes_to_which_file(
    tmp_path: Path, dtype: torch.dtype, state: bool, params: bool, expected: tuple[int, ...]
) -> None:
    """Bytes per element that the second step reads from and writes to the file of masters and
    state, and that of parameters: an fp32 parameter is its own master. In the first step there are
    no moments to read. The pieces begin inside blocks of the disk, and their middle goes past the
    page cache all the same."""
    group = make_group(parameters([(5000,)]), stage=3, dtype=dtype, home=Home.NVME if params else Home.DEVICE)
    group.runs = {0: (0, 96), 1: (96, group.layout.numel)}  # type: ignore[assignment]
    files = [RegionFile([tmp_path], 1 << 16), RegionFile([tmp_path], 1 << 16)]
    homes = Homes(masters=files[0] if state else None, params=files[1] if params else None, failure=DiskFailure())
    homes.swap_out(group)
    grad_buffer = make_grad_buffer(group)[0]
    pieces: Any = cut_pieces([grad_buffer], most=CUT, make=OffloadedPiece)
    base = FusedAdam([{"params": [p.weight for p in pieces if p.opt_group == number]} for number in (0, 1)])
    columns = {torch.float32: state_columns(base)}
    store = UpdateStore(homes, pieces, base.state, columns, buffer_numel=CUT, buffer_count=2)
    optimizer = ShardedOptimizer(base, pieces, store=store)
    for moments in (0, 8 * state):
        store.wait()
        before = [count for file in files for count in (file.bytes_read, file.bytes_written)]
        grad_buffer.reduced().fill_(1.0)
        run_update(optimizer, 1.0)
        after = [count for file in files for count in (file.bytes_read, file.bytes_written)]
        moved = [(now - once) / group.layout.shard_numel for now, once in zip(after, before, strict=True)]
        assert moved == [expected[0] - 8 * state + moments, *expected[1:]]
    slots = [slot for piece in pieces for slot in piece.slots.values()]
    assert all(slot.offset % BLOCK == slot.start % BLOCK for slot in slots)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pinned", [True, False])
def test_copies_next_to_the_devices_work(pinned: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    copier = Copier(device, pinned=pinned)
    assert copier.buffer(64).is_pinned() is pinned
    on_host = copier.buffer(4 << 20).view(torch.float32)
    for number in range(5):
        made = torch.arange(1 << 20, device=device, dtype=torch.float32) + number
        copier.copy(made, on_host).wait()
        assert torch.equal(on_host, made.cpu())
        on_host.mul_(2)
        back = torch.empty_like(made)
        copy = copier.copy(on_host, back)
        copy.order()
        doubled = back + 0  # given to the device after the copy, so it sees it
        copy.wait()
        assert copy.done() and torch.equal(doubled, made * 2)


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
        (lambda params: torch.optim.RMSprop(params, momentum=0.9), ["square_avg", "momentum_buffer"]),
        (FusedAdam, ["exp_avg", "exp_avg_sq"]),
        (FusedLion, ["exp_avg"]),
    ],
)
def test_the_state_that_an_optimizer_will_have(build: Any, kinds: list[str]) -> None:
    base = build(weights())
    state, values = (
        dict(base.state),
        [weight.clone() for opt_group in base.param_groups for weight in opt_group["params"]],
    )
    assert state_columns(base) == [StateColumn(kind, torch.float32) for kind in kinds]
    assert dict(base.state) == state and not getattr(base, "_opt_called", False), "nothing is left behind"
    after = [weight for opt_group in base.param_groups for weight in opt_group["params"]]
    assert all(torch.equal(a, b) for a, b in zip(after, values, strict=True))


def test_state_of_another_width() -> None:
    class Small(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:
            for opt_group in self.param_groups:
                for weight in opt_group["params"]:
                    self.state[weight] = {"q": torch.zeros_like(weight, dtype=torch.uint8), "rows": torch.zeros(3)}

    assert state_columns(Small(weights())) == [StateColumn("q", torch.uint8)]
