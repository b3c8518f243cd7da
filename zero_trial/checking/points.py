"""The points of a search space: all of a grid, or a seeded sample of a space that is too large or continuous."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zero_trial.config.hyperparameters import is_range

Path = tuple[str, ...]


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


def find_ranges(section: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Mapping[str, Any]]]:
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


def _points(hyperparameters: Mapping[str, Any], paths: list[Path], rows: list[tuple[Any, ...]]) -> tuple[Point, ...]:
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
