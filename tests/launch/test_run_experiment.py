"""The checks before a run, which ends are worth another start, and the command line of a rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from zero_trial.errors import ConfigError
from zero_trial.launch.first_cause import Cause
from zero_trial.launch.hosts import PlacementRequest
from zero_trial.launch.run_experiment import (
    RunRequest,
    check_run,
    newest_step,
    repeat_command,
    restart_line,
    restart_may_help,
    write_report,
)
from zero_trial.launch.supervisor import HostRanks, LaunchResult, RankProgram
from zero_trial.trial.runs.run_layout import RunFolder

ROOT = Path(__file__).parents[2]

EXPERIMENT: dict[str, Any] = {
    "name": "tiny",
    "entrypoint": "model_def:MyTrial",
    "resources": {"slots_per_trial": 2},
    "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 3}},
    "hyperparameters": {},
    "data": {"ds_config": {"train_batch_size": 8}},
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "model_def.py").write_text("from zero_trial import ZeroTrial\nclass MyTrial(ZeroTrial): ...\n")
    return tmp_path


def request(project: Path, changes: dict[str, Any] | None = None, **more: Any) -> RunRequest:
    path = project / "const.yaml"
    path.write_text(yaml.safe_dump({**EXPERIMENT, **(changes or {})}))
    return RunRequest(**{"experiment_path": path, "model_dir": project, **more})


@pytest.mark.parametrize(
    ("changes", "more", "ranks", "seed", "micro"),
    [
        ({}, {}, 2, 0, 4),
        ({"reproducibility": {"experiment_seed": 3}}, {}, 2, 3, 4),
        ({"reproducibility": {"experiment_seed": 3}}, {"placement": PlacementRequest(slots=4), "seed": 9}, 4, 9, 2),
        # several hosts count all ranks
        ({}, {"placement": PlacementRequest(nnodes="2", node_rank=1, master_addr="a")}, 4, 0, 2),
        ({"data": {}}, {}, 2, 0, None),  # a trial may bring its own ds_config
    ],
)
def test_a_good_experiment(
    changes: dict[str, Any], more: dict[str, Any], ranks: int, seed: int, micro: int | None, project: Path
):
    checked = check_run(request(project, changes, **more), {"CUDA_VISIBLE_DEVICES": ""})
    assert (checked.ranks, checked.seed, str(checked.entrypoint)) == (ranks, seed, "model_def:MyTrial")
    assert (checked.batch and checked.batch.batch.micro_batch_size) == micro
    assert not (project / "runs").exists()
    if micro is None:
        write_report(project, checked)
        assert checked.ds_config is None and not RunFolder(project).resolved_config.exists()


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        (
            {"searcher": {"name": "grid", "metric": "loss", "max_length": 3}},
            {},
            "the searcher grid runs several trials",
        ),
        ({"entrypoint": "model_def:Other"}, {}, "const.yaml:"),
        ({}, {"model_dir": Path("nowhere")}, "MODEL_DIR: the folder does not exist: got nowhere"),
        ({}, {"experiment_path": Path("nowhere.yaml")}, "nowhere.yaml: cannot be read"),
        ({}, {"experiment_path": None}, "no experiment was given"),
        ({}, {"placement": PlacementRequest(slots=3)}, "8"),  # 8 samples cannot be shared by 3 ranks
    ],
)
def test_refusals(changes: dict[str, Any], more: dict[str, Any], message: str, project: Path):
    with pytest.raises(ConfigError) as caught:
        check_run(request(project, changes, **more), {"CUDA_VISIBLE_DEVICES": ""})
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_run_of_a_model_that_is_gone(tmp_path: Path):
    lock = RunFolder(tmp_path).config_lock
    lock.write_text(yaml.safe_dump({**EXPERIMENT, "data": {"zero_trial": {"model_dir": "../gone/model"}}}))
    with pytest.raises(ConfigError, match=r"config.lock.yaml:\d+ data.zero_trial.model_dir: .*--resume"):
        check_run(RunRequest(resume=tmp_path), {"CUDA_VISIBLE_DEVICES": ""})


def test_the_command_that_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert repeat_command(tmp_path / "runs" / "0001") == "zero-trial run runs/0001/config.lock.yaml"
    assert repeat_command(tmp_path / "my runs") == "zero-trial run 'my runs/config.lock.yaml'"


def test_the_report_of_a_run_is_written_once(project: Path, tmp_path: Path):
    """A run that goes on from its lock, where all is written out, keeps the sources of the first
    time."""
    checked = check_run(request(project), {"CUDA_VISIBLE_DEVICES": ""})
    write_report(tmp_path, checked)
    body = json.loads(RunFolder(tmp_path).resolved_config.read_text())
    sources = {entry["key"]: entry["source"] for entry in body["values"]}
    assert sources["train_batch_size"].endswith("data.ds_config") and sources["gradient_clipping"] == "default"
    assert {row["name"]: row["value"] for row in body["batch"]}["train_micro_batch_size_per_gpu"] == 4
    assert body["ds_config"]["gradient_clipping"] == 1.0
    RunFolder(tmp_path).resolved_config.write_text("{}")
    write_report(tmp_path, checked)
    assert RunFolder(tmp_path).resolved_config.read_text() == "{}"


@pytest.mark.parametrize(
    ("code", "before", "now", "helps"),
    [
        (5, None, 3, True),  # a rank was killed, and something is saved
        (1, 3, 6, True),  # an error that no one expected, after progress
        (5, None, None, False),  # nothing was saved
        (1, 3, 3, False),  # it fails where it failed before
        (0, None, 3, False),
        (2, None, 3, False),  # a user's mistake
        (3, None, 3, False),  # it does not fit into memory
        (4, None, 3, False),  # it diverged
        (75, None, 3, False),  # asked to stop
        (130, None, 3, False),
    ],
)
def test_a_restart_may_help(code: int, before: int | None, now: int | None, helps: bool) -> None:
    assert restart_may_help(LaunchResult(code), before, now) is helps


def test_only_finished_checkpoints_count(tmp_path: Path) -> None:
    assert newest_step(tmp_path) is None
    for name in ("step-000003", "step-000012", "step-000020.tmp-1", "step-000030"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for name in ("step-000003", "step-000012", "step-000020.tmp-1"):
        (tmp_path / "checkpoints" / name / "metadata.json").touch()
    assert newest_step(tmp_path) == 12


def test_the_commands_of_ranks_and_the_line_of_a_restart():
    command = HostRanks(RankProgram("zero_trial.run", ("model_def:MyTrial",), "module"), 2, "/r", cwd="/m")
    guard = [sys.executable, "-m", "zero_trial.launch.guard", "--parent", "7", "--run-dir", "/r", "--cwd", "/m"]
    assert command.argv(7) == [*guard, "-m", "zero_trial.run", "model_def:MyTrial"]
    assert RankProgram("a.py", ("--x",)).guarded() == ["a.py", "--x"]
    assert RankProgram("nvidia-smi", (), "program").guarded() == ["--exec", "nvidia-smi"]
    assert "--inject-local-rank" in HostRanks(RankProgram("a.py", local_rank=True), 1, "/r").argv(1)
    outcome = LaunchResult(5, Cause(1, "killed by SIGKILL", 5))
    assert restart_line(outcome, 1, 5, 12) == "restart 1 of 5, from step 12: rank 1: killed by SIGKILL"
