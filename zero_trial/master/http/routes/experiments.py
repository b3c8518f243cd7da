"""Routes of experiments: create, look at, steer, change and delete them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

from zero_trial.master.core import context_archive
from zero_trial.master.errors import Invalid, NotFound, Unsupported
from zero_trial.master.http import render
from zero_trial.master.http.request import Request, real, whole
from zero_trial.master.http.response import Response, ok
from zero_trial.master.http.router import AuthLevel, Route
from zero_trial.master.records import Created, Experiment, ExperimentPatch, GcPolicy, NewExperiment

ROOT = "/api/v1/experiments"
CONTEXT_BODY = 128 * 1024 * 1024  # bytes: a full context directory in base64, and its configuration


def create(call: Request) -> Response:
    """POST /experiments."""
    body = call.body()
    files = body.get("modelDefinition") or []
    if not isinstance(files, list):
        raise Invalid("modelDefinition must be a list of files")
    if body.get("template"):
        raise Unsupported(
            "templates are not kept here; write what the template says into the experiment's configuration"
        )
    if body.get("unmanaged"):
        raise Unsupported("unmanaged experiments are not kept here; run the script by itself, or submit it")
    if body.get("projectId") not in (None, 0, render.PROJECT_ID):
        raise NotFound(f"there is one project here, number {render.PROJECT_ID}")
    parent = body.get("parentId")
    new = NewExperiment(
        config_text=text_of(body, "config"),
        context=context_archive.from_model_definition(files),
        owner=call.user,
        activate=bool(body.get("activate", True)),
        validate_only=bool(body.get("validateOnly", False)),
        parent_id=whole(parent, "parentId") if parent else None,
    )
    return _created(call, call.cluster.experiments.create(new))


def resume_ended(call: Request) -> Response:
    """POST /experiments/continue."""
    body = call.body()
    return _created(
        call, call.cluster.experiments.resume_ended(whole(body.get("id"), "id"), text_of(body, "overrideConfig"))
    )


def _created(call: Request, created: Created) -> Response:
    # Clients know launch warnings by name and fail on any other text; the rest is in the master's log.
    warnings = [warning for warning in created.warnings if warning.startswith("LAUNCH_WARNING_")]
    rendered = _render(call, created.experiment)
    return ok({"experiment": rendered, "config": rendered["config"], "warnings": warnings})


def _render(call: Request, experiment: Experiment) -> render.Dict:
    owner = call.cluster.accounts.user(experiment.owner)
    return render.experiment(experiment, user_id=owner.id if owner is not None else 0)


def list_all(call: Request) -> Response:
    """GET /experiments, newest first unless asked otherwise."""
    users, states, labels = set(call.query_all("users")), set(call.query_all("states")), set(call.query_all("labels"))
    archived, name = call.request.first("archived"), call.request.first("name").lower()
    user_ids = {user.name: user.id for user in call.cluster.accounts.users()}
    wanted_ids = set(call.query_all("userIds"))
    found = [
        experiment
        for experiment in call.cluster.experiments.all()
        if (not archived or experiment.archived == (archived == "true"))
        and (not users or experiment.owner in users)
        and (not wanted_ids or str(user_ids.get(experiment.owner)) in wanted_ids)
        and (not states or f"STATE_{experiment.state.value}" in states or f"STATE_{experiment.shown_state}" in states)
        and (not labels or labels <= set(experiment.labels))
        and name in experiment.name.lower()
    ]
    found.sort(key=lambda experiment: experiment.id, reverse=call.request.first("orderBy") != "ORDER_BY_ASC")
    page, pagination = call.page(found)
    return ok(
        {
            "experiments": [render.experiment(each, user_id=user_ids.get(each.owner, 0)) for each in page],
            "pagination": pagination,
        }
    )


def get(call: Request) -> Response:
    """GET /experiments/{experimentId}."""
    experiment = call.cluster.experiments.get(call.number("experimentId"))
    job = next((job for job in call.cluster.machine.jobs() if job.experiment_id == experiment.id), None)
    rendered = _render(call, experiment)
    return ok({"experiment": rendered, "config": rendered["config"], "jobSummary": render.job_summary(job)})


def trials(call: Request) -> Response:
    """GET /experiments/{experimentId}/trials."""
    found = call.cluster.experiments.trials(call.number("experimentId"))
    states = set(call.query_all("states"))
    found = [trial for trial in found if not states or f"STATE_{trial.state.value}" in states]
    found.sort(key=lambda trial: trial.id, reverse=call.request.first("orderBy") == "ORDER_BY_DESC")
    page, pagination = call.page(found)
    return ok({"trials": [render.trial(trial) for trial in page], "pagination": pagination})


def model_def(call: Request) -> Response:
    """GET /experiments/{experimentId}/model_def."""
    packed = call.cluster.experiments.context(call.number("experimentId"))
    return ok({"b64Tgz": base64.b64encode(packed).decode()})


def steer(verb: str) -> Callable[[Request], Response]:
    """POST /experiments/{experimentId}/VERB."""

    def action(call: Request) -> Response:
        getattr(call.cluster.experiments, verb)(call.number("experimentId"))
        return Response()

    return action


def patch(call: Request) -> Response:
    """PATCH /experiments/{experimentId}."""
    body = call.body()
    labels = body.get("labels")
    if labels is not None and not (isinstance(labels, list) and all(isinstance(label, str) for label in labels)):
        raise Invalid("labels must be a list of texts")
    change = ExperimentPatch(
        name=_maybe_text(body, "name"),
        description=_maybe_text(body, "description"),
        labels=None if labels is None else list(dict.fromkeys(labels)),
        notes=_maybe_text(body, "notes"),
        resources=_resources(body.get("resources")),
        gc_policy=_policy(body.get("checkpointStorage")),
    )
    return ok({"experiment": _render(call, call.cluster.experiments.patch(call.number("experimentId"), change))})


def _resources(sent: Any) -> Mapping[str, float | None] | None:
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


def label(call: Request) -> Response:
    """PUT and DELETE /experiments/{experimentId}/labels/{label}."""
    name = call.text("label")
    put = call.request.head.method == "PUT"
    change = ExperimentPatch(add_label=name) if put else ExperimentPatch(remove_label=name)
    changed = call.cluster.experiments.patch(call.number("experimentId"), change)
    return ok({"labels": list(changed.labels)})


def best_metric(call: Request) -> Response:
    """GET /experiments/{experimentId}/searcher/best_searcher_validation_metric; 404 says that there is none yet."""
    best = call.cluster.experiments.best_searcher_metric(call.number("experimentId"))
    if best is None:
        raise NotFound("no trial has reported the searcher's metric yet")
    return ok({"metric": best})


def preview_gc(call: Request) -> Response:
    """GET /experiments/{experimentId}/preview_gc: what ``det experiment set gc-policy`` shows before it asks."""
    names = ("save_experiment_best", "save_trial_best", "save_trial_latest")
    policy = GcPolicy(*(_count(call.request.first(name), name) for name in names))
    number = call.number("experimentId")
    searcher = call.cluster.experiments.get(number).config.get("searcher")
    metric = searcher.get("metric") if isinstance(searcher, Mapping) else None
    checkpoints = [
        {
            "TrialID": each.trial_id,
            "StepsCompleted": each.steps_completed,
            "State": each.state.value,
            "ValidationMetrics": dict(each.validation_metrics),
            "UUID": each.uuid,
            "Resources": {name: str(size) for name, size in each.resources.items()},
            "ReportTime": render.when(each.reported),
        }
        for each in call.cluster.experiments.preview_gc(number, policy)
    ]
    return ok({"checkpoints": checkpoints, "metric_name": metric})


def text_of(body: Mapping[str, Any], name: str) -> str:
    """A text of a body that must be there. Invalid otherwise."""
    value = body.get(name)
    if not isinstance(value, str):
        raise Invalid(f"{name} must be a text")
    return value


def _maybe_text(body: Mapping[str, Any], name: str) -> str | None:
    return None if body.get(name) is None else text_of(body, name)


_ONE = f"{ROOT}/{{experimentId:int}}"

ROUTES = (
    Route("POST", ROOT, create, limit=CONTEXT_BODY),
    Route("GET", ROOT, list_all),
    Route("POST", f"{ROOT}/continue", resume_ended),
    Route("GET", _ONE, get, AuthLevel.BOTH),
    Route("PATCH", _ONE, patch),
    Route("DELETE", _ONE, steer("delete")),
    *(
        Route("POST", f"{_ONE}/{verb}", steer(verb))
        for verb in ("pause", "activate", "cancel", "kill", "archive", "unarchive")
    ),
    Route("GET", f"{_ONE}/trials", trials, AuthLevel.BOTH),
    Route("GET", f"{_ONE}/model_def", model_def),
    Route("PUT", f"{_ONE}/labels/{{label}}", label),
    Route("DELETE", f"{_ONE}/labels/{{label}}", label),
    Route("GET", f"{_ONE}/searcher/best_searcher_validation_metric", best_metric, AuthLevel.BOTH),
    Route("GET", "/experiments/{experimentId:int}/preview_gc", preview_gc),
)
