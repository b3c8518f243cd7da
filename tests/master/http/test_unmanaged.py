"""The original core_v2 in a process of its own, against a served master."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.master.http.conftest import Ask
from tests.master.world import TASK_TOKEN, USER_TOKEN, World
from zero_trial.master.http.server import HttpServer
from zero_trial.master.logs import LogQuery
from zero_trial.master.records import ExperimentState

SCRIPT = """
import sys
from determined.experimental import core_v2

storage = sys.argv[1]
core_v2.init(config=core_v2.Config(
    name="mine", hparams={"lr": 0.1}, checkpoint_storage=storage, external_experiment_id="e", external_trial_id="t",
))
begin = core_v2.info.trial._steps_completed
print("begins at", begin, core_v2.info.latest_checkpoint)
for step in range(begin, begin + 3):
    core_v2.train.report_training_metrics(steps_completed=step, metrics={"loss": 1.0})
core_v2.train.report_validation_metrics(steps_completed=step, metrics={"loss": 0.5})
core_v2.train.report_progress(0.5)
with core_v2.checkpoint.store_path({"steps_completed": step}) as (path, uuid):
    (path / "state").write_text("x")
if begin:
    sys.exit(3)
core_v2.close()
"""


def start(server: HttpServer, folder: Path) -> subprocess.CompletedProcess[str]:
    given = {"DET_MASTER": server.url, "DET_USER": "determined", "DET_USER_TOKEN": USER_TOKEN}
    environment = {**os.environ, **given, "HOME": str(folder), "no_proxy": "127.0.0.1"}
    command = [sys.executable, "-c", SCRIPT, str(folder / "saved")]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.smoke
def test_a_script_of_ones_own_reports_and_goes_on(server: HttpServer, world: World, tmp_path: Path) -> None:
    pytest.importorskip("determined.experimental.core_v2")
    first = start(server, tmp_path)
    assert first.returncode == 0, first.stderr
    found = list(world.experiments.all())[-1]
    assert (found.unmanaged, found.external_id, found.state) == (True, "e", ExperimentState.COMPLETED)
    (saved,) = world.experiments.checkpoints(found.id)
    assert world.checkpoints.directory(saved.uuid).joinpath("state").read_text() == "x"
    assert [len(list(world.trials.metrics(3, group))) for group in ("training", "validation")] == [3, 1]

    second = start(server, tmp_path)
    assert second.returncode == 3, second.stderr
    again = world.experiments.get(found.id)
    assert (again.state, again.num_trials) == (ExperimentState.ERROR, 1)
    assert f"begins at 2 {saved.uuid}" in [line.message for line in world.trials.logs(3, LogQuery()) if line]
    assert world.trials.get(3).run_id == 2


def test_an_allocation_makes_and_moves_no_unmanaged_trial(ask: Ask, world: World) -> None:
    number = world.add_unmanaged("mine")
    trial = world.unmanaged.create(number, {}, "first")
    before = world.content()
    inner = {"experimentId": number, "unmanaged": True}
    asked: list[tuple[str, str, Any]] = [
        ("PUT", "/api/v1/experiments/by-external-id/mine", {"config": "{}", "unmanaged": True}),
        ("POST", "/api/v1/trials", inner),
        ("PUT", "/api/v1/trials", {"createTrialRequest": inner, "externalTrialId": "x"}),
        ("POST", f"/api/v1/trials/{trial.id}/start", {"resume": True}),
        ("PATCH", f"/api/v1/trials/{trial.id}", {"state": "STATE_COMPLETED"}),
        ("POST", f"/api/v1/trials/{trial.id}/progress", {"progress": 0.5}),
        ("POST", "/api/v1/runs/start", {"runId": trial.id}),
        ("POST", "/task-logs", [{"task_id": trial.task_id, "log": "x"}]),
        (
            "POST",
            "/api/v1/checkpoints",
            {"uuid": "6f1c8d2e-0000-4000-8000-000000000000", "taskId": trial.task_id, "metadata": {}, "resources": {}},
        ),
    ]
    for method, path, body in asked:
        assert ask(method, path, task=TASK_TOKEN, body=body)[0] in (401, 403), path
        assert ask(method, path, user=TASK_TOKEN, body=body)[0] in (401, 403), path
        assert ask(method, path, body=body)[0] == 401, path
    assert world.content() == before
