"""Routes of experiments: create, read, control, change and delete them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from zero_trial.master.agent.resources import POOL
from zero_trial.master.core import context_archive
from zero_trial.master.core.registry import FIRST, UNCATEGORIZED
from zero_trial.master.http.messages import (
    AuthLevel,
    Dict,
    Request,
    Route,
    fields,
    packed,
    real,
    text_in,
    texts,
    when,
    whole,
)
from zero_trial.master.http.trial_routes import external_id, trial_json
from zero_trial.master.records import (
    Created,
    Experiment,
    ExperimentPatch,
    GcPolicy,
    Invalid,
    Job,
    NewExperiment,
    NotFound,
)
from zero_trial.master.store import experiment_rows, metric_rows

_ROOT = "/api/v1/experiments"
CONTEXT_BODY = 128 * 1024 * 1024  # bytes: a maximum context directory in base64, plus the configuration


def _put(request: Request) -> Dict:
    """Create an unmanaged experiment, or return the one with this external id."""
    body = request.body()
    if not body.get("unmanaged"):
        raise Invalid("only unmanaged experiments can have an external id", where="unmanaged")
    new = _new(request, body)
    if new.parent_id is not None:
        raise Invalid("an unmanaged experiment cannot have a parent", where="parentId")
    new = replace(new, external_id=external_id(request.args["externalExperimentId"]))
    answer = request.master.experiments.create(new)
    return {"experiment": _render(request, answer.experiment), "config": answer.config}


def _new(request: Request, body: Mapping[str, Any]) -> NewExperiment:
    files = body.get("modelDefinition") or []
    if not isinstance(files, list):
        raise Invalid("modelDefinition must be a list of files")
    parent = body.get("parentId")
    return NewExperiment(
        config_text=_required_text(body, "config"),
        context=context_archive.from_model_definition(files),
        owner=request.user.name,
        activate=bool(body.get("activate", True)),
        validate_only=bool(body.get("validateOnly", False)),
        parent_id=whole(parent, "parentId") if parent else None,
        project_id=whole(body.get("projectId") or FIRST, "projectId"),
        unmanaged=bool(body.get("unmanaged", False)),
        template=text_in(body, "template") or "",
    )


def _resume_ended(request: Request) -> Dict:
    body = request.body()
    number, override = whole(body.get("id"), "id"), _required_text(body, "overrideConfig")
    return _created(request, request.master.experiments.resume_ended(number, override))


def _created(request: Request, created: Created) -> Dict:
    # Clients know launch warnings by name and fail on any other text; other warnings are in the
    # master's log.
    warnings = [warning for warning in created.warnings if warning.startswith("LAUNCH_WARNING_")]
    return {"experiment": _render(request, created.experiment), "config": created.config, "warnings": warnings}


def _render(request: Request, experiment: Experiment) -> Dict:
    owner = request.master.accounts.user(experiment.owner)
    return experiment_json(experiment, user_id=owner.id if owner is not None else 0)


def _list_all(request: Request) -> Dict:
    """List experiments, newest first by default."""
    labels, name = set(request.query_all("labels")), request.first("name").lower()
    user_ids = request.user_ids()
    project_id = request.query_number("projectId")
    found = [
        experiment.id
        for experiment in request.master.experiments.all()
        if request.passes_switch("archived", experiment.archived)
        and (project_id or not _is_hidden(request, experiment))
        and project_id in (0, experiment.project_id)
        and request.passes("users", experiment.owner)
        and request.passes("userIds", str(user_ids.get(experiment.owner)))
        and (
            request.passes("states", f"STATE_{experiment.state.value}")
            or request.passes("states", f"STATE_{experiment.shown_state}")
        )
        and labels <= set(experiment.labels)
        and name in experiment.name.lower()
    ]
    if request.first("orderBy") != "ORDER_BY_ASC":
        found.reverse()
    page, pagination = request.page(found)
    shown = request.master.state.read(experiment_rows.get_all, page)
    experiments = [experiment_json(each, user_id=user_ids.get(each.owner, 0)) for each in shown]
    return {"experiments": experiments, "pagination": pagination}


def _is_hidden(request: Request, experiment: Experiment) -> bool:
    """Return whether a list without archived experiments omits this one because of its project."""
    project = experiment.project
    return request.first("archived").lower() == "false" and project is not None and project.archived


def _get(request: Request) -> Dict:
    experiment = request.master.experiments.get(request.number)
    job = request.master.machine.job(experiment.id)
    rendered = _render(request, experiment)
    return {"experiment": rendered, "config": rendered["config"], "jobSummary": job and job_summary_json(job)}


def _trials(request: Request) -> Dict:
    found = request.master.experiments.trials(request.number)
    found = [trial for trial in found if request.passes("states", f"STATE_{trial.state.value}")]
    found.sort(key=lambda trial: trial.id, reverse=request.descending)
    page, pagination = request.page(found)
    with request.master.state.database.reading() as connection:
        shown = [replace(each, summary_metrics=metric_rows.summary(connection, each.id)) for each in page]
    return {"trials": [trial_json(trial) for trial in shown], "pagination": pagination}


def _steer(operation: str) -> Callable[[Request], None]:
    return lambda request: getattr(request.master.experiments, operation)(request.number)


def _delete(request: Request) -> None:
    found = request.master.experiments.get(request.number)
    request.require_owner(found.owner, f"experiment {found.id}")
    request.master.experiments.delete(found.id)


def _patch(request: Request) -> Dict:
    body = request.body()
    labels = body.get("labels")
    change = ExperimentPatch(
        name=text_in(body, "name"),
        description=text_in(body, "description"),
        labels=None if labels is None else texts(labels, "labels"),
        notes=text_in(body, "notes"),
        resources=resource_changes(body.get("resources")),
        gc_policy=_policy(body.get("checkpointStorage")),
    )
    return {"experiment": _render(request, request.master.experiments.patch(request.number, change))}


def resource_changes(sent: Any) -> Mapping[str, float | None] | None:
    """Parse changes of resources; return None if there are none. Raises Invalid."""
    if not isinstance(sent, dict) or not sent:
        return None
    change: dict[str, float | None] = {}
    if "maxSlots" in sent:
        change["max_slots"] = None if sent["maxSlots"] is None else whole(sent["maxSlots"], "maxSlots")
    if sent.get("weight") is not None:
        change["weight"] = real(sent["weight"], "weight")
    if sent.get("priority") is not None:
        change["priority"] = whole(sent["priority"], "priority")
    return change


def _policy(sent: Any) -> GcPolicy | None:
    if not isinstance(sent, dict) or not sent:
        return None
    return GcPolicy(
        *(_count(sent.get(name), name) for name in ("saveExperimentBest", "saveTrialBest", "saveTrialLatest"))
    )


def _count(value: Any, name: str) -> int:
    number = whole(value, name)
    if number < 0:
        raise Invalid(f"{name} must not be negative", got=number)
    return number


def _label(request: Request) -> Dict:
    name = request.args["label"]
    put = request.head.method == "PUT"
    change = ExperimentPatch(add_label=name) if put else ExperimentPatch(remove_label=name)
    return {"labels": request.master.experiments.patch(request.number, change).labels}


def _best_metric(request: Request) -> Dict:
    best = request.master.experiments.get(request.number).best_metric
    if best is None:
        raise NotFound("no trial has reported the searcher's metric yet")
    return {"metric": best}


def _preview_gc(request: Request) -> Dict:
    """Return the checkpoints that ``det experiment set gc-policy`` shows before it asks."""
    names = ("save_experiment_best", "save_trial_best", "save_trial_latest")
    policy = GcPolicy(*(_count(request.first(name), name) for name in names))
    searcher = request.master.experiments.get(request.number).config.get("searcher")
    metric = searcher.get("metric") if isinstance(searcher, Mapping) else None
    checkpoints = [
        {
            "TrialID": each.trial_id,
            "StepsCompleted": each.steps_completed,
            "State": each.state.value,
            "ValidationMetrics": dict(each.validation_metrics),
            "UUID": each.uuid,
            "Resources": {name: str(size) for name, size in each.resources.items()},
            "ReportTime": when(each.reported),
        }
        for each in request.master.experiments.preview_gc(request.number, policy)
    ]
    return {"checkpoints": checkpoints, "metric_name": metric}


def _preview_search(request: Request) -> Dict:
    """Return the data that ``det preview-search`` shows."""
    config = request.body().get("config")
    if not isinstance(config, dict):
        raise Invalid("config must be a map")
    searcher, planned = request.master.experiments.preview_search(config)
    shown = [
        {"count": each.count, "unit": {"name": each.unit or None, "value": each.units, "maxLength": each.units is None}}
        for each in planned
    ]
    return {"summary": {"config": searcher, "trials": shown}}


def _required_text(body: Mapping[str, Any], name: str) -> str:
    value = text_in(body, name)
    if value is None:
        raise Invalid(f"{name} must be a string")
    return value


# -- responses, in the format of Determined's bindings


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def experiment_json(record: Experiment, *, user_id: int = 1) -> Dict:
    """Render a v1Experiment."""
    searcher = _mapping(record.config.get("searcher"))
    resources = _mapping(record.config.get("resources"))
    project = record.project
    same = ("id", "name", "description", "labels", "notes", "archived", "progress", "num_trials", "best_trial_id")
    more = ("checkpoint_count", "config", "original_config", "job_id", "project_id", "unmanaged")
    return {
        **fields(record, *same, *more),
        "state": f"STATE_{record.shown_state or record.state.value}",
        "startTime": when(record.created),
        "endTime": when(record.ended),
        "duration": None if record.ended is None else int(record.ended - record.created),
        "trialIds": [],
        "bestTrialSearcherMetric": record.best_metric,
        "checkpointSize": str(record.checkpoint_size),
        "hyperparameters": dict(_mapping(record.config.get("hyperparameters"))),
        "searcherType": str(searcher.get("name", "")),
        "searcherMetric": searcher.get("metric"),
        "resourcePool": resources.get("resource_pool") or POOL,
        "username": record.owner,
        "displayName": record.owner,
        "userId": user_id,
        "forkedFrom": record.parent_id,
        "projectName": UNCATEGORIZED if project is None else project.name,
        "projectOwnerId": 1,
        "workspaceId": FIRST if project is None else project.workspace_id,
        "workspaceName": UNCATEGORIZED if project is None else project.workspace_name,
        "parentArchived": project is not None and project.archived,
        "externalExperimentId": record.external_id,
    }


def job_summary_json(job: Job) -> Dict:
    """Render a v1JobSummary."""
    return {"state": f"STATE_{job.state}", "jobsAhead": job.jobs_ahead}


_ONE = f"{_ROOT}/{{experimentId:int}}"

ROUTES = (
    Route(
        "POST",
        _ROOT,
        lambda call: _created(call, call.master.experiments.create(_new(call, call.body()))),
        limit=CONTEXT_BODY,
    ),
    Route("PUT", f"{_ROOT}/by-external-id/{{externalExperimentId}}", _put, limit=CONTEXT_BODY),
    Route("GET", _ROOT, _list_all),
    Route("POST", f"{_ROOT}/continue", _resume_ended),
    Route("GET", _ONE, _get, AuthLevel.BOTH),
    Route("PATCH", _ONE, _patch),
    Route("DELETE", _ONE, _delete),
    *(
        Route("POST", f"{_ONE}/{operation}", _steer(operation))
        for operation in ("pause", "activate", "cancel", "kill", "archive", "unarchive")
    ),
    Route("GET", f"{_ONE}/trials", _trials, AuthLevel.BOTH),
    Route("GET", f"{_ONE}/model_def", lambda call: packed(call.master.experiments.context(call.number))),
    Route("PUT", f"{_ONE}/labels/{{label}}", _label),
    Route("DELETE", f"{_ONE}/labels/{{label}}", _label),
    Route("GET", f"{_ONE}/searcher/best_searcher_validation_metric", _best_metric, AuthLevel.BOTH),
    Route("GET", "/experiments/{experimentId:int}/preview_gc", _preview_gc),
    Route("POST", "/api/v1/preview-hp-search", _preview_search),
)
