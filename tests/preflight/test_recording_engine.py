"""The engine that trains nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zero_trial.errors import ConfigError, TrialError
from zero_trial.pipeline.module import LayerSpec, PipelineModule
from zero_trial.preflight.recording_engine import NotInDryRun, RecordingEngine, recording_factory
from zero_trial.trial.context import make_engine_mpu

CONFIG = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
}


def engine(ranks: int = 4, **options: Any) -> RecordingEngine:
    made = recording_factory(ranks)(**{"model": torch.nn.Linear(2, 1), "config": CONFIG, **options})
    assert made[0].optimizer is made[1] and made[0].lr_scheduler is made[3]
    found: RecordingEngine = made[0]
    return found


def test_it_answers_for_the_whole_run():
    found = engine()
    sizes = (found.train_batch_size(), found.train_micro_batch_size_per_gpu(), found.gradient_accumulation_steps())
    assert sizes == (16, 2, 2)
    assert (found.world_size, found.dp_world_size, found.mpu.get_data_parallel_world_size()) == (4, 4, 4)
    assert found.get_lr() == [0.5] and found.get_global_grad_norm() is None


def test_what_ported_trials_ask_in_their_constructor():
    """It computes in fp32, and says so: a trial that halves its batches for fp16 does not halve them here."""
    found = engine(config={**CONFIG, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    assert (found.fp16_enabled(), found.bfloat16_enabled(), found.zero_optimization_stage()) == (False, False, 1)
    assert not found.was_step_applied()
    found.step()
    assert found.was_step_applied()


def test_a_mesh_with_a_model_axis():
    mpu = engine(config={**CONFIG, "mesh": {"model": 2}}).mpu
    assert (mpu.get_data_parallel_world_size(), mpu.get_model_parallel_world_size()) == (2, 2)
    assert (mpu.get_pipe_parallel_world_size(), mpu.get_slice_parallel_rank(), mpu.get_pipe_parallel_rank()) == (
        1,
        0,
        0,
    )
    assert mpu.get_data_parallel_rank() == 0


def doubled(value: torch.Tensor) -> torch.Tensor:
    return 2 * value


def pipeline(ranks: int = 4, **config: Any) -> Any:
    layers = [LayerSpec(torch.nn.Linear, 2, 3), doubled, LayerSpec(torch.nn.Linear, 3, 1)]
    model = PipelineModule(layers, loss_fn=torch.nn.functional.mse_loss)
    return engine(ranks, config={**CONFIG, "mesh": {"pipe": 2}, **config}, model=model)


def test_a_pipeline_has_fewer_data_parallel_ranks_and_its_last_stage_reports():
    found = pipeline()
    assert found.is_pipe_parallel and found.is_last_stage() and not found.is_first_stage()
    assert (found.dp_world_size, found.world_size, found.train_micro_batch_size_per_gpu()) == (2, 4, 4)
    mpu = make_engine_mpu(found.mpu)
    assert mpu.should_report_metrics and mpu.should_build_data_loader
    assert all(parameter.is_meta for parameter in found.parameters()), "looked at without memory"


def test_a_pipeline_takes_its_micro_batches_at_once():
    found = pipeline()
    batches = [(torch.full((4, 2), float(number)), torch.zeros(4, 1)) for number in range(6)]
    feed = iter(batches)
    loss = found.train_batch(feed)
    expected = [torch.nn.functional.mse_loss(found.module(x), y) for x, y in batches]
    assert loss.item() == pytest.approx(torch.stack(expected[:2]).mean().item())
    assert (found.micro_steps, found.global_steps) == (2, 1)
    found.set_dataiterator(feed)
    each, outputs = found.eval_batch(return_logits=True, reduce_output=None, num_micro_batches=3)
    assert torch.equal(torch.stack(each), torch.stack(expected[2:5])) and len(outputs) == 3
    found.set_dataloader(batches)
    assert len(found.eval_batch(compute_loss=False)) == 2 and found.global_steps == 1


@pytest.mark.parametrize("call", [lambda e: e(torch.ones(1, 2)), lambda e: e.step(), lambda e: e.backward(None)])
def test_a_pipeline_takes_no_single_micro_batch(call: Any):
    with pytest.raises(TrialError, match=r"only whole batches go through a pipeline. Use engine.train_batch"):
        call(pipeline())


def test_stages_of_a_model_that_is_none():
    with pytest.raises(ConfigError, match="the model is no pipeline: got 2 stages for a Linear"):
        engine(config={**CONFIG, "mesh": {"pipe": 2}})


def test_stages_that_the_model_brings_along():
    model = PipelineModule([torch.nn.Linear(2, 1), torch.mean], num_stages=2)
    assert engine(4, model=model).dp_world_size == 2


def test_a_pipeline_of_one_stage_and_without_a_loss_function():
    model = PipelineModule([torch.nn.Linear(2, 1), torch.mean])
    found = engine(1, model=model)
    assert found.is_first_stage() and found.is_last_stage()
    assert found.eval_batch(iter([(torch.ones(8, 2), None)] * 2)).dim() == 0


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
    with pytest.raises(NotInDryRun, match=r"engine.monitor"):
        _ = found.monitor
    with pytest.raises(NotInDryRun):
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
