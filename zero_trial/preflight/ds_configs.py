"""The points of a search space: all of a grid, or a seeded sample of a space that is too large or continuous."""

from __future__ import annotations

import copy
import itertools
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.reconcile import Reconciliation, reconcile
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError, InvalidHP, ZeroTrialError
from zero_trial.experiment.experiment import ExperimentConfig
from zero_trial.experiment.hyperparameters import is_range
from zero_trial.preflight.issues import Area, Issue, Severity, flat

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """One set of hyperparameters: ``values`` by dotted name are what was chosen, ``hyperparameters`` the whole with them in place."""

    number: int
    values: Mapping[str, Any]
    hyperparameters: Mapping[str, Any]

    def describe(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.values.items())


@dataclass(frozen=True)
class Space:
    """``points`` are those to look at; ``total`` is how many there are, None where nobody can count them."""

    points: tuple[Point, ...]
    total: int | None

    @property
    def complete(self) -> bool:
        return self.total == len(self.points)


def explore(hyperparameters: Mapping[str, Any], searcher: str, most: int, seed: int = 0) -> Space:
    """The points of a search by ``searcher``, ``most`` at most. Pure: the same seed gives the same points.

    A sample holds the ends of every range and, as far as ``most`` allows, every value of a categorical.
    """
    axes = dict(find_ranges(hyperparameters))
    if not axes:
        return Space((Point(1, {}, hyperparameters),), 1)
    rng = random.Random(seed)
    if searcher == "grid":
        grid = [grid_values(spec) for spec in axes.values()]
        total = math.prod(len(values) for values in grid)
        numbers = range(total) if total <= most else sorted(rng.sample(range(total), most))
        chosen = [_of_grid(grid, number) for number in numbers]
        return Space(_points(hyperparameters, list(axes), chosen), total)
    columns = [_sample(spec, most, rng) for spec in axes.values()]
    unlike = {repr(row): row for row in zip(*columns, strict=True)}
    whole = math.prod(len(spec["vals"]) if spec["type"] == "categorical" else math.inf for spec in axes.values())
    counted = len(unlike) if whole == len(unlike) else None
    return Space(_points(hyperparameters, list(axes), list(unlike.values())), counted)


def find_ranges(section: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """Path and spec of every range, in order."""
    for key, value in section.items():
        if is_range(value):
            yield (*above, key), value
        elif isinstance(value, Mapping):
            yield from find_ranges(value, (*above, key))


def grid_values(spec: Mapping[str, Any]) -> list[Any]:
    """The values of one axis of a grid, as Determined spaces them: ``count`` from minval to maxval, both included, evenly (for log: in the
    exponent); a count of 1 is the middle. Without a count: both ends.
    """
    if spec["type"] == "categorical":
        return list(spec["vals"])
    low, high, count = spec["minval"], spec["maxval"], int(spec.get("count") or 2)
    if spec["type"] == "int":
        count = min(count, int(high) - int(low) + 1)
    middle = [(low + high) / 2]
    even = middle if count == 1 else [low + (high - low) * number / (count - 1) for number in range(count)]
    return [_valued(spec, value) for value in even]


def _valued(spec: Mapping[str, Any], value: float) -> Any:
    if spec["type"] == "log":
        return float(spec.get("base", 10)) ** value
    return math.floor(value + 0.5) if spec["type"] == "int" else float(value)


def _sample(spec: Mapping[str, Any], count: int, rng: random.Random) -> list[Any]:
    """``count`` values of one axis: the ends first, then at random; a categorical goes round, so that no value is left out."""
    if spec["type"] == "categorical":
        values = list(spec["vals"])
        rng.shuffle(values)
        return [values[number % len(values)] if number < len(values) else rng.choice(values) for number in range(count)]
    low, high = spec["minval"], spec["maxval"]
    inner = [rng.randint(low, high) if spec["type"] == "int" else rng.uniform(low, high) for _ in range(count)]
    return [_valued(spec, value) for value in [low, high, *inner][:count]]


def _of_grid(grid: list[list[Any]], number: int) -> tuple[Any, ...]:
    """Row ``number`` of the cartesian product, the last axis running fastest; the product itself is never made."""
    found = []
    for values in reversed(grid):
        number, index = divmod(number, len(values))
        found.append(values[index])
    return tuple(reversed(found))


def _points(hyperparameters: Mapping[str, Any], paths: list[KeyPath], rows: list[tuple[Any, ...]]) -> tuple[Point, ...]:
    found = []
    for number, row in zip(itertools.count(1), rows, strict=False):
        whole = copy.deepcopy(dict(hyperparameters))
        for path, value in zip(paths, row, strict=True):
            section = whole
            for part in path[:-1]:
                section = section[part]
            section[path[-1]] = copy.deepcopy(value)
        names = {".".join(path): value for path, value in zip(paths, row, strict=True)}
        found.append(Point(number, names, whole))
    return tuple(found)


# The ds_config of every point of a search, read and reconciled with the ranks; the same fault at many points is one finding.


_NUMBERS = re.compile(r"[-+]?\d[\d.]*(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Resolved:
    """One point's ds_config and batch sizes, as they will be used."""

    point: Point
    config: DsConfig
    batch: Reconciliation


@dataclass(frozen=True)
class ConfigChecks:
    """``legal``: points that can be trained; ``pruned``: numbers of those that a search would leave out."""

    findings: tuple[Issue, ...]
    legal: tuple[Resolved, ...]
    pruned: tuple[int, ...]


def resolve(experiment: ExperimentConfig, model_dir: Path, slots: int, point: Point) -> Resolved:
    """Raises ConfigError with all faults of the point's ds_config, InvalidHP where a search would go on without the point."""
    search = experiment.searcher.searches
    values = point.hyperparameters
    source = experiment.ds_config(model_dir, values)
    config = read_ds_config(source, hints=experiment.hints, hyperparameters=values, search=search)
    return Resolved(point, config, reconcile(config, slots, values, search=search))


def check_ds_configs(experiment: ExperimentConfig, model_dir: Path, slots: int, space: Space) -> ConfigChecks:
    """All points of ``space``. Reads files; starts nothing."""
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
    return ConfigChecks(tuple(_findings(groups.values(), space, bool(legal))), tuple(legal), tuple(pruned))


@dataclass
class _Group:
    """The points at which the same thing is wrong; the first one's words stand for all."""

    error: ZeroTrialError
    severity: Severity
    points: list[Point] = field(default_factory=list)


def _add(groups: dict[str, _Group], error: ZeroTrialError, severity: Severity, point: Point) -> None:
    """Numbers differ from point to point and do not make another fault."""
    key = (
        f"{type(error).__name__} {error.where} {_NUMBERS.sub('#', error.what)} {error.expected if error.where else ''}"
    )
    group = groups.setdefault(key, _Group(error, severity))
    if point not in group.points[-1:]:
        group.points.append(point)


def _findings(groups: Iterable[_Group], space: Space, some_legal: bool) -> Iterable[Issue]:
    """An invalid combination is a warning as long as there are others that can be trained."""
    for group in groups:
        invalid = isinstance(group.error, InvalidHP)
        severity = Severity.WARNING if invalid and some_legal else group.severity
        numbers = tuple(point.number for point in group.points)
        yield Issue(Area.DS_CONFIG, severity, group.error, numbers, _where_it_holds(group, space, invalid))


def _where_it_holds(group: _Group, space: Space, invalid: bool) -> str:
    if len(space.points) == 1:
        return ""
    pruned = "would be pruned: " if invalid else ""
    if len(group.points) == len(space.points):
        return f"{pruned}at every point"
    return f"{pruned}at {len(group.points)} of {len(space.points)} points, first {group.points[0].describe()}"


def first_legal(experiment: ExperimentConfig, model_dir: Path, slots: int, most: int = 128) -> Resolved:
    """The first point of the search that can be trained; of constants, the only one. Raises ConfigError with the faults if there is none."""
    space = explore(experiment.hyperparameters, experiment.searcher.name, most, experiment.experiment_seed or 0)
    faults: list[ZeroTrialError] = []
    for point in space.points:
        try:
            return resolve(experiment, model_dir, slots, point)
        except ConfigError as error:
            faults = faults or flat([error])
    raise ConfigError.many([fault for fault in faults if isinstance(fault, ConfigError)])
