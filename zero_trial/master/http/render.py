"""Experiments, trials, metrics and checkpoints as the plain dicts that Determined's bindings read."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from zero_trial.master.records import EARLIEST, LATEST, Checkpoint, Experiment, Job, MetricReport, Trial, Workload

Dict = dict[str, Any]

WORKSPACE = "Uncategorized"  # the one workspace, and the one project in it
WORKSPACE_ID = PROJECT_ID = 1
POOL = "default"
_OWN_GROUPS = {"training": "avg_metrics", "validation": "validation_metrics"}  # names in a trial's summary


def when(seconds: float) -> str:
    """RFC 3339 in UTC, with milliseconds. A time that has no such form, which older masters stored, becomes the nearest that has one."""
    return (
        datetime.fromtimestamp(min(max(seconds, EARLIEST), LATEST), timezone.utc)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def maybe_when(seconds: float | None) -> str | None:
    """The same of a time that may not have come."""
    return None if seconds is None else when(seconds)


def experiment(record: Experiment, *, user_id: int = 1) -> Dict:
    """v1Experiment."""
    searcher = _mapping(record.config.get("searcher"))
    resources = _mapping(record.config.get("resources"))
    return {
        "id": record.id,
        "name": record.name,
        "description": record.description,
        "labels": list(record.labels),
        "notes": record.notes,
        "state": f"STATE_{record.shown_state or record.state.value}",
        "archived": record.archived,
        "startTime": when(record.created),
        "endTime": maybe_when(record.ended),
        "duration": None if record.ended is None else int(record.ended - record.created),
        "progress": record.progress,
        "numTrials": record.num_trials,
        "trialIds": [],
        "bestTrialId": record.best_trial_id,
        "bestTrialSearcherMetric": record.best_metric,
        "checkpointCount": record.checkpoint_count,
        "checkpointSize": str(record.checkpoint_size),
        "config": dict(record.config),
        "originalConfig": record.original_config,
        "hyperparameters": dict(_mapping(record.config.get("hyperparameters"))),
        "searcherType": str(searcher.get("name", "")),
        "searcherMetric": searcher.get("metric"),
        "resourcePool": resources.get("resource_pool") or POOL,
        "username": record.owner,
        "displayName": record.owner,
        "userId": user_id,
        "jobId": record.job_id,
        "forkedFrom": record.parent_id,
        "projectId": PROJECT_ID,
        "projectName": WORKSPACE,
        "projectOwnerId": 1,
        "workspaceId": WORKSPACE_ID,
        "workspaceName": WORKSPACE,
        "parentArchived": False,
        "unmanaged": record.unmanaged,
    }


def job_summary(job: Job | None) -> Dict | None:
    """v1JobSummary."""
    return None if job is None else {"state": f"STATE_{job.state}", "jobsAhead": job.jobs_ahead}


def trial(record: Trial) -> Dict:
    """trialv1Trial."""
    return {
        "id": record.id,
        "experimentId": record.experiment_id,
        "state": f"STATE_{record.shown_state or record.state.value}",
        "startTime": when(record.created),
        "endTime": maybe_when(record.ended),
        "hparams": dict(record.hparams),
        "restarts": record.restarts,
        "totalBatchesProcessed": record.steps_completed,
        "bestValidation": _maybe_metrics(record.best_validation),
        "latestValidation": _maybe_metrics(record.latest_validation),
        "searcherMetricValue": record.searcher_metric,
        "summaryMetrics": {_OWN_GROUPS.get(group, group): value for group, value in record.summary_metrics.items()},
        "runnerState": record.runner_state or None,
        "wallClockTime": record.wall_clock,
        "warmStartCheckpointUuid": record.warm_start_checkpoint,
        "checkpointCount": record.checkpoint_count,
        "totalCheckpointSize": str(record.checkpoint_size),
        "taskId": record.task_id,
        "taskIds": [record.task_id],
        "metadata": None,
    }


def metrics_workload(report: MetricReport) -> Dict:
    """v1MetricsWorkload."""
    return {
        "endTime": when(report.reported),
        "metrics": {"avgMetrics": dict(report.metrics), "batchMetrics": report.batch_metrics or []},
        "numInputs": 0,
        "totalBatches": report.steps_completed or 0,
    }


def _maybe_metrics(report: MetricReport | None) -> Dict | None:
    return None if report is None else metrics_workload(report)


def trial_metrics(report: MetricReport) -> Dict:
    """v1MetricsReport."""
    return {
        "trialId": report.trial_id,
        "trialRunId": report.run_id,
        "group": report.group,
        "totalBatches": report.steps_completed or 0,
        "metrics": {"avg_metrics": dict(report.metrics), "batch_metrics": report.batch_metrics or []},
        "endTime": when(report.reported),
        "id": report.id,
        "archived": report.archived,
    }


def workload(record: Workload) -> Dict:
    """v1WorkloadContainer."""
    if record.checkpoint is not None:
        return {"checkpoint": checkpoint_workload(record.checkpoint)}
    if record.validation is not None:
        return {"validation": metrics_workload(record.validation)}
    return {"training": _maybe_metrics(record.training)}


def checkpoint_workload(record: Checkpoint) -> Dict:
    """v1CheckpointWorkload."""
    return {
        "uuid": record.uuid,
        "state": f"STATE_{record.state.value}",
        "endTime": when(record.reported),
        "resources": _sizes(record.resources),
        "metadata": dict(record.metadata),
        "totalBatches": record.steps_completed,
    }


def checkpoint(record: Checkpoint) -> Dict:
    """v1Checkpoint."""
    return {
        "uuid": record.uuid,
        "state": f"STATE_{record.state.value}",
        "taskId": record.task_id or None,
        "allocationId": record.allocation_id or None,
        "reportTime": when(record.reported),
        "resources": _sizes(record.resources),
        "metadata": dict(record.metadata),
        "storageId": record.storage_id,
        "training": {
            "trialId": record.trial_id,
            "experimentId": record.experiment_id,
            "experimentConfig": dict(record.experiment_config),
            "hparams": dict(record.hparams),
            "trainingMetrics": None,
            "validationMetrics": {"avgMetrics": dict(record.validation_metrics), "batchMetrics": []},
            "searcherMetric": record.searcher_metric,
        },
    }


def _sizes(resources: Mapping[str, int]) -> dict[str, str]:
    """File sizes as text, as protobuf sends 64-bit numbers."""
    return {name: str(size) for name, size in resources.items()}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
