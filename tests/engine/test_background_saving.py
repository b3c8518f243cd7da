"""Saves of an engine that training does not wait for: the bits that they hold, and faults in the
background."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_trial
from tests.engine.test_saving import ALL, FP16, engine_of, same, train, values_of
from tests.support.pool import Pools
from zero_trial.checkpoint import CheckpointReader, writer
from zero_trial.engine import saving
from zero_trial.errors import CheckpointError, TrialError

DECOUPLED = {"checkpoint": {"writer": {"decoupled": True}}}


def go_on_while_it_is_written(stage: str, config: dict[str, Any], folder: str, bound: int) -> None:
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
    one, other = (CheckpointReader(Path(folder) / tag) for tag in ("waits", "goes on"))
    other.verify()
    assert one.shapes == other.shapes
    for name in one.shapes:
        assert torch.equal(one.read(name).view(-1).view(torch.uint8), other.read(name).view(-1).view(torch.uint8)), name
    assert 0 <= saving.snapshot_bytes(engine) <= bound
    again = engine_of(stage, {**config, **DECOUPLED}, seed=9)
    torch.set_rng_state(random)
    again.load_checkpoint(folder, "goes on")
    assert same(before, values_of(again)) == []
    assert train(again, range(2, 4)) == trace
    engine.destroy()
    again.destroy()


@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3-free"])
def test_training_goes_on_and_the_checkpoint_has_the_bits_of_its_call(ranks: Pools, stage: str, tmp_path: Path) -> None:
    ranks(2).run(go_on_while_it_is_written, stage, ALL, str(tmp_path), 1 << 20)


def test_so_it_does_in_fp16_and_with_state_on_nvme(ranks: Pools, tmp_path: Path) -> None:
    nvme = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    ranks(2).run(go_on_while_it_is_written, "zero2", {**ALL, **FP16}, str(tmp_path / "fp16"), 1 << 20)
    bf16 = {**ALL, "bf16": {"enabled": True}, **nvme}
    # masters and moments are on the disk; what is frozen is not
    ranks(2).run(go_on_while_it_is_written, "zero2", bf16, str(tmp_path / "nvme"), 4 * 11 * 12)
    assert len(list((tmp_path / "nvme" / "goes on").glob("rank-0000?-nvme.safetensors"))) == 2


def test_the_key_and_the_argument(tmp_path: Path) -> None:
    engine = engine_of("zero2", {**ALL, **DECOUPLED})
    train(engine, range(1))
    assert engine._background._preparing is not None
    engine._background._preparing.join()
    prepared = engine._background.buffer_bytes
    for asynchronous, under_way in ((None, True), (False, False), (True, True)):
        engine.save_checkpoint(tmp_path, "a", asynchronous=asynchronous)
        assert engine.checkpoint_under_way == under_way
    engine.load_checkpoint(tmp_path)
    assert not engine.checkpoint_under_way
    assert engine._background.buffer_bytes == prepared > 0
    engine.save_checkpoint(tmp_path, "b")
    engine.abandon_checkpoint()
    assert not engine.checkpoint_under_way and engine.wait_for_checkpoint() is None
    engine.save_checkpoint(tmp_path, "b")
    engine.destroy()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert CheckpointReader(tmp_path / "b").manifest.step == 1


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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_is_raised_by_the_same_step_on_all(ranks: Pools, rank: int, tmp_path: Path) -> None:
    first, second = ranks(2).run(fail_on_one, str(tmp_path), rank)
    assert first == second
    assert "No space left" in first[0] and f"rank {rank}" in first[0] and first[1] < 30
    assert first[2] == ["first", "third"]


def refuse(folder: str) -> None:
    engine = engine_of("zero2", {**ALL, **DECOUPLED})
    with pytest.raises(TrialError):
        engine.save_checkpoint("")
    with pytest.raises(CheckpointError):
        engine.save_checkpoint(folder, "a/b")
    assert not engine.checkpoint_under_way
    engine.destroy()


def test_what_is_wrong_at_the_call_is_raised_there(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(refuse, str(tmp_path))


def test_an_engine_without_the_key_copies_nothing() -> None:
    engine = engine_of("zero1", ALL)
    train(engine, range(1))
    assert isinstance(engine, zero_trial.Engine) and not engine._background.prepared
    engine.destroy()
