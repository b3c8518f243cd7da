"""Read the store of an embedded master, which may be running: an experiment and its trials as a
sweep, a trial as a run, and data for the board. Never writes."""

from __future__ import annotations

import copy
import math
import sqlite3
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from posixpath import normpath
from typing import Any

from zero_trial.errors import ConfigError, ZeroTrialError
from zero_trial.master import logs
from zero_trial.master.core.context_archive import read_context
from zero_trial.master.core.lifecycle import STOPPED_BY_SEARCH
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.records import CheckpointState, Experiment, ExperimentState, Trial, TrialState, existing
from zero_trial.master.search.pruning import ds_config_file, parse_file, replaced_rates, resolved
from zero_trial.master.search.searcher import WORST, AdaptiveAsha, Bracket, Rung, restore
from zero_trial.master.store import checkpoint_rows, experiment_rows, metric_rows, trial_rows
from zero_trial.master.store.database import loads, reading
from zero_trial.report.report_data import (
    BestConfig,
    BracketHistory,
    CheckpointRow,
    Curve,
    Memory,
    MetricChange,
    OutputLine,
    Overview,
    OverviewRow,
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
    most_of_each,
    reach,
    swept_axes,
)
from zero_trial.report.run_reader import mapping, settings_of, training_series, whole
from zero_trial.schema.config_source import read_yaml
from zero_trial.trial.runs.events import COUNTERS, ENGINE_GROUP, is_finite
from zero_trial.util.files import signature
from zero_trial.util.text import format_count, format_duration

_FIRST_LINES = 500  # of a log, when the page is opened

_TONES = {
    ExperimentState.COMPLETED: Tone.GOOD,
    ExperimentState.ERROR: Tone.BAD,
    ExperimentState.CANCELED: Tone.QUIET,
    ExperimentState.PAUSED: Tone.QUIET,
}


class StoreSource:
    """A master's store and logs as data for the board."""

    unit = "trial"

    def __init__(self, directory: MasterDirectory) -> None:
        self._directory = directory

    def version(self) -> object:
        base = self._directory.database
        return signature(base), signature(base.with_name(f"{base.name}-wal"))

    def overview(self) -> Overview:
        with reading(self._directory.database) as connection:
            rows = tuple(_row(each) for each in experiment_rows.all_(connection) if not each.archived)[::-1]
        begin = "det experiment create const.yaml MODEL_DIR -f"
        return Overview("Experiments", f"embedded master in {self._directory.root}", "experiment", rows, begin)

    def sweep(self, name: str, drawn: tuple[str, str] | None) -> SweepReport:
        return from_master_store(self._directory.database, _number(name), drawn)

    def run(self, name: str) -> RunReport:
        return from_master_trial(self._directory.database, _number(name))

    def log(self, name: str) -> Iterator[list[OutputLine]]:
        with reading(self._directory.database) as connection:
            trial = _trial(connection, _number(name))
        return _lines(logs.LogTail(logs.Source(self._directory.trial_logs(trial.id), trial.id, trial.task_id)))


def _lines(tail: logs.LogTail) -> Iterator[list[OutputLine]]:
    """Yield the newest lines that the master has stored, then new lines."""
    fresh: Iterable[logs.LogLine] = reversed(list(islice(tail.newest_first(), _FIRST_LINES)))
    while True:
        yield [OutputLine(line.message, line.rank, line.time, line.level) for line in fresh]
        fresh = tail.new()


def _number(name: str) -> int:
    if not name.isascii() or not name.isdigit() or len(name) > 9:
        raise ConfigError("an id is a number", where="name", got=name[:80])
    return int(name)


def _row(experiment: Experiment) -> OverviewRow:
    pruned = f", {experiment.pruned_trials} pruned" if experiment.pruned_trials else ""
    return OverviewRow(
        name=str(experiment.id),
        title=experiment.name or f"experiment {experiment.id}",
        status=_experiment_status(experiment),
        done=1.0 if experiment.state is ExperimentState.COMPLETED else experiment.progress,
        metric=_goal(experiment)[0],
        best=experiment.best_metric,
        trials=f"{experiment.num_trials}{pruned}",
        started=experiment.created,
    )


# One experiment, or one trial, within one view of the store.


def from_master_store(path: Path, experiment_id: int, drawn: tuple[str, str] | None = None) -> SweepReport:
    """Return the current state of the sweep.

    Raises ConfigError if the store or the experiment does not exist. Reads only.

    Args:
        drawn: group and name of the metric in the curves, unless it is the searcher's.
    """
    with reading(path) as connection:
        experiment = experiment_rows.get(connection, experiment_id)
        if experiment is None:
            known = [str(other.id) for other in experiment_rows.all_(connection, counted=False)]
            raise ConfigError(
                "the experiment does not exist" if known else "no experiment exists yet",
                where="the master's store",
                got=experiment_id,
                expected=", ".join(known) or None,
            )
        return _read_experiment(connection, experiment, drawn)


def _read_experiment(
    connection: sqlite3.Connection, experiment: Experiment, drawn: tuple[str, str] | None
) -> SweepReport:
    config = experiment.config
    searcher = config.get("searcher") or {}
    metric, smaller = _goal(experiment)
    trials = trial_rows.of_experiment(connection, experiment.id, derived=True)
    shown = drawn or ("validation", metric)
    # the x axis: the searcher's time metric if rungs are counted in it
    asha = searcher.get("name") == "adaptive_asha"
    unit = str(searcher.get("time_metric") or "batches") if asha else "batches"
    ladders: tuple[BracketHistory, ...] = ()
    if asha:
        measured = _measured(connection, experiment, unit)
        snapshot = experiment_rows.snapshot(connection, experiment.id)
        names = {trial.request_id: str(trial.id) for trial in trials}
        ladders = bracket_histories(config, snapshot, measured, names)
    sizes = {trial.id: trial.hparams.get("global_batch_size") for trial in trials}
    batches = {name: size if isinstance(size, int) and size > 0 else None for name, size in sizes.items()}
    axes = swept_axes(config.get("hyperparameters") or {})
    found = []
    for trial in trials:
        speed, batch = _pace(connection, trial), batches[trial.id]
        curve = _curves(connection, trial, shown[0], shown[1]).get(shown[1]) or Curve()
        found.append(
            TrialReport(
                id=str(trial.id),
                status=_trial_status(trial),
                point={axis.name: value for axis in axes if (value := reach(trial.hparams, axis.name)) is not None},
                curve=curve.series(shown[1], most_of_each(len(trials))),
                best=trial.searcher_metric,
                steps=trial.steps_completed,
                why=trial.reason if trial.state in (TrialState.ERROR, TrialState.CANCELED) else "",
                pruned=trial.pruned,
                memory=_memory(connection, trial),
                throughput=speed * batch if speed is not None and batch else speed,
                restarts=trial.restarts,
                seconds=trial.wall_clock or None,
            )
        )
    ranked = [(trial.searcher_metric, trial) for trial in trials if trial.searcher_metric is not None]
    best: BestConfig | None = None
    notes: tuple[str, ...] = ()
    if ranked:
        value, winner = (min if smaller else max)(ranked, key=lambda pair: pair[0])
        files = _context_files(connection, experiment, winner)
        best = _best(experiment, winner, value, files)
        notes = replaced_rates(config, winner.hparams, files)
    started = f"started {format_time(experiment.created)}"
    return SweepReport(
        title=experiment.name or f"experiment {experiment.id}",
        status=_experiment_status(experiment),
        searcher=str(searcher.get("name", "")),
        metric=metric,
        drawn="" if shown == ("validation", metric) else " ".join(shown),
        metrics=tuple(metric_rows.names(connection, experiment.id)),
        smaller_is_better=smaller,
        trials=tuple(found),
        unit=unit,
        throughput_unit="samples/s" if any(batches.values()) else "steps/s",
        axes=axes,
        ladders=ladders,
        pruned=tuple(Counter(trial.reason or "unknown" for trial in trials if trial.pruned).most_common()),
        best=best,
        notes=notes,
        subtitle=" · ".join(part for part in (f"experiment {experiment.id}", started, experiment.description) if part),
        facts=_facts(experiment),
        created=format_time(time.time()),
    )


def from_master_trial(path: Path, trial_id: int) -> RunReport:
    """Return the current state of a trial. Raises ConfigError if it does not exist. Reads only."""
    with reading(path) as connection:
        trial = _trial(connection, trial_id)
        experiment = existing(experiment_rows.get(connection, trial.experiment_id), "its experiment")
        return _read_trial(connection, experiment, trial)


def _trial(connection: sqlite3.Connection, trial_id: int) -> Trial:
    found = trial_rows.get(connection, trial_id, derived=True, summary=False)
    if found is None:
        raise ConfigError("the trial does not exist", where="the master's store", got=trial_id)
    return found


def _read_trial(connection: sqlite3.Connection, experiment: Experiment, trial: Trial) -> RunReport:
    loss, progress = training_series(
        {**_curves(connection, trial, ENGINE_GROUP), **_curves(connection, trial, "training")}
    )
    validation = _curves(connection, trial, "validation")
    goal, smaller = _goal(experiment)
    ends = {name: one.ends() for name, one in sorted(validation.items(), key=lambda pair: pair[0] != goal)}
    speed = _pace(connection, trial)
    facts = (
        ("ran for", format_duration(trial.wall_clock) if trial.wall_clock else None),
        ("steps", trial.steps_completed),
        ("steps per second", format_count(speed) if speed else None),
        ("slots", (experiment.config.get("resources") or {}).get("slots_per_trial")),
        ("restarts", trial.restarts or None),
        ("seed", trial.seed),
    )
    body = resolved(experiment.config, trial.hparams, _context_files(connection, experiment, trial))
    ds_config = settings_of(body)
    swept = {axis.name for axis in swept_axes(experiment.config.get("hyperparameters") or {})}
    return RunReport(
        title=f"trial {trial.id}",
        status=_trial_status(trial),
        subtitle=f"{experiment.name} · started {format_time(trial.created)}",
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
        validation=tuple(one.series(name) for name, one in validation.items()),
        progress=progress,
        memory=_memory(connection, trial),
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
        config={"hyperparameters": trial.hparams},
        experiment=str(experiment.id),
    )


def _goal(experiment: Experiment) -> tuple[str, bool]:
    """Return the searcher's metric, and whether smaller values are better."""
    searcher = experiment.config.get("searcher") or {}
    return str(searcher.get("metric", "")), bool(searcher.get("smaller_is_better", True))


_READ_AT_ONCE = 1000  # reports


def _curves(connection: sqlite3.Connection, trial: Trial, group: str, only: str | None = None) -> dict[str, Curve]:
    """Return the metrics of a group by name, or just ``only``."""
    rows = connection.execute(
        "SELECT steps, metrics FROM metrics WHERE trial_id = ? AND grp = ? AND archived = 0 AND steps IS NOT NULL "
        "ORDER BY steps, id",
        (trial.id, group),
    )
    found: defaultdict[str, tuple[array[float], array[float]]] = defaultdict(lambda: (array("d"), array("d")))
    # Parsing a page at once halves the time; parsing everything at once would block other threads.
    while page := rows.fetchmany(_READ_AT_ONCE):
        reports = loads(f"[{','.join(text for _, text in page)}]")
        for (step, _), values in zip(page, reports, strict=True):
            for name in values if only is None else (only,):
                if is_finite(value := values.get(name)):
                    found[name][0].append(step)
                    found[name][1].append(value)
    return {name: Curve(*pair) for name, pair in found.items() if only is not None or name not in COUNTERS}


def _measured(connection: sqlite3.Connection, experiment: Experiment, unit: str) -> Iterator[Measured]:
    """Yield the validations of all trials in the order in which the search received them, each with
    the units that the trial had trained, and the metric or NaN."""
    metric, _ = _goal(experiment)
    rows = connection.execute(
        "SELECT t.request_id, m.metrics FROM trials t JOIN metrics m ON m.trial_id = t.id AND m.grp = 'validation' "
        "AND m.archived = 0 AND m.steps IS NOT NULL WHERE t.experiment_id = ? ORDER BY m.id",
        (experiment.id,),
    )
    for request_id, text in rows:
        values = loads(text)
        if is_finite(values.get(unit)) and metric in values:
            yield request_id, float(values[unit]), float(values[metric]) if is_finite(values[metric]) else math.nan


_PACE = "FROM metrics WHERE trial_id = ? AND grp = 'training' AND archived = 0 AND steps IS NOT NULL"


def _pace(connection: sqlite3.Connection, trial: Trial) -> float | None:
    """Return the steps per second between the training reports of the trial's newest run, including
    validations and saves; None with fewer than two reports."""
    last = connection.execute(
        f"SELECT steps, reported, run_id {_PACE} ORDER BY steps DESC, id DESC LIMIT 1", (trial.id,)
    ).fetchone()
    if last is None:
        return None
    first = connection.execute(
        f"SELECT steps, reported {_PACE} AND run_id = ? ORDER BY steps, id LIMIT 1", (trial.id, last["run_id"])
    ).fetchone()
    steps, seconds = last["steps"] - first["steps"], last["reported"] - first["reported"]
    return steps / seconds if steps > 0 and seconds > 0 else None


def _facts(experiment: Experiment) -> tuple[tuple[str, str], ...]:
    config = experiment.config
    searcher = config.get("searcher") or {}
    shown = (
        ("searcher", searcher.get("name")),
        ("mode", searcher.get("mode")),
        ("at most", f"{searcher['max_trials']} trials" if searcher.get("max_trials") else None),
        ("at a time", searcher.get("max_concurrent_trials")),
        ("slots per trial", (config.get("resources") or {}).get("slots_per_trial")),
        ("seed", (config.get("reproducibility") or {}).get("experiment_seed")),
        ("took", format_duration((experiment.ended or time.time()) - experiment.created)),
    )
    return tuple((name, str(value)) for name, value in shown if value is not None)


def _best(experiment: Experiment, winner: Trial, value: float, files: Mapping[str, bytes]) -> BestConfig:
    """Return the best trial's point as an experiment, with the sweep's ds_config written out."""
    ds_config = None
    name = ds_config_file(experiment.config, winner.hparams)
    if name is not None and "ds_config" in (experiment.config.get("data") or {}) and normpath(name) in files:
        with suppress(ConfigError):
            ds_config = parse_file(name, files[normpath(name)]).value
    config = best_experiment(_as_submitted(experiment), winner.hparams, winner.seed, ds_config)
    return BestConfig(str(winner.id), value, as_yaml(config, f"trial {winner.id} of experiment {experiment.id}"))


def _as_submitted(experiment: Experiment) -> Mapping[str, Any]:
    """Return the user's configuration, with the completed searcher."""
    config = experiment.config
    try:
        written = read_yaml(experiment.original_config, "the submitted experiment").value
    except ConfigError:
        return config
    # the data as trials received it: older masters read the names y and n as text
    data = {"data": config.get("data")} if "data" in written else {}
    return {**written, **data, "searcher": config.get("searcher") or {}}


def _context_files(connection: sqlite3.Connection, experiment: Experiment, trial: Trial) -> Mapping[str, bytes]:
    """Return the small files of the context directory if the base ds_config is one of them."""
    if ds_config_file(experiment.config, trial.hparams) is None:
        return {}
    return read_context(experiment_rows.context(connection, experiment.id) or b"").files


def _memory(connection: sqlite3.Connection, trial: Trial) -> Memory:
    facts = mapping(trial_rows.metadata(connection, trial.id).get("zero_trial"))
    return Memory(
        planned=whole(facts.get("memory_planned_bytes")), measured=whole(facts.get("memory_measured_peak_bytes"))
    )


def _trial_status(trial: Trial) -> Status:
    if trial.pruned:
        return Status("pruned", Tone.QUIET)
    if trial.reason == STOPPED_BY_SEARCH and trial.state in (TrialState.COMPLETED, TrialState.STOPPING_COMPLETED):
        return Status("stopped early", Tone.QUIET)
    if trial.state.stopping:
        return Status("ending", Tone.BUSY)
    return Status("failed", Tone.BAD) if trial.state is TrialState.ERROR else _experiment_status(trial)


def _experiment_status(found: Experiment | Trial) -> Status:
    """Return the displayed state of an experiment."""
    word = (found.shown_state or found.state.value).lower().replace("_", " ")
    return Status(word, _TONES.get(found.state, Tone.BUSY))


# Why a search stopped a trial: replays its brackets, validation by validation, with the search's
# own rules.
#
# A search stores rungs but not the state at each decision; its decisions follow from the order of
# validations.


Measured = tuple[str, float, float]
"""One validation that the search received: the trial, its length in units, and the reported
metric."""


def bracket_histories(
    config: Mapping[str, Any], snapshot: Mapping[str, Any], measured: Iterable[Measured], names: Mapping[str, str]
) -> tuple[BracketHistory, ...]:
    """Return the brackets of an adaptive_asha search with their decisions; () for another search or
    an invalid snapshot.

    ``names``: request id -> name on the page.
    """
    try:
        search = restore(config["searcher"], config.get("hyperparameters") or {}, snapshot)
    except (ZeroTrialError, KeyError, TypeError, ValueError):
        return ()
    if not isinstance(search, AdaptiveAsha):
        return ()
    events = list(measured)
    return tuple(
        _replayed(number, bracket, [event for event in events if event[0] in bracket.position], search.sign, names)
        for number, bracket in enumerate(search.brackets, 1)
    )


def _replayed(
    number: int, bracket: Bracket, events: Sequence[Measured], sign: float, names: Mapping[str, str]
) -> BracketHistory:
    fresh = Bracket(
        [Rung(rung.units) for rung in bracket.rungs], bracket.divisor, bracket.max_trials, bracket.max_concurrent
    )
    found: list[RungDecision] = []
    stopped: set[str] = set()
    for request_id, after, metric in events:
        if request_id in stopped:
            continue
        before = [len(rung.entries) for rung in fresh.rungs]
        fresh.position.setdefault(request_id, 0)
        stop = fresh.climb(request_id, int(after), WORST if math.isnan(metric) else sign * metric)
        passed = [index for index, rung in enumerate(fresh.rungs) if len(rung.entries) > before[index]]
        for index in passed:
            verdict, why = _verdict(fresh, index, request_id, ends=stop and index == passed[-1])
            name, units = names.get(request_id, request_id), fresh.rungs[index].units
            found.append(RungDecision(name, verdict, number, index, units, metric, why))
        if stop:
            stopped.add(request_id)
    return BracketHistory(number, tuple(rung.units for rung in bracket.rungs), tuple(found))


def _verdict(bracket: Bracket, index: int, request_id: str, *, ends: bool) -> tuple[RungOutcome, str]:
    """Return a rung's decision about a trial that it has just measured, and the reason."""
    entries = [entry for _, entry in bracket.rungs[index].entries]
    rank, count = ordinal(1 + entries.index(request_id)), len(entries)
    if index == len(bracket.rungs) - 1:
        return RungOutcome.FINISHED, f"{rank} of {count} that reached this rung."
    verdict = RungOutcome.STOPPED if ends else RungOutcome.WENT_ON
    if count == 1:
        return verdict, "The first one measured here continues."
    may = max(int(count / bracket.divisor), 1)
    return (
        verdict,
        f"{rank} of the {count} measured here so far; the best {may} may continue (1 in {bracket.divisor:g}).",
    )


def ordinal(number: int) -> str:
    """Return 1st, 2nd, 3rd, 4th, 11th."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


# The best point of a sweep as a runnable experiment: the sweep's configuration with a value for
# each range.


_KEPT_OF_SEARCHER = ("metric", "smaller_is_better")


# keys of the sweep, not of its best point
_DROPPED = ("project", "workspace", "checkpoint_policy", "labels")


def best_experiment(
    config: Mapping[str, Any], hparams: Mapping[str, Any], seed: int | None, ds_config: Any = None
) -> dict[str, Any]:
    """Return the sweep's configuration with the searcher ``single`` and constant hyperparameters.

    ``ds_config`` replaces the name of a file.

    Pure; does not change ``config``.
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
    """Return plain values as an experiment's hyperparameters. A mapping with a key ``type`` would
    be read as a range, so it becomes a const."""

    def written(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return copy.deepcopy(value)
        if "type" in value:
            return {"type": "const", "val": copy.deepcopy(dict(value))}
        return {key: written(inner) for key, inner in value.items()}

    return {key: written(value) for key, value in values.items()}


def _length(searcher: Mapping[str, Any]) -> Any:
    """Return the length of a full training from the searcher."""
    if searcher.get("max_time") is not None and searcher.get("time_metric"):
        return {str(searcher["time_metric"]): searcher["max_time"]}
    return copy.deepcopy(searcher.get("max_length"))
