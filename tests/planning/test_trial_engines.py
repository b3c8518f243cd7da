"""The engines of a dry run: with real values for a check, behind a proxy for a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from tests.planning.measured import ROWS, batch, build, ds_config
from tests.support.memory_plans import memory_plan
from zero_trial.errors import ConfigError, TrialError
from zero_trial.pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec
from zero_trial.planning.lone_task import TrialEngines, check_initialize
from zero_trial.planning.planner import Planner
from zero_trial.trial.context import make_engine_mpu


def planned(engines: TrialEngines, train: Any, *batches: Any, ranks: int = 2, **more: Any) -> Planner:
    return Planner(engines.subject(train, batches, **more), engines.settings, ranks)


def stepping(*engines: Any) -> Any:
    """Return a train_batch that steps each of them with the next batch."""

    def train_batch(batches: Iterator[Any]) -> None:
        given = next(batches)
        for engine in engines:
            engine.backward(engine(*given))
            engine.step()

    return train_batch


def test_a_trial_is_planned_like_its_model_and_two_engines_together() -> None:
    subject = TrialEngines(2)
    engine = subject.initialize(model=build("gpt"), config=ds_config(2))[0]
    sizes = (engine.train_micro_batch_size_per_gpu(), engine.train_batch_size(), engine.world_size)
    assert sizes == (ROWS, 2 * ROWS, 2)
    planner = planned(subject, stepping(engine), batch())
    assert planner.plan() == memory_plan(build("gpt"), ds_config(2), 2, batch())
    rows = planner.compare()
    assert [row.plan is None for row in rows] == [False] * 7
    away = rows[-1].plan
    assert away is not None and away.figures.optimizer < planner.plan().figures.optimizer / 2
    subject = TrialEngines(2)
    engines = [subject.initialize(model=build("gpt"), config=ds_config(1))[0] for _ in range(2)]
    both = planned(subject, stepping(*engines), batch()).plan()
    single = memory_plan(build("gpt"), ds_config(1), 2, batch())
    assert both.figures.states == 2 * single.figures.states and both.parameter_count == 2 * single.parameter_count
    assert both.figures.peak > single.figures.peak + single.figures.states * 0.9


def test_a_model_on_the_meta_device_may_have_buffers_with_values() -> None:
    model = torch.nn.Linear(4, 4, device="meta")
    model.register_buffer("scale", torch.ones(4), persistent=False)
    engine = TrialEngines(2).initialize(model=model, config=CONFIG)[0]
    assert engine.module.scale.is_meta and not model.scale.is_meta


def test_a_trial_that_does_its_own_accumulation() -> None:
    subject = TrialEngines(2)
    engine = subject.initialize(model=build("gpt"), config=ds_config(1, accumulation=3))[0]
    calls = []

    def train_batch(batches: Iterator[Any]) -> None:
        calls.append(engine.gradient_accumulation_steps())
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(*next(batches)))
            engine.step()

    assert engine.gradient_accumulation_steps() == 3
    plan = planned(subject, train_batch, batch(), whole_steps=True).plan()
    # a third micro-batch needs nothing that the second does not
    assert calls == [2] and plan.accumulation == 3


def test_client_optimizers_and_generators_of_parameters() -> None:
    model = build("gpt")
    config = ds_config(1)
    del config["optimizer"]
    subject = TrialEngines(2)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, optimizer, _, _ = subject.initialize(model=model, config=config, optimizer=own)
    assert optimizer is not None and engine.get_lr() == [0.1]
    # SGD without momentum keeps nothing
    assert planned(subject, stepping(engine), batch()).plan().figures.optimizer == 0
    other = TrialEngines(2)
    model = build("gpt")
    other.initialize(model=model, config=ds_config(1), model_parameters=(param for param in model.parameters()))


def test_a_trial_may_use_what_initialize_returns() -> None:
    """The optimizer is that of all parameters, of whatever they were given as."""
    deep = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(60)))
    config = {**CONFIG, "scheduler": {"type": "WarmupLR", "params": {}}}
    made, optimizer, loader, scheduler = TrialEngines(4).initialize(model=deep, config=config)
    assert (made.train_batch_size(), made.mpu.get_data_parallel_world_size(), len(made.module)) == (16, 4, 60)
    assert made.optimizer is optimizer and made.lr_scheduler is scheduler and made.training_dataloader is loader
    assert made(torch.ones(2, 4, device="meta")).shape == (2, 4)
    for groups in ([{"params": [layer.weight]} for layer in deep], [defaultdict(int, params=list(deep.parameters()))]):
        own = TrialEngines(4).initialize(model=deep, model_parameters=groups, config=CONFIG)[1]
        assert len(own.param_groups) == len(groups)
    assert all(not param.is_meta for param in deep.parameters()), "the trial's own model keeps its values"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU")
@pytest.mark.parametrize(("stage", "place"), [(2, "nvme"), (3, "cpu"), (3, "nvme")])
def test_a_trial_is_planned_for_an_absent_gpu_with_offload(stage: int, place: str) -> None:
    away = {"device": place, **({"nvme_path": "."} if place == "nvme" else {})}
    config = ds_config(stage, bf16=True)
    config["zero_optimization"] |= {"offload_optimizer": away, **({"offload_param": away} if stage == 3 else {})}
    subject = TrialEngines(2, "cuda")
    made = subject.initialize(model=build("gpt"), config=config)[0]
    found = planned(subject, stepping(made), batch()).plan().figures
    assert found == memory_plan(build("gpt"), config, 2, batch(), device="cuda").figures
    assert found.optimizer == 0 and (found.disk if place == "nvme" else found.host) > 0


def test_faults_and_auto_from_the_width_of_the_model() -> None:
    with pytest.raises(ConfigError, match="needs a model"):
        TrialEngines(2).initialize(config=ds_config(1))
    with pytest.raises(TrialError, match="the trial created no engine"):
        _ = TrialEngines(2).settings

    class Wide(torch.nn.Linear):
        class Config:
            d_model = 8

        config = Config()

    config = {**CONFIG, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    subject = TrialEngines(1)
    subject.initialize(model=Wide(1, 1), config=config)
    assert subject.settings.zero_optimization.reduce_bucket_size == 64
    assert engine(1, model=Wide(1, 1), config=config).config.zero_optimization.reduce_bucket_size == 64


CONFIG: dict[str, Any] = {"train_batch_size": 16, "gradient_accumulation_steps": 2}
CONFIG["optimizer"] = {"type": "AdamW", "params": {"lr": 0.5}}


def engine(ranks: int = 4, *, most_values: float = 1000, **options: Any) -> Any:
    given = {"model": torch.nn.Linear(2, 1), "config": CONFIG, **options}
    made = check_initialize(ranks, most_values)(**given)
    assert made[0].optimizer is made[1] and made[0].lr_scheduler is made[3]
    return made[0]


def test_an_engine_answers_for_the_whole_run() -> None:
    found = engine()
    sizes = (found.train_batch_size(), found.train_micro_batch_size_per_gpu(), found.gradient_accumulation_steps())
    assert sizes == (16, 2, 2)
    assert (found.world_size, found.dp_world_size, found.mpu.get_data_parallel_world_size()) == (4, 4, 4)
    assert found.get_lr() == [0.5] and str(found.device) == "cpu"


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "bf16")])
def test_an_engine_evaluates_in_the_precision_of_the_run(stage: int, precision: str) -> None:
    half = {} if precision == "fp32" else {precision: {"enabled": True}}
    found = engine(config={**CONFIG, **half, "zero_optimization": {"stage": stage}})
    with torch.no_grad():
        output = found(torch.ones(3, 2))
    assert output.shape == (3, 1) and output.isfinite().all() and found.zero_optimization_stage() == stage
    assert (found.fp16_enabled(), found.bfloat16_enabled()) == (precision == "fp16", precision == "bf16")
    assert {param.dtype for param in found.module.parameters()} == {output.dtype}


def test_nothing_is_written(tmp_path: Path) -> None:
    """By the writers of ds_config; a package that the run would miss is still an error."""
    writers = {name: {"enabled": True, "output_path": str(tmp_path)} for name in ("csv_monitor", "tensorboard")}
    found = engine(config={**CONFIG, **writers, "flops_profiler": {"enabled": True, "output_file": f"{tmp_path}/f"}})
    found.backward(found(torch.ones(2, 2)).sum())
    found.step()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="comet"):
        engine(config={**CONFIG, "comet": {"enabled": True}})


def pipeline(ranks: int = 4, *, most_values: float = 1000, num_stages: int | None = None, **config: Any) -> Any:
    tied = TiedLayerSpec("tied", torch.nn.Linear, 3, 3)
    layers = [LayerSpec(torch.nn.Linear, 2, 3), tied, torch.nn.functional.relu, tied, LayerSpec(torch.nn.Linear, 3, 1)]
    model = PipelineModule(layers, num_stages=num_stages, loss_fn=mse_loss)
    return engine(ranks, most_values=most_values, config={**CONFIG, "mesh": {"pipe": 2}, **config}, model=model)


def test_a_pipeline_has_fewer_data_parallel_ranks_and_reports() -> None:
    found = pipeline(most_values=0)
    assert found.is_pipe_parallel and found.is_last_stage()
    assert (found.dp_world_size, found.train_micro_batch_size_per_gpu(), found.train_batch_size()) == (2, 4, 16)
    mpu = make_engine_mpu(found.mpu)
    assert mpu.should_report_metrics and mpu.should_build_data_loader
    assert all(parameter.is_meta for parameter in found.parameters()), "no memory for a look at the sizes"
    assert str(found.device) == "cpu", "where the trial puts its tensors"


@pytest.mark.parametrize(("stage", "schedule"), [(0, "zb_v"), (3, "1f1b")])
def test_a_pipeline_evaluates_its_micro_batches(stage: int, schedule: str) -> None:
    found = pipeline(zero_optimization={"stage": stage}, pipeline={"schedule": schedule})
    feed = iter([(torch.full((4, 2), float(number)), torch.zeros(4, 1)) for number in range(6)])
    assert found.eval_batch(feed).isfinite() and len(list(feed)) == 4


def test_stages_that_the_model_brings_along() -> None:
    assert pipeline(num_stages=2, mesh={}).dp_world_size == 2
    with pytest.raises(ConfigError):
        engine(config={**CONFIG, "mesh": {"pipe": 2}})
    with pytest.raises(ConfigError):
        engine(ranks=3)


def test_optimizers_and_schedulers_of_the_user() -> None:
    model = torch.nn.Linear(2, 1)
    config = {name: value for name, value in CONFIG.items() if name != "optimizer"}
    mine = torch.optim.SGD(model.parameters(), lr=0.25)
    assert engine(model=model, optimizer=mine, config=config).get_lr() == [0.25]
    counts = []
    made = engine(optimizer=lambda groups: counts.append(len(groups[0]["params"])) or torch.optim.SGD(groups, lr=0.125))
    assert made.get_lr() == [0.125] and counts[0] == 2, "a function gets all parameters"
    scheduled = engine(lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2))
    assert scheduled.lr_scheduler.step_size == 2
    # the ds_config may come as another argument
    assert engine(config=None, config_params=CONFIG).train_batch_size() == 16
    assert engine(config=None, args=SimpleNamespace(deepspeed_config=CONFIG)).train_batch_size() == 16
