"""Tests for parameters on NVMe (zero_trial/engine/offload_config.py,
zero_trial/sharding/offload/homes.py): bits, traffic, memory, refusals."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.offloaded import (
    PLAIN,
    PRECISIONS,
    Net,
    alike,
    differing,
    loss,
    offloaded_zero,
    train,
    trained,
    two_groups,
    values_of,
)
from tests.support.dense import STAGES, Case, Turn, build_engine
from tests.support.device import device
from tests.support.pipelines import batches, layers, make_engine
from tests.support.pool import Pools
from zero_trial import zero
from zero_trial.errors import CheckpointError, StorageError
from zero_trial.sharding.layout import ALIGN, round_up
from zero_trial.sharding.offload.homes import Homes, OffloadedHome
from zero_trial.sharding.offload.region_file import BLOCK
from zero_trial.sharding.plan import Home


def engine_of(
    stage: str,
    config: dict[str, Any],
    folder: str | None,
    state: str = "none",
    build: Callable[[], nn.Module] = Net,
    **params: Any,
) -> Any:
    zero_config = dict(STAGES[stage]) | {"sub_group_size": 4096}
    if folder is not None:
        zero_config = {"param_persistence_threshold": 0, "module_granularity_threshold": 1} | zero_config
        zero_config["offload_param"] = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0} | params
        zero_config["offload_optimizer"] = {"device": state, "nvme_path": folder, "buffer_count": 2}
    return build_engine(Case(build, loss, groups=two_groups, config=PLAIN | config), zero_config)


def homes_of(engine: Any) -> Homes:
    found = next(unit.offloaded for unit in engine.sharded.groups if unit.offloaded is not None)
    assert isinstance(found, OffloadedHome)
    return found.homes


def away(engine: Any) -> list[Any]:
    return [unit for unit in engine.sharded.groups if unit.offloaded is not None]


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
    here, there = engine_of(stage, config, None), engine_of(stage, config, folder, state, buffer_count=2, device=params)
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
        again = engine_of(stage, config, target, state, buffer_count=1, device=params)
        again.load_checkpoint(f"{folder}/save", tag=place)
        assert alike(train(again, range(3, 5)), here.trace[3:])
        assert differing(known, values_of(again)) == []
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
        ("zero3", "fp16", "nvme", "none"),
        ("zero0", "bf16", "nvme", "nvme"),
        ("zero2", "fp16", "nvme", "nvme"),
        ("zero1", "fp32", "none", "nvme"),
        ("zero3-free", "bf16", "none", "nvme"),
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


@pytest.mark.parametrize(("precision", "reads", "writes"), [("bf16", 0, 2), ("fp32", 4, 4)])
def test_bytes_per_step_and_in_memory(tmp_path: Path, precision: str, reads: int, writes: int) -> None:
    """Freed after each use, every unit is read for a forward, and every block again for its
    backward, in whole blocks of the disk; an update writes 2 bytes of a 16-bit parameter, and reads
    and writes 4 of an fp32 one, which is its own master."""
    engine = engine_of("zero3-free", PRECISIONS[precision], str(tmp_path))
    units, homes = away(engine), homes_of(engine)
    trained = sum(unit.layout.shard_numel for unit in units if unit.trainable)
    train(engine, range(2))
    before = homes.params.bytes_read, homes.params.bytes_written
    train(engine, range(2, 4))
    moved = homes.params.bytes_read - before[0], homes.params.bytes_written - before[1]
    again = [unit for unit in units if unit.block]
    assert (len(units), len(again)) == (5, 3)
    micro_batches = 2 * engine.gradient_accumulation_steps()
    assert moved == (micro_batches * read_bytes([*units, *again]) + 2 * reads * trained, 2 * writes * trained)
    kept = engine.persistent_bytes()
    masters = 4 * trained if precision == "bf16" else 0
    assert kept["parameters"] == masters + ring(engine)
    assert all(unit.shard.isnan().all() and unit.shard.untyped_storage().nbytes() <= 4 for unit in units)
    assert not any(unit.live for unit in units)


def read_bytes(units: list[Any]) -> int:
    """The file has whole blocks."""
    return sum(round_up(unit.layout.shard_numel * unit.shard.element_size(), BLOCK) for unit in units)


def ring(engine: Any) -> int:
    return sum(buffer.near.numel() for buffer in homes_of(engine).buffers)


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
        engine = engine_of("zero3-free", {}, folder, "nvme")
        torch.manual_seed(2)
        train(engine, range(2))
        with pytest.raises(RuntimeError):
            engine(torch.ones(4, 7))
        zero.safe_set_full_fp32_param(engine.module.first.weight, torch.full((91, 6), 0.1))
        torch.manual_seed(3)
        results.append((train(engine, range(2, 4)), values_of(engine)))
    assert results[0][0] == results[1][0] and differing(results[0][1], results[1][1]) == []


def test_a_disk_that_fails_gives_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write of new parameters fails behind the step's back: neither a forward, nor a checkpoint,
    nor a step goes on from half of them."""
    engine = engine_of("zero3-free", {"bf16": {"enabled": True}}, str(tmp_path), "nvme")
    train(engine, range(1))

    def broken(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", broken)
        with pytest.raises(StorageError, match="could not be read or written"):
            train(engine, range(1, 3))
    for use in (lambda: engine(Turn(0, 0, 0).normal(4, 6)), lambda: engine.save_checkpoint(str(tmp_path / "save"))):
        with pytest.raises((StorageError, CheckpointError), match="the disk has failed, and offloaded state is lost"):
            use()


def run_pipeline_that_nearly_fits(folder: str) -> tuple[int, int, int]:
    """Two pipeline stages of which the larger has more elements than may stay, so that it alone has
    a file."""
    zero_config = {"stage": 2, "param_persistence_threshold": 0}
    here = make_engine(layers(blocks=3), 2, zero_config, 2)
    sizes = here.mesh.world.gather_json(elements_of(here.module), "sizes")
    assert sizes[0] != sizes[1]
    most = min(sizes) + 100
    section = {"device": "nvme", "nvme_path": folder, "max_in_cpu": most}
    there = make_engine(layers(blocks=3), 2, zero_config | {"offload_param": section}, 2)
    traces = []
    for engine in (here, there):
        losses = [engine.train_batch(batches(0, 2, 1, start=step)).item() for step in range(3)]
        traces.append((losses, {name: value.clone() for name, value in engine.module_state_dict().items()}))
    assert traces[0][0] == traces[1][0] and differing(traces[0][1], traces[1][1]) == []
    count = len(away(there))
    for engine in (here, there):
        engine.destroy()
    return sizes[here.global_rank], most, count


def elements_of(module: nn.Module) -> int:
    return sum(round_up(param.numel(), ALIGN) for param in module.parameters())


def test_a_pipeline_of_which_a_stage_fits_into_memory(ranks: Pools, tmp_path: Path) -> None:
    answers = ranks(2).run(run_pipeline_that_nearly_fits, str(tmp_path))
    assert sorted(count > 0 for *_, count in answers) == [False, True]
    assert [count > 0 for *_, count in answers] == [size > most for size, most, _ in answers]


# --- tests of parameters that leave a device between uses, on the stand-in device -----------------


Cell = tuple[str, str, str, str]  # ZeRO stage, place of parameters, place of optimizer state, precision


def engine_from_device(cell: Cell, folder: str, micro_batches: int = 2, **section: Any) -> Any:
    stage, params, state, precision = cell
    zero_config = offloaded_zero(stage, params, state, folder, **section)
    config = {"gradient_accumulation_steps": micro_batches, "gradient_clipping": 0.5} | PRECISIONS[precision]
    return build_engine(Case(lambda: Net().to("standin"), loss, groups=two_groups, config=config), zero_config)


def run_pipelines(folder: str, stage: int, most: int | None) -> list[str]:
    """Two pipeline stages whose parameters go to files, or all fit into ``max_in_cpu``: then they
    are in the host's memory."""
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    found, engines = [], []
    kept = {} if most is None else {"max_in_cpu": most}
    for section in ({}, {"offload_param": {"device": "nvme", "nvme_path": folder} | kept}):
        zero_config = {"stage": stage, "param_persistence_threshold": 0} | section
        engines.append(make_engine(layers(blocks=2), 2, zero_config, 2, bf16={"enabled": True}))
        losses = [engines[-1].train_batch(batches(0, 2, 1, start=step)).item() for step in range(3)]
        found.append((losses, {name: value.cpu() for name, value in engines[-1].module_state_dict().items()}))
    homes = {group.plan.home for group in engines[1].sharded.groups}
    want = Home.HOST if most is None else Home.NVME
    places = [*(f"parameters in {home.value}" for home in homes - {want})]
    losses_differ = [] if found[0][0] == found[1][0] else [f"{found[1][0]} instead of {found[0][0]}"]
    return [*places, *losses_differ, *differing(found[0][1], found[1][1])]


@pytest.mark.parametrize(("stage", "most"), [(3, None), (0, 0)])
def test_a_pipeline_from_a_device(devices: Pools, tmp_path: Path, stage: int, most: int | None) -> None:
    assert devices(2).run(run_pipelines, str(tmp_path), stage, most) == [[], []]


def run_partly_kept(folder: str) -> list[str]:
    """``max_in_cpu`` holds the first groups in the host's memory, the rest is in the file."""
    known = trained(engine_from_device(("zero3", "none", "none", "bf16"), folder))
    engine = engine_from_device(("zero3", "nvme", "none", "bf16"), folder, max_in_cpu=5000)
    homes, written = homes_of(engine), homes_of(engine).params.bytes_written
    kept = homes.kept.end
    found = trained(engine)
    assert 0 < kept <= 2 * 5000 + 4096 and homes.params.bytes_written > written and alike(found[0], known[0])
    return differing(known[1], found[1])


def test_a_part_stays_in_the_hosts_memory(devices: Pools, tmp_path: Path) -> None:
    assert devices(2).run(run_partly_kept, str(tmp_path)) == [[], []]


def run_overlap(folder: str) -> list[tuple[str, int, list[Any]]]:
    """(cell, copies between host and device in a step, those beside which nothing may go on)."""
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


class Adapted(Net):
    """All frozen but small matrices beside two layers, as LoRA trains them."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(3, 91) / 9), nn.Parameter(torch.zeros(91, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.frozen(x + self.blocks[1](x)) + x @ self.down.T @ self.up.T)


def run_resumed(folder: str) -> list[str]:
    """A checkpoint of parameters that are away, read by a run without offload and by one with it;
    and an adapter beside frozen layers in the file."""
    logging.getLogger("zero_trial").setLevel(logging.ERROR)
    wrong = []
    for stage, build in (("zero0", Net), ("zero3", Adapted)):
        found = []
        for places in (("none", "none"), ("nvme", "none") if stage == "zero0" else ("cpu", "cpu")):
            case = Case(lambda build=build: build().to("standin"), loss, config=PRECISIONS["bf16"])  # type: ignore[misc]
            engine = build_engine(case, offloaded_zero(stage, *places, folder))
            if places == ("none", "none"):
                torch.manual_seed(3)
                train(engine, range(2))
                engine.save_checkpoint(f"{folder}/{stage}")
            engine.load_checkpoint(f"{folder}/{stage}")
            trace = train(engine, range(2, 4))
            engine.save_checkpoint(f"{folder}/{stage}-{places[0]}")
            found.append((trace, {name: value.cpu() for name, value in values_of(engine).items()}))
            away = sum(group.offloaded is not None for group in engine.sharded.groups)
            if (away > 2) != (places[0] != "none") or not alike(trace, found[0][0]):
                wrong.append(f"{stage} {places}: {away} groups away, {trace} instead of {found[0][0]}")
            wrong += [f"{stage} {places}: {name}" for name in differing(found[0][1], found[-1][1])]
    return wrong


def test_checkpoints_and_adapters(devices: Pools, tmp_path: Path) -> None:
    assert devices(2).run(run_resumed, str(tmp_path)) == [[], []]


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
