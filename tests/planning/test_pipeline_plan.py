"""Plans of pipelines: the parts, built where they cost nothing, what a row of a schedule holds, and
a row per stage."""

from __future__ import annotations

import itertools
import json
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import zero_trial
from tests.planning.measured import MODEL_DEFS, model_module
from tests.planning.pipelines import (
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    batch,
    ds_config,
    pipeline,
    settings,
    watched_step,
)
from tests.support.pool import Pools
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.engine.pipeline_build import pipeline_settings, training_schedule
from zero_trial.errors import DoesNotFit
from zero_trial.pipeline.lowering import Sharding, choose
from zero_trial.pipeline.module import PipelineModule
from zero_trial.pipeline.schedule import ParameterLifetime
from zero_trial.planning.live_bytes import LiveBytes
from zero_trial.planning.pipeline_parts import ChunkBytes, Parts, chunk_bytes, parts_of, play_row, whole_bytes
from zero_trial.planning.planner import PipelinePlanner
from zero_trial.sharding.plan import plan_for_stage
from zero_trial.sharding.precision import dtype_policy


@cache
def parts(schedule: str = "1f1b", **section: Any) -> Parts:
    return parts_of(pipeline(), pipeline_settings(settings(schedule=schedule, pipeline=section)))


def test_every_stage_has_its_layers_and_nothing_has_values():
    found, model = parts("looped_bfs"), pipeline()
    assert found.placement.ranks == (0, 1, 0, 1)
    # a block is five embeddings large, so the chunks hold one block each
    assert found.bounds == (0, 2, 3, 4, 6)
    assert [found.layers(rank) for rank in (0, 1)] == ["0-1,3", "2,4-5"]
    assert found.ties == ((0, 3),) and len(found.stages) == 2
    assert sum(found.elements) == found.parameters + VOCABULARY * WIDTH == model.total_parameters + VOCABULARY * WIDTH
    assert parts(partition_method="type:Embedding").bounds != parts().bounds
    for interval in (0, 1):
        chunks = parts(activation_checkpoint_interval=interval).whole.given["model"].values()
        assert all(chunk.recomputes == bool(interval) for chunk in chunks)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    built = parts_of(PipelineModule.from_sequential(net, partition_method="uniform"), pipeline_settings(settings()))
    assert built.elements == (6, 6) and [built.layers(rank) for rank in (0, 1)] == ["0", "1"]
    assert not next(net.parameters()).is_meta, "layers that are built stay as they are"


@cache
def traced(schedule: str, on_host: bool = False, **section: Any) -> dict[int, ChunkBytes]:
    return chunk_bytes(parts(schedule, **section), batch(), dtype_policy(), 4, on_host=on_host)


def held(
    schedule: str = "1f1b",
    rank: int = 0,
    micro_batches: int = 4,
    whole: tuple[int, int, int] = (0, 0, 0),
    parameters: ParameterLifetime | None = None,
    on_host: bool = False,
    **section: Any,
) -> tuple[int, int, int]:
    """Saved bytes, all but what outlives a step, and saved inputs on the host."""
    one, of_all = pipeline_settings(settings(schedule=schedule)), parts(schedule, **section)
    policy = choose(Sharding(*plan_for_stage(3).cuts), parameters)
    row = training_schedule(one, policy, micro_batches).rows[rank]
    chunks = {int(name): chunk for name, chunk in of_all.whole.given["model"].named_children()}
    mine = {chunk: chunks[chunk] for chunk in of_all.placement.of(rank)}
    return play_row(row, traced(schedule, on_host, **section), whole_bytes(mine, *whole))


def test_activations_are_those_of_the_micro_batches_in_flight():
    """1F1B holds two on the first of two ranks and one on the last; GPipe holds them all."""
    first, last = held(rank=0)[0], held(rank=1)[0]
    assert held("1f1b", micro_batches=8)[0] == held("gpipe", micro_batches=2)[0] == first
    assert held("gpipe", micro_batches=4)[0] == 2 * first
    assert held("gpipe", rank=1, micro_batches=4)[0] == pytest.approx(4 * last, rel=0.05)
    # two halves of a backward hold on until the second
    assert held("zb_h1")[0] >= first and held("zb_h1", rank=1)[1] > held("1f1b", rank=1)[1]
    recomputed = held(activation_checkpoint_interval=1)[0]
    assert 2 * ROWS * LENGTH * WIDTH * 4 <= recomputed < first / 3


def test_inputs_of_micro_batches_in_flight_wait_on_the_host():
    """Those of two blocks, and tokens; the blocks of one micro-batch come back at one time."""
    one, tokens = 4 * ROWS * LENGTH * WIDTH, 8 * ROWS * LENGTH
    for schedule, flying in (("1f1b", 2), ("gpipe", 4)):
        (saved, most, none), (left, less, host) = (
            held(schedule, on_host=on_host, activation_checkpoint_interval=1) for on_host in (False, True)
        )
        assert (saved, none, left, host) == (2 * one * flying, 0, 0, flying * (2 * one + tokens))
        assert most - less == pytest.approx(2 * one * (flying - 1), rel=0.05)
    config = {
        "activation_checkpointing": {"cpu_checkpointing": True},
        "pipeline": {"activation_checkpoint_interval": 1},
    }
    wide = batch(1024 * ROWS)
    for device, shown in (("cpu", False), ("cuda", True)):
        plan = PipelinePlanner(
            pipeline(), settings(2, train_micro_batch_size_per_gpu=len(wide[0]), **config), 4, wide, device=device
        )
        assert ("host memory" in plan.plan().table()) is shown


def test_what_is_whole_is_counted_while_it_is():
    plain = held("looped_bfs")[1]
    size = sum(param.numel() for param in parts("looped_bfs").stages[0].given["model"].parameters())
    bounds = (ParameterLifetime.HOLD, 4 * size, 4 * size), (ParameterLifetime.CHUNK, 1, 4 * size - 1)
    for parameters, least, most in bounds:
        assert plain + least <= held("looped_bfs", whole=(4, 0, 0), parameters=parameters)[1] <= plain + most
    later = held("1f1b", micro_batches=8, whole=(0, 4, 0))[1]
    assert later > held("1f1b", micro_batches=8)[1], "not at the first backward, but at the others"
    assert held("looped_bfs", whole=(4, 0, 10**9))[1] == plain, "too small to be freed"


def planner(*args: Any, processes: int = 0, **kwargs: Any) -> PipelinePlanner:
    return PipelinePlanner(pipeline(), settings(*args, **kwargs), 4, batch(), processes=processes)


def test_a_row_per_stage():
    plan = planner(2).plan()
    assert [(stage.rank, stage.layers, stage.in_flight) for stage in plan.stages] == [(0, "0-2", 2), (1, "3-5", 1)]
    assert (plan.zero_stage, plan.data_ranks, plan.micro_batch, plan.accumulation) == (2, 2, ROWS, 4)
    title, head, *rows, price = plan.table().splitlines()
    assert title == "per rank: ZeRO-2, fp32, 2 stages x 2 ranks, micro batch 4, accumulation 4"
    assert head.split() == ["stage", "layers", "parameters", "in", "flight", "states", "activations", "peak"]
    assert [row.split()[:4] for row in rows] == [["0", "0-2", "18.4k", "2"], ["1", "3-5", "18.4k", "1"]]
    assert price.startswith("pipeline: 1f1b, 2 stages x 1 chunk, 4 micro-batches, bubble 20.0%; ZeRO-2, parameters")
    assert plan.line(10**9).startswith("params 35.3k on 2 stages · stage 0 needs most: ")
    assert plan.line(10**9).endswith("(limit 953.7 MiB)  fits") and plan.line(10).endswith("does not fit")
    whole = json.loads(json.dumps(plan.as_dict()))
    assert whole["stages"][0]["figures"]["total"] == plan.stages[0].figures.total
    # fp32 with Adam: 16 bytes per parameter; at stage 3 a shard of them, but for what is too small
    for zero, each in ((0, 16), (3, 8)):
        for stage in planner(zero).plan().stages:
            assert stage.figures.states == pytest.approx(each * stage.elements, rel=0.05)


def test_processes_count_beside_the_tensors_of_a_stage():
    one = planner(2, processes=2**20)
    plan = one.plan()
    tensors = plan.largest.figures.total
    assert plan.fits(tensors + 2**20) and not plan.fits(tensors + 2**20 - 1) and plan.as_dict()["processes"] == 2**20
    assert any(line.split()[:3] == ["processes", "1.0", "MiB"] for line in plan.table().splitlines())
    assert "too much" in plan.table(tensors) and ", processes 1.0 MiB)" in str(one.does_not_fit(tensors))


def test_every_stage_is_compared_even_where_the_policy_is_one_stage_s_own():
    both = planner(3, "looped_bfs", pipeline={"zero_policy": "chunk"})
    rows = both.compare()
    assert [row.plan.zero_stage for row in rows if row.plan is not None] == [0, 1, 2, 3, 3]
    assert [row.name for row in rows][-2:] == [
        "ZeRO-3, micro batch 4 x accumulation 4 (as configured)",
        "ZeRO-3, micro batch 2 x accumulation 8",
    ]
    table = both.comparison(10**9)
    assert table.count("  fits") == 5 and table.splitlines()[0].split() == ["stage", "states", "activations", "peak"]
    # an open policy is what moves least
    assert "parameters hold" in planner(3, "looped_bfs").plan().price
    assert "parameters free" in planner(3, "looped_bfs", pipeline={"zero_policy": "free"}).plan().price


def test_what_does_not_fit():
    one = planner(0, "gpipe")
    error = one.does_not_fit(one.plan(micro_batch=2).largest.figures.total)
    assert isinstance(error, DoesNotFit) and "pipeline stage 1 needs" in str(error)
    assert "Smallest change that fits: micro batch 4→2 with accumulation 4→8 (same global batch)." in str(error)
    assert "No stage and no micro-batch fits" in str(one.does_not_fit(10))


CASES: list[tuple[int, int, str, dict[str, Any]]] = [
    # ranks, ZeRO stage, schedule, further keys
    (2, 0, "1f1b", {}),
    (2, 2, "zb_v", {}),
    (4, 1, "zb_h1", {}),
    (4, 3, "looped_bfs", {"pipeline": {"zero_policy": "chunk"}}),
    (4, 2, "interleaved", {"bf16": {"enabled": True}}),
]


@pytest.mark.parametrize(("ranks_", "stage", "schedule", "more"), CASES)
def test_the_plan_is_met(ranks: Pools, ranks_: int, stage: int, schedule: str, more: dict[str, Any]) -> None:
    held = ranks(ranks_).run(watched_step, ds_config(stage, schedule, **more))
    plan = PipelinePlanner(pipeline(), settings(stage, schedule, **more), ranks_, batch()).plan()
    for number, figures in enumerate(row.figures for row in plan.stages):
        measured = held[number * ranks_ // 2]
        assert figures.states == pytest.approx(measured["states"], rel=0.02)
        assert figures.activations == pytest.approx(measured["activations"], rel=0.05)
        assert figures.peak == pytest.approx(measured["peak"], rel=0.05)


def letters(config: str) -> tuple[PipelineModule, dict[str, Any], tuple[torch.Tensor, torch.Tensor]]:
    """The shipped image pipeline, whose layers are modules, with a micro-batch."""
    module, folder = model_module("image_pipeline"), MODEL_DEFS / "image_pipeline" / "ds_configs"
    net = module.letter_net(module.NetConfig(width=16), 52, seed=7)
    found = json.loads((folder / config).read_text()) | {"train_batch_size": 64}
    del found["scheduler"]
    ranks = 2 if config == "zero0.json" else 4
    given = torch.zeros(64 * 2 // ranks // 4, 1, 28, 28), torch.zeros(64 * 2 // ranks // 4, dtype=torch.int64)
    made = PipelineModule.from_sequential(net, loss_fn=cross_entropy, partition_method="type:Conv2d|Linear")
    return made, found, given


def watched_letters(config: str) -> int:
    """Bytes of one rank at most."""
    live = LiveBytes()
    with live:
        model, found, given = letters(config)
        engine = zero_trial.initialize(model=model, config=found)[0]
        live.hold([*engine.module.parameters(), *engine.module.buffers(), *given])
        live.follow(engine.sharded.buffers)
        for _ in range(2):
            live.restart()
            engine.train_batch(itertools.repeat(given))
    engine.destroy()
    return live.peak


@pytest.mark.parametrize(("config", "ranks_"), [("zero0.json", 2), ("zero2.json", 4), ("zero3.json", 4)])
def test_the_plan_of_a_shipped_pipeline_is_met(ranks: Pools, config: str, ranks_: int) -> None:
    model, found, given = letters(config)
    measured = ranks(ranks_).run(watched_letters, config)
    plan = PipelinePlanner(model, read_ds_config(found), ranks_, given).plan()
    for number, stage in enumerate(plan.stages):
        assert stage.figures.peak == pytest.approx(measured[number * ranks_ // 2], rel=0.03)
