"""The engine that trains nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zero_trial.checking.recording_engine import NotRehearsed, RecordingEngine, recording_factory
from zero_trial.errors import ConfigError

CONFIG = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
}


def engine(ranks: int = 4, **options: Any) -> RecordingEngine:
    made = recording_factory(ranks)(model=torch.nn.Linear(2, 1), **{"config": CONFIG, **options})
    assert made[0].optimizer is made[1] and made[0].lr_scheduler is made[3]
    found: RecordingEngine = made[0]
    return found


def test_it_answers_for_the_whole_run():
    found = engine()
    sizes = (found.train_batch_size(), found.train_micro_batch_size_per_gpu(), found.gradient_accumulation_steps())
    assert sizes == (16, 2, 2)
    assert (found.world_size, found.dp_world_size, found.mpu.get_data_parallel_world_size()) == (4, 4, 4)
    assert found.get_lr() == [0.5] and found.get_global_grad_norm() is None


def test_a_mesh_with_a_model_axis():
    mpu = engine(config={**CONFIG, "mesh": {"model": 2}}).mpu
    assert (mpu.get_data_parallel_world_size(), mpu.get_model_parallel_world_size()) == (2, 2)
    assert (mpu.get_pipe_parallel_world_size(), mpu.get_slice_parallel_rank(), mpu.get_pipe_parallel_rank()) == (
        1,
        0,
        0,
    )
    assert mpu.get_data_parallel_rank() == 0


def test_it_counts_and_changes_nothing():
    found = engine()
    before = [parameter.clone() for parameter in found.parameters()]
    found.train()
    boundaries = []
    for _ in range(4):
        with found.no_sync():
            found.backward(found(torch.ones(2, 2)).sum())
        boundaries.append(found.is_gradient_accumulation_boundary())
        found.step()
    assert boundaries == [False, True, False, True]
    assert (found.micro_steps, found.global_steps) == (4, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, found.parameters(), strict=True))
    found.zero_grad()
    assert found.eval().module.training is False


def test_what_only_a_run_has():
    found = engine()
    assert getattr(found, "is_pipe_parallel", False) is False
    with pytest.raises(NotRehearsed, match=r"engine.monitor"):
        _ = found.monitor
    with pytest.raises(NotRehearsed):
        recording_factory(1)(config=CONFIG)


def test_optimizers_and_schedulers_of_the_user():
    model = torch.nn.Linear(2, 1)
    mine = torch.optim.SGD(model.parameters(), lr=0.25)
    assert engine(optimizer=mine).optimizer is mine
    made = engine(optimizer=lambda groups: torch.optim.SGD(groups, lr=0.125))
    assert made.get_lr() == [0.125]
    scheduled = engine(lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2))
    assert scheduled.lr_scheduler.step_size == 2
    groups = engine(model_parameters=[{"params": list(model.parameters()), "lr": 3.0}])
    assert groups.get_lr() == [3.0]


def test_where_the_ds_config_comes_from():
    class Arguments:
        deepspeed_config = CONFIG

    assert engine(config=None, config_params=CONFIG).train_batch_size() == 16
    assert engine(config=None, args=Arguments()).train_batch_size() == 16
    with pytest.raises(ConfigError, match="train_batch_size 16 ≠"):
        engine(ranks=3)


def test_the_width_of_the_model_fills_auto():
    class Wide(torch.nn.Linear):
        class Config:
            d_model = 8

        config = Config()

    config = {**CONFIG, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    made, *_ = recording_factory(1)(model=Wide(1, 1), config=config)
    assert made.config.zero_optimization.reduce_bucket_size == 64
