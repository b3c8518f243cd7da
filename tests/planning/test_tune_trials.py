"""What a way to train becomes: changes of an experiment, a plan, and a reason when a trial dies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planning.project import MODEL, project
from zero_trial.errors import ConfigError, ExitStatus
from zero_trial.launch.run_experiment import RunRequest, check_run
from zero_trial.launch.supervisor import Cause, LaunchResult
from zero_trial.planning import tune_trials
from zero_trial.planning.compare import PlannedMachine
from zero_trial.planning.tune_search import SearchSettings, TuneSearch
from zero_trial.planning.tune_space import (
    ACCUMULATION,
    MICRO,
    STAGE,
    Margin,
    TrainingWay,
    Weighed,
    own_way,
    select,
    ways_to_train,
)
from zero_trial.planning.tune_trials import (
    changes_of,
    changes_of_trial,
    ended_because,
    facts_of,
    key_in_ds_config,
    run_trial,
    weigh_way,
)
from zero_trial.trial.runs.rank_records import RankRecord, write_rank
from zero_trial.trial.runs.run_layout import RunFolder


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


@pytest.mark.parametrize(
    ("key", "values", "inside"),
    [
        ("hyperparameters.width", (4, 8), None),
        ("data.source", ("x",), None),
        ("trainer", ("deepspeed",), None),
        ("resources.slots_per_trial", (2, 4), None),
        ("optimizer.params.lr", (0.1, 0.2), "optimizer.params.lr"),
        ("hyperparameters.ds_config.gradient_clipping", (1.0,), "gradient_clipping"),
        ("zero_optimization.overlap_comm", (True, False), "zero_optimization.overlap_comm"),
    ],
)
def test_which_keys_are_of_the_ds_config(key: str, values: tuple[object, ...], inside: str | None) -> None:
    assert key_in_ds_config(key) == inside


@pytest.mark.parametrize(("key", "values"), [("hyperparameters.width", (4, 8)), ("optimizer.params.lr", (0.1, 0.2))])
def test_the_own_configuration_is_one_of_the_ways(key: str, values: tuple[float, ...], tmp_path: Path) -> None:
    made = project(tmp_path)
    checked = check_run(RunRequest(made.experiment, made.folder), os.environ)
    facts = facts_of(checked, keep=(), vary={key: values})
    assert facts.current[key] == values[0]
    assert own_way(facts) in ways_to_train(facts)
    with pytest.raises(ConfigError):
        facts_of(checked, keep=("zero_optimization.stag",), vary={})


def test_savers_that_are_switched_on_are_known(tmp_path: Path) -> None:
    zero = {"stage": 2, "reduce_every": "micro", "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    made = project(tmp_path, ds_config={"train_batch_size": 8, "zero_optimization": zero})
    facts = facts_of(check_run(RunRequest(made.experiment, made.folder), os.environ), keep=(), vary={})
    own = own_way(facts)
    assert own.mapping["zero_optimization.offload_optimizer.device"] == "nvme"
    assert own.mapping["zero_optimization.reduce_every"] == "micro"


def test_a_trial_writes_to_no_monitor(tmp_path: Path) -> None:
    monitors = {name: {"enabled": True} for name in ("wandb", "comet", "tensorboard", "csv_monitor")}
    made = project(tmp_path, ds_config={"train_batch_size": 8, **monitors})
    changes = changes_of_trial(way(0, 4, 1))
    config = check_run(RunRequest(made.experiment, made.folder, changes=changes), os.environ).ds_config
    assert config is not None
    assert not any(getattr(config, name).enabled for name in monitors)


class _Interrupted:
    """In place of a supervisor: the user presses Ctrl-C."""

    def __init__(self, stop: object) -> None:
        self._stop = stop

    def run(self) -> LaunchResult:
        assert callable(self._stop)
        self._stop()
        return LaunchResult(0)


@pytest.mark.parametrize("speeds", [{}, {4: 2.0}])
def test_an_interrupted_trial_leaves_nothing_and_what_was_measured_counts(
    speeds: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = project(tmp_path)
    search = TuneSearch(
        select([way(0, 4, 1)], lambda _: Weighed(1), Margin(0, 0), None, sizes=1), SearchSettings(1, 16)
    )
    trial = search.next_trial()
    assert trial is not None
    trial.speeds |= speeds
    monkeypatch.setattr(tune_trials, "supervisor_of", lambda *_: _Interrupted(_[4]))
    with pytest.raises(KeyboardInterrupt):
        run_trial(RunRequest(made.experiment, made.folder), trial, search, tmp_path / "0001", os.environ)
    assert not (tmp_path / "0001").exists()
    assert bool(trial.why) is not bool(speeds)
    assert (search.outcome().best() is trial) is bool(speeds)


@pytest.mark.skipif(sys.platform != "linux", reason="the score is Linux's")
def test_ranks_are_offered_to_the_kernel_once_when_all_are_there(tmp_path: Path) -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    with subprocess.Popen([sleep, "60"]) as process:
        score = Path(f"/proc/{process.pid}/oom_score_adj")
        before = score.read_text()
        write_rank(tmp_path, RankRecord(0, 0, process.pid))
        assert not tune_trials._offer_to_the_oom_killer(tmp_path, 2)
        assert score.read_text() == before
        write_rank(tmp_path, RankRecord(1, 1, process.pid))
        assert tune_trials._offer_to_the_oom_killer(RunFolder(tmp_path).path, 2)
        assert score.read_text().strip() == "500"
        process.kill()


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
