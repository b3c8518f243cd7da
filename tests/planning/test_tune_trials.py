"""What a way to train becomes: changes of an experiment, a plan, and a short run."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planning.project import MODEL, project
from zero_trial.ds_config.keys_running import AutotuningSection
from zero_trial.errors import ConfigError, ExitStatus
from zero_trial.launch.first_cause import Cause
from zero_trial.launch.run_experiment import RunRequest, check_run
from zero_trial.launch.screen import Screen
from zero_trial.launch.supervisor import LaunchResult
from zero_trial.planning import tune_trials
from zero_trial.planning.compare import PlannedMachine
from zero_trial.planning.tune_space import ACCUMULATION, MICRO, STAGE, TrainingWay, own_way, ways_to_train
from zero_trial.planning.tune_trials import (
    changes_of,
    changes_of_trial,
    facts_of,
    refuse_autotuning,
    run_trial,
    search_budget,
    weigh_way,
)


def way(stage: int, micro: int, accumulation: int) -> TrainingWay:
    return TrainingWay(((STAGE, stage), (MICRO, micro), (ACCUMULATION, accumulation)), ((STAGE, stage),))


CPU = PlannedMachine("cpu", None, asked=True, one_host=True)


def test_the_values_of_a_way_reach_the_ds_config(tmp_path: Path) -> None:
    made = project(tmp_path)
    request = RunRequest(made.experiment, made.folder, changes=changes_of(way(3, 2, 2)))
    config = check_run(request, os.environ).ds_config
    assert config is not None
    assert (config.zero_optimization.stage, config.train_micro_batch_size_per_gpu) == (3, 2)


def test_what_an_experiment_has_now(tmp_path: Path) -> None:
    made = project(tmp_path)
    facts = facts_of(check_run(RunRequest(made.experiment, made.folder), os.environ), keep=(), accelerator=False)
    assert (facts.samples, facts.pipe, facts.current[STAGE], facts.current[MICRO]) == (4, 1, 0, 4)
    assert own_way(facts) in ways_to_train(facts)


def test_a_plan_or_the_reason_why_there_is_none(tmp_path: Path) -> None:
    made = project(tmp_path)
    request = RunRequest(made.experiment, made.folder)
    small, large = weigh_way(request, way(0, 1, 4), CPU, os.environ), weigh_way(request, way(0, 4, 1), CPU, os.environ)
    assert 0 < small.bytes < large.bytes
    assert small.seconds > large.seconds  # more micro-batches
    refused = weigh_way(replace(request, changes={("hyperparameters", "width"): 5}), way(0, 1, 4), CPU, os.environ)
    assert refused.refusal
    assert not weigh_way(request, way(0, 3, 1), CPU, os.environ).bytes  # 3 x 1 x 2 ranks is not the global batch


FIXED = "self.context.get_train_micro_batch_size_per_gpu())"
TORCH = "torch.utils.data.DataLoader([torch.ones(4)] * 6, "


@pytest.mark.parametrize(
    ("model", "samples", "refused"),
    [
        (MODEL, 4, False),
        (MODEL.replace(FIXED, "2)"), 2, False),  # select compares it with the own way's
        (MODEL.replace("DataLoader([torch.ones(4)] * 40, ", TORCH).replace(FIXED, "8, drop_last=True)"), None, True),
        (MODEL.replace(FIXED, FIXED[:-1] + ", collate_fn=lambda samples: samples[9])"), None, True),
    ],
    ids=["follows", "of its own size", "has too few samples", "cannot make this batch"],
)
def test_what_the_loader_gives_is_known(model: str, samples: int | None, refused: bool, tmp_path: Path) -> None:
    """What yields nothing is a refusal of this way and does not end the tune."""
    made = project(tmp_path, model=model)
    found = weigh_way(RunRequest(made.experiment, made.folder), way(0, 4, 1), CPU, os.environ)
    assert (found.samples, bool(found.refusal)) == (samples, refused)


def test_savers_that_are_switched_on_are_known(tmp_path: Path) -> None:
    zero = {"stage": 2, "reduce_every": "micro", "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    made = project(tmp_path, ds_config={"train_batch_size": 8, "zero_optimization": zero})
    facts = facts_of(check_run(RunRequest(made.experiment, made.folder), os.environ), keep=(), accelerator=False)
    own = own_way(facts)
    assert own.mapping["zero_optimization.offload_optimizer.device"] == "nvme"
    assert own.mapping["zero_optimization.reduce_every"] == "micro"


def test_a_trial_writes_to_no_monitor(tmp_path: Path) -> None:
    monitors = {name: {"enabled": True} for name in ("wandb", "comet", "tensorboard", "csv_monitor")}
    made = project(tmp_path, ds_config={"train_batch_size": 8, **monitors})
    changes = changes_of_trial(way(0, 4, 1), 3)
    config = check_run(RunRequest(made.experiment, made.folder, changes=changes), os.environ).ds_config
    assert config is not None
    assert not any(getattr(config, name).enabled for name in monitors)


@pytest.mark.parametrize(
    ("code", "cause", "interrupted"),
    [
        (ExitStatus.INFRASTRUCTURE, "killed by SIGKILL, perhaps by the kernel's out-of-memory killer", False),
        (130, "stopped by SIGINT", True),  # before the ranks were there
        (ExitStatus.PREEMPTED, "stopped at step 1 of 60 and saved", True),
    ],
)
def test_how_a_trial_ends_early(
    code: int, cause: str, interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        tune_trials, "run_experiment", lambda *_: (LaunchResult(code, Cause(None, cause, code)), tmp_path)
    )
    request, screen = RunRequest(made.experiment, made.folder), Screen(io.StringIO(), quiet=True)
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            run_trial(request, way(0, 4, 1), 3, screen, os.environ)
    else:
        assert cause in run_trial(request, way(0, 4, 1), 3, screen, os.environ).why
    assert bool(list((tmp_path / "tunes").iterdir())) is not interrupted


@pytest.mark.parametrize(
    ("section", "asked", "expected"),
    [
        ({}, {}, (6, 18)),
        ({}, {"trials": 9, "steps": 8}, (9, 10)),
        ({"tuner_num_trials": 5}, {}, (5, 18)),
        ({"start_profile_step": 1, "end_profile_step": 4}, {}, (6, 5)),
        ({"fast": False}, {}, (24, 18)),
        ({"tuner_type": "gridsearch"}, {}, (24, 18)),
        ({}, {"trials": 0}, None),
        ({}, {"steps": -3}, None),
    ],
)
def test_the_autotuning_section_sets_the_defaults(
    section: dict[str, Any], asked: dict[str, int], expected: tuple[int, int] | None
) -> None:
    if expected is not None:
        assert search_budget(AutotuningSection(**section), 24, **asked) == expected
        return
    with pytest.raises(ConfigError, match=f"--{next(iter(asked))}"):
        search_budget(AutotuningSection(**section), 24, **asked)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"tuner_type": "random"}, "tuner_type"),
        ({"max_train_batch_size": 16}, "max_train_batch_size"),
        ({"min_train_batch_size": 64}, "min_train_batch_size"),
        ({"start_profile_step": 9, "end_profile_step": 8}, "end_profile_step"),
    ],
)
def test_what_the_tuner_does_not_do_is_refused(section: dict[str, Any], key: str) -> None:
    refuse_autotuning(AutotuningSection(), 32)
    with pytest.raises(ConfigError, match=f"autotuning.{key}"):
        refuse_autotuning(AutotuningSection(**section), 32)
