"""The points of a search: a random draw, the points of a grid by number, and those that a check
looks at.

The master, ``zero-trial check`` and ``zero-trial config`` ask the same functions.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.experiment.hyperparameters import is_range, ranges


def sample(space: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return ``space`` with every range replaced by a value.

    Names are visited in alphabetical order, whatever their order in the YAML. The top level is a
    map of names even if one of them is ``type``, as in Determined.
    """
    drawn = {name: _value(space[name], rng) for name in sorted(space)}
    return {name: drawn[name] for name in space}


def has_ranges(space: Mapping[str, Any]) -> bool:
    """Return whether two samples can differ."""
    return bool(ranges(space))


def _value(spec: Any, rng: random.Random) -> Any:
    if not isinstance(spec, Mapping):
        return copy.deepcopy(spec)
    if is_const(spec):
        return copy.deepcopy(spec.get("val"))
    if is_range(spec):
        return _draw(spec, rng)
    return sample(spec, rng)


def is_const(spec: Any) -> bool:
    """Return whether ``spec`` is written ``{type: const, val: ...}``."""
    return isinstance(spec, Mapping) and spec.get("type") == "const"


def _draw(spec: Mapping[str, Any], rng: random.Random) -> Any:
    match spec["type"]:
        case "categorical":
            return copy.deepcopy(rng.choice(spec["vals"]))
        case "int":
            return rng.randint(spec["minval"], spec["maxval"])  # both ends included
        case "double":
            return rng.uniform(spec["minval"], spec["maxval"])
        case "log":
            return float(spec["base"]) ** rng.uniform(spec["minval"], spec["maxval"])
        case other:
            raise ConfigError("no kind of hyperparameter", got=other, expected="int, double, log, categorical or const")


# The points of a grid, by number: the cartesian product of the axes, which is never made as a
# whole.


Path = tuple[str, ...]

MOST_POINTS = 1_000_000
"""A grid that is larger than this is a slip: it would not end, and its axes would fill the
memory."""


@dataclass(frozen=True)
class Grid:
    """Axes in alphabetical order of their paths; the last axis runs fastest."""

    space: Mapping[str, Any]
    axes: tuple[tuple[Path, tuple[Any, ...]], ...]

    @classmethod
    def of(cls, space: Mapping[str, Any]) -> Grid:
        """Return the grid of ``space``. Raises ConfigError for a range without a count, and for a
        grid of more than ``MOST_POINTS``."""
        found: list[tuple[Path, tuple[Any, ...]]] = []
        _collect(space, (), found)
        grid = cls(space, tuple(found))
        if grid.size > MOST_POINTS:
            raise ConfigError("the grid has too many points", got=grid.size, expected=f"at most {MOST_POINTS}")
        return grid

    @property
    def size(self) -> int:
        """Return how many points there are."""
        return math.prod(len(values) for _, values in self.axes)

    def values(self, number: int) -> dict[Path, Any]:
        """Return the value of every axis at point ``number``, 0 to size - 1."""
        chosen: dict[Path, Any] = {}
        for path, values in reversed(self.axes):
            number, index = divmod(number, len(values))
            chosen[path] = values[index]
        return {path: chosen[path] for path, _ in self.axes}

    def point(self, number: int) -> dict[str, Any]:
        """Return the hyperparameters of point ``number``, 0 to size - 1."""
        return _with(self.space, (), self.values(number))


def axis_values(spec: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return ``count`` values from minval to maxval, both included, evenly spaced (for log: in the
    exponent); a count of 1 is the middle.

    An int axis is rounded, halves away from zero, and has at most maxval - minval + 1 values.
    """
    if spec["type"] == "categorical":
        return tuple(spec["vals"])
    if not isinstance(spec.get("count"), int):
        raise ConfigError("grid search is in use but count was not provided", got=dict(spec), fix="Add count: 5.")
    low, high, count = spec["minval"], spec["maxval"], spec["count"]
    if spec["type"] == "int":
        count = min(count, high - low + 1)
    if count > MOST_POINTS:
        raise ConfigError("the grid has too many points", got=count, expected=f"at most {MOST_POINTS}")
    steps = max(count - 1, 1)
    even = [(low + high) / 2] if count == 1 else [low + (high - low) * number / steps for number in range(count)]
    return tuple(_written(spec, value) for value in even)


def _written(spec: Mapping[str, Any], value: float) -> Any:
    if spec["type"] == "log":
        return float(spec["base"]) ** value
    return int(math.copysign(math.floor(abs(value) + 0.5), value)) if spec["type"] == "int" else float(value)


def _collect(section: Mapping[str, Any], above: Path, found: list[tuple[Path, tuple[Any, ...]]]) -> None:
    for name in sorted(section):
        spec = section[name]
        if is_range(spec):
            found.append(((*above, name), axis_values(spec)))
        elif isinstance(spec, Mapping) and not is_const(spec):
            _collect(spec, (*above, name), found)


def _with(section: Mapping[str, Any], above: Path, chosen: Mapping[Path, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for name, spec in section.items():
        path = (*above, name)
        if path in chosen:
            whole[name] = copy.deepcopy(chosen[path])
        elif is_const(spec):
            whole[name] = copy.deepcopy(spec.get("val"))
        else:
            whole[name] = _with(spec, path, chosen) if isinstance(spec, Mapping) else copy.deepcopy(spec)
    return whole


# The points that a check looks at.


@dataclass(frozen=True)
class Point:
    """One set of hyperparameters: the chosen ``values`` by dotted name, and the whole with them in
    place.
    """

    number: int
    values: Mapping[str, Any]
    hyperparameters: Mapping[str, Any]

    def describe(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.values.items())


@dataclass(frozen=True)
class Space:
    """``points`` are those to look at; ``total`` is how many there are, None where they cannot be
    counted.
    """

    points: tuple[Point, ...]
    total: int | None

    @property
    def complete(self) -> bool:
        return self.total == len(self.points)


def explore(hyperparameters: Mapping[str, Any], searcher: str, most: int, seed: int = 0) -> Space:
    """Return the points of a search by ``searcher``, ``most`` at most.

    Pure: the same seed gives the same points.

    A grid's points are those that the master starts, in its order. A sample of another search holds
    the ends of every range and, as far as ``most`` allows, every value of a categorical. Raises
    ConfigError as ``Grid.of`` does.
    """
    axes = dict(find_ranges(hyperparameters))
    if not axes:
        return Space((Point(1, {}, hyperparameters),), 1)
    rng = random.Random(seed)
    if searcher == "grid":
        grid = Grid.of(hyperparameters)
        numbers = range(grid.size) if grid.size <= most else sorted(rng.sample(range(grid.size), most))
        return Space(_points(hyperparameters, [grid.values(number) for number in numbers]), grid.size)
    columns = [_sampled(spec, most, rng) for spec in axes.values()]
    unlike = {repr(row): dict(zip(axes, row, strict=True)) for row in zip(*columns, strict=True)}
    whole = math.prod(len(spec["vals"]) if spec["type"] == "categorical" else math.inf for spec in axes.values())
    return Space(_points(hyperparameters, list(unlike.values())), len(unlike) if whole == len(unlike) else None)


def find_ranges(section: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield path and spec of every range, in the order of the YAML."""
    for key, value in section.items():
        if is_range(value):
            yield (*above, key), value
        elif isinstance(value, Mapping):
            yield from find_ranges(value, (*above, key))


def _sampled(spec: Mapping[str, Any], count: int, rng: random.Random) -> list[Any]:
    """Return ``count`` values of one axis: the ends first, then at random; a categorical goes
    round.
    """
    if spec["type"] == "categorical":
        values = list(spec["vals"])
        rng.shuffle(values)
        return [values[number % len(values)] if number < len(values) else rng.choice(values) for number in range(count)]
    low, high = spec["minval"], spec["maxval"]
    inner = [rng.randint(low, high) if spec["type"] == "int" else rng.uniform(low, high) for _ in range(count)]
    return [_written(spec, value) for value in [low, high, *inner][:count]]


def _points(hyperparameters: Mapping[str, Any], rows: list[dict[Path, Any]]) -> tuple[Point, ...]:
    names = [{".".join(path): value for path, value in row.items()} for row in rows]
    wholes = [_with(hyperparameters, (), row) for row in rows]
    return tuple(Point(number, *pair) for number, pair in enumerate(zip(names, wholes, strict=True), 1))
