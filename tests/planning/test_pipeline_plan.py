"""Plans of pipelines: a row per stage, the policy that will be chosen, and what fits."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import zero_trial
from tests.planning.measured import MODEL_DEFS, model_module
from tests.planning.pipelines import ROWS, batch, ds_config, pipeline, settings, watched_step
from tests.support.pool import Pools
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import DoesNotFit
from zero_trial.pipeline.module import PipelineModule
from zero_trial.planning.live_bytes import LiveBytes
from zero_trial.planning.pipeline_plan import PipelinePlanner


def planner(*args: Any, ranks: int = 4, **kwargs: Any) -> PipelinePlanner:
    return PipelinePlanner(pipeline(), settings(*args, **kwargs), ranks, batch())


def test_a_row_per_stage():
    plan = planner(2).plan()
    assert [(stage.rank, stage.layers, stage.in_flight) for stage in plan.stages] == [(0, "0-2", 2), (1, "3-5", 1)]
    assert (plan.zero_stage, plan.data_ranks, plan.micro_batch, plan.accumulation) == (2, 2, ROWS, 4)
    lines = plan.table().splitlines()
    assert lines[0] == "per rank: ZeRO-2, fp32, 2 stages x 2 ranks, micro batch 4, accumulation 4"
    assert lines[1].split() == [
        "stage",
        "layers",
        "parameters",
        "in",
        "flight",
        "states",
        "activations",
        "peak",
    ]
    assert lines[2].split()[:4] == ["0", "0-2", "18.4k", "2"] and lines[3].split()[:2] == ["1", "3-5"]
    assert lines[4].startswith(
        "pipeline: 1f1b, 2 stages x 1 chunk, 4 micro-batches, bubble 20.0%; ZeRO-2, parameters stay"
    )
    assert plan.line(10**9).startswith("params 35.3k on 2 stages · stage 0 needs most: ")
    assert plan.line(10**9).endswith("(limit 953.7 MiB)  fits") and plan.line(10).endswith("does not fit")
    whole = json.loads(json.dumps(plan.as_dict()))
    assert whole["stages"][0]["figures"]["total"] == plan.stages[0].figures.total


def test_processes_count_beside_the_tensors_of_a_stage():
    one = PipelinePlanner(pipeline(), settings(2), 4, batch(), processes=2**20)
    plan = one.plan()
    tensors = plan.largest.figures.total
    assert plan.fits(tensors + 2**20) and not plan.fits(tensors + 2**20 - 1) and plan.as_dict()["processes"] == 2**20
    assert any(line.split()[:3] == ["processes", "1.0", "MiB"] for line in plan.table().splitlines())
    assert "too much" in plan.table(tensors) and ", processes 1.0 MiB)" in str(one.does_not_fit(tensors))


def test_states_are_those_of_the_stage_s_own_layers():
    """fp32 with Adam: 16 bytes per parameter; at stage 3 a shard of them, but for what is too small
    to shard."""
    zero0, zero3 = planner(0).plan(), planner(3).plan()
    for stage in zero0.stages:
        assert stage.figures.states == pytest.approx(16 * stage.elements, rel=0.01)
    for stage in zero3.stages:
        assert stage.figures.states == pytest.approx(8 * stage.elements, rel=0.05)


def test_an_open_policy_is_what_moves_least_and_says_its_price():
    assert "parameters hold" in planner(3, "looped_bfs").plan().price
    assert "parameters free" in planner(3, "looped_bfs", pipeline={"zero_policy": "free"}).plan().price


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


def test_what_does_not_fit():
    one = planner(0, "gpipe")
    half = one.plan(micro_batch=2).largest.figures.total
    error = one.does_not_fit(half)
    assert isinstance(error, DoesNotFit) and "pipeline stage 1 needs" in str(error)
    assert "This fits: " in str(error)
    assert "Nothing compared fits" in str(one.does_not_fit(10))


CASES: list[tuple[int, int, str, dict[str, Any]]] = [
    # ranks, ZeRO stage, schedule, further keys
    (2, 0, "1f1b", {}),
    (2, 1, "zb_h1", {}),
    (2, 2, "zb_v", {}),
    (4, 2, "gpipe", {}),
    (4, 3, "1f1b", {}),
    (4, 3, "looped_bfs", {"pipeline": {"zero_policy": "chunk"}}),
    (4, 1, "interleaved", {"bf16": {"enabled": True}}),
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
