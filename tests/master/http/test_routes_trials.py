"""Trials as the genuine client and the genuine harness ask for them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.master.http.conftest import Ask
from tests.master.world import TASK_TOKEN, UUID, World

bindings = pytest.importorskip("determined.common.api.bindings")
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


def test_a_report_of_a_run_that_is_over_is_refused(task: Any, world: World) -> None:
    with pytest.raises(errors.APIException, match="not the trial's newest"):
        send(task, "training", report(trialRunId=2))
    assert world.trials.metrics(1) == []


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"group": "training"},
        {"group": "", "metrics": {"trialRunId": 1, "metrics": {"avgMetrics": {}}}},
        {"group": "training", "metrics": {"trialRunId": 1}},
        {"group": "training", "metrics": {"trialRunId": 1, "metrics": {"avgMetrics": [1]}}},
        {"group": "training", "metrics": {"trialRunId": "x", "metrics": {"avgMetrics": {}}}},
        {"group": "training", "metrics": {"trialRunId": 1, "stepsCompleted": 1.5, "metrics": {"avgMetrics": {}}}},
        {"group": "training", "metrics": {"trialRunId": 1, "reportTime": "noon", "metrics": {"avgMetrics": {}}}},
        *(
            {"group": "training", "metrics": {"trialRunId": 1, "metrics": {"avgMetrics": {}, "batchMetrics": batches}}}
            for batches in ("x", 1, {"loss": 1.0}, [1.0], [{"loss": 1.0}, None])
        ),
        {
            "group": "training",
            "metrics": {"trialRunId": 1, "reportTime": "9999-12-31T23:59:59-12:00", "metrics": {"avgMetrics": {}}},
        },
    ],
)
def test_a_report_that_is_none_is_refused(ask: Ask, world: World, body: dict[str, Any]) -> None:
    assert ask("POST", "/api/v1/trials/1/metrics", task=TASK_TOKEN, body=body)[0] == 400
    assert world.trials.metrics(1) == []


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
    world.exit(1, code=1)
    assert (world.state_of(1), world.trials.get(1).reason) == ("ERROR", "the trial ended itself: INVALID_HP")


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


def test_a_trial_is_killed_by_users(user: Any, world: World) -> None:
    user.post("/api/v1/trials/1/kill")
    assert world.agent.killed == ["task-1.1"]
