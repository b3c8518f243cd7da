"""Tests for zero_trial/engine/offload_config.py: state on NVMe trains the same bits, moves the
bytes that it should, and says what it cannot do."""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.engine.offloaded import (
    PLAIN,
    PRECISIONS,
    Net,
    alike,
    differing,
    engine_of,
    loss,
    offloaded_zero,
    train,
    trained,
    two_groups,
    values_of,
)
from tests.support.dense import STAGES, Case, Turn, build_engine
from tests.support.device import device
from tests.support.fresh_ranks import run_fresh
from tests.support.pipelines import batches, layers, make_engine
from tests.support.pool import Pools
from zero_trial.device import accelerator
from zero_trial.engine.offload_config import offload_line
from zero_trial.errors import ConfigError, DoesNotFit, StorageError
from zero_trial.sharding.offload.region_file import RegionFile
from zero_trial.sharding.offload.update_store import UpdateStore


def spill_file(engine: Any) -> RegionFile:
    store = engine.optimizer.store
    assert isinstance(store, UpdateStore) and isinstance(store.homes.masters, RegionFile)
    return store.homes.masters


@pytest.mark.parametrize(("precision", "each"), [("fp32", 8), ("bf16", 12)])
def test_bytes_per_step_and_in_memory(tmp_path: Path, precision: str, each: int) -> None:
    """2 x 12 bytes per 16-bit parameter with Adam, 2 x 8 per fp32 one, which is its own master."""
    engine = engine_of("zero2", PRECISIONS[precision], str(tmp_path))
    file = spill_file(engine)
    count = sum(unit.layout.shard_numel for unit in engine.sharded.groups if unit.trainable)
    train(engine, range(1))
    before = file.bytes_read, file.bytes_written
    train(engine, range(1, 4))
    assert (file.bytes_read - before[0], file.bytes_written - before[1]) == (3 * each * count, 3 * each * count)
    kept, width = engine.persistent_bytes(), 4 if precision == "fp32" else 2
    assert kept["parameters"] == width * count, "no masters"
    assert kept["optimizer"] == sum(buffer.numel() for buffer in engine.optimizer.store.buffers)
    before = file.bytes_read, file.bytes_written
    engine.optimizer.store.wait()  # else backward might find buffers that are being written
    engine.backward(loss(engine, Turn(9, 0, 0)) * float("nan"))
    engine.step()
    engine.backward(loss(engine, Turn(9, 1, 0)))
    engine.step()
    assert engine.skipped_steps == 1
    ahead = sum(each * piece.numel for piece in engine.optimizer.pieces[:3])
    assert (file.bytes_read - before[0], file.bytes_written - before[1]) == (ahead, 0), "what was read during backward"
    train(engine, range(9, 10))
    moved = file.bytes_read - before[0], file.bytes_written - before[1]
    assert moved == (each * count, each * count), "the step after one that was skipped does not read that again"


@pytest.mark.parametrize(("stage", "precision"), [("zero1", "fp32"), ("zero3", "bf16")])
def test_a_part_of_the_state_goes_to_the_file(tmp_path: Path, stage: str, precision: str) -> None:
    """ratio: whole units go while they fit; the others' state stays, and the bits are the same."""
    each = 8 if precision == "fp32" else 12
    found: dict[float, int] = {}
    traces = []
    for ratio in (None, 0.0, 0.5, 1.0):
        section = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2, "ratio": ratio}
        given = {"offload_optimizer": section, "sub_group_size": 4096} if ratio is not None else {}
        case = Case(Net, loss, groups=two_groups, config=PLAIN | PRECISIONS[precision])
        engine = build_engine(case, STAGES[stage] | {"reduce_bucket_size": 10_000} | given)
        torch.manual_seed(6)
        traces.append((train(engine, range(2)), values_of(engine)))
        if ratio is not None:
            file = spill_file(engine)
            before = file.bytes_read, file.bytes_written
            train(engine, range(2, 3))
            found[ratio] = file.bytes_written - before[1]
            assert file.bytes_read - before[0] == found[ratio]
            resident_elements = engine.persistent_bytes()["optimizer"] - sum(
                buffer.numel() for buffer in engine.optimizer.store.buffers
            )
            count = sum(unit.layout.shard_numel for unit in engine.sharded.groups if unit.trainable)
            moments = found[ratio] * 8 // each
            assert resident_elements == 8 * count - moments, "what is not in the file is in memory"
    assert all(trace[0] == traces[0][0] and differing(trace[1], traces[0][1]) == [] for trace in traces)
    assert found[0.0] == 0 and found[1.0] == each * count
    assert 0.2 * found[1.0] < found[0.5] <= 0.5 * found[1.0]


def test_host_memory_is_where_it_lives_already(caplog: pytest.LogCaptureFixture) -> None:
    """offload_param and offload_optimizer with device cpu, on a rank that computes there."""
    given = {"offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu"}}
    case = Case(Net, loss)
    with caplog.at_level(logging.INFO, "zero_trial"):
        away = build_engine(case, STAGES["zero3"] | given)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("offload")]
    assert said == ["offload: optimizer state and parameters already in host memory, because this rank computes there"]
    here = build_engine(case, STAGES["zero3"])
    for engine in (here, away):
        torch.manual_seed(3)
        engine.trace = train(engine, range(2))
    assert here.trace == away.trace and differing(values_of(here), values_of(away)) == []
    assert here.persistent_bytes() == away.persistent_bytes()


def amsgrad(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)


def halved(base: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(base, 0.5)


OPTIMIZERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Lion": ({"type": "Lion", "params": {"lr": 1e-3}}, {}),
    "RMSprop": ({"type": "RMSprop", "params": {"lr": 1e-3, "momentum": 0.9}}, {}),
    "client": ({}, {"optimizer": amsgrad, "lr_scheduler": halved}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_elementwise_optimizer(tmp_path: Path, name: str) -> None:
    traces = []
    for folder in (None, str(tmp_path)):
        optimizer, given = OPTIMIZERS[name]
        config = {"bf16": {"enabled": True}} | ({"optimizer": optimizer} if optimizer else {})
        engine = engine_of("zero2", config, folder, **given)
        torch.manual_seed(4)
        traces.append((train(engine, range(3)), values_of(engine), engine.get_lr()))
    assert traces[0][0] == traces[1][0] and differing(traces[0][1], traces[1][1]) == []
    assert traces[0][2] == traces[1][2] == [1.25e-3 if name == "client" else 1e-3] * 2


@pytest.mark.parametrize("name", ["Lamb", "Adafactor"])
def test_optimizers_that_need_whole_tensors_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine_of("zero0", {"optimizer": {"type": name, "params": {"lr": 1e-3}}}, str(tmp_path))
    assert str(error.value).startswith("zero_optimization.offload_optimizer.device: this optimizer ")
    assert "whole tensors" in str(error.value) and ': got "nvme"' in str(error.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("place", ["cpu", "nvme"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_away_from_a_gpu(tmp_path: Path, precision: str, place: str) -> None:
    """On a GPU: what is trained differs from training without offload by no more than CPU and CUDA
    arithmetic of the update do."""
    results = []
    for section in (None, {"device": place, "nvme_path": str(tmp_path), "buffer_count": 2}):
        given = {"offload_optimizer": section} if section is not None else {}
        case = Case(
            lambda: Net().cuda(), lambda model, turn: (model(turn.normal(4, 6).cuda()) - 1).float().square().mean()
        )
        case = replace(case, config=PRECISIONS[precision])
        engine = build_engine(case, STAGES["zero2"] | given)
        before = torch.cuda.memory_allocated()
        torch.manual_seed(3)
        for step in range(4):
            engine.backward(case.loss(engine, Turn(step, 0, 0)))
            engine.step()
        results.append((values_of(engine), before))
        engine.destroy()
    for name, value in results[0][0].items():
        assert torch.allclose(value.float(), results[1][0][name].float(), rtol=2e-2, atol=1e-4), name


def no_folder_on_one_rank(folder: str) -> str:
    rank = torch.distributed.get_rank()
    try:
        engine_of("zero1", {}, folder if rank == 0 else f"{folder}/none")
    except (ConfigError, StorageError) as error:
        return f"{type(error).__name__}: {error}"
    return "built"


def test_a_folder_that_one_rank_lacks_stops_all(ranks: Pools, tmp_path: Path) -> None:
    first, second = ranks(2).run(no_folder_on_one_rank, str(tmp_path))
    assert second.startswith("ConfigError: zero_optimization.offload_optimizer.nvme_path: there is no such folder")
    assert first.startswith(
        "StorageError: file for optimizer state: another rank has no place for its state: got rank 1: zero_opt"
    )


def test_room_is_found_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        DoesNotFit, match=r"the disk has not enough room for offloaded state: got .* free \(No space left"
    ):
        engine_of("zero1", {"bf16": {"enabled": True}}, str(tmp_path))


def test_a_disk_that_fails_in_training_ends_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("zero1", {}, str(tmp_path))
    train(engine, range(1))

    def broken(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", broken)
        with pytest.raises(StorageError, match="offloaded state could not be read or written"):
            train(engine, range(1, 2))


def peak_of(folder: str) -> tuple[int, int, int]:
    """Elements, bytes of the buffers, and the peak of this process."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16) for _ in range(2)))
    model.to_empty(device="cpu")
    for param in model.parameters():
        param.data.fill_(1e-4)
    offload = {"device": "nvme", "nvme_path": folder, "buffer_count": 3} if folder else {"device": "none"}
    sizes = {"reduce_bucket_size": 1 << 24, "sub_group_size": 1 << 20}
    config = {"train_batch_size": 2, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    config["zero_optimization"] = {"stage": 2, **sizes, "offload_optimizer": offload}
    engine = zero_trial.initialize(model=model, config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4096)).float().square().mean())
        engine.step()
    ring = sum(buffer.numel() for buffer in engine.optimizer.store.buffers)
    status = Path("/proc/self/status").read_text()  # getrusage would also count the process that started this one
    return 2 * 4096 * 4096, ring, int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_a_rank_needs_12_bytes_less_for_each_parameter(tmp_path: Path) -> None:
    """The process's own peak, model building included: 34 M parameters, 403 MB of masters and
    moments, 38 MB of buffers.

    Tensors are so large that the allocator maps each of them: what is freed is gone, and the peak
    is what was needed. On a busy machine a parameter's masters are still being written while those
    of the next one are made: the least of three peaks counts.
    """
    count, _, here = run_fresh(1, peak_of, "")[0].value
    saved = 0
    for _ in range(3):
        _, ring, peak = run_fresh(1, peak_of, str(tmp_path))[0].value
        assert ring == 3 * 3 * (4 * (1 << 20) + 4096)
        saved = max(saved, here - peak)
        if saved >= 0.95 * (12 * count - ring):
            return
    raise AssertionError(f"{saved / count:.2f} bytes per parameter")


def test_an_engine_that_is_destroyed_gives_the_disk_back(tmp_path: Path) -> None:
    engine = engine_of("zero2", PRECISIONS["bf16"], str(tmp_path))
    train(engine, range(1))
    descriptor = spill_file(engine)._files[0].cached
    assert os.fstat(descriptor).st_size > 0
    engine.destroy()
    engine.destroy()
    with pytest.raises(OSError):
        os.fstat(descriptor)
    assert engine.module(torch.ones(1, 6).bfloat16()).isfinite().all()


def run_pipelines(stage: str, schedule: str, params: str, state: str, folder: str) -> int:
    """Two pipeline stages with a tied weight; each rank has a file of its own for what its layers
    offload."""
    traces = []
    for places in (["none", "none"], [params, state]):
        zero_config = offloaded_zero(stage, *places, folder)
        more = {"bf16": {"enabled": True}, "pipeline": {"schedule": schedule}}
        engine = make_engine(layers(blocks=3), 2, zero_config, 2, **more)
        losses = [engine.train_batch(batches(0, 2, 1, start=step)).item() for step in range(3)]
        pieces = len(engine.optimizer.pieces)
        away = any(group.offloaded is not None for group in engine.sharded.groups)
        assert away == (places[0] == "nvme"), places
        traces.append((losses, {name: value.clone() for name, value in engine.module_state_dict().items()}))
        engine.destroy()
    assert traces[0][0] == traces[1][0] and differing(traces[0][1], traces[1][1]) == []
    return pieces


@pytest.mark.parametrize(
    ("stage", "schedule", "params", "state"),
    [
        ("zero1", "1f1b", "none", "nvme"),
        ("zero3", "zb_h1", "nvme", "nvme"),
        ("zero2", "interleaved", "nvme", "none"),
    ],
)
def test_a_pipeline_of_two_stages(
    ranks: Pools, tmp_path: Path, stage: str, schedule: str, params: str, state: str
) -> None:
    found = ranks(2).run(run_pipelines, stage, schedule, params, state, str(tmp_path))
    assert all(count > 1 for count in found)


def test_the_line_at_the_start(tmp_path: Path) -> None:
    line = offload_line(engine_of("zero1", {}, str(tmp_path)))
    assert line is not None and line.startswith("offload: 0.") and "; 3 buffers of 0.0 MiB" in line
    assert f"MiB of masters and optimizer state per rank in {tmp_path} (" in line
    assert offload_line(engine_of("zero1", {}, None)) is None


# --- tests that the bits do not depend on where parameters and optimizer state live ---------------


# ZeRO stage, place of parameters, place of optimizer state, precision, micro-batches
Cell = tuple[str, str, str, str, int]
# Each pair of two values of any two columns. fp32 parameters are updated on the host, 16-bit ones
# where their state is.
PAIRWISE: list[Cell] = [
    ("zero0", "cpu", "none", "bf16", 1),
    ("zero0", "nvme", "cpu", "fp32", 4),
    ("zero0", "nvme", "nvme", "fp16", 1),
    ("zero1", "cpu", "cpu", "bf16", 1),
    ("zero1", "cpu", "nvme", "fp16", 4),
    ("zero1", "nvme", "none", "fp32", 1),
    ("zero2", "cpu", "cpu", "fp16", 1),
    ("zero2", "cpu", "nvme", "fp32", 1),
    ("zero2", "nvme", "none", "bf16", 4),
    ("zero3", "cpu", "cpu", "fp32", 1),
    ("zero3", "nvme", "none", "fp16", 1),
    ("zero3", "nvme", "nvme", "bf16", 4),
]
EVERYTHING: list[Cell] = [
    *itertools.product(
        ("zero0", "zero1", "zero2", "zero3"), ("cpu", "nvme"), ("none", "cpu", "nvme"), PRECISIONS, (1, 4)
    )
]


class SmallNet(nn.Module):
    """As small as a model can be that has all that differs: tied, frozen and empty parameters, one
    that stays, dropout, and weights of more than one buffer that fill no block of a disk."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 67)
        self.blocks = nn.ModuleList([nn.Linear(67, 67), nn.Linear(67, 67, bias=False)])
        self.blocks[1].weight = self.blocks[0].weight
        self.frozen = nn.Linear(67, 67, bias=False).requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.last = nn.Linear(67, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.blocks[0](self.first(x)))
        x = x + self.blocks[1](nn.functional.dropout(x, 0.2))
        return self.last(self.frozen(x))


def engine_at(cell: Cell, folder: Any) -> Any:
    stage, params, state, precision, micro_batches = cell
    zero_config = offloaded_zero(stage, params, state, folder)
    if micro_batches > 1:
        zero_config.pop("reshard_after", None)
    config = {"gradient_accumulation_steps": micro_batches, "gradient_clipping": 0.5} | PRECISIONS[precision]
    return build_engine(Case(SmallNet, loss, groups=two_groups, config=config), zero_config)


def run_cells(cells: list[Cell], folder: str) -> list[str]:
    """What differs from the run without offload, of all cells."""
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    wrong = []
    for cell in cells:
        stage, params, _, precision, micro_batches = cell
        trace, values, away = run_cell(cell, folder)
        known = reference("zero3" if stage == "zero3" else "zero0", precision, micro_batches)
        names = differing(known[1], values)
        if not alike(trace, known[0]) or names:
            wrong.append(f"{cell}: {trace} instead of {known[0]}, {names}")
        leaves = params == "nvme" or accelerator() is not None
        if away < 3 if leaves else away:
            wrong.append(f"{cell}: {away} groups are away")
    return wrong


@functools.cache
def reference(stage: str, precision: str, micro_batches: int) -> Any:
    """The run without offload, once per process. Stages 1 and 2 have the bits of stage 0; stage 3
    adds the gradients of several micro-batches in another order."""
    return run_cell((stage, "none", "none", precision, micro_batches), None)


def run_cell(cell: Cell, folder: str | None) -> tuple[Any, dict[str, torch.Tensor], int]:
    """One step, a second one that uses what the first has left, and where that overflows a
    third."""
    found = trained(engine_at(cell, folder), 3 if cell[3] == "fp16" else 2)
    if accelerator() is not None:  # forget the streams of this engine, which each launch would be compared with
        device.use().reset()
        torch.standin.synchronize()
    return found


@pytest.mark.smoke
@pytest.mark.parametrize(("count", "cells"), [(1, PAIRWISE[2::4]), (2, PAIRWISE), (4, PAIRWISE[3::4])])
def test_every_place(ranks: Pools, tmp_path: Path, count: int, cells: list[Cell]) -> None:
    assert ranks(count).run(run_cells, cells, str(tmp_path)) == [[]] * count


@pytest.mark.smoke
@pytest.mark.parametrize(("count", "cells"), [(1, PAIRWISE[1::4]), (2, PAIRWISE), (4, PAIRWISE[2::4])])
def test_every_place_from_a_device(devices: Pools, tmp_path: Path, count: int, cells: list[Cell]) -> None:
    assert devices(count).run(run_cells, cells, str(tmp_path)) == [[]] * count


@pytest.mark.extended
@pytest.mark.parametrize("count", [1, 2, 4])
def test_all_places(ranks: Pools, devices: Pools, tmp_path: Path, count: int) -> None:
    for pools in (ranks, devices):
        assert pools(count).run(run_cells, EVERYTHING, str(tmp_path), timeout=900) == [[]] * count
