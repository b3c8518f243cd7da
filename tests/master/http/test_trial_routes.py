"""Trials, tasks and allocations as the original client and Determined's harness ask for them."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.master.http.conftest import Ask
from tests.master.world import TASK_TOKEN, USER_TOKEN, UUID, World
from zero_trial.master.http import listen
from zero_trial.master.http.server import HttpServer
from zero_trial.master.logs import LogQuery
from zero_trial.master.records import ExperimentState

bindings = pytest.importorskip("determined.common.api.bindings")
client = pytest.importorskip("determined.experimental.client")
errors = pytest.importorskip("determined.common.api.errors")


def report(**changes: Any) -> Any:
    values = {"trialId": 1, "trialRunId": 1, "stepsCompleted": 5, "reportTime": None}
    return bindings.v1TrialMetrics(**{**values, "metrics": bindings.v1Metrics(avgMetrics={"loss": 0.2}), **changes})


def send(session: Any, group: str, metrics: Any) -> None:
    body = bindings.v1ReportTrialMetricsRequest(group=group, metrics=metrics)
    bindings.post_ReportTrialMetrics(session, body=body, metrics_trialId=metrics.trialId)


def test_a_report_is_stored_as_it_was_meant(task: Any, user: Any, world: World) -> None:
    at = {"stepsCompleted": None, "reportTime": "2023-11-14T22:13:30Z"}
    send(task, "training", report())
    send(task, "cpu", report(**at, metrics=bindings.v1Metrics(avgMetrics={"laptop": {"util": 50.0}})))
    send(user, "validation", report(metrics=bindings.v1Metrics(avgMetrics={"validation_loss": 0.5})))
    cpu, training, _ = sorted(world.trials.metrics(1), key=lambda each: each.group)
    assert (training.steps_completed, training.metrics, training.batch_metrics) == (5, {"loss": 0.2}, None)
    assert (cpu.steps_completed, cpu.metrics, cpu.reported) == (None, {"laptop": {"util": 50.0}}, 1_700_000_010.0)
    found = client.Determined._from_session(user).get_trial(1)
    [training], [validation] = found.iter_metrics("training"), found.iter_metrics("validation")
    assert (training.metrics, training.batch_metrics) == ({"loss": 0.2}, None)
    assert (validation.metrics, validation.steps_completed) == ({"validation_loss": 0.5}, 5)
    [listed] = client.Determined._from_session(user).get_experiment(1).list_trials()
    for trial in (found, listed):
        assert trial.summary_metrics["validation_metrics"]["validation_loss"]["last"] == 0.5


def test_the_rest_that_the_harness_reports(task: Any, world: World) -> None:
    task.post("/api/v1/trials/1/progress", json={"progress": 0.5, "is_raw": True})
    task.post("/api/v1/trials/1/runner/metadata", json={"state": "training"})
    task.post("/api/v1/trials/1/early_exit", json={"reason": "EXITED_REASON_INVALID_HP"})
    started = bindings.post_RunPrepareForReporting(
        task, body=bindings.v1RunPrepareForReportingRequest(runId=1, checkpointStorage=None)
    )
    assert started.storageId is None
    found = world.trials.get(1)
    assert (found.progress, found.runner_state) == (0.5, "training")
    body = bindings.v1PostRunMetadataRequest(metadata={"dataset": {"rows": 3}}, runId=1)
    assert bindings.post_PostRunMetadata(task, body=body, runId=1).metadata == {"dataset": {"rows": 3}}
    assert bindings.get_GetRunMetadata(task, runId=1).metadata == {"dataset": {"rows": 3}}
    world.exit(1)
    assert (world.state_of(1), world.trials.get(1).reason) == ("COMPLETED", "the trial exited early: INVALID_HP")


def test_one_trial(task: Any, user: Any, world: World) -> None:
    for group, values in (("training", {"loss": 0.2}), ("validation", {"validation_loss": 0.5}), ("cpu", {"util": 1})):
        world.report(1, group, 7, values)
    world.change_trial(1, steps_completed=7)
    assert task.get("/api/v1/trials/1").json()["trial"]["latestValidation"]["totalBatches"] == 7
    found = bindings.get_GetTrial(user, trialId=1).trial
    assert (found.state, found.totalBatchesProcessed, found.taskId) == (bindings.trialv1State.RUNNING, 7, "task-1")
    assert found.bestValidation.metrics.avgMetrics == {"validation_loss": 0.5}
    assert set(found.summaryMetrics) == {"avg_metrics", "validation_metrics", "cpu"}
    with pytest.raises(errors.NotFoundException, match="trial 9 not found"):
        bindings.get_GetTrial(user, trialId=9)


def test_the_history_of_a_trial_and_parts_of_it(user: Any, world: World) -> None:
    world.report(1, "training", 5, {"loss": "NaN"})
    world.report(1, "validation", 5, {"validation_loss": 0.5})
    world.save(UUID)
    option = bindings.GetTrialWorkloadsRequestFilterOption

    def kinds(**asked: Any) -> list[str]:
        found = bindings.get_GetTrialWorkloads(user, trialId=1, offset=0, limit=1000, **asked).workloads
        names = ("training", "validation", "checkpoint")
        return [name for each in found for name in names if getattr(each, name) is not None]

    assert kinds(includeBatchMetrics=False) == ["training", "validation", "checkpoint"]
    assert kinds(orderBy=bindings.v1OrderBy.DESC) == ["checkpoint", "validation", "training"]
    assert kinds(filter=option.CHECKPOINT) == ["checkpoint"]
    assert kinds(filter=option.VALIDATION) == ["validation"]
    assert kinds(filter=option.CHECKPOINT_OR_VALIDATION) == ["validation", "checkpoint"]
    training = bindings.get_GetTrialWorkloads(user, trialId=1).workloads[0].training
    assert (training.totalBatches, training.metrics.avgMetrics) == (5, {"loss": "NaN"})


def test_reports_are_streamed(user: Any, task: Any, world: World) -> None:
    for step in range(250):
        world.report(1, "training", step, {"loss": 1.0})
    world.report(2, "validation", 1, {"loss": 1.0})
    pages = list(bindings.get_GetTrainingMetrics(user, trialIds=[1, 2]))
    assert [report.totalBatches for page in pages for report in page.metrics] == list(range(250))
    assert [page.metrics[0].trialId for page in bindings.get_GetValidationMetrics(user, trialIds=[1, 2])] == [2]
    assert sum(len(page.metrics) for page in bindings.get_GetMetrics(task, trialIds=[1], group="training")) == 250


# A value of a metric, and how it comes back; None: it is refused.
METRICS: list[tuple[Any, tuple[Any, ...] | None]] = [
    *((value, (value,)) for value in (0, -1, 1.5, 1e308, 2**63, 10**400, -(10**400), 10**4000)),
    *((value, (value,)) for value in (True, False, None)),
    *((text, (text,)) for text in ("", "text", "2026-01-31T12:00:00Z", "\0", "\x1b[2J", "\U0001f600")),
    *((value, (value,)) for value in ([], {}, [1, [2, "x"]], {"a": {"b": [None]}}, {"": 1})),
    *((float(word), (shown,)) for word, shown in (("nan", "NaN"), ("inf", "Infinity"), ("-inf", "-Infinity"))),
    *((word, (word,)) for word in ("NaN", "Infinity", "-Infinity")),
    ([math.nan, {"a": -math.inf}], (["NaN", {"a": "-Infinity"}],)),
    ("\ud800", None),
    ({"\udc00": 1}, None),
    (functools.reduce(lambda inner, _: [inner], range(120), 1), None),
]


PATHS = (
    *("trials/1", "experiments/1", "experiments", "experiments/1/trials", "job-queues-v2", f"checkpoints/{UUID}"),
    *("trials/1/workloads?includeBatchMetrics=true", "trials/1/checkpoints?sortByMetric=other"),
    *("experiments/1/checkpoints", "trials/metrics/trial_metrics?trialIds=1"),
    "experiments/1/searcher/best_searcher_validation_metric",
)


@pytest.mark.parametrize("group", ["training", "validation", "gpu"])
def test_a_value_of_a_metric_is_refused_or_comes_back(ask: Ask, world: World, group: str) -> None:
    """No stored value makes a later answer fail, neither as the searcher's metric nor as another,
    nor next to numbers."""
    world.save(UUID)
    shown = dict(enumerate((back for _, back in METRICS), start=5))
    for steps, value in [(4, 1.0), *enumerate((value for value, _ in METRICS), start=5), (999, 2.0)]:
        values = {"validation_loss": value, "other": value}
        sent = {"trialRunId": 1, "stepsCompleted": steps, "metrics": {"avgMetrics": values, "batchMetrics": [values]}}
        status, _ = ask("POST", "/api/v1/trials/1/metrics", task=TASK_TOKEN, body={"group": group, "metrics": sent})
        assert status == (400 if shown.get(steps, ()) is None else 200), value
    for path in PATHS:
        status, answer = ask("GET", f"/api/v1/{path}", user=USER_TOKEN)
        assert status == 200 or (status == 404 and "best" in path), (path, answer)
    assert world.states(1) == ("ACTIVE", ["ACTIVE"])
    reports = ask("GET", "/api/v1/trials/metrics/trial_metrics?trialIds=1", user=USER_TOKEN)[1]["result"]["metrics"]
    assert {each["totalBatches"] for each in reports} == {4, 999, *(at for at, back in shown.items() if back)}
    for each in reports:
        if back := shown.get(each["totalBatches"]):
            own = each["metrics"].get("validation_metrics") or each["metrics"]["avg_metrics"]
            for values in (own, *(each["metrics"].get("batch_metrics") or ())):
                assert (values["validation_loss"], values["other"]) == (back[0], back[0])


POLL = "/api/v1/allocations/task-1.1/signals/preemption"


def test_when_too_many_wait_the_next_waits_a_second_and_others_are_answered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long polls take three quarters of the threads at most: four here, so three of them."""
    api = pytest.importorskip("determined.common.api")
    asked: list[float] = []
    signal = world.tasks.preemption_signal
    monkeypatch.setattr(
        world.tasks, "preemption_signal", lambda name, seconds: (asked.append(seconds), signal(name, seconds))[1]
    )
    with listen(world, threads=4) as server:
        session = api.TaskSession(server.url, "determined", TASK_TOKEN, None, max_retries=0)
        polls = [threading.Thread(target=lambda: session.get(POLL, params={"timeout_seconds": "60"})) for _ in range(3)]
        for poll in polls:
            poll.start()
        deadline = time.monotonic() + 10
        while len(asked) < 3 and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert session.get(POLL, params={"timeout_seconds": "60"}).json() == {"preempt": False}
        assert sorted(asked) == [1.0, 60.0, 60.0, 60.0]
        world.experiments.pause(1)
        for poll in polls:
            poll.join(timeout=60)
            assert not poll.is_alive()


def test_tasks_with_what_runs_for_them(user: Any) -> None:
    found = bindings.get_GetTasks(user).allocationIdToSummary
    assert sorted(found) == ["task-1.1", "task-2.1"]
    summary = found["task-1.1"]
    facts = (summary.taskId, summary.slotsNeeded, summary.priority, summary.schedulerType)
    assert facts == ("task-1", 1, 42, "priority")
    assert [resource.containerId for resource in summary.resources] == ["container-1"]
    assert [list(resource.agentDevices) for resource in summary.resources] == [["laptop"]]


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
