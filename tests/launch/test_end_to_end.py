"""Whole runs from the command line, two ranks on the CPU: the good one, and every bad input, which
ends soon with one clear error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.launch.programs import LIMIT, start_zero_trial, zero_trial

# A linear model on numbers made from a seed. The hyperparameter `fault` chooses what goes wrong, on
# which rank.
MODEL_DEF = """
import os, signal, threading
import torch
from torch.utils.data import TensorDataset
from zero_trial import ZeroTrial
from zero_trial.trial import DataLoader


class MyTrial(ZeroTrial):
    def __init__(self, context):
        self.context = context
        self.fault = context.get_hparam("fault")
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(0 if self.fault == "empty" else 64, 4, generator=generator)
        self.data = TensorDataset(x, x.sum(dim=1, keepdim=True))
        torch.manual_seed(context.get_trial_seed())
        self.engine = context.initialize(model=torch.nn.Linear(4, 1))

    def build_training_data_loader(self):
        if self.fault != "uneven":
            return DataLoader(self.data, self.context.get_train_micro_batch_size_per_gpu(), shuffle=True)
        self.context.disable_dataset_reproducibility_checks()
        batches = 8 - 3 * self.context.distributed.rank
        return [tuple(tensor[:4] for tensor in self.data.tensors) for _ in range(batches)]

    def build_validation_data_loader(self):
        return DataLoader(self.data, self.context.get_train_micro_batch_size_per_gpu())

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        x, y = next(dataloader_iter)
        if batch_idx == 3 and self.context.distributed.rank == 1:
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "hang":
                threading.Event().wait()
            if self.fault == "bug":
                raise KeyError("no such thing")
        if batch_idx == 3 and self.fault == "pause":
            open(os.path.join(os.environ["READY"], f"ready-{self.context.distributed.rank}"), "w").close()
            while not os.path.exists(os.path.join(os.environ["READY"], "go")):
                threading.Event().wait(0.02)
        mark = os.path.join(os.environ.get("READY", ""), "killed")
        if batch_idx == 5 and self.fault == "kill once" and self.context.distributed.rank == 1 and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = torch.nn.functional.mse_loss(self.engine(x), y)
        if self.fault == "nan" and batch_idx == 3:
            loss = loss * float("nan")
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter, batch_idx):
        x, y = next(dataloader_iter)
        return {"validation_loss": torch.nn.functional.mse_loss(self.engine(x), y)}
"""

EXPERIMENT: dict[str, Any] = {
    "name": "tiny",
    "entrypoint": "model_def:MyTrial",
    "resources": {"slots_per_trial": 2},
    "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 10}},
    "perform_initial_validation": True,
    "scheduling_unit": 1,  # ranks talk, and look whether to stop, after every step
    "reproducibility": {"experiment_seed": 5},
    "hyperparameters": {"fault": "none"},
    "data": {
        "ds_config": {
            "train_batch_size": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
            "zero_optimization": {"stage": 2},
            "comm_timeout_seconds": 60.0,
        }
    },
}


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A folder with a model; when the test is over, no process may be left that names it."""
    write_project(tmp_path)
    yield tmp_path
    assert processes_of(tmp_path) == []


@dataclass(frozen=True)
class Unbroken:
    """A run from its start to its end, which others are compared with."""

    folder: Path
    done: subprocess.CompletedProcess[str]

    @property
    def summary(self) -> dict[str, Any]:
        return read_summary(self.folder / "runs/0001")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    folder = tmp_path_factory.mktemp("unbroken")
    write_project(folder)
    done = zero_trial("run", "const.yaml", "model", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return Unbroken(folder, done)


def write_project(project: Path) -> None:
    (project / "model").mkdir()
    (project / "model" / "model_def.py").write_text(MODEL_DEF)
    write_experiment(project)


def read_summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def write_experiment(project: Path, fault: str = "none", **changes: Any) -> None:
    content = {**EXPERIMENT, **changes, "hyperparameters": {"fault": fault}}
    (project / "const.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def processes_of(project: Path) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(project) in word for word in words):
            found.append(" ".join(words))
    return found


def run_fault(project: Path, fault: str, ranks: int = 2) -> tuple[int, list[str], str]:
    """Exit code, error lines and whole output of a run with a fault. Never a traceback on the
    screen."""
    ds_config = EXPERIMENT["data"]["ds_config"] | ({"comm_timeout_seconds": 3.0} if fault == "hang" else {})
    write_experiment(project, fault, data={"ds_config": ds_config})
    done = zero_trial("run", "const.yaml", "model", "--slots", ranks, cwd=project)
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stderr.splitlines(), done.stdout


@pytest.mark.smoke
def test_a_run(unbroken: Unbroken):
    """The summary holds what the screen shows."""
    project, done, summary = unbroken.folder, unbroken.done, unbroken.summary
    assert (summary["ranks"], summary["zero_stage"], summary["seed"], summary["step"]) == (2, 2, 5, 10)
    before, after = (summary[f"{when}_validation"]["validation_loss"] for when in ("initial", "final"))
    assert after < before
    assert f"validation_loss {before:.4g} -> {after:.4g}" in done.stdout
    assert "2 ranks · ZeRO-2 · seed 5" in done.stdout
    resolved = json.loads((project / "runs/0001/resolved_config.json").read_text())
    assert resolved["batch"][0]["value"] == 2
    locked = yaml.safe_load((project / "runs/0001/config.lock.yaml").read_text())
    assert locked["data"]["ds_config"] == resolved["ds_config"], "defaults are written out"
    log = (project / "runs/0001/logs/rank-0.log").read_text()
    assert (
        log.startswith("ds_config, defaults: ")
        and "ds_config" not in (project / "runs/0001/logs/rank-1.log").read_text()
    )
    assert processes_of(project) == []


def test_the_command_that_a_run_ends_with_repeats_it(unbroken: Unbroken):
    """Bit for bit."""
    project = unbroken.folder
    repeat = unbroken.done.stdout.splitlines()[-1].removeprefix("repeat  zero-trial ").split()
    assert repeat == ["run", "runs/0001/config.lock.yaml"]
    again = zero_trial(*repeat, "--json", cwd=project)
    report = json.loads(again.stdout)
    assert report["exit_code"] == 0
    assert report["summary"]["final_validation"] == unbroken.summary["final_validation"]
    assert (project / "runs/0002/summary.json").exists()
    first, second = (json.loads((project / f"runs/000{run}/resolved_config.json").read_text()) for run in (1, 2))
    assert first["ds_config"] == second["ds_config"]
    assert processes_of(project) == []


@pytest.mark.smoke
def test_a_rank_killed_in_mid_step(project: Path):
    code, errors, _ = run_fault(project, "kill")
    assert code == 5
    assert errors[0].startswith("failed  rank 1: killed by SIGKILL (signal 9)")
    assert errors[1:] == ["log     runs/0001/logs/rank-1.log"]


def test_a_rank_that_never_comes(project: Path):
    code, errors, _ = run_fault(project, "hang")
    assert code == 5
    assert len(errors) == 2 and "rank 1" in errors[0]


def test_a_loader_that_yields_nothing(project: Path):
    code, errors, _ = run_fault(project, "empty", ranks=1)
    assert code == 2
    assert len(errors) == 2 and "build_training_data_loader" in errors[0]


def test_a_loss_that_is_not_finite(project: Path):
    code, errors, _ = run_fault(project, "nan", ranks=1)
    assert code == 4
    assert len(errors) == 2 and "nan" in errors[0]


def test_a_fault_of_the_trial_s_code(project: Path):
    code, errors, _ = run_fault(project, "bug")
    assert code == 1
    assert errors[0].startswith("failed  rank 1: KeyError: 'no such thing'") and len(errors) == 2
    assert "Traceback" in (project / "runs/0001/logs/rank-1.log").read_text()


def test_ranks_with_different_numbers_of_batches(project: Path):
    """Not an error: the shortest rank's number is an epoch's length on all, and that is said."""
    code, errors, output = run_fault(project, "uneven")
    assert (code, errors) == (0, [])
    assert any(line.startswith("note    ") and "batches" in line for line in output.splitlines())


def test_stopped_and_resumed_is_bit_equal_to_unbroken(project: Path, unbroken: Unbroken):
    write_experiment(project, "pause")
    os.environ["READY"] = str(project)  # the program below inherits it
    try:
        command = start_zero_trial("run", "const.yaml", "model", "--run-dir", "part", cwd=project)
        ready = threading.Event()
        while not all((project / f"ready-{rank}").exists() for rank in (0, 1)):
            assert command.poll() is None
            ready.wait(0.05)
        command.send_signal(signal.SIGINT)
        while not (project / "part" / "preempt").exists():
            ready.wait(0.05)
        (project / "go").touch()
        output, errors = command.communicate(timeout=LIMIT)
        assert command.returncode == 75
        assert errors.startswith("stopped ") and "same command" not in errors
        assert "resume  zero-trial resume part" in output
        resumed = zero_trial("run", "--resume", "part", cwd=project)
    finally:
        del os.environ["READY"]
    assert (resumed.returncode, resumed.stderr) == (0, "")
    part, whole = read_summary(project / "part"), unbroken.summary
    assert part["final_validation"] == whole["final_validation"]
    assert (part["step"], whole["step"]) == (10, 10)


def test_a_run_killed_before_its_first_checkpoint_can_be_resumed(project: Path, unbroken: Unbroken):
    write_experiment(project, "kill once")
    done = zero_trial("run", "const.yaml", "model", "--run-dir", "part", cwd=project, env={"READY": str(project)})
    assert done.returncode == 5 and not (project / "part/checkpoints").exists()
    resumed = zero_trial("resume", "part", cwd=project, env={"READY": str(project)})
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert "saved no checkpoint" in resumed.stdout
    assert read_summary(project / "part")["final_validation"] == unbroken.summary["final_validation"]
    steps = [json.loads(line) for line in (project / "part/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if line["group"] == "training"] == list(range(1, 11))


def test_a_run_that_crashed_after_it_had_saved_goes_on_by_itself(project: Path):
    """``max_restarts``: once, from the newest checkpoint; a run that keeps crashing at one place is
    given up (other tests here)."""
    write_experiment(project, "kill once", min_checkpoint_period={"batches": 4}, max_restarts=1)
    done = zero_trial("run", "const.yaml", "model", cwd=project, env={"READY": str(project)})
    assert (done.returncode, done.stderr) == (0, "")
    assert "restart 1 of 1, from step 4: rank 1: killed by SIGKILL" in done.stdout
    lines = [json.loads(line) for line in (project / "runs/0001/metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["group"] == "training"]
    assert steps == list(range(1, 11))  # what was reported after the checkpoint is reported once
    assert not list((project / "runs/0001/errors").glob("*.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"entrypoint": "model_def:MyTrail"},
            "model_def:MyTrail not found in ./model_def.py; it defines MyTrial(ZeroTrial). Use entrypoint: model_def:MyTrial.",
        ),
        ({"data": {"ds_config": {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 4}}}, "train_batch_size 6"),
        (
            {"data": {"ds_config": {"train_batch_size": 8, "zero_optimisation": {"stage": 2}}}},
            'Did you mean "zero_optimization"?',
        ),
        (
            {"searcher": {"name": "random", "metric": "validation_loss", "max_trials": 3, "max_length": 5}},
            "the searcher random tries many trials",
        ),
    ],
)
def test_faults_that_can_be_known_before_a_run(changes: dict[str, Any], message: str, project: Path):
    """Nothing is started and no run folder is made."""
    write_experiment(project, **changes)
    done = zero_trial("run", "const.yaml", "model", cwd=project)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.startswith("error   ")
    assert "const.yaml:" in done.stderr
    assert not (project / "runs").exists()


SCRIPT = """
import argparse, os
parser = argparse.ArgumentParser(); parser.add_argument("--local_rank", type=int); parser.add_argument("--fail", type=int)
args = parser.parse_args()
print("rank", os.environ["RANK"], "local", args.local_rank, flush=True)
if args.fail == args.local_rank: raise ValueError("boom")
"""


@pytest.mark.smoke
def test_a_plain_script(project: Path):
    """``launch`` shows rank 0 and passes --local_rank to a script that knows it."""
    (project / "train.py").write_text(SCRIPT)
    done = zero_trial("launch", "--slots", 2, "train.py", cwd=project)
    assert (done.returncode, done.stdout, done.stderr) == (0, "rank 0 local 0\n", "")


def test_a_plain_script_that_fails_on_one_rank(project: Path):
    (project / "train.py").write_text(SCRIPT)
    done = zero_trial("launch", "--num_gpus", 2, "train.py", "--fail", 1, cwd=project)
    # rank 0 may be ended before it prints
    assert done.returncode == 1 and done.stdout in ("", "rank 0 local 0\n")
    assert done.stderr.splitlines() == [
        'failed  rank 1: ValueError: boom (train.py:6: if args.fail == args.local_rank: raise ValueError("boom"))',
        "log     runs/0001/logs/rank-1.log",
    ]
