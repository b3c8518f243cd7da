"""Tests for parameters on NVMe (zero_trial/engine/offload_config.py,
zero_trial/sharding/offload/homes.py): bits, traffic, memory, refusals."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.engine.offloaded import PLAIN, PRECISIONS, Net, alike, differing, loss, train, two_groups, values_of
from tests.support.dense import STAGES, Case, Turn, build_engine
from tests.support.models import ADAMW
from tests.support.pipelines import batches, cross_entropy, layers, make_engine
from tests.support.pool import Pools
from zero_trial import zero
from zero_trial.engine.offload_config import offload_line
from zero_trial.errors import CheckpointError, ConfigError, StorageError
from zero_trial.pipeline import PipelineModule
from zero_trial.sharding.layout import ALIGN, round_up
from zero_trial.sharding.offload.homes import Homes, OffloadedHome
from zero_trial.sharding.offload.region_file import BLOCK
from zero_trial.sharding.param_group import GroupState
from zero_trial.sharding.unshard import Unsharder

PLACES = ("none", "nvme")


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
        ("zero3-free", "bf16", "nvme", "nvme"),
        ("zero3", "fp16", "nvme", "none"),
        ("zero0", "fp32", "nvme", "nvme"),
        ("zero1", "bf16", "nvme", "none"),
        ("zero2", "fp16", "nvme", "nvme"),
        ("zero0", "bf16", "none", "nvme"),
        ("zero1", "fp16", "none", "nvme"),
        ("zero2", "fp32", "none", "nvme"),
        ("zero3", "bf16", "none", "nvme"),
        ("zero3-free", "fp16", "none", "nvme"),
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


@pytest.mark.parametrize(("stage", "state"), [("zero3-free", "nvme"), ("zero0", "none")])
def test_one_rank_trains_the_same_bits(tmp_path: Path, stage: str, state: str) -> None:
    assert run_both(stage, "bf16", "nvme", state, str(tmp_path))[0] == 2


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


def test_what_the_section_says(tmp_path: Path) -> None:
    """nvme_path says where, buffer_count and buffer_size how much memory, max_in_cpu what stays."""
    sections = ({"buffer_size": 4096}, {"buffer_count": 1, "buffer_size": 9000}, {"buffer_count": 2})
    found = []
    for section in sections:
        engine = engine_of("zero3-free", {}, str(tmp_path), **section)
        engine(Turn(0, 0, 0).normal(4, 6))
        homes = homes_of(engine)
        found.append((homes._buffer_size, len(homes.buffers), homes.buffers[0].near.numel()))
        assert homes.params.folders == [tmp_path]  # type: ignore[attr-defined]
    assert found == [(4096, 5, 4 * 4096), (9000, 1, 4 * 4096), (100_000_000, 2, 4 * 4096)], (
        "a quarter of 27,000 elements"
    )


@pytest.mark.parametrize(("most", "stay"), [(8 * 91 * 91, True), (2 * (8384 + 96) + 10, False), (0, False)])
def test_so_many_elements_stay_in_memory(tmp_path: Path, most: int, stay: bool) -> None:
    engine = engine_of("zero3-free", {}, str(tmp_path), max_in_cpu=most)
    here = [unit for unit in engine.sharded.groups if unit.offloaded is None]
    kept = sum(unit.layout.shard_numel for unit in here)
    assert kept <= most and (len(here) == len(engine.sharded.groups)) == stay
    line = offload_line(engine)
    assert line is not None and line.endswith(f"{kept:,} elements stay in memory")
    why = "max_in_cpu and stage3_param_persistence_threshold hold them"
    assert line.startswith(f"offload: all parameters stay in memory: {why}; ") == stay
    assert stay or (line.startswith("offload: 0.") and f" MiB of parameters per rank in {tmp_path} (" in line)
    assert stay or kept == (0, 2 * (8384 + 96))[most > 0]
    traces = []
    for each in (engine, engine_of("zero3-free", {}, None)):
        torch.manual_seed(1)
        traces.append(train(each, range(2)))
    assert traces[0] == traces[1]


def test_small_parameters_stay(tmp_path: Path) -> None:
    """Below stage3_param_persistence_threshold they always live, and there is nothing to read."""
    engine = engine_of("zero3", {"bf16": {"enabled": True}}, str(tmp_path))
    here = [unit for unit in engine.sharded.groups if unit.offloaded is None]
    assert len(here) == 1 and all(slot.numel < 20 for slot in here[0].layout.slots)
    assert len(away(engine)) > 3


def test_blocks_are_read_ahead_of_their_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on all are, but for what a step begins with."""
    engine = engine_of("zero3-free", {}, str(tmp_path), buffer_count=40)
    ahead: list[tuple[str, bool]] = []
    once = Unsharder.unshard

    def unshard(unsharder: Unsharder, block: str, *, record: bool = True) -> None:
        ahead.extend((block, read(unit)) for unit in away(engine) if unit.block == block)
        once(unsharder, block, record=record)

    def read(unit: Any) -> bool:
        parts = unit.offloaded.parts
        return unit.state is not GroupState.SHARDED or (bool(parts) and parts[-1].high == unit.offloaded.numel)

    monkeypatch.setattr(Unsharder, "unshard", unshard)
    train(engine, range(1))
    assert ahead and not any(found for block, found in ahead if block)
    del ahead[:]
    train(engine, range(1, 2))
    assert ahead[:2] == [("", False)] * 2, "the root, trained and frozen, was not announced"
    assert all(found for _, found in ahead[2:])


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 91), nn.Linear(91, 91), nn.Linear(91, 91))


def test_reads_run_as_far_ahead_as_there_are_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little is unsharded ahead, and no more is live for it; also of what a backward begins
    with, while the forward ends with it."""
    near = {"prefetch_bucket_size": 1, "reshard_after": "forward"}
    monkeypatch.setitem(STAGES, "near", STAGES["zero3-free"] | near)
    engine = engine_of("near", {}, str(tmp_path), build=three_layers, buffer_count=40, buffer_size=10**6)
    ahead: list[tuple[str, str]] = []
    once = Unsharder.unshard

    def unshard(unsharder: Unsharder, block: str, *, record: bool = True) -> None:
        assert not any(unit.state is not GroupState.SHARDED for unit in away(engine))
        ahead.append((block, "".join(sorted({unit.block for unit in away(engine) if unit.offloaded.parts}))))
        once(unsharder, block, record=record)

    monkeypatch.setattr(Unsharder, "unshard", unshard)
    train(engine, range(1))
    del ahead[:]
    train(engine, range(1, 2))
    all_the_way = [("0", "012"), ("1", "012"), ("2", "012"), ("2", "012"), ("1", "012"), ("0", "012")]
    assert ahead == [("0", ""), *all_the_way[1:], *all_the_way[:3], ("2", "012"), ("1", "01"), ("0", "0")]


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


@pytest.mark.parametrize("state", PLACES)
def test_a_disk_that_fails_gives_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """A write of new parameters fails behind the step's back: neither a forward, nor a checkpoint,
    nor a step goes on from half of them."""
    engine = engine_of("zero3-free", {"bf16": {"enabled": True}}, str(tmp_path), state)
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


def test_what_a_failed_disk_held_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new engine goes on from the last checkpoint, and needs the room."""
    engine = engine_of("zero3-free", {}, str(tmp_path), "nvme")
    train(engine, range(1))
    closed: list[bool] = []
    monkeypatch.setattr(engine.monitor, "close", lambda: closed.append(True))
    descriptors = [file._files[0].cached for file in (homes_of(engine).params, homes_of(engine).masters)]
    homes_of(engine).failure.record([Path("/disk")], OSError("no"))
    with pytest.raises(StorageError, match="the disk has failed"):
        engine.destroy()
    assert closed == [True]
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fstat(descriptor)


def test_optimizers_that_need_whole_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        engine_of("zero3-free", {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}, str(tmp_path))
    assert str(error.value).startswith(
        "zero_optimization.offload_param.device: this optimizer needs whole tensors or their norms, and offloaded "
        'state comes in pieces: got "nvme" with '
    )


def run_one_rank_looks(folder: str) -> list[float]:
    """Rank 0 logs its own part of the weights between micro-batches: no other rank hears of that,
    and no one waits in vain."""
    engine = engine_of("zero3-free", {"gradient_accumulation_steps": 3}, folder, buffer_count=40)
    losses = []
    for step in range(3):
        for number in range(3):
            value = loss(engine, Turn(step, number, engine.global_rank))
            engine.backward(value)
            engine.step()
            losses.append(value.item())
            if engine.global_rank == 0:
                parts = [zero.safe_get_local_fp32_param(p) for p in engine.module.parameters()]
                assert not any(part.isnan().any() for part in parts if part is not None)  # None: frozen
    engine.destroy()
    return losses


def test_one_rank_may_look_at_its_own_part(ranks: Pools, tmp_path: Path) -> None:
    assert all(len(losses) == 9 for losses in ranks(2).run(run_one_rank_looks, str(tmp_path)))


def run_built_in_shards(folder: str) -> None:
    """A model that no rank ever held: its shards come from zero.Init, and go to the file."""

    def built() -> Net:
        with zero.Init():
            return Net()

    found = []
    for build in (Net, built):
        section = {"offload_param": {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}}
        engine = build_engine(Case(build, loss, config=PRECISIONS["bf16"]), STAGES["zero3-free"] | section)
        torch.manual_seed(5 + engine.global_rank)
        found.append((train(engine, range(2)), values_of(engine)))
        assert len(away(engine)) == 5
        engine.destroy()
    assert found[0][0] == found[1][0] and differing(found[0][1], found[1][1]) == []


def test_a_model_built_in_shards(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(run_built_in_shards, str(tmp_path))


def known_on_first_rank(stage: str, precision: str, folder: str) -> list[list[str]]:
    """What differs from an engine in memory whose ranks all have the values, where the others have
    none, and where they have wrong ones."""
    rank = torch.distributed.get_rank()

    def build(others: str) -> nn.Module:
        with torch.device("meta") if rank and others == "meta" else nullcontext():
            model = Net()
        for param in model.parameters() if rank and others == "garbage" else ():
            param.data.fill_(float("nan"))
        return model

    found = []
    for others in ("alike", "meta", "garbage"):
        place = None if others == "alike" else folder
        engine = engine_of(stage, PRECISIONS[precision], place, "none", functools.partial(build, others))
        assert bool(away(engine)) == (place is not None)
        torch.manual_seed(70 + rank)
        trace = torch.tensor([row[0] for row in train(engine, range(2))])
        found.append(values_of(engine) | {"trace": trace})
        engine.destroy()
    return [differing(found[0], each) for each in found[1:]]


@pytest.mark.parametrize(
    ("stage", "precision"), [("zero0", "bf16"), ("zero1", "fp32"), ("zero2", "bf16"), ("zero3", "fp32")]
)
def test_values_of_rank_0_alone(ranks: Pools, tmp_path: Path, stage: str, precision: str) -> None:
    assert ranks(2).run(known_on_first_rank, stage, precision, str(tmp_path)) == [[[], []]] * 2


def run_pipeline_that_nearly_fits(folder: str, place: str) -> tuple[int, ...]:
    """Two pipeline stages of which the larger has as many elements as may stay ("all"), or some
    more, so that it alone has a file. Padding, here of the tied weight, counts in groups."""
    zero_config = {"stage": 2, "param_persistence_threshold": 0}
    here = make_engine(layers(blocks=3), 2, zero_config, 2)
    sizes = here.mesh.world.gather_json(elements_of(here.module), "sizes")
    assert sizes[0] != sizes[1]
    most = max(sizes) if place == "all" else min(sizes) + 100
    section = {"device": "nvme", "nvme_path": folder, "max_in_cpu": most}
    there = make_engine(layers(blocks=3), 2, zero_config | {"offload_param": section}, 2)
    padded = sum(group.layout.numel for group in there.sharded.groups)
    traces = []
    for engine in (here, there):
        losses = [engine.train_batch(batches(0, 2, 1, start=step)).item() for step in range(3)]
        traces.append((losses, {name: value.clone() for name, value in engine.module_state_dict().items()}))
    assert traces[0][0] == traces[1][0] and differing(traces[0][1], traces[1][1]) == []
    count = len(away(there))
    for engine in (here, there):
        engine.destroy()
    return sizes[here.global_rank], most, padded, count


def elements_of(module: nn.Module) -> int:
    return sum(round_up(param.numel(), ALIGN) for param in module.parameters())


@pytest.mark.parametrize("place", ["all", "some"])
def test_a_pipeline_of_which_a_stage_fits_into_memory(ranks: Pools, tmp_path: Path, place: str) -> None:
    answers = ranks(2).run(run_pipeline_that_nearly_fits, str(tmp_path), place)
    assert any(size == most < padded for size, most, padded, _ in answers) == (place == "all")
    assert [count > 0 for *_, count in answers] == [size > most for size, most, *_ in answers]


def run_frozen_stage(folder: str) -> list[int]:
    """Masters in a file, and a pipeline stage that has none: it waits for nothing that the other
    does alone."""
    found = []
    for section in ({}, {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}):
        module = PipelineModule(layers(blocks=3, tied=False), num_stages=2, loss_fn=cross_entropy, seed_layers=True)
        if module.stage_id == 0:
            module.requires_grad_(False)
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "comm_timeout_seconds": 30.0}
        config |= {"optimizer": ADAMW, "zero_optimization": {"stage": 1} | section, "bf16": {"enabled": True}}
        engine = zero_trial.initialize(model=module, config=config)[0]
        losses = [engine.train_batch(batches(0, 2, 1, start=step)).item() for step in range(2)]
        found.append((losses, {name: value.clone() for name, value in engine.module_state_dict().items()}))
        pieces = len(engine.optimizer.pieces)
        engine.destroy()
    assert found[0][0] == found[1][0] and differing(found[0][1], found[1][1]) == []
    return [pieces]


def test_a_pipeline_with_a_frozen_stage(ranks: Pools, tmp_path: Path) -> None:
    (first,), (second,) = ranks(2).run(run_frozen_stage, str(tmp_path))
    assert first == 0 < second


def run_adapters(folder: str) -> int:
    """Small trained weights beside a frozen model (LoRA), whose full copy is in a file; rank 0
    evaluates alone, since a use communicates nothing at stage 1; two engines are under way."""
    results = []
    for place in (None, folder):
        engines = [adapters_of(place, seed) for seed in (1, 2)]
        torch.manual_seed(9)
        trace = [train(engine, range(step, step + 1)) for step in range(3) for engine in engines]
        if engines[0].global_rank == 0:
            with torch.no_grad():
                trace.append(engines[0](Turn(7, 7, 7).normal(4, 6)).sum().item())
        results.append((trace, [values_of(engine) for engine in engines]))
        away = [group for group in engines[0].sharded.groups if group.offloaded is not None]
        for engine in engines:
            engine.destroy()
    assert differing(results[0][1][0], results[1][1][0]) == differing(results[0][1][1], results[1][1][1]) == []
    assert all(alike(a, b) for a, b in zip(results[0][0][:6], results[1][0][:6], strict=True))
    assert results[0][0][6:] == results[1][0][6:]
    return sum(not group.trainable for group in away)


def adapters_of(folder: str | None, seed: int) -> Any:
    section = {"offload_param": {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}} if folder else {}
    zero_config = {"stage": 1, "param_persistence_threshold": 50, "module_granularity_threshold": 1} | section

    def built() -> nn.Module:
        torch.manual_seed(seed)
        model = Net().requires_grad_(False)
        model.blocks[1].requires_grad_(True)
        return model

    return build_engine(Case(built, loss, config=PLAIN), zero_config)


def test_adapters_beside_a_frozen_model(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(2).run(run_adapters, str(tmp_path)) == [3, 3], "frozen groups in the file"
