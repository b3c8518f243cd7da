"""The runs and the experiments of a project as tables, as pages and scripts of a cluster search
them.

A run is a trial by another name, with the same id. What a row needs is read from the store when a
filter, a sort order or an answer asks for it: a search by id does not read a single report.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

from zero_trial.master.core.filters import (
    BOOLEAN,
    DATE,
    NUMBER,
    STATISTICS,
    TEXT,
    Column,
    Filter,
    flatten,
    kind_of,
    read_filter,
    sort_rows,
)
from zero_trial.master.core.state import MasterState
from zero_trial.master.records import Experiment, ExperimentState, Json, Project, Trial, User, as_number, existing
from zero_trial.master.store import accounts, experiments, metrics, trials, workspaces

EVERYWHERE = -1  # instead of a project's id: in all projects
_SHOWN_GROUPS = {"training": "TRAINING", "validation": "VALIDATIONS"}


@dataclass(frozen=True)
class ListedColumn:
    """A column of a project's table as it is listed; location and kind without their prefixes."""

    name: str
    title: str
    location: str
    kind: str


@dataclass(frozen=True)
class MetricRange:
    """The smallest and the largest value of a metric in a project."""

    name: str
    low: float
    high: float


class _Row:
    """A run, or an experiment with its best run, as filters see it.

    It may be used while ``connection`` is in one consistent view.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        experiment: Experiment,
        project: Project,
        user: User | None,
        now: float,
        run: Trial | None = None,
    ) -> None:
        self.experiment = experiment
        self.project = project
        self.user = user
        self.now = now
        self.of_run = run is not None
        self._connection = connection
        self._run = run

    @property
    def config(self) -> Json:
        """Return the completed configuration."""
        return self.experiment.config

    @property
    def archived(self) -> bool:
        """Return whether the run or its experiment is archived."""
        return self.experiment.archived or (self.of_run and self.run is not None and self.run.archived)

    @cached_property
    def run(self) -> Trial | None:
        """Return the run; of an experiment the best one, if there is one."""
        if self._run is not None:
            return self._run
        if self.best is not None:
            return trials.get(self._connection, self.best[0])
        only = experiments.only_trial(self._connection, self.experiment.id, self.config)
        return None if only is None else trials.get(self._connection, only)

    @cached_property
    def best(self) -> tuple[int, float] | None:
        """Return trial id and searcher's metric of the best validation of the experiment."""
        smaller = experiments.smaller_is_better(self.config)
        return experiments.best(self._connection, self.experiment.id, smaller_is_better=smaller)

    @cached_property
    def whole_run(self) -> Trial | None:
        """Return the same with its checkpoints and validations, and without the summary."""
        return None if self.run is None else trials.get(self._connection, self.run.id, derived=True, summary=False)

    @cached_property
    def whole_experiment(self) -> Experiment:
        """Return the experiment with its trials and checkpoints counted."""
        found = experiments.get(self._connection, self.experiment.id, project=lambda _: self.project)
        return existing(found, f"experiment {self.experiment.id}")

    @cached_property
    def summary(self) -> Json:
        """Return the summary of the run's metrics."""
        return {} if self.run is None else metrics.summary(self._connection, self.run.id)

    @cached_property
    def hparams(self) -> Mapping[str, Sequence[Any]]:
        """Return the run's hyperparameters by their dotted names; of an experiment those that are
        const."""
        if self.of_run and self.run is not None:
            return flatten(self.run.hparams)
        spaces = dict(space_of(self.config.get("hyperparameters")))
        return {name: [section["val"]] for name, section in spaces.items() if section["type"] == "const"}

    @cached_property
    def metadata(self) -> Mapping[str, Sequence[Any]]:
        """Return the run's metadata by their dotted names."""
        return {} if self.run is None else flatten(trials.metadata(self._connection, self.run.id))


def space_of(section: Any, name: str = "") -> Iterator[tuple[str, Json]]:
    """Yield the hyperparameters of a completed section by their dotted names."""
    if isinstance(section, Mapping) and isinstance(section.get("type"), str):
        yield name, section
    elif isinstance(section, Mapping):
        for key in sorted(section):
            yield from space_of(section[key], f"{name}.{key}" if name else str(key))


# -- the columns


def _of_config(*path: str) -> Callable[[_Row], Any]:
    def value(row: _Row) -> Any:
        found: Any = row.config
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    return value


def _labels(row: _Row) -> str:
    return json.dumps(list(row.experiment.labels), ensure_ascii=False)


def _percent(row: _Row) -> int:
    return round((row.experiment.progress or 0.0) * 100)


def _progress(row: _Row) -> float:
    return row.experiment.progress or 0.0


def _user_id(row: _Row) -> int | None:
    return None if row.user is None else row.user.id


def multitrial(experiment: Experiment) -> bool:
    """Return whether an experiment searches, and is not one run only."""
    return bool((experiment.config.get("searcher") or {}).get("name") != "single")


_EXPERIMENT: Mapping[str, Column] = {
    "id": Column("ID", NUMBER, lambda row: row.experiment.id),
    "name": Column("Name", TEXT, lambda row: row.experiment.name),
    "description": Column("Description", TEXT, lambda row: row.experiment.description),
    "tags": Column("Tags", TEXT, _labels),
    "forkedFrom": Column("Forked", NUMBER, lambda row: row.experiment.parent_id),
    "startTime": Column("Start time", DATE, lambda row: row.experiment.created),
    "duration": Column("Duration", NUMBER, lambda row: (row.experiment.ended or row.now) - row.experiment.created),
    "numTrials": Column("Trial count", NUMBER, lambda row: row.whole_experiment.num_trials),
    "state": Column("State", TEXT, lambda row: row.experiment.state.value),
    "searcherType": Column("Searcher", TEXT, _of_config("searcher", "name")),
    "resourcePool": Column("Resource pool", TEXT, _of_config("resources", "resource_pool")),
    "progress": Column("Progress", NUMBER, _percent, _progress),
    "checkpointSize": Column("Checkpoint size", NUMBER, lambda row: row.whole_experiment.checkpoint_size),
    "checkpointCount": Column("Checkpoints", NUMBER, lambda row: row.whole_experiment.checkpoint_count),
    "user": Column("User", NUMBER, _user_id, lambda row: row.experiment.owner, TEXT),
    "searcherMetric": Column("Searcher Metric", TEXT, _of_config("searcher", "metric")),
    "searcherMetricsVal": Column("Searcher Metric Value", NUMBER, lambda row: row.best and row.best[1]),
    "externalExperimentId": Column("External Experiment ID", TEXT, lambda row: row.experiment.external_id),
    "externalTrialId": Column("External Trial ID", TEXT, lambda row: row.run and row.run.external_id),
    "archived": Column("Archived", BOOLEAN, lambda row: row.experiment.archived, shown="UNSPECIFIED"),
    "endTime": Column("", DATE, lambda row: row.experiment.ended),
    "projectId": Column("", NUMBER, lambda row: row.project.id),
}
_RUN: Mapping[str, Column] = {
    "id": Column("Global Run ID", NUMBER, lambda row: row.run.id),
    "experimentDescription": Column("Search Description", TEXT, lambda row: row.experiment.description),
    "tags": Column("Tags", TEXT, _labels),
    "forkedFrom": Column("Forked", NUMBER, lambda row: row.experiment.parent_id),
    "startTime": Column("Start Time", DATE, lambda row: row.run.created),
    "endTime": Column("End Time", DATE, lambda row: row.run.ended),
    "duration": Column("Duration", NUMBER, lambda row: (row.run.ended or row.now) - row.run.created),
    "state": Column("State", TEXT, lambda row: row.run.state.value),
    "searcherType": Column("Searcher", TEXT, _of_config("searcher", "name")),
    "resourcePool": Column("Resource Pool", TEXT, _of_config("resources", "resource_pool")),
    "checkpointSize": Column("Checkpoint Size", NUMBER, lambda row: row.whole_run.checkpoint_size),
    "checkpointCount": Column("Checkpoints", NUMBER, lambda row: row.whole_run.checkpoint_count),
    "user": Column("User", NUMBER, _user_id, lambda row: row.experiment.owner, TEXT),
    "searcherMetric": Column("Searcher Metric", TEXT, _of_config("searcher", "metric")),
    "searcherMetricsVal": Column("Searcher Metric Value", NUMBER, lambda row: row.whole_run.searcher_metric),
    "externalExperimentId": Column("External Experiment ID", TEXT, lambda row: row.experiment.external_id),
    "projectId": Column("Project ID", NUMBER, lambda row: row.project.id),
    "externalRunId": Column("External Run ID", TEXT, lambda row: row.run.external_id),
    "experimentProgress": Column("Search Progress", NUMBER, _percent, _progress),
    "experimentId": Column("Search ID", NUMBER, lambda row: row.experiment.id),
    "experimentName": Column("Search Name", TEXT, lambda row: row.experiment.name),
    "isExpMultitrial": Column("Part of Search", BOOLEAN, lambda row: multitrial(row.experiment), shown="UNSPECIFIED"),
    "parentArchived": Column("Parent Archived", BOOLEAN, lambda row: row.project.archived, shown="UNSPECIFIED"),
    "localId": Column("Run ID", TEXT, lambda row: local_id(row.project, row.run), lambda row: row.run.id),
    "archived": Column("Archived", BOOLEAN, lambda row: row.archived, shown="UNSPECIFIED"),
}


def local_id(project: Project, run: Trial) -> str:
    """Return the short name of a run in its project."""
    return f"{project.key}-{run.id}"


@dataclass(frozen=True)
class RunEntry:
    """A run with what is shown beside it."""

    run: Trial
    experiment: Experiment
    project: Project
    user: User | None
    metadata: Json


class TableService:
    """Searches runs and experiments, and describes the tables of a project."""

    def __init__(self, state: MasterState) -> None:
        self._state = state

    # -- searching

    def run_ids(self, project_id: int | None = None, text: str = "", sort: str = "") -> list[int]:
        """List the ids of the runs of a project (None: of all) that a filter takes, in order.
        Raises NotFound or Invalid.
        """
        wanted = _filter(text, {"RUN": _RUN, "EXPERIMENT": _EXPERIMENT})
        with self._state.database.reading() as connection:
            return [row.run.id for row in sort_rows(self._runs(connection, project_id, wanted), sort, _RUN) if row.run]

    def runs(self, ids: Iterable[int]) -> list[RunEntry]:
        """Return the runs of these ids that are there, whole, with what is shown beside them."""
        with self._state.database.reading() as connection:
            found = [run for number in ids if (run := trials.get(connection, number, derived=True)) is not None]
            users = {user.name: user for user in accounts.users(connection)}
            projects = {each.id: each for each in workspaces.projects(connection)}
            of = {
                number: existing(experiments.get(connection, number, derived=False), f"experiment {number}")
                for number in {run.experiment_id for run in found}
            }
            return [
                RunEntry(
                    run,
                    of[run.experiment_id],
                    projects[of[run.experiment_id].project_id],
                    users.get(of[run.experiment_id].owner),
                    trials.metadata(connection, run.id),
                )
                for run in found
            ]

    def experiment_ids(self, project_id: int | None = None, text: str = "", sort: str = "") -> list[int]:
        """Do the same for experiments; those that are being deleted are left out."""
        wanted = _filter(text, {"EXPERIMENT": _EXPERIMENT})
        with self._state.database.reading() as connection:
            rows = self._experiments(connection, project_id, wanted)
            return [row.experiment.id for row in sort_rows(rows, sort, _EXPERIMENT)]

    def experiments(self, ids: Iterable[int]) -> list[tuple[Experiment, Trial | None]]:
        """Return the experiments of these ids that are there, each with its best trial."""
        with self._state.database.reading() as connection:
            project = cache(partial(workspaces.project, connection, counted=False))
            found = [experiments.get(connection, number, project=project) for number in ids]
            return [
                (each, None if each.best_trial_id is None else trials.get(connection, each.best_trial_id, derived=True))
                for each in found
                if each is not None
            ]

    def _experiments(
        self, connection: sqlite3.Connection, project_id: int | None, wanted: Filter | None = None
    ) -> list[_Row]:
        projects = {each.id: each for each in workspaces.projects(connection)}
        if project_id is not None:
            existing(projects.get(project_id), f"project {project_id}")
        users = {user.name: user for user in accounts.users(connection)}
        now = self._state.clock()
        rows = (
            _Row(connection, each, projects[each.project_id], users.get(each.owner), now)
            for each in experiments.of_project(connection, project_id)
            if each.state is not ExperimentState.DELETING
        )
        return [row for row in rows if wanted is None or _taken(row, wanted)]

    def _runs(self, connection: sqlite3.Connection, project_id: int | None, wanted: Filter | None) -> list[_Row]:
        of = {row.experiment.id: row for row in self._experiments(connection, project_id)}
        rows = (
            _Row(connection, (on := of[run.experiment_id]).experiment, on.project, on.user, on.now, run)
            for run in trials.of_project(connection, project_id)
            if run.experiment_id in of
        )
        return [row for row in rows if wanted is None or _taken(row, wanted)]

    # -- columns and ranges

    def columns(self, project_id: int, *, of_runs: bool) -> list[ListedColumn]:
        """List the columns of a project's table: the fixed ones, then its metrics and
        hyperparameters, of runs their metadata too. Raises NotFound.
        """
        location, table = ("RUN", _RUN) if of_runs else ("EXPERIMENT", _EXPERIMENT)
        listed = [
            ListedColumn(name, column.title, location, column.shown or column.kind)
            for name, column in table.items()
            if column.title
        ]
        with self._state.database.reading() as connection:
            rows = self._runs(connection, project_id, None) if of_runs else self._experiments(connection, project_id)
            kinds: dict[tuple[str, str], set[str]] = {}
            for row in rows:
                for group, summaries in row.summary.items():
                    for name, entry in summaries.items():
                        kinds.setdefault((group, name), set()).add(str(entry.get("type")))
            listed += [column for key in sorted(kinds) for column in _of_metric(*key, kinds[key])]
            listed += _of_hparams([row.hparams for row in rows]) if of_runs else _of_spaces(row.config for row in rows)
            listed += _of_metadata(row.metadata for row in rows) if of_runs else []
        return listed

    def ranges(self, project_id: int) -> list[MetricRange]:
        """List the ranges of the metrics of the best trials of a project's experiments. Raises
        NotFound.
        """
        found: dict[str, list[float]] = {}
        with self._state.database.reading() as connection:
            for row in self._experiments(connection, project_id):
                for group, summaries in row.summary.items():
                    for name, entry in summaries.items():
                        for statistic in STATISTICS if entry.get("type") == "number" else ():
                            number = as_number(entry.get(statistic))
                            found.setdefault(f"{group}.{name}.{statistic}", []).extend(
                                [] if number is None or math.isnan(number) else [number]
                            )
                if row.best is not None:
                    found.setdefault("searcherMetricsVal", []).append(row.best[1])
        return [MetricRange(name, min(values), max(values)) for name, values in found.items() if values]


def _filter(text: str, tables: Mapping[str, Mapping[str, Column]]) -> Filter | None:
    return read_filter(text, tables) if text else None


def _taken(row: _Row, wanted: Filter) -> bool:
    return (wanted.archived or not row.archived) and wanted.matches(row)


_KINDS = {"string": TEXT, "number": NUMBER, "date": DATE, "boolean": TEXT, "array": "ARRAY"}


def _of_metric(group: str, name: str, kinds: set[str]) -> list[ListedColumn]:
    """List the columns of one metric; one whose reports are of several types has none of them."""
    kind = _KINDS.get(next(iter(kinds)), "UNSPECIFIED") if len(kinds) == 1 else "UNSPECIFIED"
    location = _SHOWN_GROUPS.get(group, "CUSTOM_METRIC")
    statistics = STATISTICS if kind == NUMBER else ("last",)
    return [ListedColumn(f"{group}.{name}.{each}", "", location, kind) for each in statistics]


def _of_spaces(configs: Iterable[Json]) -> list[ListedColumn]:
    kinds: dict[str, str] = {}
    for config in configs:
        for name, section in space_of(config.get("hyperparameters")):
            ranged = section["type"] in ("int", "double", "log")
            kinds.setdefault(name, NUMBER if ranged else _listed(section.get("val")))
    return [ListedColumn(f"hp.{name}", "", "HYPERPARAMETERS", kind) for name, kind in kinds.items()]


def _of_hparams(found: Iterable[Mapping[str, Sequence[Any]]]) -> list[ListedColumn]:
    kinds = _kinds_of(found, lambda values: _listed(values[0], TEXT))
    return [ListedColumn(f"hp.{name}", "", "RUN_HYPERPARAMETERS", kind) for name, kind in kinds]


def _of_metadata(found: Iterable[Mapping[str, Sequence[Any]]]) -> list[ListedColumn]:
    def kind(values: Sequence[Any]) -> str:
        if len(values) > 1:
            return "ARRAY"
        return TEXT if values[0] is None else _listed(values[0], TEXT, dates=True)

    return [ListedColumn(f"metadata.{name}", "", "RUN_METADATA", kind) for name, kind in _kinds_of(found, kind)]


def _kinds_of(
    found: Iterable[Mapping[str, Sequence[Any]]], kind: Callable[[Sequence[Any]], str]
) -> list[tuple[str, str]]:
    """List the names with their kinds, each pair once."""
    return list(dict.fromkeys((name, kind(values)) for each in found for name, values in each.items()))


def _listed(value: Any, boolean: str = "UNSPECIFIED", *, dates: bool = False) -> str:
    """Return the kind of a value as columns are listed, which know no boolean."""
    kind = kind_of(value, dates=dates)
    return boolean if kind == BOOLEAN else kind or "UNSPECIFIED"
