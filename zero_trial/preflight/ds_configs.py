"""Resolve the ds_config of every point of a search; the same fault at many points is reported
once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from zero_trial.ds_config.batch import Reconciliation, reconcile
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError, InvalidHP, ZeroTrialError
from zero_trial.experiment.experiment import ExperimentConfig
from zero_trial.experiment.space import Point, Space, explore
from zero_trial.preflight.issues import Area, CheckIssue, Severity, flat

_NUMBERS = re.compile(r"[-+]?\d[\d.]*(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Resolved:
    """One point's ds_config and batch sizes, as they will be used."""

    point: Point
    config: DsConfig
    batch: Reconciliation


@dataclass(frozen=True)
class ConfigChecks:
    """``legal``: points that can be trained; ``pruned``: numbers of those that a search would leave
    out.
    """

    issues: tuple[CheckIssue, ...]
    legal: tuple[Resolved, ...]
    pruned: tuple[int, ...]


def resolve(experiment: ExperimentConfig, model_dir: Path, slots: int, point: Point) -> Resolved:
    """Resolve one point. Raises ConfigError with all faults of its ds_config, InvalidHP where a
    search would go on without the point.
    """
    search = experiment.searcher.searches
    values = point.hyperparameters
    source = experiment.ds_config(model_dir, values)
    config = read_ds_config(source, hints=experiment.hints, hyperparameters=values, search=search)
    return Resolved(point, config, reconcile(config, slots, values, search=search))


def check_ds_configs(experiment: ExperimentConfig, model_dir: Path, slots: int, space: Space) -> ConfigChecks:
    """Check the ds_config of every point of ``space``. Reads files; starts nothing."""
    groups: dict[str, _Group] = {}
    legal: list[Resolved] = []
    pruned: list[int] = []
    for point in space.points:
        try:
            resolved = resolve(experiment, model_dir, slots, point)
        except ConfigError as error:
            faults = flat([error])
            if all(isinstance(fault, InvalidHP) for fault in faults):
                pruned.append(point.number)
            for fault in faults:
                _add(groups, fault, Severity.FAULT, point)
        else:
            legal.append(resolved)
            for warning in resolved.config.warnings:
                _add(groups, ConfigError(warning), Severity.WARNING, point)
    return ConfigChecks(tuple(_issues(groups.values(), space, bool(legal))), tuple(legal), tuple(pruned))


@dataclass
class _Group:
    """The points at which the same thing is wrong; the first one's words stand for all."""

    error: ZeroTrialError
    severity: Severity
    points: list[Point] = field(default_factory=list)


def _add(groups: dict[str, _Group], error: ZeroTrialError, severity: Severity, point: Point) -> None:
    """Add the point to the group of the same error; numbers, which differ from point to point, do
    not count."""
    key = (
        f"{type(error).__name__} {error.where} {_NUMBERS.sub('#', error.what)} {error.expected if error.where else ''}"
    )
    group = groups.setdefault(key, _Group(error, severity))
    if point not in group.points[-1:]:
        group.points.append(point)


def _issues(groups: Iterable[_Group], space: Space, some_legal: bool) -> Iterable[CheckIssue]:
    """Yield an issue per group; an invalid combination is a warning as long as others can be
    trained."""
    for group in groups:
        invalid = isinstance(group.error, InvalidHP)
        severity = Severity.WARNING if invalid and some_legal else group.severity
        numbers = tuple(point.number for point in group.points)
        yield CheckIssue(Area.DS_CONFIG, severity, group.error, numbers, _where_it_holds(group, space, invalid))


def _where_it_holds(group: _Group, space: Space, invalid: bool) -> str:
    if len(space.points) == 1:
        return ""
    pruned = "would be pruned: " if invalid else ""
    if len(group.points) == len(space.points):
        return f"{pruned}at every point"
    return f"{pruned}at {len(group.points)} of {len(space.points)} points, first {group.points[0].describe()}"


def first_legal(experiment: ExperimentConfig, model_dir: Path, slots: int, most: int = 128) -> Resolved:
    """Return the first point of the search that can be trained; of constants, the only one.

    Raises ConfigError with the faults if there is none.
    """
    space = explore(experiment.hyperparameters, experiment.searcher.name, most, experiment.experiment_seed or 0)
    faults: list[ZeroTrialError] = []
    for point in space.points:
        try:
            return resolve(experiment, model_dir, slots, point)
        except ConfigError as error:
            faults = faults or flat([error])
    raise ConfigError.many([fault for fault in faults if isinstance(fault, ConfigError)])
