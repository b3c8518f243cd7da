"""Check an experiment: report all known errors before any rank is started."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_trial.ds_config.batch import Reconciliation, reconcile
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError, InvalidHP, ZeroTrialError
from zero_trial.experiment.entrypoint import (
    Entrypoint,
    check_entrypoint,
    parse_entrypoint,
)
from zero_trial.experiment.experiment import ExperimentConfig, KeyPath, examine_experiment
from zero_trial.experiment.space import Point, Space, explore, find_ranges
from zero_trial.launch.hosts import count_devices
from zero_trial.launch.run_experiment import model_folder
from zero_trial.planning.issues import (
    Area,
    CheckIssue,
    Severity,
    check_machine,
    check_nvme,
    flat,
    issues_of,
    note,
)
from zero_trial.schema.document import Provenance

MOST_POINTS = 128
_NUMBERS = re.compile(r"[-+]?\d[\d.]*(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class CheckRequest:
    """What to check.

    Args:
        path: the experiment's file.
        changes: values that override those of the file.
        points: maximum number of points of a search to check.
        build: whether the model definition is imported and built.
        dry_run: whether one batch is evaluated.
    """

    experiment_path: Path
    model_dir: Path | None = None
    changes: Mapping[KeyPath, Any] = field(default_factory=dict)
    slots: int | None = None
    points: int = MOST_POINTS
    build: bool = True
    dry_run: bool = False


@dataclass
class CheckReport:
    """All issues, and in ``looked`` a short text on each area, in the order of the check."""

    issues: list[CheckIssue] = field(default_factory=list)
    looked: dict[Area, str] = field(default_factory=dict)
    experiment: ExperimentConfig | None = None
    space: Space | None = None
    configs: ConfigChecks | None = None
    seconds: float = 0.0

    @property
    def faults(self) -> list[CheckIssue]:
        return _faults(self.issues)

    @property
    def exit_code(self) -> int:
        """Return 2 if the configuration is wrong, 1 if only the trial's code is, else 0."""
        return max((issue.error.exit_code for issue in self.faults), default=0)


def check_experiment(request: CheckRequest, env: Mapping[str, str]) -> CheckReport:
    """Read and resolve the experiment, and build its trial in a dry run.

    Starts no ranks and writes no files itself.

    Faults of the experiment are not raised: the report contains all issues.
    """
    started = time.perf_counter()
    report = CheckReport()
    _ExperimentCheck(request, report).run(env)
    report.seconds = time.perf_counter() - started
    return report


class _ExperimentCheck:
    """One check of an experiment; stores its findings in ``report``."""

    def __init__(self, request: CheckRequest, report: CheckReport) -> None:
        self.request = request
        self.report = report
        self.issues = report.issues
        self.looked = report.looked

    def run(self, env: Mapping[str, str]) -> None:
        """Check every area that can be read."""
        try:
            examined = examine_experiment(self.request.experiment_path, changes=self.request.changes)
        except ConfigError as error:
            self.issues += issues_of(Area.EXPERIMENT, error)
            return
        experiment = self.report.experiment = examined.config
        self.looked[Area.EXPERIMENT] = self.request.experiment_path.name
        self.issues += [issue for fault in examined.faults for issue in issues_of(Area.EXPERIMENT, fault)]
        self.issues += [note(Area.EXPERIMENT, Severity.WARNING, text) for text in experiment.warnings]
        self.issues += check_searcher(experiment)
        self.issues += [note(Area.EXPERIMENT, Severity.WARNING, text) for text in examined.cluster_warnings]
        self.issues += [
            note(Area.EXPERIMENT, Severity.FAULT, f"a master rejects this: {fault.what}", where=fault.where)
            for fault in examined.cluster_faults
        ]
        model_dir = self._model_dir(experiment)
        entrypoint = self._entrypoint(experiment, model_dir) if model_dir is not None else None
        slots = self.request.slots if self.request.slots is not None else experiment.slots_per_trial
        first = self._configs(experiment, model_dir or Path(), slots)
        document = experiment.document
        where = "--slots" if self.request.slots else document.where("resources.slots_per_trial")
        devices = count_devices(env)
        self.looked[Area.SLOTS] = (
            f"{slots} slots on {devices.gpus or devices.cores} {'GPUs' if devices.gpus else 'cores'}"
        )
        self.issues += check_machine(slots, where, devices, first.config if first is not None else None)
        if model_dir is None:
            return
        if first is not None:
            self.issues += check_nvme(first.config, base=model_dir)
        if self.request.build and entrypoint is not None and slots > 0:
            space, point = self.report.space, first.point if first is not None else None
            if point is None and space is not None and not experiment.names_ds_config():
                point = space.points[0]  # the trial provides its own ds_config
            if point is not None:
                self._dry_run(experiment, entrypoint, point, model_dir, slots)

    def _model_dir(self, experiment: ExperimentConfig) -> Path | None:
        try:
            return model_folder(experiment, self.request.model_dir)
        except ConfigError as error:
            self.issues += issues_of(Area.ENTRYPOINT, error)
            return None

    def _entrypoint(self, experiment: ExperimentConfig, model_dir: Path) -> Entrypoint | None:
        """Find the trial's class by reading the source; None if it does not exist."""
        where = experiment.document.where("entrypoint")
        if not experiment.entrypoint:
            return None  # reported already
        try:
            entrypoint = parse_entrypoint(experiment.entrypoint, where)
            check_entrypoint(entrypoint, model_dir, where)
        except ConfigError as error:
            self.issues += issues_of(Area.ENTRYPOINT, error)
            return None
        self.looked[Area.ENTRYPOINT] = str(entrypoint)
        return entrypoint

    def _configs(self, experiment: ExperimentConfig, model_dir: Path, slots: int) -> Resolved | None:
        """Resolve the ds_config of every point and return the first that can be trained."""
        for issue in _faults(self.issues):  # an invalid range cannot be sampled
            ranges = issue.area is Area.EXPERIMENT and "hyperparameters" in (issue.error.where or "")
            if ranges and 'nested key "type"' not in issue.error.what:
                return None
        searcher, seed = experiment.searcher.name, experiment.experiment_seed or 0
        space = self.report.space = explore(experiment.hyperparameters, searcher, max(self.request.points, 1), seed)
        if not experiment.names_ds_config():
            self.looked[Area.DS_CONFIG] = "the trial passes its own ds_config"
            return None
        checks = self.report.configs = check_ds_configs(experiment, model_dir, max(slots, 1), space)
        self.issues += checks.issues
        if len(space.points) > 1:
            total = space.total if space.total is not None else "an infinite space"
            some = "" if space.complete else f" of {total}"
            self.looked[Area.SPACE] = (
                f"{len(space.points)} points{some}: {len(checks.legal)} legal, {len(checks.pruned)} would be pruned"
            )
        sources = checks.legal[0].config.sources.values() if checks.legal else ()
        autos = sum(source.provenance in (Provenance.AUTO, Provenance.OPEN) for source in sources)
        self.looked[Area.DS_CONFIG] = f"ds_config ({autos} 'auto' filled)" if autos else "ds_config"
        return checks.legal[0] if checks.legal else None

    def _dry_run(
        self, experiment: ExperimentConfig, entrypoint: Entrypoint, point: Point, model_dir: Path, slots: int
    ) -> None:
        """Build the trial, train one step, and evaluate one batch."""
        # imports torch, and runs the user's code
        from zero_trial.planning.lone_task import DryRunRequest, too_large
        from zero_trial.planning.trial_dry_run import dry_run_trial

        seed = experiment.experiment_seed or 0
        scene = DryRunRequest(
            experiment, entrypoint, point.hyperparameters, model_dir, slots, seed, self.request.dry_run
        )
        found = dry_run_trial(scene)
        self.issues += found.issues
        large = too_large(scene, found.parameters) if found.parameters and not _faults(found.issues) else None
        if large is not None:
            self.issues.append(CheckIssue(Area.SLOTS, Severity.FAULT, large))
        if found.parameters:
            self.looked[Area.TRIAL] = f"{found.parameters:,} parameters".replace(",", " ")
        if found.epoch_steps is not None:
            more = f", {found.validation_batches} validation batches" if found.validation_batches else ""
            self.looked[Area.LOADERS] = f"{found.epoch_steps} steps per epoch{more}"
        if found.metrics is not None:
            self.looked[Area.METRIC] = f"reports {', '.join(found.metrics)}"


def _faults(issues: list[CheckIssue]) -> list[CheckIssue]:
    return [issue for issue in issues if issue.severity is Severity.FAULT]


def check_searcher(experiment: ExperimentConfig) -> list[CheckIssue]:
    """Check that the searcher has a length and something to search. Pure."""
    searcher, document, found = experiment.searcher, experiment.document, []
    if searcher.max_length is None and searcher.rest.get("max_time") is None:
        where = document.where("searcher.max_length")
        fix = "Write searcher: {max_length: {batches: 200}}."
        found.append(note(Area.EXPERIMENT, Severity.FAULT, "the run has no length", where=where, fix=fix))
    name, axes = searcher.name, list(find_ranges(experiment.hyperparameters))
    what, fix = "", "Use searcher: {name: single}."
    if name != "single" and not axes:
        what = f"there is nothing to search: all hyperparameters are constants, so {name} would repeat the same point"
    elif name == "single" and axes:
        listed = ", ".join(".".join(path) for path, _ in axes)
        what = f"single draws one point, but zero-trial run only accepts constants: {listed}"
        fix = "Use constants, or another searcher."
    if what:
        found.append(note(Area.SPACE, Severity.WARNING, what, where=document.where("searcher.name"), fix=fix))
    return found


# --- the ds_config of each point of a search; the same fault at many points is reported once ---


@dataclass(frozen=True)
class Resolved:
    """One point's ds_config and batch sizes, as they will be used."""

    point: Point
    config: DsConfig
    batch: Reconciliation


@dataclass(frozen=True)
class ConfigChecks:
    """``legal``: points that can be trained; ``pruned``: numbers of points that a search skips."""

    issues: tuple[CheckIssue, ...]
    legal: tuple[Resolved, ...]
    pruned: tuple[int, ...]


def resolve(experiment: ExperimentConfig, model_dir: Path, slots: int, point: Point) -> Resolved:
    """Resolve one point. Raises ConfigError with all faults of its ds_config, InvalidHP if a search
    would continue without the point."""
    search = experiment.searcher.searches
    values = point.hyperparameters
    source = experiment.ds_config(model_dir, values)
    config = read_ds_config(source, hints=experiment.hints, hyperparameters=values, search=search)
    return Resolved(point, config, reconcile(config, slots, values, search=search))


def check_ds_configs(experiment: ExperimentConfig, model_dir: Path, slots: int, space: Space) -> ConfigChecks:
    """Check the ds_config of every point of ``space``. Reads files; starts nothing.

    Errors that differ only in numbers count as the same. An invalid combination is a warning if
    other combinations can be trained.
    """
    found: dict[str, tuple[ZeroTrialError, Severity, list[Point]]] = {}
    legal: list[Resolved] = []
    pruned: list[int] = []

    def add(error: ZeroTrialError, severity: Severity, point: Point) -> None:
        expected = error.expected if error.where else ""
        key = f"{type(error).__name__} {error.where} {_NUMBERS.sub('#', error.what)} {expected}"
        points = found.setdefault(key, (error, severity, []))[2]
        if point not in points[-1:]:
            points.append(point)

    for point in space.points:
        try:
            resolved = resolve(experiment, model_dir, slots, point)
        except ConfigError as error:
            faults = flat([error])
            if all(isinstance(fault, InvalidHP) for fault in faults):
                pruned.append(point.number)
            for each in faults:
                add(each, Severity.FAULT, point)
        else:
            legal.append(resolved)
            for warning in resolved.config.warnings:
                add(ConfigError(warning), Severity.WARNING, point)
    issues = []
    for fault, severity, points in found.values():
        invalid = isinstance(fault, InvalidHP)
        severity = Severity.WARNING if invalid and legal else severity
        at = _where_it_holds(points, space, invalid)
        issues.append(CheckIssue(Area.DS_CONFIG, severity, fault, tuple(point.number for point in points), at))
    return ConfigChecks(tuple(issues), tuple(legal), tuple(pruned))


def _where_it_holds(points: list[Point], space: Space, invalid: bool) -> str:
    if len(space.points) == 1:
        return ""
    pruned = "would be pruned: " if invalid else ""
    if len(points) == len(space.points):
        return f"{pruned}at every point"
    return f"{pruned}at {len(points)} of {len(space.points)} points, first {points[0].describe()}"


def first_legal(experiment: ExperimentConfig, model_dir: Path, slots: int) -> Resolved:
    """Return the first point of the search that can be trained; without ranges, the only point.

    Raises ConfigError with the faults if there is none.
    """
    space = explore(experiment.hyperparameters, experiment.searcher.name, MOST_POINTS, experiment.experiment_seed or 0)
    faults: list[ZeroTrialError] = []
    for point in space.points:
        try:
            return resolve(experiment, model_dir, slots, point)
        except ConfigError as error:
            faults = faults or flat([error])
    raise ConfigError.many([fault for fault in faults if isinstance(fault, ConfigError)])


# --- the report ---


def render_check(report: CheckReport) -> list[str]:
    """Return a line about the checked areas, then one block per issue, faults first."""
    bad = {issue.area for issue in report.faults}
    answer = dict.fromkeys((Area.EXPERIMENT, Area.ENTRYPOINT, Area.DS_CONFIG), " ok") | dict.fromkeys(bad, " wrong")
    done = [f"{says}{answer.get(area, '')}" for area, says in report.looked.items() if area is not Area.SPACE]
    lines = [f"check   {' · '.join(done) or 'nothing could be read'}  {report.seconds:.1f} s"]
    if Area.SPACE in report.looked:
        lines.append(f"search  {report.looked[Area.SPACE]}")
    for severity in Severity:
        for issue in report.issues:
            if issue.severity is severity:
                first, *rest = issue.text.splitlines()
                lines += [f"{severity.value:<8}{first}", *(f"        {line}" for line in rest)]
    return lines


def check_as_json(report: CheckReport) -> dict[str, Any]:
    """Return the report as JSON data: issues, ``looked`` by area, and points of a search."""
    found: dict[str, Any] = {
        "ok": not report.faults,
        "exit_code": report.exit_code,
        "seconds": round(report.seconds, 3),
        "looked": {area.value: says for area, says in report.looked.items()},
        "issues": [issue.as_json() for issue in report.issues],
    }
    if report.space is not None:
        checks = report.configs
        found["points"] = {
            "total": report.space.total,
            "looked_at": [{"number": point.number, "values": dict(point.values)} for point in report.space.points],
            "legal": [resolved.point.number for resolved in checks.legal] if checks is not None else None,
            "pruned": list(checks.pruned) if checks is not None else None,
        }
    return found
