"""A trial from a script of the user's own, off a cluster, in this process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zero_trial
from tests.support.in_memory import InMemoryPlatform
from tests.trial.harness import DS_CONFIG, LineTrial
from zero_trial.errors import ConfigError, InvalidHP
from zero_trial.trial import ZeroTrialContext
from zero_trial.trial.reporting import End, Outcome
from zero_trial.trial.runs.events import read_lines
from zero_trial.trial.runs.run_layout import lock_run
from zero_trial.trial.runtime.trainer import Trainer, init

CONF: dict[str, Any] = {
    "data": {"ds_config": DS_CONFIG},
    "reproducibility": {"experiment_seed": 7},
    # tests start from one of the last three; a complete trial keeps one unless this says more
    "checkpoint_storage": {"save_trial_latest": 3},
}


class Batch:
    """Determined's unit looks like this."""

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("RANK", "WORLD_SIZE", "DET_TASK_TYPE", "DET_ALLOCATION_ID", "ZERO_TRIAL_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def fit(steps: int, kind: Any = LineTrial, run_dir: str | None = None, conf: Any = None, **options: Any) -> Outcome:
    with init(exp_conf=CONF if conf is None else conf, run_dir=run_dir) as context:
        return Trainer(kind(context), context).fit(max_length=zero_trial.Batch(steps), **options)


def losses(run: Path) -> list[tuple[int, float]]:
    return [(x["step"], x["metrics"]["loss"]) for x in read_lines(run / "metrics.jsonl") if x["group"] == "training"]


class Noisy(LineTrial):
    noise = 0.1
    shuffle = True


def test_a_script_trains_into_the_next_folder_of_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = fit(4, reporting_period=zero_trial.Batch(2), validation_period=zero_trial.Batch(2))
    assert (outcome.end, outcome.step, outcome.total_steps) == (End.COMPLETED, 4, 4)
    run = folder / "runs" / "0001"
    assert [step for step, _ in losses(run)] == [2, 4]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["step"], summary["seed"], summary["ranks"]) == (4, 7, 1)
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == "done    step 4/4  checkpoint step-000004"
    assert any("every validation is saved" in line for line in shown)  # nothing says what is best


def test_a_folder_that_is_given_goes_on_and_so_does_a_checkpoint(folder: Path) -> None:
    every = {"reporting_period": Batch(1)}
    fit(6, Noisy, "whole", **every)
    fit(3, Noisy, "parts", **every)
    fit(6, Noisy, "parts", **every)
    fit(6, Noisy, "other", latest_checkpoint="parts/checkpoints/step-000003", **every)
    assert [step for step, _ in losses(folder / "whole")] == [1, 2, 3, 4, 5, 6]
    assert losses(folder / "parts") == losses(folder / "whole")
    assert losses(folder / "other") == losses(folder / "whole")[3:]


def test_asked_to_stop_it_saves_and_the_script_exits_with_75(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Asked(LineTrial):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    with pytest.raises(SystemExit) as ended:
        fit(6, Asked, "run", reporting_period={"batches": 1})
    assert ended.value.code == 75
    # and no error
    assert capsys.readouterr().err.startswith("stopped at step 3 of 6 and saved step-000003.")
    assert json.loads((folder / "run" / "errors" / "rank-0.json").read_text())["type"] == "Preempted"
    assert fit(6, run_dir="run").step == 6
    assert not list((folder / "run" / "errors").iterdir())


def test_an_error_of_ours_is_its_message_and_its_exit_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(context: ZeroTrialContext) -> Any:
        raise InvalidHP("too small")

    with pytest.raises(SystemExit) as ended:
        fit(2, refuse, "run")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error   too small.\n"
    assert json.loads((folder / "run" / "early_exit.json").read_text())["reason"] == "INVALID_HP"


def test_an_error_of_the_users_is_the_users(folder: Path) -> None:
    def fail(context: ZeroTrialContext) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fit(2, fail, "run")
    assert json.loads((folder / "run" / "errors" / "rank-0.json").read_text())["exit_code"] == 1


def test_what_fit_does_not_say_the_experiment_does(folder: Path) -> None:
    searcher = {"metric": "validation_loss", "max_length": {"batches": 4}}
    conf = {**CONF, "searcher": searcher, "scheduling_unit": 2, "min_validation_period": {"batches": 2}}
    with init(exp_conf=conf, run_dir="run") as context:
        assert Trainer(LineTrial(context), context).fit().step == 4
    assert [step for step, _ in losses(folder / "run")] == [2, 4]
    validated = [x["step"] for x in read_lines(folder / "run" / "metrics.jsonl") if x["group"] == "validation"]
    assert validated == [2, 4]


def test_test_mode_takes_one_step_and_one_validation_batch() -> None:
    class Counting(LineTrial):
        evaluated = 0

        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> Any:
            type(self).evaluated += 1
            return super().evaluate_batch(dataloader_iter, batch_idx)

    assert fit(100, Counting, test_mode=True).step == 1
    assert Counting.evaluated == 1


def test_hyperparameters_seed_and_switches_are_the_contexts(capsys: pytest.CaptureFixture[str]) -> None:
    with init(hparams={"lr": 0.5}, exp_conf={"hyperparameters": {"lr": 1.0}}, seed=3) as context:
        assert context.get_hparam("lr") == 0.5 and context.get_trial_seed() == 3
        assert context.get_enable_tensorboard_logging()
    with init(exp_conf={"hyperparameters": {"lr": 1.0}}, enable_tensorboard_logging=False) as context:
        assert context.get_hparam("lr") == 1.0 and context.get_trial_seed() == 0
        assert not context.get_enable_tensorboard_logging()
    fit(1, profiling_enabled=True)
    assert "only reported on a cluster" in capsys.readouterr().out


def test_an_experiments_yaml(folder: Path) -> None:
    (folder / "const.yaml").write_text(
        "name: line\nentrypoint: model_def:LineTrial\nsearcher: {name: single, metric: validation_loss, max_length: 3}\n"
        f"hyperparameters: {{depth: 0.25}}\ndata: {{ds_config: {json.dumps(DS_CONFIG)}}}\n"
    )
    with init(exp_conf="const.yaml", run_dir="run") as context:
        assert context.get_hparam("depth") == 0.25 and context.get_experiment_id() == "line"
        assert Trainer(LineTrial(context), context).fit().step == 3


def test_a_second_fit_goes_on_where_the_first_ended(folder: Path) -> None:
    """To the same bits as one fit; nothing is trained or reported twice."""
    every = {"reporting_period": Batch(1)}
    fit(6, Noisy, "whole", **every)
    with init(exp_conf=CONF, run_dir="parts") as context:
        trainer = Trainer(Noisy(context), context)
        ends = [trainer.fit(max_length=zero_trial.Batch(steps), **every).step for steps in (2, 2, 6)]
    assert ends == [2, 2, 6]
    assert losses(folder / "parts") == losses(folder / "whole")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"conf": [1]}, "exp_conf: not a mapping"),
        ({"conf": {**CONF, "reproducibility": 5}}, "reproducibility: not a mapping"),
        ({"conf": {**CONF, "reproducibility": {"experiment_seed": "x"}}}, "experiment_seed: not a seed: got 'x'"),
        ({"conf": {**CONF, "searcher": "single"}}, "searcher: not a mapping"),
        ({"conf": {**CONF, "hyperparameters": [1]}}, "hyperparameters: not a mapping"),
        ({"run_dir": "file"}, "run_dir: the run's folder cannot be created"),
        ({"run_dir": "held"}, "another process is running in this folder"),
        ({"kind": lambda context: LineTrial}, "got the class LineTrial"),
    ],
)
def test_what_cannot_be_run_is_named(
    options: dict[str, Any], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").touch()
    (folder / "held").mkdir()
    with lock_run(folder / "held"), pytest.raises(SystemExit) as ended:
        fit(1, **options)
    assert ended.value.code == 2 and words in capsys.readouterr().err
    assert [path.name for path in (folder / "held").iterdir()] == ["held"]


def test_a_run_without_a_length_and_a_context_that_is_not_a_scripts() -> None:
    with init(exp_conf=CONF) as context, pytest.raises(ConfigError, match=r"fit\(max_length="):
        Trainer(LineTrial(context), context).fit()
    elsewhere = ZeroTrialContext(InMemoryPlatform(), zero_trial.initialize)
    with pytest.raises(ConfigError, match=r"with zero_trial\.init\(\)"):
        Trainer(LineTrial.__new__(LineTrial), elsewhere)
