"""Trials, tasks and allocations as the original client and Determined's harness ask for them."""

from __future__ import annotations

import functools
import math
import threading
import time
from typing import Any

import pytest

from tests.master.http.conftest import Ask
from tests.master.world import TASK_TOKEN, USER_TOKEN, UUID, World
from zero_trial.master.http import listen
from zero_trial.master.logs import LogQuery

bindings = pytest.importorskip("determined.common.api.bindings")
client = pytest.importorskip("determined.experimental.client")
errors = pytest.importorskip("determined.common.api.errors")


def report(**changes: Any) -> Any:
    values = {
        "trialId": 1,
        "trialRunId": 1,
        "stepsCompleted": 5,
        "metrics": bindings.v1Metrics(avgMetrics={"loss": 0.2}),
        "reportTime": None,
    }
    return bindings.v1TrialMetrics(**{**values, **changes})


def send(session: Any, group: str, metrics: Any) -> None:
    body = bindings.v1ReportTrialMetricsRequest(group=group, metrics=metrics)
    bindings.post_ReportTrialMetrics(session, body=body, metrics_trialId=metrics.trialId)


def test_a_report_is_stored_as_it_was_meant(task: Any, world: World) -> None:
    send(task, "training", report())
    send(
        task,
        "cpu",
        report(
            stepsCompleted=None,
            reportTime="2023-11-14T22:13:30Z",
            metrics=bindings.v1Metrics(avgMetrics={"laptop": {"util": 50.0}}),
        ),
    )
    second, first = sorted(world.trials.metrics(1), key=lambda each: each.group)
    assert (first.group, first.steps_completed, first.metrics, first.batch_metrics) == (
        "training",
        5,
        {"loss": 0.2},
        None,
    )
    assert (second.group, second.steps_completed, second.metrics, second.reported) == (
        "cpu",
        None,
        {"laptop": {"util": 50.0}},
        1_700_000_010.0,
    )


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
    world.exit(1)
    assert (world.state_of(1), world.trials.get(1).reason) == ("COMPLETED", "the trial ended itself: INVALID_HP")


def test_what_a_trial_says_of_itself_is_kept(task: Any, user: Any, world: World) -> None:
    body = bindings.v1PostRunMetadataRequest(metadata={"dataset": {"rows": 3}}, runId=1)
    assert bindings.post_PostRunMetadata(task, body=body, runId=1).metadata == {"dataset": {"rows": 3}}
    assert bindings.get_GetRunMetadata(user, runId=1).metadata == {"dataset": {"rows": 3}}


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
        return [
            name
            for each in found
            for name in ("training", "validation", "checkpoint")
            if getattr(each, name) is not None
        ]

    assert kinds(includeBatchMetrics=False) == ["training", "validation", "checkpoint"]
    assert kinds(orderBy=bindings.v1OrderBy.DESC) == ["checkpoint", "validation", "training"]
    assert kinds(filter=option.CHECKPOINT) == ["checkpoint"]
    assert kinds(filter=option.VALIDATION) == ["validation"]
    assert kinds(filter=option.CHECKPOINT_OR_VALIDATION) == ["validation", "checkpoint"]
    training = bindings.get_GetTrialWorkloads(user, trialId=1).workloads[0].training
    assert (training.totalBatches, training.metrics.avgMetrics) == (5, {"loss": "NaN"})


def test_reports_are_streamed(user: Any, task: Any, world: World) -> None:
    for step in range(2500):
        world.report(1, "training", step, {"loss": 1.0})
    world.report(2, "validation", 1, {"loss": 1.0})
    pages = list(bindings.get_GetTrainingMetrics(user, trialIds=[1, 2]))
    assert [report.totalBatches for page in pages for report in page.metrics] == list(range(2500))
    assert [page.metrics[0].trialId for page in bindings.get_GetValidationMetrics(user, trialIds=[1, 2])] == [2]
    assert sum(len(page.metrics) for page in bindings.get_GetMetrics(task, trialIds=[1], group="training")) == 2500


def test_the_sdk_reads_what_was_reported(user: Any, world: World) -> None:
    world.report(1, "training", 5, {"loss": 0.2})
    world.report(1, "validation", 5, {"validation_loss": 0.5})
    found = client.Determined._from_session(user).get_trial(1)
    [training], [validation] = found.iter_metrics("training"), found.iter_metrics("validation")
    assert (training.metrics, training.batch_metrics) == ({"loss": 0.2}, None)
    assert (validation.metrics, validation.steps_completed) == ({"validation_loss": 0.5}, 5)
    [listed] = client.Determined._from_session(user).get_experiment(1).list_trials()
    for trial in (found, listed):
        assert trial.summary_metrics["validation_metrics"]["validation_loss"]["last"] == 0.5


def test_users_report_metrics_too(user: Any, world: World) -> None:
    body = {"metrics": {"metrics": {"avgMetrics": {"bleu": 0.3}}, "stepsCompleted": 5, "trialId": 1, "trialRunId": 1}}
    user.post("/api/v1/trials/1/metrics", json={**body, "group": "evaluation"})
    assert [report.metrics for report in world.trials.metrics(1, "evaluation")] == [{"bleu": 0.3}]


# A value of a metric, and how it comes back; None: it is refused.
METRICS: list[tuple[Any, tuple[Any, ...] | None]] = [
    *((value, (value,)) for value in (0, -1, 1.5, 1e308, 2**63, 10**400, -(10**400), 10**4000)),
    *(
        (value, (value,))
        for value in (True, False, None, "", "text", "2026-01-31T12:00:00Z", "\0", "\x1b[2J", "\U0001f600")
    ),
    *((value, (value,)) for value in ([], {}, [1, [2, "x"]], {"a": {"b": [None]}}, {"": 1})),
    *((float(word), (shown,)) for word, shown in (("nan", "NaN"), ("inf", "Infinity"), ("-inf", "-Infinity"))),
    *((word, (word,)) for word in ("NaN", "Infinity", "-Infinity")),
    ([math.nan, {"a": -math.inf}], (["NaN", {"a": "-Infinity"}],)),
    ("\ud800", None),
    ({"\udc00": 1}, None),
    (functools.reduce(lambda inner, _: [inner], range(120), 1), None),
]


@pytest.mark.parametrize("group", ["training", "validation", "gpu"])
@pytest.mark.parametrize(("value", "shown"), METRICS, ids=lambda item: repr(item)[:20])
def test_a_value_of_a_metric_is_refused_or_comes_back(
    ask: Ask, world: World, group: str, value: Any, shown: tuple[Any, ...] | None
) -> None:
    """No stored value makes a later answer fail, neither as the searcher's metric nor as another,
    nor beside numbers."""
    world.save(UUID)
    for steps, reported in ((4, 1.0), (5, value), (6, 2.0)):
        values = {"validation_loss": reported, "other": reported}
        metrics = {
            "trialRunId": 1,
            "stepsCompleted": steps,
            "metrics": {"avgMetrics": values, "batchMetrics": [values]},
        }
        status, _ = ask("POST", "/api/v1/trials/1/metrics", task=TASK_TOKEN, body={"group": group, "metrics": metrics})
        assert status == (400 if shown is None and steps == 5 else 200)
    answers = {}
    for path in (
        *(
            "trials/1",
            "experiments/1",
            "experiments",
            "experiments/1/trials",
            "trials/1/workloads?includeBatchMetrics=true",
        ),
        *(
            "trials/1/checkpoints?sortByMetric=other",
            "experiments/1/checkpoints",
            f"checkpoints/{UUID}",
            "job-queues-v2",
        ),
        *("experiments/1/searcher/best_searcher_validation_metric", "trials/metrics/trial_metrics?trialIds=1"),
    ):
        status, answers[path] = ask("GET", f"/api/v1/{path}", user=USER_TOKEN)
        assert status == 200 or (status == 404 and "best" in path), (path, answers[path])
    assert world.states(1) == ("ACTIVE", ["ACTIVE"])
    reports = answers["trials/metrics/trial_metrics?trialIds=1"]["result"]["metrics"]
    found = {each["totalBatches"]: each["metrics"] for each in reports}
    assert set(found) == ({4, 5, 6} if shown else {4, 6})
    if shown:
        own = [found[5]["validation_metrics"]] if "validation_metrics" in found[5] else [found[5]["avg_metrics"]]
        for values in (*own, *found[5].get("batch_metrics", ())):
            assert (values["validation_loss"], values["other"]) == (shown[0], shown[0])


POLL = "/api/v1/allocations/task-1.1/signals/preemption"


@pytest.fixture
def waits(world: World, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how long each poll would have waited; none does."""
    seen: list[float] = []
    ask = world.tasks.preemption_signal

    def at_once(allocation_id: str, timeout: float) -> bool:
        seen.append(timeout)
        return ask(allocation_id, 0)

    monkeypatch.setattr(world.tasks, "preemption_signal", at_once)
    return seen


def test_a_long_poll_ends_when_it_is_time(task: Any, world: World) -> None:
    timer = threading.Timer(0.1, lambda: world.experiments.pause(1))
    timer.start()
    assert task.get(POLL, params={"timeout_seconds": "60"}).json() == {"preempt": True}
    timer.join()


def test_no_request_waits_longer_than_a_minute(ask: Ask, waits: list[float]) -> None:
    assert ask("GET", f"{POLL}?timeout_seconds=inf", task=TASK_TOKEN) == (200, {"preempt": False})
    assert waits == [60.0]


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


def test_lines_that_come_over_http_are_kept(task: Any, world: World, ask: Ask) -> None:
    logs = [{"task_id": "task-1", "log": "one\n", "rank": 0}, {"task_id": "task-1", "log": "two\n"}]
    task.post("/task-logs", json=logs)
    found = list(world.tasks.logs("task-1", LogQuery()))
    assert [(line.message, line.rank) for line in found if line is not None] == [("one", 0), ("two", None)]
    for wrong in ({"logs": "x"}, [1], [{"log": "no task"}]):
        assert ask("POST", "/task-logs", task=TASK_TOKEN, body=wrong)[0] == 400


def test_tasks_with_what_runs_for_them(user: Any) -> None:
    found = bindings.get_GetTasks(user).allocationIdToSummary
    assert sorted(found) == ["task-1.1", "task-2.1"]
    summary = found["task-1.1"]
    assert (summary.taskId, summary.slotsNeeded, summary.priority, summary.schedulerType) == (
        "task-1",
        1,
        42,
        "priority",
    )
    assert [resource.containerId for resource in summary.resources] == ["container-1"]
    assert [list(resource.agentDevices) for resource in summary.resources] == [["laptop"]]
