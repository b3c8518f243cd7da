"""Read an experiment and its trials from the store of an embedded master, which may be running, as
a sweep.
"""

from __future__ import annotations

import copy
import io
import math
import sqlite3
import tarfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from posixpath import normpath
from typing import Any

from zero_trial.errors import ConfigError, ZeroTrialError
from zero_trial.master.core.lifecycle import STOPPED_BY_SEARCH
from zero_trial.master.records import CheckpointState, Experiment, ExperimentState, Trial, TrialState
from zero_trial.master.search import restore
from zero_trial.master.search.pruning import ds_config_file, replaced_rates, resolved
from zero_trial.master.search.searcher import WORST, AdaptiveAsha, Bracket, Rung
from zero_trial.master.store import checkpoint_rows, experiment_rows, trial_rows
from zero_trial.master.store.database import reading
from zero_trial.report.curves import Curve, most_of_each
from zero_trial.report.report_data import (
    BestConfig,
    BracketHistory,
    CheckpointRow,
    Memory,
    MetricChange,
    RungDecision,
    RungOutcome,
    RunReport,
    Setting,
    Status,
    SweepReport,
    Tone,
    TrialReport,
    as_yaml,
    format_time,
    leaves,
    reach,
    swept_axes,
)
from zero_trial.report.run_reader import settings_of, training_series
from zero_trial.report.store_curves import StoreCurves, pace
from zero_trial.schema.config_source import read_json, read_yaml
from zero_trial.trial.runs.events import COUNTERS, ENGINE_GROUP, is_finite
from zero_trial.util.text import format_count, format_duration

_LARGEST_DS_CONFIG = 2**20  # bytes

_WORDS = {
    TrialState.COMPLETED: ("completed", Tone.GOOD),
    TrialState.CANCELED: ("canceled", Tone.QUIET),
    TrialState.ERROR: ("failed", Tone.BAD),
    TrialState.PAUSED: ("paused", Tone.QUIET),
}


def from_master_store(path: Path, experiment_id: int) -> SweepReport:
    """Return the current state of the sweep.

    Raises ConfigError if the store or the experiment is not there. Reads only.
    """
    with reading(path) as connection:
        return read_experiment(connection, StoreCurves(), experiment_id)


def read_experiment(
    connection: sqlite3.Connection, curves: StoreCurves, experiment_id: int, drawn: tuple[str, str] | None = None
) -> SweepReport:
    """Return the current state of the sweep. Raises ConfigError if the experiment is not there.

    Args:
        drawn: group and name of the metric that the curves show, unless it is the searcher's.
    """
    curves.refresh(connection)
    experiment = experiment_rows.get(connection, experiment_id)
    if experiment is None:
        known = [str(other.id) for other in experiment_rows.all_(connection, counted=False)]
        raise ConfigError(
            "there is no such experiment" if known else "there is no experiment yet",
            where="the master's store",
            got=experiment_id,
            expected=", ".join(known) or None,
        )
    return _Reader(connection, curves, experiment, drawn).read()


def read_trial(connection: sqlite3.Connection, curves: StoreCurves, trial_id: int) -> RunReport:
    """Return the current state of one trial. Raises ConfigError if it is not there."""
    curves.refresh(connection)
    trial = trial_rows.get(connection, trial_id, derived=True, summary=False)
    experiment = experiment_rows.get(connection, trial.experiment_id) if trial is not None else None
    if trial is None or experiment is None:
        raise ConfigError("there is no such trial", where="the master's store", got=trial_id)
    reported = {**curves.group(connection, trial, ENGINE_GROUP), **curves.group(connection, trial, "training")}
    training = {name: one for name, one in reported.items() if name not in COUNTERS}
    validation = {
        name: one for name, one in curves.group(connection, trial, "validation").items() if name not in COUNTERS
    }
    searcher = experiment.config.get("searcher") or {}
    goal, smaller = str(searcher.get("metric", "")), bool(searcher.get("smaller_is_better", True))
    ends = {name: one.ends() for name, one in sorted(validation.items(), key=lambda pair: pair[0] != goal) if len(one)}
    speed = pace(connection, trial)
    resources = experiment.config.get("resources") or {}
    facts = (
        ("ran for", format_duration(trial.wall_clock) if trial.wall_clock else None),
        ("steps", trial.steps_completed),
        ("steps per second", format_count(speed) if speed else None),
        ("slots", resources.get("slots_per_trial")),
        ("restarts", trial.restarts or None),
        ("seed", trial.seed),
    )
    metadata = (trial_rows.metadata(connection, trial.id) or {}).get("zero_trial")
    loss, progress = training_series(training)
    body = resolved(experiment.config, trial.hparams, _ds_config_files(connection, experiment, trial))
    ds_config = settings_of(body)
    started = format_time(trial.created)
    swept = {axis.name for axis in swept_axes(experiment.config.get("hyperparameters") or {})}
    return RunReport(
        title=f"trial {trial.id}",
        status=_trial_status(trial),
        subtitle=f"{experiment.name} · started {started}",
        message=trial.reason if trial.state is TrialState.ERROR else "",
        changes=tuple(
            MetricChange(
                name,
                first[1] if first[0] < last[0] else None,
                last[1],
                best=validation[name].best(smaller) if name == goal else None,
            )
            for name, (first, last) in ends.items()
        ),
        facts=tuple((name, str(value)) for name, value in facts if value is not None),
        training=loss,
        validation=tuple(one.series(name) for name, one in validation.items() if len(one)),
        progress=progress,
        memory=_memory(metadata if isinstance(metadata, Mapping) else {}),
        settings=tuple(
            Setting(name, value, "the search" if name in swept else "the experiment", "", True)
            for name, value in leaves(trial.hparams).items()
        )
        + ds_config.pop("settings"),
        **ds_config,
        checkpoints=tuple(
            CheckpointRow(saved.steps_completed, saved.uuid, saved.size, saved.state is CheckpointState.COMPLETED)
            for saved in sorted(checkpoint_rows.of_trial(connection, trial.id), key=lambda saved: saved.steps_completed)
        ),
        created=format_time(time.time()),
    )


class _Reader:
    """One experiment within one view of the store."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        curves: StoreCurves,
        experiment: Experiment,
        drawn: tuple[str, str] | None,
    ) -> None:
        self.connection = connection
        self.experiment = experiment
        self.config: Mapping[str, Any] = experiment.config
        self.searcher: Mapping[str, Any] = self.config.get("searcher") or {}
        self.metric = str(self.searcher.get("metric", ""))
        self.smaller = bool(self.searcher.get("smaller_is_better", True))
        self.axes = swept_axes(self.config.get("hyperparameters") or {})
        self.trials = trial_rows.of_experiment(connection, experiment.id, derived=True)
        self.curves = curves
        self.drawn = drawn or ("validation", self.metric)

    def read(self) -> SweepReport:
        experiment = self.experiment
        found = self._ladders()
        self.curves.ahead(self.connection, self.trials, "validation", self.metric, goal=True)
        if self.drawn != ("validation", self.metric):
            self.curves.ahead(self.connection, self.trials, *self.drawn, goal=False)
        reports = tuple(self._trial(trial) for trial in self.trials)
        reasons = Counter(trial.reason or "unknown" for trial in self.trials if trial.pruned)
        seconds = (experiment.ended or time.time()) - experiment.created
        started = format_time(experiment.created)
        return SweepReport(
            title=experiment.name or f"experiment {experiment.id}",
            status=experiment_status(experiment),
            searcher=str(self.searcher.get("name", "")),
            metric=self.metric,
            drawn="" if self.drawn == ("validation", self.metric) else " ".join(self.drawn),
            smaller_is_better=self.smaller,
            trials=reports,
            unit=self._unit(),
            throughput_unit="samples/s" if any(self._batch(trial) for trial in self.trials) else "steps/s",
            axes=self.axes,
            ladders=found,
            pruned=tuple(reasons.most_common()),
            best=self._best(),
            notes=self._notes(),
            subtitle=" · ".join(
                part for part in (f"experiment {experiment.id}", f"started {started}", experiment.description) if part
            ),
            facts=self._facts(seconds),
            created=format_time(time.time()),
        )

    def _unit(self) -> str:
        """Return what trials are measured by: the searcher's time metric where that is what steps
        count.
        """
        unit = str(self.searcher.get("time_metric") or "batches")
        return unit if self.searcher.get("name") == "adaptive_asha" else "batches"

    def _ladders(self) -> tuple[BracketHistory, ...]:
        """Return the brackets, replayed from all validations in the order in which they came."""
        if self.searcher.get("name") != "adaptive_asha":
            return ()
        unit = self._unit()
        measured = [
            (number, RungMeasurement(trial.request_id, time, value))
            for trial in self.trials
            for number, time, value in self.curves.measured(self.connection, trial, unit, self.metric)
        ]
        in_order = [measurement for _, measurement in sorted(measured, key=lambda pair: pair[0])]
        names = {trial.request_id: str(trial.id) for trial in self.trials}
        return bracket_histories(
            self.config, experiment_rows.snapshot(self.connection, self.experiment.id), in_order, names
        )

    def _trial(self, trial: Trial) -> TrialReport:
        goal = self.curves.goal(self.connection, trial, self.metric)
        curve = goal
        if self.drawn != ("validation", self.metric):
            curve = self.curves.group(self.connection, trial, *self.drawn).get(self.drawn[1]) or Curve()
        facts = (trial_rows.metadata(self.connection, trial.id) or {}).get("zero_trial")
        speed = pace(self.connection, trial)
        batch = self._batch(trial)
        return TrialReport(
            id=str(trial.id),
            status=_trial_status(trial),
            point={axis.name: value for axis in self.axes if (value := reach(trial.hparams, axis.name)) is not None},
            curve=curve.series(self.drawn[1], most_of_each(len(self.trials))),
            best=trial.searcher_metric if trial.searcher_metric is not None else goal.best(self.smaller),
            steps=trial.steps_completed,
            why=trial.reason if trial.state in (TrialState.ERROR, TrialState.CANCELED) else "",
            pruned=trial.pruned,
            memory=_memory(facts if isinstance(facts, Mapping) else {}),
            throughput=speed * batch if speed is not None and batch else speed,
            restarts=trial.restarts,
            seconds=trial.wall_clock or None,
        )

    def _batch(self, trial: Trial) -> int | None:
        size = trial.hparams.get("global_batch_size")
        return size if isinstance(size, int) and size > 0 else None

    def _facts(self, seconds: float) -> tuple[tuple[str, str], ...]:
        searcher = self.searcher
        shown = (
            ("searcher", searcher.get("name")),
            ("mode", searcher.get("mode")),
            ("at most", f"{searcher['max_trials']} trials" if searcher.get("max_trials") else None),
            ("at a time", searcher.get("max_concurrent_trials")),
            ("slots per trial", (self.config.get("resources") or {}).get("slots_per_trial")),
            ("seed", (self.config.get("reproducibility") or {}).get("experiment_seed")),
            ("took", format_duration(seconds)),
        )
        return tuple((name, str(value)) for name, value in shown if value is not None)

    def _winner(self) -> tuple[float, Trial] | None:
        measured = [(trial.searcher_metric, trial) for trial in self.trials if trial.searcher_metric is not None]
        return (min if self.smaller else max)(measured, key=lambda pair: pair[0]) if measured else None

    def _notes(self) -> tuple[str, ...]:
        """Return that the winner trained at another learning rate than its point says."""
        winner = self._winner()
        if winner is None:
            return ()
        files = _ds_config_files(self.connection, self.experiment, winner[1])
        return replaced_rates(self.config, winner[1].hparams, files)

    def _best(self) -> BestConfig | None:
        winner = self._winner()
        if winner is None:
            return None
        value, trial = winner
        ds_config = self._ds_config(trial)
        experiment_yaml = best_experiment(self._as_submitted(), trial.hparams, trial.seed, ds_config)
        name = "best.yaml"
        command = f"zero-trial run {name} MODEL_DIR"
        text = as_yaml(experiment_yaml, f"trial {trial.id} of experiment {self.experiment.id}: {command}")
        return BestConfig(str(trial.id), value, name, text, command)

    def _as_submitted(self) -> Mapping[str, Any]:
        """Return what the user wrote, with the searcher as the master completed it: a file with
        every default in it is hard to read.
        """
        try:
            written = read_yaml(self.experiment.original_config, "the submitted experiment").value
        except ConfigError:
            return self.config
        # the data as the trials got it: older masters took the names y and n for text
        data = {"data": self.config.get("data")} if "data" in written else {}
        return {**written, **data, "searcher": self.searcher}

    def _ds_config(self, trial: Trial) -> Any:
        """Return the content of the ds_config that the experiment names as a file of its context
        directory; None where it names none.
        """
        if "ds_config" not in (self.config.get("data") or {}):
            return None
        for name, content in _ds_config_files(self.connection, self.experiment, trial).items():
            with suppress(ConfigError):
                return (read_yaml if name.endswith((".yaml", ".yml")) else read_json)(content.decode(), name).value
        return None


def _ds_config_files(connection: sqlite3.Connection, experiment: Experiment, trial: Trial) -> dict[str, bytes]:
    """Return the file of the context directory that is the base ds_config, if there is one."""
    name = ds_config_file(experiment.config, trial.hparams)
    archive = experiment_rows.context(connection, experiment.id) if name is not None else None
    text = member(archive, name) if archive is not None and name is not None else None
    return {normpath(name): text.encode()} if text is not None and name is not None else {}


def member(archive: bytes, name: str) -> str | None:
    """Return the text of one small file within a .tar.gz, of which nothing is unpacked."""
    wanted = name.removeprefix("./")
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as files:
            for entry in files:
                if entry.isfile() and entry.name.removeprefix("./") == wanted and entry.size <= _LARGEST_DS_CONFIG:
                    content = files.extractfile(entry)
                    return content.read().decode("utf-8", "replace") if content is not None else None
    except (tarfile.TarError, OSError, EOFError):
        return None
    return None


def _number(value: Any) -> float:
    return float(value) if is_finite(value) else float("nan")


def _memory(facts: Mapping[str, Any]) -> Memory:
    planned, measured = _number(facts.get("memory_planned_bytes")), _number(facts.get("memory_measured_peak_bytes"))
    return Memory(
        planned=int(planned) if is_finite(planned) else None, measured=int(measured) if is_finite(measured) else None
    )


def _trial_status(trial: Trial) -> Status:
    if trial.pruned:
        return Status("pruned", Tone.QUIET)
    if trial.reason == STOPPED_BY_SEARCH and trial.state in (TrialState.COMPLETED, TrialState.STOPPING_COMPLETED):
        return Status("stopped early", Tone.QUIET)
    if trial.state.stopping:
        return Status("ending", Tone.BUSY)
    if trial.state in _WORDS:
        return Status(*_WORDS[trial.state])
    return Status((trial.shown_state or trial.state.value).lower().replace("_", " "), Tone.BUSY)


def experiment_status(experiment: Experiment) -> Status:
    """Return the state of an experiment, as it is shown."""
    words = {
        ExperimentState.COMPLETED: Tone.GOOD,
        ExperimentState.ERROR: Tone.BAD,
        ExperimentState.CANCELED: Tone.QUIET,
        ExperimentState.PAUSED: Tone.QUIET,
    }
    tone = words.get(experiment.state, Tone.BUSY)
    return Status((experiment.shown_state or experiment.state.value).lower().replace("_", " "), tone)


# Why a search stopped a trial: its brackets replayed, validation by validation, with the search's
# own rules.
#
# A search stores the rungs and not what it saw when it decided; its decisions follow from the order
# of validations.


@dataclass(frozen=True)
class RungMeasurement:
    """One validation as it came to the search: whose, after how many units, and the metric as it
    was reported.
    """

    request_id: str
    time: float
    metric: float


def bracket_histories(
    config: Mapping[str, Any],
    snapshot: Mapping[str, Any],
    measured: Iterable[RungMeasurement],
    names: Mapping[str, str],
) -> tuple[BracketHistory, ...]:
    """Return the brackets of an adaptive_asha search with their decisions; nothing for another
    search, or a snapshot that is not one.

    ``names``: what each request id is called on the page.
    """
    try:
        search = restore(config["searcher"], config.get("hyperparameters") or {}, snapshot)
    except (ZeroTrialError, KeyError, TypeError, ValueError):
        return ()
    if not isinstance(search, AdaptiveAsha):
        return ()
    events = list(measured)
    return tuple(
        _replayed(
            number, bracket, [event for event in events if event.request_id in bracket.position], search.sign, names
        )
        for number, bracket in enumerate(search.brackets, 1)
    )


def _replayed(
    number: int, bracket: Bracket, events: list[RungMeasurement], sign: float, names: Mapping[str, str]
) -> BracketHistory:
    fresh = Bracket(
        [Rung(rung.units) for rung in bracket.rungs], bracket.divisor, bracket.max_trials, bracket.max_concurrent
    )
    found: list[RungDecision] = []
    stopped: set[str] = set()
    for event in events:
        if event.request_id in stopped:
            continue
        before = [len(rung.entries) for rung in fresh.rungs]
        fresh.position.setdefault(event.request_id, 0)
        value = WORST if math.isnan(event.metric) else sign * event.metric
        stop = fresh.climb(event.request_id, int(event.time), value)
        passed = [index for index, rung in enumerate(fresh.rungs) if len(rung.entries) > before[index]]
        for index in passed:
            ends = stop and index == passed[-1]
            found.append(_decision(number, fresh, index, event, ends, names))
        if stop:
            stopped.add(event.request_id)
    return BracketHistory(number, tuple(rung.units for rung in bracket.rungs), tuple(found))


def _decision(
    number: int, bracket: Bracket, index: int, event: RungMeasurement, ends: bool, names: Mapping[str, str]
) -> RungDecision:
    rung = bracket.rungs[index]
    rank = 1 + next(at for at, (_, request_id) in enumerate(rung.entries) if request_id == event.request_id)
    count = len(rung.entries)
    top = index == len(bracket.rungs) - 1
    if top:
        verdict, why = RungOutcome.FINISHED, f"{ordinal(rank)} of {count} that came this far."
    else:
        may = max(int(count / bracket.divisor), 1)
        verdict = RungOutcome.STOPPED if ends else RungOutcome.WENT_ON
        why = (
            f"{ordinal(rank)} of the {count} measured here so far; the best {may} may go on (1 in {bracket.divisor:g})."
        )
        if count == 1:
            why = "The first to be measured here goes on."
    return RungDecision(
        names.get(event.request_id, event.request_id), verdict, number, index, rung.units, event.metric, why
    )


def ordinal(number: int) -> str:
    """Return 1st, 2nd, 3rd, 4th, 11th."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


# The best point of a sweep as an experiment that runs: the sweep's configuration with one value for
# each range.


_KEPT_OF_SEARCHER = ("metric", "smaller_is_better")


# of the sweep, not of its best point
_DROPPED = ("project", "workspace", "checkpoint_policy", "labels")


def best_experiment(
    config: Mapping[str, Any], hparams: Mapping[str, Any], seed: int | None, ds_config: Any = None
) -> dict[str, Any]:
    """Return the sweep's configuration with the searcher ``single`` and constant hyperparameters.

    ``ds_config`` replaces a file that is named.

    Pure; ``config`` is left as it is.
    """
    found = {key: copy.deepcopy(value) for key, value in config.items() if key not in _DROPPED}
    searcher = config.get("searcher") or {}
    found["name"] = f"{config.get('name') or 'sweep'}-best"
    found["searcher"] = {"name": "single", **{key: searcher[key] for key in _KEPT_OF_SEARCHER if key in searcher}}
    length = _length(searcher)
    if length is not None:
        found["searcher"]["max_length"] = length
    found["hyperparameters"] = as_hyperparameters(hparams)
    if seed is not None:
        found["reproducibility"] = {**(found.get("reproducibility") or {}), "experiment_seed": seed}
    if ds_config is not None:
        found["data"] = {**(found.get("data") or {}), "ds_config": ds_config}
    return found


def as_hyperparameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values as an experiment may hold them: a mapping with a key ``type`` would be
    read as a range, so it becomes a const.
    """

    def written(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return copy.deepcopy(value)
        if "type" in value:
            return {"type": "const", "val": copy.deepcopy(dict(value))}
        return {key: written(inner) for key, inner in value.items()}

    return {key: written(value) for key, value in values.items()}


def _length(searcher: Mapping[str, Any]) -> Any:
    """Return a whole training, as the searcher states it."""
    if searcher.get("max_time") is not None and searcher.get("time_metric"):
        return {str(searcher["time_metric"]): searcher["max_time"]}
    return copy.deepcopy(searcher.get("max_length"))
