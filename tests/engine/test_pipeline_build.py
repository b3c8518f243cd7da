"""Building a pipeline: settings and policy from ds_config, its layers, and the sharding actions of
its schedule.

On ranks it is tested with the engine.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.models import ADAMW
from tests.support.pipelines import cross_entropy, layers, micro_batch
from zero_trial.comm import MeshShape, build_mesh
from zero_trial.ds_config.keys_running import SCHEDULE_CHUNKS
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.engine.pipeline_build import (
    ChunkShards,
    PipelineSettings,
    build_layers,
    hops_of,
    pipeline_settings,
    training_schedule,
    with_stages,
)
from zero_trial.engine.pipeline_engine import PipelineEngine
from zero_trial.errors import ConfigError
from zero_trial.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from zero_trial.pipeline.lowering import Sharding, choose
from zero_trial.pipeline.schedule import RECIPES, ChunkPlacement, ParameterLifetime, ReductionTiming
from zero_trial.sharding.plan import Reshard, plan_for_stage


def settings(stage: int = 3, zero: dict[str, Any] | None = None, **pipeline: Any) -> PipelineSettings:
    zero = {"stage": stage, **(zero or {})}
    return pipeline_settings(
        read_ds_config({"zero_optimization": zero, "pipeline": pipeline, "mesh": {"pipe": pipeline.pop("stages", 2)}})
    )


def test_chunks_per_rank():
    assert settings(schedule="interleaved", chunks_per_rank=3).chunks_per_rank == 3
    assert [settings(schedule=name).chunks_per_rank for name in ("1f1b", "interleaved", "zb_v")] == [1, 2, 2]


@pytest.mark.parametrize(
    ("stage", "words", "expected"),
    [
        (3, {"zero_policy": "free"}, (ParameterLifetime.FREE, None)),
        (
            3,
            {"zero_policy": "hold", "zero": {"reduce_every": "micro"}},
            (ParameterLifetime.HOLD, ReductionTiming.MICRO),
        ),
        (
            3,
            {"zero": {"reshard_after": "step"}, "zero_policy": "boundary"},
            (ParameterLifetime.HOLD, ReductionTiming.BOUNDARY),
        ),
        (2, {"zero_policy": "hold"}, (None, None)),  # parameters stay all the same
    ],
)
def test_older_keys_say_the_same_of_a_pipeline(stage: int, words: dict[str, Any], expected: tuple[Any, Any]):
    found = settings(stage, **words)
    assert (found.parameters, found.reduction) == expected


def test_the_words_are_those_of_the_recipes():
    assert {name: (row.chunks if row.fixed else None) for name, row in RECIPES.items()} == dict(SCHEDULE_CHUNKS)


@pytest.mark.parametrize("name", SCHEDULE_CHUNKS)
def test_a_schedule_has_all_that_a_step_needs(name: str):
    schedule = training_schedule(settings(schedule=name), choose(Sharding(*plan_for_stage(3).cuts)), 4)
    assert (schedule.stages, schedule.micro_batches, schedule.training) == (2, 4, True)
    assert schedule.parameters is ParameterLifetime.HOLD and schedule.reduction is ReductionTiming.BOUNDARY


CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "optimizer": ADAMW}


def test_the_stages_come_from_the_module_where_the_config_names_none():
    module = PipelineModule(layers(), num_stages=3)
    assert with_stages(read_ds_config(CONFIG), module).mesh.pipe == 3
    assert with_stages(read_ds_config(CONFIG | {"mesh": {"pipe": 2}}), PipelineModule(layers())).mesh.pipe == 2
    with pytest.raises(ConfigError, match="disagree about the pipeline stages: got 2, expected 3"):
        with_stages(read_ds_config(CONFIG | {"mesh": {"pipe": 2}}), module)
    with pytest.raises(ConfigError, match="got 2 stages for a Linear"):
        with_stages(read_ds_config(CONFIG | {"mesh": {"pipe": 2}}), nn.Linear(1, 1))


def test_the_config_decides_about_cut_and_recomputation():
    module = PipelineModule(layers(), num_stages=1, loss_fn=cross_entropy)
    pipeline = {"schedule": "interleaved", "partition_method": "uniform", "activation_checkpoint_interval": 2}
    build_layers(module, read_ds_config(CONFIG | {"pipeline": pipeline}), build_mesh(MeshShape()), has_parameters=False)
    assert len(module.chunks) == 2 and module.parts == [0, 5, 9]
    assert all(chunk.recomputes for chunk in module.chunks.values())


def test_parameters_that_were_given_away_are_not_replaced():
    module = PipelineModule(layers(), num_stages=1)
    config = read_ds_config(CONFIG | {"pipeline": {"schedule": "interleaved"}})
    with pytest.raises(
        ConfigError, match="the optimizer's layers are not those that this schedule places on this rank"
    ):
        build_layers(module, config, build_mesh(MeshShape()), has_parameters=True)
    same = read_ds_config(CONFIG)
    before = list(module.parameters())
    build_layers(module, same, build_mesh(MeshShape()), has_parameters=True)
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))


def test_messages_go_over_every_border_and_back():
    assert hops_of(ChunkPlacement.loop(3)) == [(0, 1), (1, 2), (1, 0), (2, 1)]
    assert hops_of(ChunkPlacement.loop(2, 2)) == [(0, 1), (1, 0)]
    assert hops_of(ChunkPlacement.loop(3, 2)) == [(0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2)]
    assert hops_of(ChunkPlacement.v(3)) == [(0, 1), (1, 2), (2, 1), (1, 0)]


def test_one_stage_is_a_pipeline():
    module = PipelineModule(layers(), num_stages=1, loss_fn=cross_entropy, seed_layers=True)
    given = list(module.parameters())
    engine, wrapped, _, _ = zero_trial.initialize(model=module, model_parameters=given, config=CONFIG)
    assert isinstance(engine, PipelineEngine) and engine.sharded.plan.reshard is Reshard.SCHEDULED
    assert wrapped is engine.optimizer and engine.mpu is engine.grid
    assert (engine.is_pipe_parallel, engine.is_first_stage(), engine.is_last_stage()) == (True, True, True)
    assert (engine.num_stages, engine.stage_id, engine.micro_batches) == (1, 0, 2)
    engine.destroy()


def test_data_from_initialize_and_from_loaders():
    data = torch.utils.data.TensorDataset(
        *[torch.cat(parts) for parts in zip(*[micro_batch(0, n, 0) for n in range(4)], strict=True)]
    )
    module = PipelineModule(layers(2), num_stages=1, loss_fn=cross_entropy, seed_layers=True)
    engine, _, loader, _ = zero_trial.initialize(model=module, config=CONFIG, training_data=data)
    assert len(loader) == 4
    assert [torch.equal(x, data[2 * n : 2 * n + 2][0]) for n, (x, _) in enumerate(loader)] == [True] * 4
    for _ in range(5):  # more than one pass
        assert engine.train_batch().item() > 0
    engine.set_dataloader([micro_batch(1, 0, 0), micro_batch(1, 1, 0)])
    first = engine.train_batch().item()
    engine.set_batch_fn(lambda batch: (batch["x"], batch["y"]))
    engine.set_dataiterator(iter([{"x": x, "y": y} for x, y in [micro_batch(1, 0, 0), micro_batch(1, 1, 0)]]))
    assert 0 < engine.train_batch().item() < first
    with pytest.raises(StopIteration):
        engine.train_batch()
    engine.destroy()


def module_of(placement: ChunkPlacement, stage: int) -> PipelineModule:
    ends = [TiedLayerSpec("e", nn.Linear, 4, 4), TiedLayerSpec("e", nn.Linear, 4, 4)]
    module = PipelineModule(
        [ends[0], *[LayerSpec(nn.Linear, 4, 4) for _ in range(6)], ends[1]], partition_method="uniform"
    )
    module.build(placement, stage)
    return module


class Recorded:
    def __init__(self) -> None:
        self.words: list[str] = []
        self.unsharder: Any = SimpleNamespace(
            unshard_async=lambda group: self.words.append(f"start {group}"),
            unshard=lambda group, record: self.words.append(f"ensure {group}"),
            reshard=lambda group: self.words.append(f"release {group}"),
        )

    def __getattr__(self, name: str) -> Any:
        return lambda group: self.words.append(f"{name} {group}")


V, LOOP = ChunkPlacement.v(2), ChunkPlacement.loop(2)
# One rank has both chunks of the tied module e: it is freed and reduced with the last of them, or
# reduced with each where every micro-batch is; a new step forgets the one before.
CALLS: list[tuple[ChunkPlacement, int, bool, str, str]] = [
    (V, 0, False, "unshard 0, unshard 3, reshard 3, reshard 0",
     "start chunk0, start tied.e, start chunk3, start tied.e, release chunk3, release chunk0, release tied.e"),
    (V, 0, False, "reduce 3, reduce 0", "reduce chunk3, reduce chunk0, reduce tied.e"),
    (V, 0, True, "reduce 3, reduce 0", "reduce chunk3, reduce tied.e, reduce chunk0, reduce tied.e"),
    (V, 0, False, "reduce 3, start_step, reduce 0", "reduce chunk3, reduce chunk0"),
    (V, 1, False, "need 1, backward_done 2", "ensure chunk1, end_pass chunk2"),
    (LOOP, 0, False, "tied_reduce 0", "sum_copies tied.e"),
]  # fmt: skip


@pytest.mark.parametrize(("placement", "stage", "micro", "calls", "words"), CALLS)
def test_a_tied_module_goes_with_its_chunks(
    placement: ChunkPlacement, stage: int, micro: bool, calls: str, words: str
) -> None:
    reported: Any = Recorded()
    shards = ChunkShards(reported, module_of(placement, stage), every_micro_batch=micro)
    for call in calls.split(", "):
        name, *number = call.split()
        getattr(shards, name)(*map(int, number))
    assert ", ".join(reported.words) == words
