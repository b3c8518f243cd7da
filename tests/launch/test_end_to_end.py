"""Whole runs from the command line, two ranks on the CPU: the good one, repeated, stopped and
resumed; and bad ones, which end soon with one clear error.

Which rank is blamed for what is tested in test_supervisor.py and test_cause.py.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.launch.programs import (
    EXPERIMENT,
    LIMIT,
    Unbroken,
    processes_of,
    read_lines,
    read_summary,
    start_zero_trial,
    write_experiment,
    write_project,
    zero_trial,
)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A folder with a model; when the test is over, no process may be left that names it."""
    write_project(tmp_path)
    yield tmp_path
    assert processes_of(tmp_path) == []


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


def test_the_command_that_a_run_ends_with_is_stopped_and_resumed_to_the_same_bits(project: Path, unbroken: Unbroken):
    """From the lock of the first run, where all is written out."""
    repeat = unbroken.done.stdout.splitlines()[-1].removeprefix("repeat  zero-trial ").split()
    assert repeat == ["run", "runs/0001/config.lock.yaml"]
    command = start_zero_trial(
        *repeat, "--run-dir", project / "part", cwd=unbroken.folder, env={"FAULTS": "pause", "MARKS": str(project)}
    )
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
    assert f"resume  zero-trial resume {project}/part" in output
    resumed = zero_trial("run", "--resume", "part", "--json", cwd=project)
    report = json.loads(resumed.stdout)
    assert (resumed.returncode, report["exit_code"], report["summary"]["step"]) == (0, 0, 10)
    assert report["summary"]["final_validation"] == unbroken.summary["final_validation"]
    first, second = (
        json.loads((run / "resolved_config.json").read_text())["ds_config"]
        for run in (unbroken.folder / "runs/0001", project / "part")
    )
    assert first == second


def test_a_rank_that_never_comes(project: Path):
    ds_config = {**EXPERIMENT["data"]["ds_config"], "comm_timeout_seconds": 3.0}
    write_experiment(project, data={"ds_config": ds_config})
    done = zero_trial("run", "const.yaml", "model", cwd=project, env={"FAULTS": "hang"})
    assert done.returncode == 5 and "Traceback" not in done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 2 and "rank 1" in done.stderr.splitlines()[0]


def test_a_run_killed_before_its_first_checkpoint_can_be_resumed(project: Path, unbroken: Unbroken):
    faults = {"FAULTS": "kill once", "MARKS": str(project)}
    done = zero_trial("run", "const.yaml", "model", "--run-dir", "part", cwd=project, env=faults)
    assert done.returncode == 5 and not (project / "part/checkpoints").exists()
    first, second = done.stderr.splitlines()
    assert first.startswith("failed  rank 1: killed by SIGKILL (signal 9)")
    assert second == "log     part/logs/rank-1.log"
    resumed = zero_trial("resume", "part", cwd=project, env=faults)
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert "saved no checkpoint" in resumed.stdout
    assert read_summary(project / "part")["final_validation"] == unbroken.summary["final_validation"]
    assert read_lines(project / "part", "training") == list(range(1, 11))


def test_a_crash_after_a_checkpoint_is_restarted_once_and_the_next_fault_is_the_users(project: Path):
    """``max_restarts``: from the newest checkpoint. Ranks have different numbers of batches, which
    is no error: the shortest rank's number is an epoch's length on all, and that is logged."""
    write_experiment(project, min_checkpoint_period={"batches": 4}, max_restarts=1)
    faults = {"FAULTS": "uneven,kill once,bug", "MARKS": str(project)}
    done = zero_trial("run", "const.yaml", "model", cwd=project, env=faults)
    assert "restart 1 of 1, from step 4: rank 1: killed by SIGKILL" in done.stdout
    assert any(line.startswith("note    ") and "batches" in line for line in done.stdout.splitlines())
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    first, second = done.stderr.splitlines()
    assert first.startswith("failed  rank 1: KeyError: 'no such thing'")
    assert second == "log     runs/0001/logs/rank-1.log"
    assert "Traceback" in (project / "runs/0001/logs/rank-1.log").read_text()
    # what was reported after the checkpoint is reported once
    assert read_lines(project / "runs/0001", "training") == list(range(1, 8))


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
