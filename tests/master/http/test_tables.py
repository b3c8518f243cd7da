"""The tables of runs and experiments, with the genuine bindings against a served master."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.master.world import BEGAN, World
from zero_trial.master.records import Experiment, ExperimentState, TrialState

bindings = pytest.importorskip("determined.common.api.bindings")
errors = pytest.importorskip("determined.common.api.errors")

UUID_OF_2 = "7f1c8d2e-0000-4000-8000-0123456789ab"


def sweep(world: World, **config: Any) -> Experiment:
    """An experiment of two runs, with lr 0.1 and 0.2."""
    searcher = {"name": "grid", "metric": "validation_loss"}
    space = {"lr": {"type": "categorical", "vals": [0.1, 0.2]}}
    return world.submit(searcher=searcher, hyperparameters=space, **config)


def where(
    column: str, sign: str, value: Any, *, location: str = "RUN", kind: str = "NUMBER", archived: bool = False
) -> str:
    field = {
        "kind": "field",
        "columnName": column,
        "operator": sign,
        "value": value,
        "location": f"LOCATION_TYPE_{location}",
        "type": f"COLUMN_TYPE_{kind}",
    }
    root = {"kind": "group", "conjunction": "and", "children": [field]}
    return json.dumps({"filterGroup": root, "showArchived": archived})


def found(user: Any, **query: Any) -> list[int]:
    return [run.id for run in bindings.post_SearchRuns(user, body=bindings.v1SearchRunsRequest(**query)).runs]


def acted(user: Any, action: str, ids: list[int], project: int = 1, **more: Any) -> dict[int, str]:
    kind = getattr(bindings, f"v1{action}RunsRequest")
    body = kind(runIds=ids, projectId=project, **more)
    answer = getattr(bindings, f"post_{action}Runs")(user, body=body)
    return {result.id: result.error for result in answer.results}


def end(world: World, number: int, state: str = "COMPLETED") -> None:
    """End a trial and its experiment."""
    world.change_trial(number, state=TrialState(state), ended=BEGAN + 60)
    experiment = world.trials.get(number).experiment_id
    world.change_experiment(experiment, state=ExperimentState(state), ended=BEGAN + 60)


def project(world: World, name: str = "second") -> int:
    owner = world.accounts.users()[0]
    return world.workspaces.create_project(world.workspaces.create(name, owner, None).id, name, owner, "", None).id


# -- searching


def test_runs_are_searched_sorted_and_shown_in_pages(user: Any, world: World) -> None:
    grid = sweep(world, name="sweep", labels=["a"])
    world.report(1, "validation", 5, {"validation_loss": 0.5, "kind": "good"})
    world.report(2, "validation", 5, {"validation_loss": 0.25})
    world.trials.set_metadata(2, {"a": {"b": 3}})
    assert found(user) == [1, 2, 3, 4]
    assert found(user, filter=where("experimentId", "=", grid.id)) == [3, 4]
    assert found(user, filter=where("lr", ">=", 0.15, location="RUN_HYPERPARAMETERS"))[0] in (3, 4)
    assert found(user, filter=where("validation.validation_loss.min", "<", 0.4, location="VALIDATIONS")) == [2]
    assert found(user, filter=where("metadata.a.b", "=", 3, location="RUN_METADATA")) == [2]
    assert found(user, filter=where("isExpMultitrial", "=", True)) == [3, 4]
    assert found(user, filter=where("name", "contains", "SWE", location="EXPERIMENT")) == [3, 4]
    assert found(user, filter=where("user", "=", 1)) == [1, 2, 3, 4]
    assert found(user, filter=where("user", "=", 2)) == []
    assert found(user, filter=where("localId", "=", "UNC-2")) == [2]
    assert found(user, sort="searcherMetricsVal=asc,id=desc") == [2, 1, 4, 3]
    assert found(user, projectId=project(world)) == []
    page = bindings.post_SearchRuns(user, body=bindings.v1SearchRunsRequest(sort="id=desc", offset=1, limit=2))
    assert [run.id for run in page.runs] == [3, 2]
    assert (page.pagination.total, page.pagination.startIndex, page.pagination.endIndex) == (4, 1, 3)
    assert found(user, offset=-1) == [4]
    assert found(user, limit=-2) == []
    run = page.runs[1]
    assert (run.state, run.experiment.isMultitrial, run.localId) == (bindings.trialv1State.ACTIVE, False, "UNC-2")
    assert run.summaryMetrics["validation_metrics"]["validation_loss"]["min"] == 0.25
    assert (run.metadata, run.hyperparameters["lr"], run.searcherMetricValue) == ({"a": {"b": 3}}, 0.1, 0.25)
    assert page.runs[0].labels == ["a"]


def test_experiments_are_searched_with_their_best_trials(user: Any, world: World) -> None:
    grid = sweep(world, name="sweep")
    world.report(3, "validation", 5, {"validation_loss": 0.5})
    world.report(4, "validation", 5, {"validation_loss": 0.25})

    def ids(**query: Any) -> list[int]:
        answer = bindings.post_SearchExperiments(user, body=bindings.v1SearchExperimentsRequest(**query))
        return [each.experiment.id for each in answer.experiments]

    assert ids() == [1, 2, grid.id]
    experiment = "EXPERIMENT"
    assert ids(filter=where("numTrials", ">", 1, location=experiment)) == [grid.id]
    assert ids(filter=where("validation.validation_loss.min", "<", 0.3, location="VALIDATIONS")) == [grid.id]
    assert ids(filter=where("hp.lr", "contains", 0.2, location="HYPERPARAMETERS")) == [grid.id]
    assert ids(sort="name=desc", limit=1) == [grid.id]
    world.change_experiment(1, archived=1)
    assert ids(filter=where("id", "<", 3, location=experiment)) == [2]
    assert ids(filter=where("id", "<", 3, location=experiment, archived=True)) == [1, 2]
    shown = bindings.post_SearchExperiments(user, body=bindings.v1SearchExperimentsRequest(sort="id=desc", limit=1))
    assert (shown.experiments[0].bestTrial.id, shown.pagination.total) == (4, 3)
    with pytest.raises(errors.APIException) as caught:
        ids(filter=where("id", "=", 3))
    assert caught.value.status_code == 400
    with pytest.raises(errors.APIException) as caught:
        ids(projectId=9)
    assert caught.value.status_code == 404


def test_tables_of_metrics_read_no_reports(world: World) -> None:
    world.report(1, "validation", 5, {"validation_loss": 0.5})
    world.report(2, "validation", 5, {"validation_loss": 0.25})
    with world.state.database.transaction() as connection:
        connection.execute("UPDATE metrics SET metrics = 'not JSON'")
    names = {column.name for column in world.tables.columns(1, of_runs=False)}
    assert {f"validation.validation_loss.{each}" for each in ("last", "max", "mean", "min")} <= names
    assert names & {column.name for column in world.tables.columns(1, of_runs=True)} >= {
        "validation.validation_loss.min"
    }
    ranges = {each.name: (each.low, each.high) for each in world.tables.ranges(1)}
    assert ranges["validation.validation_loss.min"] == (0.25, 0.5) == ranges["searcherMetricsVal"]
    assert world.tables.run_ids(sort="validation.validation_loss.min=asc") == [2, 1]
    low = where("validation.validation_loss.min", "<", 0.3, location="VALIDATIONS")
    assert world.tables.run_ids(text=low) == [2]


def test_a_search_by_id_reads_no_reports(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a report was read")

    monkeypatch.setattr("zero_trial.master.store.metrics.summary", refuse)
    assert world.tables.run_ids(text=where("id", "=", 2), sort="startTime=desc") == [2]
    with pytest.raises(AssertionError):
        world.tables.run_ids(sort="validation.validation_loss.min=asc")


# -- actions on runs


def test_runs_are_killed_by_their_ids_or_by_a_filter(user: Any, world: World) -> None:
    assert acted(user, "Kill", [1, 9]) == {1: "", 9: "Run with id '9' not found in project with id '1'"}
    assert world.agent.killed == ["task-1.1"]
    world.exit(1, 137)
    assert world.trials.get(1).state is TrialState.CANCELED
    assert acted(user, "Kill", [1]) == {1: ""}
    assert acted(user, "Kill", [], filter=where("id", ">", 0)) == {1: "", 2: ""}
    assert world.agent.killed == ["task-1.1", "task-2.1"]
    with pytest.raises(errors.APIException) as caught:
        acted(user, "Kill", [1], filter=where("id", ">", 0))
    assert caught.value.status_code == 400
    assert acted(user, "Kill", [2], project=project(world))[2].startswith("Run with id '2' not found")


def test_single_runs_are_paused_and_resumed_and_those_of_a_search_are_not(user: Any, world: World) -> None:
    grid = sweep(world)
    refused = "Cannot pause/unpause run '{}' (part of multi-trial)."
    of_grid = where("experimentId", "=", grid.id)
    assert acted(user, "Pause", [1, 3]) == {1: "", 3: refused.format(3)}
    assert world.experiments.get(1).state is ExperimentState.PAUSED
    assert acted(user, "Resume", [], filter=of_grid) == {number: refused.format(number) for number in (3, 4)}
    assert acted(user, "Resume", [1]) == {1: ""}
    assert world.experiments.get(1).state is ExperimentState.ACTIVE
    end(world, 2)
    assert acted(user, "Pause", [2])[2].startswith("Failed to pause associated experiment: ")


def test_runs_are_archived_once_they_have_ended(user: Any, world: World) -> None:
    end(world, 1)
    assert acted(user, "Archive", [1, 2]) == {1: "", 2: "Run is not in terminal state."}
    assert acted(user, "Archive", [1]) == {1: ""}
    assert found(user, filter=where("id", ">", 0)) == [2]
    assert found(user, filter=where("archived", "=", True, archived=True)) == [1]
    assert acted(user, "Pause", [1]) == {1: "Run is archived."}
    assert acted(user, "Unarchive", [1, 2]) == {1: "", 2: ""}
    world.change_experiment(1, archived=1)
    assert acted(user, "Archive", [1]) == {1: "Run is part of archived Search (id: '1')."}


def test_a_deleted_run_leaves_nothing_but_its_checkpoints(user: Any, world: World) -> None:
    world.write(1, "a line")
    world.report(1, "validation", 5, {"validation_loss": 0.5})
    world.save(UUID_OF_2, 1)
    logs = world.directory.trial_logs(1)
    assert acted(user, "Delete", [1, 2]) == dict.fromkeys((1, 2), "Run is not in a terminal state.")
    world.exit(1)
    end(world, 1)
    assert logs.is_dir()
    assert acted(user, "Delete", [1]) == {1: ""}
    assert not logs.exists()
    assert found(user) == [2]
    assert [row for row in world.content() if row[0] in ("metrics", "allocations") and row[2] == 1] == []
    saved = world.experiments.checkpoints(1)
    assert [each.uuid for each in saved] == [UUID_OF_2]
    assert saved[0].experiment_config["name"] == "example"  # its storage is known
    assert bindings.get_GetExperimentTrials(user, experimentId=1).trials == []
    again = bindings.v1ContinueExperimentRequest(id=1, overrideConfig="searcher: {metric: validation_loss}")
    bindings.post_ContinueExperiment(user, body=again)
    assert found(user) == [2, 3]


def test_a_run_of_a_search_that_goes_on_is_not_deleted(user: Any, world: World) -> None:
    sweep(world)
    world.change_trial(3, state=TrialState.COMPLETED, ended=BEGAN)
    assert acted(user, "Delete", [3]) == {3: "Run is part of Search '3', which has not ended."}
    assert found(user) == [1, 2, 3, 4]


def test_runs_move_with_their_experiments(user: Any, world: World) -> None:
    sweep(world)
    target = project(world)

    def move(ids: list[int], source: int = 1, **more: Any) -> dict[int, str]:
        body = bindings.v1MoveRunsRequest(runIds=ids, sourceProjectId=source, destinationProjectId=target, **more)
        return {result.id: result.error for result in bindings.post_MoveRuns(user, body=body).results}

    assert move([3], skipMultitrial=True) == {3: "Skipping run '3' (part of multi-trial)."}
    assert move([3, 1]) == {3: "", 1: "", 4: ""}
    assert found(user, projectId=target) == [1, 3, 4]
    assert move([1], source=target) == {}
    assert move([1])[1].startswith("Run with id '1' not found")
    world.workspaces.archive_project(target, world.accounts.users()[0], True)
    with pytest.raises(errors.APIException) as caught:
        move([2])
    assert caught.value.status_code == 409
    assert found(user, filter=where("parentArchived", "=", True)) == [1, 3, 4]


# -- actions on experiments


def test_experiments_are_changed_many_at_once(user: Any, world: World) -> None:
    def act(operation: str, ids: list[int], project_id: int = 1, **filters: Any) -> dict[int, str]:
        verb = "delete" if operation == "Delete" else "post"
        chosen = bindings.v1BulkExperimentFilters(**filters) if filters else None
        body = getattr(bindings, f"v1{operation}ExperimentsRequest")(
            experimentIds=ids, projectId=project_id, filters=chosen
        )
        answer = getattr(bindings, f"{verb}_{operation}Experiments")(user, body=body, projectId=project_id)
        return {result.id: result.error for result in answer.results}

    missing = "experiment '9' not found"
    assert act("Pause", [1, 9]) == {1: "", 9: missing}
    assert world.experiments.get(1).state is ExperimentState.PAUSED
    assert act("Activate", [], name="EXAMPLE") == {1: ""}  # only those to which it applies
    assert act("Cancel", [2], -1) == {2: ""}
    assert act("Archive", [1]) == {1: "Experiment is not in terminal state."}
    for number in (1, 2):
        world.exit(number)
        end(world, number)
    assert act("Archive", [1]) == {1: ""}
    assert act("Archive", [1]) == {1: "Experiment is already archived."}
    assert act("Kill", [1, 2]) == {1: "Experiment is archived.", 2: ""}
    assert act("Unarchive", [], archived=True) == {1: ""}
    assert act("Unarchive", [1]) == {1: "Experiment is not archived."}
    states = [bindings.experimentv1State.COMPLETED]
    assert act("Archive", [], states=states, excludedExperimentIds=[2], userIds=[1], projectId=1) == {1: ""}
    assert act("Unarchive", [], labels=["none"]) == {}
    target = project(world)
    body = bindings.v1MoveExperimentsRequest(experimentIds=[1, 2], projectId=1, destinationProjectId=target)
    moved = bindings.post_MoveExperiments(user, body=body, projectId=1).results
    assert {each.id: each.error for each in moved} == {1: "Experiment is archived.", 2: ""}
    assert world.experiments.get(2).project_id == target
    assert act("Delete", [2]) == {2: "experiment '2' not found"}
    assert act("Delete", [2], target) == {2: ""}
    assert world.experiments.get(2).state is ExperimentState.DELETING


def test_only_owners_and_administrators_delete_and_move(user: Any, world: World) -> None:
    """Ids of others are refused one by one, and nothing happens to them."""
    target = project(world)
    for number in (1, 2):
        world.exit(number)
        end(world, number)
    world.change_experiment(2, owner="another")
    world.set_user(1, admin=0)
    refused = "only the owner of experiment 2 and administrators may do this."
    assert acted(user, "Delete", [2]) == {2: refused}
    body = bindings.v1MoveRunsRequest(runIds=[1, 2], sourceProjectId=1, destinationProjectId=target)
    assert {each.id: each.error for each in bindings.post_MoveRuns(user, body=body).results} == {1: "", 2: refused}
    move = bindings.v1MoveExperimentsRequest(experimentIds=[2], projectId=1, destinationProjectId=target)
    assert bindings.post_MoveExperiments(user, body=move, projectId=1).results[0].error == refused
    delete = bindings.v1DeleteExperimentsRequest(experimentIds=[1, 2], projectId=-1)
    found = bindings.delete_DeleteExperiments(user, body=delete, projectId=-1).results
    assert {each.id: each.error for each in found} == {1: "", 2: refused}
    assert (world.experiments.get(2).state, world.experiments.get(2).project_id) == (ExperimentState.COMPLETED, 1)


# -- columns and ranges


def test_the_columns_of_a_project(user: Any, world: World) -> None:
    sweep(world)
    world.report(1, "validation", 5, {"validation_loss": 0.5, "kind": "good"})
    world.report(2, "other", 5, {"y": 1})  # the only trial is the best one, without the searcher's metric
    world.report(3, "mine", 5, {"x": 1})
    world.trials.set_metadata(1, {"a": {"b": [1, 2], "c": "2024-05-01", "d": True}})
    number, text, neither = (getattr(bindings.v1ColumnType, kind) for kind in ("NUMBER", "TEXT", "UNSPECIFIED"))

    def kinds(table: str) -> dict[str, Any]:
        answer = bindings.get_GetProjectColumns(user, id=1, tableType=getattr(bindings.v1TableType, table))
        names = [each.column for each in answer.columns]
        assert len(names) == len(set(names))
        assert "endTime" in names if table == "RUN" else "endTime" not in names
        return {each.column: each.type for each in answer.columns}

    experiments, runs = kinds("EXPERIMENT"), kinds("RUN")
    assert len(bindings.get_GetProjectColumns(user, id=1).columns) == len(experiments)
    for found in (experiments, runs):
        assert {each for each in found if each.startswith("validation.")} == {
            *(f"validation.validation_loss.{each}" for each in ("last", "max", "mean", "min")),
            "validation.kind.last",
        }
        assert (found["validation.validation_loss.min"], found["validation.kind.last"]) == (number, text)
    assert experiments["hp.global_batch_size"] is number
    assert experiments["hp.lr"] is number
    assert experiments["other.y.min"] is number
    assert not any(name.startswith("mine.") for name in experiments)  # of best trials only
    assert runs["mine.x.max"] is number
    assert runs["hp.lr"] is number
    metadata = {name: kind for name, kind in runs.items() if name.startswith("metadata.")}
    assert metadata == {
        "metadata.a.b": bindings.v1ColumnType.ARRAY,
        "metadata.a.c": bindings.v1ColumnType.DATE,
        "metadata.a.d": text,
    }
    assert experiments["archived"] is neither


def test_the_ranges_of_a_projects_metrics(user: Any, world: World) -> None:
    assert bindings.get_GetProjectNumericMetricsRange(user, id=1).ranges == []
    for number, loss in ((1, 0.5), (2, 0.25)):
        world.report(number, "validation", 5, {"validation_loss": loss, "kind": "good", "bad": float("nan")})
        world.report(number, "training", 5, {"loss": 4 * loss})
    found = bindings.get_GetProjectNumericMetricsRange(user, id=1).ranges
    ranges = {each.metricsName: (each.min, each.max) for each in found}
    assert ranges["searcherMetricsVal"] == ranges["validation.validation_loss.min"] == (0.25, 0.5)
    assert ranges["training.loss.mean"] == (1.0, 2.0)
    assert not any("kind" in name or "bad" in name for name in ranges)
