"""State and parameters on NVMe or in the host's memory: the bits of training without offload, the
bytes that move and that stay, and what is refused."""

from __future__ import annotations

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
from zero_trial import zero
from zero_trial.device import accelerator
from zero_trial.engine.offload_config import offload_line
from zero_trial.errors import CheckpointError, ConfigError, StorageError
from zero_trial.sharding.plan import Home


def engine_away(stage: str, config: dict[str, Any], folder: str | None, state: str = "none", **params: Any) -> Any:
    """Parameters and states go to ``folder``; without one they stay."""
    zero_config = dict(STAGES[stage]) | {"sub_group_size": 4096}
    if folder is not None:
        zero_config = {"param_persistence_threshold": 0, "module_granularity_threshold": 1} | zero_config
        zero_config["offload_param"] = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0} | params
        zero_config["offload_optimizer"] = {"device": state, "nvme_path": folder, "buffer_count": 2}
    return build_engine(Case(Net, loss, groups=two_groups, config=PLAIN | config), zero_config)


def away(engine: Any) -> list[Any]:
    return [group for group in engine.sharded.groups if group.offloaded is not None]


def test_bytes_per_step_and_in_memory(tmp_path: Path) -> None:
    """Adam in bf16 reads and writes 12 bytes per parameter; an fp32 parameter, its own master, is
    in the file of parameters. What was read ahead for a step that is skipped is not read again."""
    engine = engine_of("zero2", PRECISIONS["bf16"], str(tmp_path))
    file, store = engine.optimizer.store.homes.masters, engine.optimizer.store
    count = sum(group.layout.shard_numel for group in engine.sharded.groups if group.trainable)
    train(engine, range(1))
    before = file.bytes_read, file.bytes_written
    train(engine, range(1, 4))
    assert (file.bytes_read - before[0], file.bytes_written - before[1]) == (36 * count, 36 * count)
    kept = engine.persistent_bytes()
    assert (kept["parameters"], kept["optimizer"]) == (2 * count, sum(buffer.numel() for buffer in store.buffers))
    before = file.bytes_read, file.bytes_written
    store.wait()  # else backward might find buffers that are being written
    for number, factor in enumerate((float("nan"), 1.0)):
        engine.backward(loss(engine, Turn(9, number, 0)) * factor)
        engine.step()
    ahead = sum(12 * piece.numel for piece in engine.optimizer.pieces[:3])
    assert (file.bytes_read - before[0], file.bytes_written - before[1]) == (ahead, 0) and engine.skipped_steps == 1
    train(engine, range(9, 10))
    assert (file.bytes_read - before[0], file.bytes_written - before[1]) == (12 * count, 12 * count)
    engine = engine_away("zero3-free", {}, str(tmp_path))
    homes = away(engine)[0].offloaded.homes
    train(engine, range(2))
    assert engine.persistent_bytes()["parameters"] == sum(buffer.near.numel() for buffer in homes.buffers)
    assert len(away(engine)) == 5 and not any(group.live for group in away(engine))


def test_a_part_of_the_state_goes_to_the_file(tmp_path: Path) -> None:
    """ratio: whole groups go while they fit; the others' state stays, and the bits are the same."""
    found: dict[float, int] = {}
    traces = []
    for ratio in (None, 0.0, 0.5, 1.0):
        section = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2, "ratio": ratio}
        given = {"offload_optimizer": section, "sub_group_size": 4096} if ratio is not None else {}
        case = Case(Net, loss, groups=two_groups, config=PLAIN | PRECISIONS["bf16"])
        engine = build_engine(case, STAGES["zero3"] | {"reduce_bucket_size": 10_000} | given)
        torch.manual_seed(6)
        traces.append((train(engine, range(2)), values_of(engine)))
        if ratio is not None:
            store = engine.optimizer.store
            before = store.homes.masters.bytes_written
            train(engine, range(2, 3))
            found[ratio] = store.homes.masters.bytes_written - before
            count = sum(group.layout.shard_numel for group in engine.sharded.groups if group.trainable)
            in_memory = engine.persistent_bytes()["optimizer"] - sum(buffer.numel() for buffer in store.buffers)
            assert in_memory == 8 * count - found[ratio] * 8 // 12, "what is not in the file is in memory"
    assert all(trace[0] == traces[0][0] and differing(trace[1], traces[0][1]) == [] for trace in traces)
    assert found[0.0] == 0 and found[1.0] == 12 * count and 0.2 * found[1.0] < found[0.5] <= 0.5 * found[1.0]


def test_host_memory_is_where_it_lives_already(caplog: pytest.LogCaptureFixture) -> None:
    """offload_param and offload_optimizer with device cpu, on a rank that computes there."""
    given = {"offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu"}}
    case = Case(Net, loss)
    with caplog.at_level(logging.INFO, "zero_trial"):
        away = build_engine(case, STAGES["zero3"] | given)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("offload")]
    assert said == [
        "offload: optimizer state and parameters already in host memory, because this rank trains on the CPU"
    ]
    here = build_engine(case, STAGES["zero3"])
    for engine in (here, away):
        torch.manual_seed(3)
        engine.trace = train(engine, range(2))
    assert here.trace == away.trace and differing(values_of(here), values_of(away)) == []
    assert here.persistent_bytes() == away.persistent_bytes()


def halved(base: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(base, 0.5)


def test_a_clients_optimizer_and_scheduler(tmp_path: Path) -> None:
    traces = []
    for folder in (None, str(tmp_path)):
        client = functools.partial(torch.optim.AdamW, lr=1e-2, amsgrad=True)
        engine = engine_of("zero2", PRECISIONS["bf16"], folder, optimizer=client, lr_scheduler=halved)
        torch.manual_seed(4)
        traces.append((train(engine, range(3)), values_of(engine), engine.get_lr()))
    assert traces[0][0] == traces[1][0] and differing(traces[0][1], traces[1][1]) == []
    assert traces[0][2] == traces[1][2] == [1.25e-3] * 2


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
    assert second.startswith("ConfigError: zero_optimization.offload_optimizer.nvme_path: the folder does not exist")
    assert first.startswith(
        "StorageError: file for optimizer state: another rank could not allocate space for offloaded state: got rank 1: zero_opt"
    )


def test_a_disk_that_fails_gives_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write of new parameters fails behind the step's back: neither a forward, nor a checkpoint,
    nor a step goes on from half of them."""
    engine = engine_away("zero3-free", PRECISIONS["bf16"], str(tmp_path), "nvme")
    train(engine, range(1))

    def broken(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", broken)
        with pytest.raises(StorageError, match="could not be read or written"):
            train(engine, range(1, 3))
    for use in (lambda: engine(Turn(0, 0, 0).normal(4, 6)), lambda: engine.save_checkpoint(str(tmp_path / "save"))):
        with pytest.raises((StorageError, CheckpointError), match="the disk failed, and offloaded state is lost"):
            use()


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
    descriptor = engine.optimizer.store.homes.masters._files[0].cached
    assert os.fstat(descriptor).st_size > 0
    engine.destroy()
    engine.destroy()
    with pytest.raises(OSError):
        os.fstat(descriptor)
    assert engine.module(torch.ones(1, 6).bfloat16()).isfinite().all()


def run_pipelines(folder: str, stage: str, params: str, state: str, schedule: str, most: int) -> tuple[Any, int]:
    """What differs between two pipeline stages with offload and without, where parameters are then,
    and how many groups are away."""
    found = []
    for places in (("none", "none"), (params, state)):
        zero_config = offloaded_zero(stage, *places, folder, max_in_cpu=most) | {"param_persistence_threshold": 0}
        engine = make_engine(
            layers(blocks=3), 2, zero_config, 2, bf16={"enabled": True}, pipeline={"schedule": schedule}
        )
        losses = [engine.train_batch(batches(0, 2, 1, start=step)).item() for step in range(3)]
        found.append((losses, {name: value.cpu().clone() for name, value in engine.module_state_dict().items()}))
        homes, count = {group.plan.home for group in engine.sharded.groups}, len(away(engine))
        engine.destroy()
    assert found[0][0] == found[1][0] and differing(found[0][1], found[1][1]) == []
    return homes, count


@pytest.mark.parametrize(
    ("world", "stage", "away_at", "schedule", "most", "homes"),
    [
        ("ranks", "zero1", ("none", "nvme"), "1f1b", 0, [Home.DEVICE] * 2),
        ("ranks", "zero3", ("nvme", "nvme"), "zb_h1", 0, [Home.NVME] * 2),
        ("ranks", "zero2", ("nvme", "none"), "interleaved", 0, [Home.NVME] * 2),
        ("ranks", "zero2", ("nvme", "none"), "1f1b", 21_444, [Home.NVME, Home.DEVICE]),
        ("devices", "zero3", ("nvme", "none"), "1f1b", 10**9, [Home.HOST] * 2),
        ("devices", "zero0", ("nvme", "none"), "1f1b", 0, [Home.NVME] * 2),
    ],
)
def test_a_pipeline_of_two_stages(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    world: str,
    stage: str,
    away_at: tuple[str, str],
    schedule: str,
    most: int,
    homes: list[Home],
) -> None:
    """Each rank has a file of its own for what its layers offload; one whose layers are no more
    than may stay in memory, here 21,344 elements of the second stage, has none."""
    found = request.getfixturevalue(world)(2).run(run_pipelines, str(tmp_path), stage, *away_at, schedule, most)
    assert all(home in places for home, (places, _) in zip(homes, found, strict=True)), found
    assert world == "ranks" or all(Home.DEVICE not in places for places, _ in found)
    assert [count > 0 for _, count in found] == [home is not Home.DEVICE for home in homes]


def test_the_line_at_the_start(tmp_path: Path) -> None:
    line = offload_line(engine_of("zero1", {}, str(tmp_path)))
    assert line is not None and line.startswith("offload: 0.") and "; 3 buffers of 0.0 MiB" in line
    assert f"MiB of masters and optimizer state per rank in {tmp_path} (" in line
    assert offload_line(engine_of("zero1", {}, None)) is None


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
@pytest.mark.parametrize(("count", "cells"), [(1, PAIRWISE[1::4]), (2, PAIRWISE)])
def test_every_place_from_a_device(devices: Pools, tmp_path: Path, count: int, cells: list[Cell]) -> None:
    assert devices(count).run(run_cells, cells, str(tmp_path)) == [[]] * count


@pytest.mark.extended
@pytest.mark.parametrize("count", [1, 2, 4])
def test_all_places(ranks: Pools, devices: Pools, tmp_path: Path, count: int) -> None:
    for pools in (ranks, devices):
        assert pools(count).run(run_cells, EVERYTHING, str(tmp_path), timeout=900) == [[]] * count


def edit(engine: Any) -> None:
    """Every way to write a value between steps."""
    model = engine.module
    with zero.GatheredParameters([model.first.bias, model.frozen.weight], modifier_rank=0), torch.no_grad():
        model.first.bias[:7] = 0.25
        model.frozen.weight[3] = -0.5
    zero.safe_set_full_fp32_param(model.first.weight, torch.full((91, 6), 0.123456))
    zero.safe_set_full_optimizer_state(model.first.weight, torch.full((91, 6), 0.5), "exp_avg")
    assert torch.all(zero.safe_get_local_fp32_param(model.first.weight) == torch.tensor(0.123456))
    state = engine.module_state_dict()
    state["blocks.1.weight"] = state["blocks.1.weight"] * 1.5
    engine.load_module_state_dict(state)
    model.eval()
    with torch.no_grad():
        engine.seen = engine(Turn(3, 3, 3).normal(4, 6)).float().sum().item()
    model.train()


def run_both(stage: str, precision: str, params: str, state: str, folder: str) -> tuple[int, int]:
    """Bits of three steps, of edits, of the checkpoints, and of runs that go on from each other's
    checkpoint."""
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    config = PRECISIONS[precision]
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    here, there = (
        engine_away(stage, config, None),
        engine_away(stage, config, folder, state, buffer_count=2, device=params),
    )
    for engine, place in ((here, "here"), (there, "away")):
        torch.manual_seed(70 + rank)
        engine.trace = train(engine, range(3))
        edit(engine)
        engine.save_checkpoint(f"{folder}/save", tag=place)
        engine.trace += train(engine, range(3, 5))
    assert alike(here.trace, there.trace) and here.seen == there.seen
    known = values_of(here)
    assert len([name for name in known if name.startswith("exp_avg ")]) >= 7
    assert differing(known, values_of(there)) == []
    for place, target in (("here", folder), ("away", None)):
        again = engine_away(stage, config, target, state, buffer_count=1, device=params)
        again.load_checkpoint(f"{folder}/save", tag=place)
        assert alike(train(again, range(3, 5)), here.trace[3:]) and differing(known, values_of(again)) == []
        again.destroy()
    assert there.skipped_steps == (precision == "fp16")
    kinds = {unit.trainable for unit in away(there)}
    there.destroy(rank0_only=False)
    assert differing(dict(here.module_state_dict()), dict(there.module.state_dict())) == [], "whole again"
    here.destroy()
    return len(kinds), len(there.optimizer.pieces)


@pytest.mark.parametrize(
    ("stage", "precision", "params", "state"),
    [
        ("zero3-free", "fp32", "nvme", "nvme"),
        ("zero0", "bf16", "nvme", "nvme"),
        ("zero2", "fp16", "nvme", "none"),
        ("zero1", "fp32", "none", "nvme"),
    ],
)
def test_two_ranks_train_the_same_bits(
    ranks: Pools, tmp_path: Path, stage: str, precision: str, params: str, state: str
) -> None:
    (tmp_path / "save").mkdir()
    for kinds, pieces in ranks(2).run(run_both, stage, precision, params, state, str(tmp_path)):
        assert kinds == (2 if params == "nvme" else 0), "trained and frozen ones"
        assert pieces > 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["save"], "no file has a name"


def test_a_model_that_is_not_trained(tmp_path: Path) -> None:
    """Inference with the weights on a disk; an engine without optimizer has no store, and saves all
    the same."""
    case = Case(Net, loss)
    section = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}}
    answers = []
    for given in ({}, section):
        engine = build_engine(replace(case, config={"optimizer": None}), STAGES["zero3-free"] | given)
        assert engine.optimizer is None
        engine.module.eval()
        with torch.no_grad():
            answers.append([engine(Turn(step, 0, 0).normal(4, 6)).sum().item() for step in range(2)])
        assert engine.save_checkpoint(str(tmp_path / "save"), tag=f"with{len(given)}")
        engine.load_checkpoint(str(tmp_path / "save"), tag="with0")
        engine.destroy()
    assert answers[0] == answers[1]


def test_a_step_that_fails_between_is_followed_by_a_whole_one(tmp_path: Path) -> None:
    """What was read ahead when a forward raised is not taken for what comes later."""
    results = []
    for folder in (None, str(tmp_path)):
        engine = engine_away("zero3-free", {}, folder, "nvme")
        torch.manual_seed(2)
        train(engine, range(2))
        with pytest.raises(RuntimeError):
            engine(torch.ones(4, 7))
        zero.safe_set_full_fp32_param(engine.module.first.weight, torch.full((91, 6), 0.1))
        torch.manual_seed(3)
        results.append((train(engine, range(2, 4)), values_of(engine)))
    assert results[0][0] == results[1][0] and differing(results[0][1], results[1][1]) == []


def engine_from_device(cell: tuple[str, str, str, str], folder: str, **section: Any) -> Any:
    stage, params, state, precision = cell
    zero_config = offloaded_zero(stage, params, state, folder, **section)
    config = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5} | PRECISIONS[precision]
    return build_engine(Case(lambda: Net().to("standin"), loss, groups=two_groups, config=config), zero_config)


def run_partly_kept(folder: str) -> list[str]:
    """``max_in_cpu`` holds the first groups in the host's memory, the rest is in the file."""
    known = trained(engine_from_device(("zero3", "none", "none", "bf16"), folder))
    engine = engine_from_device(("zero3", "nvme", "none", "bf16"), folder, max_in_cpu=5000)
    homes = away(engine)[0].offloaded.homes
    written = homes.params.bytes_written
    kept = homes.kept.end
    found = trained(engine)
    assert 0 < kept <= 2 * 5000 + 4096 and homes.params.bytes_written > written and alike(found[0], known[0])
    return differing(known[1], found[1])


def test_a_part_stays_in_the_hosts_memory(devices: Pools, tmp_path: Path) -> None:
    assert devices(2).run(run_partly_kept, str(tmp_path)) == [[], []]


def run_overlap(folder: str) -> list[tuple[str, int, list[Any]]]:
    """(cell, copies between host and device in a step, those that overlap with nothing)."""
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    found = []
    for stage, place in (("zero0", "cpu"), ("zero3", "nvme")):
        engine = engine_from_device((stage, place, "none", "bf16"), folder, buffer_count=6)
        train(engine, range(2))
        here = device.use()
        here.scheduler.reset()
        for number in range(engine.gradient_accumulation_steps()):
            engine.backward(loss(engine, Turn(3, number, engine.global_rank)))
            engine.step()
        torch.standin.synchronize()
        copies = here.copies()
        found.append((f"{stage} {place}", len(copies), [copied for copied in copies if not copied[2]]))
    return found


def test_parameters_come_beside_what_computes(devices: Pools, tmp_path: Path) -> None:
    """In the order of the step before, with buffers for two groups: of the parameters' copies to
    the device only the first of a pass run alone."""
    for rank in devices(2).run(run_overlap, str(tmp_path)):
        for cell, count, alone in rank:
            down = [nbytes for kind, nbytes, _ in alone if kind == "to the device" and nbytes > 200]
            assert count > 20 and len(down) <= 6, (cell, count, down, alone)


def edited_before_a_step(place: dict[str, str]) -> float:
    """The step after an edit of fp32 ``param.data``, the first of all."""
    zero_config = {"stage": 2, "offload_optimizer": place}
    engine = build_engine(Case(lambda: Net().to("standin"), loss), zero_config)
    param = next(param for param in engine.module.parameters() if param.dim() == 2 and param.numel())
    engine.backward(loss(engine, Turn(0, 0, engine.global_rank)))
    param.data.fill_(0.25)
    engine.step()
    return (param - 0.25).abs().max().item()


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_edits_before_the_first_step_reach_masters_on_the_host(devices: Pools, place: str, tmp_path: Path) -> None:
    there = {"device": place} | ({"nvme_path": str(tmp_path)} if place == "nvme" else {})
    assert max(devices(2).run(edited_before_a_step, there)) < 0.01
