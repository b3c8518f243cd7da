"""What a way to train becomes: changes of an experiment, a plan, and a reason when a trial dies."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.preflight.project import project
from zero_trial.errors import ExitStatus
from zero_trial.launch.experiment import RunRequest, check_run
from zero_trial.launch.supervisor import Cause, LaunchResult
from zero_trial.preflight.compare import PlannedMachine
from zero_trial.tune.space import ACCUMULATION, MICRO, STAGE, TrainingWay
from zero_trial.tune.trials import changes_of, ended_because, facts_of, speed_of, weigh_way

CPU = PlannedMachine("cpu", None, asked=True, one_host=True)


def way(stage: int, micro: int, accumulation: int) -> TrainingWay:
    return TrainingWay(((STAGE, stage), (MICRO, micro), (ACCUMULATION, accumulation)), ((STAGE, stage),))


def test_the_values_of_a_way_reach_the_ds_config(tmp_path: Path) -> None:
    made = project(tmp_path)
    request = RunRequest(made.experiment, made.folder, changes=changes_of(way(3, 2, 2)))
    config = check_run(request, os.environ).ds_config
    assert config is not None
    assert (config.zero_optimization.stage, config.train_micro_batch_size_per_gpu) == (3, 2)


def test_what_an_experiment_has_now(tmp_path: Path) -> None:
    made = project(tmp_path)
    facts = facts_of(check_run(RunRequest(made.experiment, made.folder), os.environ), keep=(), vary={})
    assert (facts.samples, facts.pipe, facts.current[STAGE], facts.current[MICRO]) == (4, 1, 0, 4)


def test_a_plan_or_the_reason_why_there_is_none(tmp_path: Path) -> None:
    made = project(tmp_path)
    request = RunRequest(made.experiment, made.folder)
    small, large = weigh_way(request, way(0, 1, 4), CPU, os.environ), weigh_way(request, way(0, 4, 1), CPU, os.environ)
    assert 0 < small.bytes < large.bytes
    assert small.seconds > large.seconds  # more micro-batches
    refused = weigh_way(replace(request, changes={("hyperparameters", "width"): 5}), way(0, 1, 4), CPU, os.environ)
    assert refused.refusal
    assert not weigh_way(request, way(0, 3, 1), CPU, os.environ).bytes  # 3 x 1 x 2 ranks is not the global batch


@pytest.mark.parametrize(
    ("warm_up", "expected"),
    [(0, (4, 1 / 1.5)), (1, (4, 1 / 1.5)), (2, (3, 0.5)), (3, (2, 0.5)), (4, (1, 0.5)), (5, (0, 0.0)), (9, (0, 0.0))],
)
def test_the_speed_of_the_steps_after_the_warm_up(warm_up: int, expected: tuple[int, float]) -> None:
    """Spans of 0.5, 1, 2 and 2 seconds between five steps."""
    assert speed_of([9.0, 9.5, 10.5, 12.5, 14.5], warm_up) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("message", "code", "memory"),
    [
        ("killed by SIGKILL, perhaps by the kernel's out-of-memory killer", ExitStatus.INFRASTRUCTURE, True),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried", ExitStatus.TRIAL_FAULT, True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", ExitStatus.TRIAL_FAULT, True),
        ("ValueError: 3 is no width", ExitStatus.TRIAL_FAULT, False),
    ],
)
def test_why_a_trial_died(message: str, code: int, memory: bool) -> None:
    why = ended_because(LaunchResult(code, Cause(1, message, code)))
    assert why.startswith("out of memory: ") is memory
    assert message in why


def test_the_end_of_the_data_and_the_user() -> None:
    assert ended_because(LaunchResult(0))
    # Ctrl-C: before the ranks were there, and after they have saved
    for message, code in ("stopped by SIGINT", 130), ("stopped at step 1 of 60 and saved", ExitStatus.PREEMPTED):
        with pytest.raises(KeyboardInterrupt):
            ended_because(LaunchResult(code, Cause(None, message, code)))
