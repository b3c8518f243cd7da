"""Wiring a pipeline in one process; on ranks it is tested with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.models import ADAMW, adamw
from tests.support.pipelines import cross_entropy, layers, micro_batch
from zero_trial.comm import MeshShape, build_mesh
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.engine.pipeline_build import build_layers, hops_of, with_stages
from zero_trial.engine.pipeline_engine import PipelineEngine
from zero_trial.errors import ConfigError
from zero_trial.pipeline import PipelineModule
from zero_trial.pipeline.schedule import ChunkPlacement
from zero_trial.sharding.plan import Reshard

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": ADAMW,
}


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
    assert len(module.chunks) == 2
    assert module.parts == [0, 5, 9]
    assert all(chunk.recomputes for chunk in module.chunks.values())


def test_parameters_that_were_given_away_are_not_replaced():
    module = PipelineModule(layers(), num_stages=1)
    config = read_ds_config(CONFIG | {"pipeline": {"schedule": "interleaved"}})
    with pytest.raises(
        ConfigError, match="the layers that the optimizer was given are not those that this schedule needs"
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


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved"])
def test_one_stage_is_plain_training(schedule: str):
    module = PipelineModule(layers(), num_stages=1, loss_fn=cross_entropy, seed_layers=True)
    dense = PipelineModule(layers(), num_stages=1, seed_layers=True)
    optimizer = adamw(dense.parameters())
    given = list(module.parameters()) if schedule == "1f1b" else None
    engine, wrapped, _, _ = zero_trial.initialize(
        model=module,
        model_parameters=given,
        config=CONFIG | {"gradient_clipping": 0.0, "pipeline": {"schedule": schedule}},
    )
    assert isinstance(engine, PipelineEngine)
    assert engine.sharded.plan.reshard is Reshard.SCHEDULED
    assert wrapped is engine.optimizer
    assert engine.mpu is engine.grid
    assert (engine.is_pipe_parallel, engine.is_first_stage(), engine.is_last_stage()) == (True, True, True)
    assert (engine.num_stages, engine.stage_id, engine.micro_batches) == (1, 0, 2)
    for step in range(3):
        pairs = [micro_batch(step, number, 0) for number in range(2)]
        losses = [cross_entropy(dense(inputs), labels) / 2 for inputs, labels in pairs]
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        assert engine.train_batch(iter(pairs)).item() == pytest.approx(sum(loss.item() for loss in losses), abs=1e-6)
    state = engine.module_state_dict()
    for name, value in dense.state_dict().items():
        assert torch.allclose(state[name], value, atol=2e-6), name
    engine.destroy()


def test_data_from_initialize_and_from_loaders():
    data = torch.utils.data.TensorDataset(
        *[torch.cat(parts) for parts in zip(*[micro_batch(0, n, 0) for n in range(4)], strict=True)]
    )
    module = PipelineModule(layers(2), num_stages=1, loss_fn=cross_entropy, seed_layers=True)
    engine, _, loader, _ = zero_trial.initialize(model=module, config=CONFIG, training_data=data)
    assert len(loader) == 4
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
