"""Saves of an engine that training does not wait for: the bits that they hold, and faults in the
background."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_trial
from tests.engine.offloaded import differing, values_of
from tests.engine.test_saving import ALL, FP16, engine_of, train
from tests.support.pool import Pools
from zero_trial import zero
from zero_trial.checkpoint import background, writer
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.errors import CheckpointError

DECOUPLED = {"checkpoint": {"writer": {"decoupled": True}}}


def unlike(*folders: Path) -> list[str]:
    """Tensors of which two checkpoints have other bits."""
    one, other = map(CheckpointReader, folders)
    assert one.shapes == other.shapes
    bits = [{name: each.read(name).view(-1).view(torch.uint8) for name in one.shapes} for each in (one, other)]
    return differing(*bits)


def go_on_while_it_is_written(stage: str, config: dict[str, Any], folder: str) -> None:
    """Train on at once; another engine that loads the checkpoint makes the same steps."""
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.manual_seed(50 + rank)
    engine = engine_of(stage, {**config, **DECOUPLED})
    torch.manual_seed(70 + rank)
    train(engine, range(2))
    before, random = values_of(engine), torch.get_rng_state()
    engine.save_checkpoint(folder, "waits", asynchronous=False)
    engine.save_checkpoint(folder, "goes on")
    assert engine.checkpoint_under_way
    trace = train(engine, range(2, 4))
    engine.wait_for_checkpoint()
    assert not engine.checkpoint_under_way
    CheckpointReader(Path(folder) / "goes on").verify()
    assert unlike(Path(folder) / "waits", Path(folder) / "goes on") == []
    again = engine_of(stage, {**config, **DECOUPLED}, seed=9)
    torch.set_rng_state(random)
    again.load_checkpoint(folder, "goes on")
    assert differing(before, values_of(again)) == [] and train(again, range(2, 4)) == trace
    engine.destroy()
    again.destroy()


@pytest.mark.parametrize("stage", ["zero0", "zero3-free"])
def test_training_goes_on_and_the_checkpoint_has_the_bits_of_its_call(ranks: Pools, stage: str, tmp_path: Path) -> None:
    ranks(2).run(go_on_while_it_is_written, stage, ALL, str(tmp_path))


def test_so_it_does_in_fp16_and_with_state_on_nvme(ranks: Pools, tmp_path: Path) -> None:
    nvme = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    ranks(2).run(go_on_while_it_is_written, "zero2", {**ALL, **FP16}, str(tmp_path / "fp16"))
    bf16 = {**ALL, "bf16": {"enabled": True}, **nvme}
    ranks(2).run(go_on_while_it_is_written, "zero2", bf16, str(tmp_path / "nvme"))
    tensors = CheckpointReader(tmp_path / "nvme" / "goes on").manifest.tensors
    files = {
        piece.file for name, entry in tensors.items() if "state/" in name and entry.shape for piece in entry.pieces
    }
    assert files == {"rank-00000-nvme.safetensors", "rank-00001-nvme.safetensors"}


def test_the_key_and_the_argument(tmp_path: Path) -> None:
    """In a folder that Hugging Face's Trainer manages only the argument saves in background."""
    engine = engine_of("zero2", {**ALL, **DECOUPLED})
    train(engine, range(1))
    for asynchronous, under_way in ((None, True), (False, False), (True, True)):
        engine.save_checkpoint(tmp_path, "a", asynchronous=asynchronous)
        assert engine.checkpoint_under_way == under_way
        engine.save_checkpoint(tmp_path / "checkpoint-7", "a", asynchronous=asynchronous)
        assert engine.checkpoint_under_way == (asynchronous is True)
    engine.load_checkpoint(tmp_path)
    assert not engine.checkpoint_under_way
    engine.save_checkpoint(tmp_path, "b")
    engine.abandon_checkpoint()
    assert not engine.checkpoint_under_way and engine.wait_for_checkpoint() is None
    engine.save_checkpoint(tmp_path, "b")
    engine.destroy()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "checkpoint-7"]
    assert CheckpointReader(tmp_path / "b").manifest.step == 1


@contextmanager
def copied_late() -> Iterator[None]:
    """Let the background copy nothing for a tenth of a second, or until the end of the block."""
    end, finish = threading.Event(), background.Snapshot.finish

    def late(self: Any) -> None:
        end.wait(0.1)
        finish(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background.Snapshot, "finish", late)
        try:
            yield
        finally:
            end.set()


def edits(engine: zero_trial.Engine) -> dict[str, Callable[[], None]]:
    """What user code may do between two steps."""
    last = engine.module.last.weight
    whole = torch.full((4, 11), 0.25)

    def everywhere() -> None:
        for state in engine.optimizer.state.values():
            state["exp_avg"].mul_(0.5)

    def inside(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["exp_avg"].data.mul_(0.5)

    def gathered() -> None:
        with zero.GatheredParameters([last], modifier_rank=0):
            last.data.fill_(0.5)

    def clamped() -> None:
        for param in engine.module.parameters():
            param.data.clamp_(-0.1, 0.1)

    def added() -> None:
        for param in engine.module.parameters():
            param.add_(0.125)

    found = {
        "a moment": lambda: zero.safe_set_full_optimizer_state(last, whole, "exp_avg"),
        "a part of a moment": lambda: zero.safe_set_local_optimizer_state(
            last, torch.ones_like(zero.safe_get_local_optimizer_state(last, "exp_avg_sq")), "exp_avg_sq"
        ),
        "a master": lambda: zero.safe_set_full_fp32_param(last, whole),
        "all moments": everywhere,
        "of the inner optimizer": lambda: inside(engine.optimizer.optimizer),
        "of the basic optimizer": lambda: inside(engine.basic_optimizer),
        "gathered parameters": gathered,
        "optimizer.load_state_dict": lambda: engine.optimizer.load_state_dict(engine.optimizer.state_dict()),
        "averages": lambda: engine.ema_weights().__enter__() if engine.optimizer.ema is not None else None,
    }
    if engine.zero_optimization_stage() < 3:
        found |= {"param.data.clamp_": clamped, "param.add_": added}
    return found


def edit_before_it_is_copied(stage: str, config: dict[str, Any], folder: str) -> None:
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    engine = engine_of(stage, {**ALL, **config, **DECOUPLED, "ema": {"decay": 0.5}})
    train(engine, range(2))
    for number, (name, edit) in enumerate({"nothing": lambda: None, **edits(engine)}.items()):
        engine.save_checkpoint(folder, f"waits {number}", asynchronous=False)
        with copied_late():
            engine.save_checkpoint(folder, f"goes on {number}")
            with torch.no_grad():
                edit()
            if name != "averages":
                train(engine, range(2, 3))
            engine.wait_for_checkpoint()
        assert unlike(*(Path(folder) / f"{tag} {number}" for tag in ("waits", "goes on"))) == [], name
    engine.destroy()


@pytest.mark.parametrize(("stage", "config"), [("zero2", {}), ("zero3-free", {"bf16": {"enabled": True}})])
def test_updates_and_edits_wait_for_copies(ranks: Pools, stage: str, config: dict[str, Any], tmp_path: Path) -> None:
    ranks(2).run(edit_before_it_is_copied, stage, config, str(tmp_path))


def fail_on_one(folder: str, rank: int) -> tuple[str, int, list[str]]:
    """The disk of one rank takes no tensors in the background; training can go on."""
    engine = engine_of("zero2", {**ALL, **DECOUPLED})
    train(engine, range(1))
    engine.save_checkpoint(folder, "first", asynchronous=False)
    whole = writer.DurableFiles.write

    def full(self: Any, path: Path, chunks: Any) -> Any:
        if engine.global_rank == rank and path.suffix == ".safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(self, path, chunks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer.DurableFiles, "write", full)
        engine.save_checkpoint(folder, "second")
        with pytest.raises(CheckpointError) as raised:
            train(engine, range(1, 30))
    steps = engine.global_steps
    train(engine, range(3))
    engine.save_checkpoint(folder, "third")
    engine.destroy()
    return str(raised.value), steps, sorted(path.name for path in Path(folder).iterdir())


def test_a_full_disk_of_one_rank_is_raised_by_the_same_step_on_all(ranks: Pools, tmp_path: Path) -> None:
    first, second = ranks(2).run(fail_on_one, str(tmp_path), 1)
    assert first == second and "No space left" in first[0] and "rank 1" in first[0] and first[1] < 30
    assert first[2] == ["first", "third"]
