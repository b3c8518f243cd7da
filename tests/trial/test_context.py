"""The trial's context: hyperparameters, engines, place among the replicas, devices, profiling."""

from __future__ import annotations

import json
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrdict import AttrDict

from tests.support.in_memory import InMemoryPlatform
from tests.trial.fake_engine import FakeEngine, FakeGrid, fake_factory
from tests.trial.harness import DS_CONFIG, LineTrial, run_rank, steps
from zero_trial.errors import ConfigError, TrialError
from zero_trial.trial.context import (
    HParams,
    ModelParallelUnit,
    ZeroTrialContext,
    make_data_parallel_mpu,
    make_engine_mpu,
    move_to,
)
from zero_trial.trial.controller import calls_per_step

TWO_ENGINES: dict[str, Any] = {**DS_CONFIG, "train_micro_batch_size_per_gpu": 4}


def test_methods_of_pytorch_trial_contexts_name_what_replaces_them() -> None:
    around = context()
    for name, words in (("wrap_model", r"context\.initialize\("), ("step_optimizer", r"self\.engine\.step\(\)")):
        with pytest.raises(AttributeError, match=rf"no '{name}' \(PyTorchTrialContext has it\)\. Use .*{words}"):
            getattr(around, name)
    with pytest.raises(AttributeError, match=r"no attribute 'wrap_modle'$"):
        getattr(around, "wrap_" + "modle")
    del around.platform
    with pytest.raises(AttributeError, match="'platform'"):  # what a property raises is not replaced
        _ = around.distributed


def context(**platform: Any) -> ZeroTrialContext:
    return ZeroTrialContext(InMemoryPlatform(**platform), fake_factory())


def engine(**config: Any) -> FakeEngine:
    return FakeEngine(torch.nn.Linear(2, 1), {**DS_CONFIG, **config})


def test_initialize_does_it_all_in_one_call() -> None:
    around = context(
        experiment={"data": {"ds_config": DS_CONFIG}},
        hparams={
            "global_batch_size": 6,
            "ds_config": {"optimizer": {"params": {"lr": 0.5}}, "gradient_accumulation_steps": 3},
        },
    )
    made = around.initialize(model=torch.nn.Linear(2, 1))
    assert around.engines == [made] and made.lr == 0.5
    assert (around.get_global_batch_size(), around.get_per_slot_batch_size()) == (6, 6)
    assert (around.get_train_micro_batch_size_per_gpu(), around.get_num_micro_batches_per_slot()) == (2, 3)
    assert around.mpu == ModelParallelUnit(0, 1, True, True) and calls_per_step(around) == 3
    assert around.parameters == 3 and around.ds_configs[0].train_batch_size == 6
    source, note = around.platform.record.events  # type: ignore[attr-defined]
    assert source["message"].startswith("ds_config ") and source["message"].endswith(": ZeRO-0, fp32")
    assert note["message"] == "global batch 6 = micro 2 x accumulation 3 x data-parallel ranks 1"
    assert "gradient_accumulation_steps" in note["table"]


def test_the_steps_of_the_tutorial_one_by_one() -> None:
    around = context(hparams={"ds_config": {"optimizer": {"params": {"lr": 0.25}}}, "global_batch_size": 2})
    config = around.overwrite_ds_config(DS_CONFIG)
    assert config["optimizer"]["params"]["lr"] == 0.25 and DS_CONFIG["optimizer"]["params"]["lr"] == 0.01
    assert around.overwrite_ds_config(DS_CONFIG, {"optimizer.params.lr": 1.0})["optimizer"]["params"]["lr"] == 1.0
    built = FakeEngine(torch.nn.Linear(1, 1), config)
    mpu = around.wrap_mpu(built.mpu)  # before the engine, as the tutorial does
    made = around.wrap_model_engine(built)
    assert around.mpu is mpu == make_data_parallel_mpu(around.distributed)
    assert around.reconcile_ds_config(made).train_batch_size == 2
    assert around.reconcile_ds_config(config).train_batch_size == 2
    sizes = SimpleNamespace(train_batch_size=2, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    assert around.reconcile_ds_config(sizes).data_parallel == 2, "an engine's _config has fields where it has methods"
    with pytest.raises(TrialError, match="Only one MPU can be passed"):
        around.set_mpu(mpu)


def test_questions_before_there_is_an_engine() -> None:
    around = context()
    for ask in (
        around.get_train_micro_batch_size_per_gpu,
        around.get_global_batch_size,
        lambda: around.use_pipeline_parallel,
    ):
        with pytest.raises(TrialError, match="Must have at least one model engine"):
            ask()
    with pytest.raises(TrialError, match="Must have at least one model engine"):
        around.set_mpu(make_data_parallel_mpu(around.distributed))
    with pytest.raises(TrialError, match="this is not an engine: got Linear"):
        around.wrap_model_engine(torch.nn.Linear(1, 1))


def test_the_first_engines_batch_counts_and_a_difference_is_said() -> None:
    around = context()
    around.wrap_model_engine(engine())
    around.wrap_model_engine(engine(train_micro_batch_size_per_gpu=8))
    assert around.get_train_micro_batch_size_per_gpu() == 2
    assert "differ in micro batch size" in around.platform.record.events[0]["message"]  # type: ignore[attr-defined]


class Pair(LineTrial):
    """Two engines, as a GAN has, the second with its own accumulation."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.other = context.initialize(
            model=torch.nn.Linear(1, 1), config={**DS_CONFIG, "gradient_accumulation_steps": 1}
        )

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        other = (self.other(torch.ones(2, 1)) ** 2).mean()
        self.other.backward(other)
        self.other.step()
        return {"loss": loss, "other": other}


def test_two_engines_with_their_own_accumulation(tmp_path: Path) -> None:
    run = run_rank(Pair, steps(4), ds_config={"gradient_accumulation_steps": 2}, storage=tmp_path)
    assert (run.trial.engine.global_steps, run.trial.other.global_steps) == (4, 8)
    assert set(run.record.training[0][1]) == {"loss", "other"}
    assert sorted(path.name for path in (tmp_path / "step-000004").iterdir() if path.is_dir()) == ["model0", "model1"]


class Asks(LineTrial):
    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        c = self.context
        answer = (c.current_train_epoch(), c.current_train_batch(), c.is_epoch_start(), c.is_epoch_end())
        self.answers = [*getattr(self, "answers", []), answer]
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


def test_the_position_is_the_trials() -> None:
    class Short(Asks):
        samples = 6

    answers = run_rank(Short, steps(4)).trial.answers
    assert [(epoch, batch) for epoch, batch, _, _ in answers] == [(0, 0), (0, 1), (0, 2), (1, 3)]
    assert [(begins, ends) for _, _, begins, ends in answers] == [
        (True, False),
        (False, False),
        (False, True),
        (True, False),
    ]
    with pytest.raises(TrialError, match="training has not started"):
        context().current_train_batch()


def test_a_tensorboard_writer_gets_what_is_reported(tmp_path: Path) -> None:
    class Writes(LineTrial):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.get_tensorboard_writer()

    run_rank(Writes, steps(2), tensorboard_path=tmp_path / "tb")
    assert [path.name.startswith("events.") for path in (tmp_path / "tb").iterdir()] == [True]
    with pytest.raises(ConfigError, match="writes no TensorBoard files"):
        context().get_tensorboard_writer()


def test_a_model_that_is_built_in_parts_says_how_large_it_is() -> None:
    class Parts(torch.nn.Linear):
        total_parameters = 40

    around = context()
    around.initialize(model=Parts(2, 1), config=DS_CONFIG)
    assert around.parameters == 40


class BothEnds(FakeEngine):
    """An engine of a pipeline whose first rank has the first and the last layer."""

    is_pipe_parallel = True

    def is_first_stage(self) -> bool:
        return self.mpu.get_pipe_parallel_rank() == 0

    is_last_stage = is_first_stage


def test_an_engine_of_a_pipeline_says_where_the_ends_are() -> None:
    for grid, duties in ((FakeGrid(0, 1), (True, True)), (FakeGrid(0, 1, pipe=1, pipes=2), (False, False))):
        around, made = context(), BothEnds(torch.nn.Linear(2, 1), DS_CONFIG)
        made.mpu = grid
        around.wrap_model_engine(made)
        assert around.use_pipeline_parallel and calls_per_step(around) == 1
        assert (around.mpu.should_report_metrics, around.mpu.should_build_data_loader) == duties


VALUES = {"lr": 0.1, "model": {"width": 8, "keys": [1, {"deep": 2}]}}


def test_hyperparameters_are_a_dict_whose_keys_are_attributes_at_every_depth() -> None:
    h = HParams(VALUES)
    assert h == VALUES and json.loads(json.dumps(h)) == VALUES
    assert h.lr == 0.1 and h.model["keys"][1].deep == 2
    h.model.width = 16
    assert h["model"]["width"] == 16 and VALUES["model"]["width"] == 8  # type: ignore[index]
    with pytest.raises(AttributeError, match=r"no hyperparameter 'learning_rate'; there are \['lr', 'model'\]"):
        _ = h.learning_rate
    args = AttrDict(h)
    assert args.lr == 0.1 and args.model.width == 16


@pytest.mark.parametrize(
    ("grid", "reports", "loads"),
    [
        (FakeGrid(1, 2, 0, 1, 0), True, True),
        (FakeGrid(1, 2, 0, 1, 1), False, False),
        (FakeGrid(1, 2, 0, 3, 0), False, True),
        (FakeGrid(1, 2, 1, 3, 0), False, False),
        (FakeGrid(1, 2, 2, 3, 0), True, True),
        (FakeGrid(1, 2, 2, 3, 1), False, False),
    ],
)
def test_each_replica_counts_once(grid: FakeGrid, reports: bool, loads: bool) -> None:
    assert make_engine_mpu(grid) == ModelParallelUnit(1, 2, reports, loads)


Point = namedtuple("Point", "x y")


def test_tensors_inside_containers_are_moved_and_the_containers_kept() -> None:
    meta, one, other = torch.device("meta"), torch.ones(2), object()
    moved = move_to({"a": [one, (one, 3)], "p": Point(one, "text"), "n": None, "o": other}, meta)
    assert moved["a"][0].device == meta and moved["a"][1][0].device == meta and moved["a"][1][1] == 3
    assert isinstance(moved["p"], Point) and moved["p"].x.device == meta and moved["p"].y == "text"
    assert moved["n"] is None and moved["o"] is other


def test_it_is_stepped_per_optimizer_step_and_not_per_micro_batch(tmp_path: Path) -> None:
    ready: list[int] = []

    class Profiled(LineTrial):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.set_profiler(
                activities=[torch.profiler.ProfilerActivity.CPU],
                schedule=torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1),
                on_trace_ready=lambda profile: ready.append(profile.step_num),
            )

    run_rank(Profiled, steps(4), ds_config={"gradient_accumulation_steps": 2}, tensorboard_path=tmp_path)
    assert ready == [3]


def test_the_platform_answers() -> None:
    around = InMemoryPlatform(
        hparams={"lr": 0.1, "model": {"width": 8}},
        experiment={"data": {"source": "text"}, "name": "e"},
        seed=7,
        trial_id="t",
        experiment_id="x",
        steps_completed=3,
    )
    view = ZeroTrialContext(around, fake_factory())
    assert view.get_hparam("lr") == 0.1 and view.get_hparams().model.width == 8
    assert view.get_data_config() == {"source": "text"} and view.get_experiment_config()["name"] == "e"
    facts = (view.get_trial_id(), view.get_experiment_id(), view.get_trial_seed(), view.get_initial_batch())
    assert facts == ("t", "x", 7, 3)
    unknown = r"hyperparameters.width: no such hyperparameter: expected one of \['lr', 'model'\]"
    with pytest.raises(ConfigError, match=unknown):
        view.get_hparam("width")
    view.note("hello")
    assert around.record.events == [{"kind": "note", "message": "hello"}]
