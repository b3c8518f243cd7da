"""Routes of the tables of a project: runs and experiments are searched, and changed many at once;
the columns of the tables and the ranges of their metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zero_trial.master.core.bulk import BULK_OPERATIONS, RUN_OPERATIONS, ActionResult, ExperimentFilter
from zero_trial.master.core.tables import RunEntry, local_id, multitrial
from zero_trial.master.http.messages import Dict, Request, Response, Route, maybe_when, ok, paginate, texts, when, whole
from zero_trial.master.http.routes.experiments import experiment_json
from zero_trial.master.http.routes.trials import summary_json, trial_json
from zero_trial.master.records import Invalid

_PAGE = 100  # rows of an answer without a limit


def _search_runs(request: Request) -> Response:
    body = request.body()
    found, pagination = paginate(request.master.tables.run_ids(*_search(body)), *_page(body))
    runs = [_run_json(entry, request.master.state.clock()) for entry in request.master.tables.runs(found)]
    return ok({"runs": runs, "pagination": pagination})


def _search_experiments(request: Request) -> Response:
    body = request.body()
    found, pagination = paginate(request.master.tables.experiment_ids(*_search(body)), *_page(body))
    ids = request.user_ids()
    experiments = [
        {
            "experiment": experiment_json(each, user_id=ids.get(each.owner, 0)),
            "bestTrial": None if best is None else trial_json(best),
        }
        for each, best in request.master.tables.experiments(found)
    ]
    return ok({"experiments": experiments, "pagination": pagination})


def _search(body: Mapping[str, Any]) -> tuple[int | None, str, str]:
    """Return project, filter and sort order of a search. Raises Invalid."""
    project = body.get("projectId")
    return None if project is None else whole(project, "projectId"), _text(body, "filter") or "", _text(body, "sort")


def _page(body: Mapping[str, Any]) -> tuple[int, int]:
    """Return offset and limit of a search. Raises Invalid."""
    return whole(body.get("offset") or 0, "offset"), whole(body.get("limit") or 0, "limit") or _PAGE


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str | None):
        raise Invalid(f"{name} must be a text")
    return value or ""


# -- runs


def _of_runs(body: Mapping[str, Any], project: str = "projectId") -> tuple[int, list[int], str | None]:
    """Return project, ids and filter of an action on runs. Raises Invalid."""
    text = None if body.get("filter") is None else _text(body, "filter")
    return whole(body.get(project), project), _ids(body, "runIds"), text


def _ids(body: Mapping[str, Any], name: str) -> list[int]:
    values = body.get(name) or []
    if not isinstance(values, list):
        raise Invalid(f"{name} must be a list of ids")
    return [whole(value, name) for value in values]


def _act_on_runs(operation: str) -> Callable[[Request], Response]:
    def action(request: Request) -> Response:
        wanted = _of_runs(request.body())
        return _results(request.master.bulk.act_on_runs(operation, *wanted, user=request.user))

    return action


def _move_runs(request: Request) -> Response:
    body = request.body()
    source, ids, text = _of_runs(body, "sourceProjectId")
    target, skip = whole(body.get("destinationProjectId"), "destinationProjectId"), bool(body.get("skipMultitrial"))
    moved = request.master.bulk.move_runs(source, target, ids, text, skip_multitrial=skip, user=request.user)
    return _results(moved)


def _results(found: list[ActionResult]) -> Response:
    return ok({"results": [{"id": each.id, "error": each.error} for each in found]})


# -- experiments


def _act(operation: str) -> Callable[[Request], Response]:
    def action(request: Request) -> Response:
        body = request.body()
        target = None
        if operation == "move":
            target = whole(body.get("destinationProjectId"), "destinationProjectId")
        project, ids = request.numbers["projectId"], _ids(body, "experimentIds")
        chosen = _chosen(body.get("filters"))
        bulk = request.master.bulk
        return _results(bulk.act_on_experiments(operation, project, ids, chosen, user=request.user, target_id=target))

    return action


def _chosen(sent: Any) -> ExperimentFilter | None:
    if sent is None:
        return None
    if not isinstance(sent, dict):
        raise Invalid("filters must be an object")
    archived = sent.get("archived")
    if not isinstance(archived, bool | None):
        raise Invalid("filters.archived must be true or false")
    return ExperimentFilter(
        name=_text(sent, "name"),
        description=_text(sent, "description"),
        labels=tuple(texts(sent.get("labels") or [], "labels")),
        states=tuple(name.removeprefix("STATE_") for name in texts(sent.get("states") or [], "states")),
        user_ids=tuple(_ids(sent, "userIds")),
        excluded=tuple(_ids(sent, "excludedExperimentIds")),
        project_id=whole(sent.get("projectId") or 0, "projectId"),
        archived=archived,
    )


# -- columns and ranges


def _columns(request: Request) -> Response:
    of_runs = request.first("tableType") == "TABLE_TYPE_RUN"
    found = request.master.tables.columns(request.numbers["projectId"], of_runs=of_runs)
    return ok(
        {
            "columns": [
                {
                    "column": each.name,
                    "displayName": each.title,
                    "location": f"LOCATION_TYPE_{each.location}",
                    "type": f"COLUMN_TYPE_{each.kind}",
                }
                for each in found
            ]
        }
    )


def _ranges(request: Request) -> Response:
    found = request.master.tables.ranges(request.numbers["projectId"])
    return ok({"ranges": [{"metricsName": each.name, "min": each.low, "max": each.high} for each in found]})


# -- what the answers contain, in the shapes of Determined's bindings


def _run_json(entry: RunEntry, now: float) -> Dict:
    """Render a v1FlatRun."""
    run, experiment, project = entry.run, entry.experiment, entry.project
    searcher, resources = experiment.config.get("searcher") or {}, experiment.config.get("resources") or {}
    return {
        "id": run.id,
        "localId": local_id(project, run),
        "state": f"STATE_{run.state.value}",
        "startTime": when(run.created),
        "endTime": maybe_when(run.ended),
        "duration": int((run.ended or now) - run.created),
        "archived": run.archived or experiment.archived,
        "parentArchived": project.archived,
        "checkpointCount": run.checkpoint_count,
        "checkpointSize": str(run.checkpoint_size),
        "searcherMetricValue": run.searcher_metric,
        "summaryMetrics": summary_json(run),
        "hyperparameters": dict(run.hparams),
        "metadata": dict(entry.metadata) or None,
        "logPolicyMatched": run.log_policy_matched,
        "externalRunId": run.external_id,
        "labels": list(experiment.labels),
        "userId": None if entry.user is None else entry.user.id,
        "projectId": project.id,
        "projectName": project.name,
        "workspaceId": project.workspace_id,
        "workspaceName": project.workspace_name,
        "experiment": {
            "id": experiment.id,
            "name": experiment.name,
            "description": experiment.description,
            "searcherType": str(searcher.get("name", "")),
            "searcherMetric": str(searcher.get("metric", "")),
            "resourcePool": str(resources.get("resource_pool") or ""),
            "isMultitrial": multitrial(experiment),
            "progress": experiment.progress or 0.0,
            "unmanaged": experiment.unmanaged,
            "forkedFrom": experiment.parent_id,
            "externalExperimentId": experiment.external_id,
        },
    }


_RUNS = "/api/v1/runs"
_PROJECT = "/api/v1/projects/{projectId:int}"

ROUTES = (
    Route("POST", _RUNS, _search_runs),
    *(Route("POST", f"{_RUNS}/{operation}", _act_on_runs(operation)) for operation in RUN_OPERATIONS),
    Route("POST", f"{_RUNS}/move", _move_runs),
    Route("POST", "/api/v1/experiments-search", _search_experiments),
    *(
        Route("DELETE" if operation == "delete" else "POST", f"{_PROJECT}/experiments/{operation}", _act(operation))
        for operation in BULK_OPERATIONS
    ),
    Route("GET", f"{_PROJECT}/columns", _columns),
    Route("GET", f"{_PROJECT}/experiments/metric-ranges", _ranges),
)
