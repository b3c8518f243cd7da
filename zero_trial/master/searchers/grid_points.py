"""The points of a grid, by number: the cartesian product of the axes, which is never made as a whole."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_trial.config.hyperparameters import is_range
from zero_trial.errors import ConfigError
from zero_trial.master.searchers.sampling import is_const

Path = tuple[str, ...]

MOST_POINTS = 1_000_000
"""A grid that is larger than this is a slip: it would not end, and its axes would fill the memory."""


@dataclass(frozen=True)
class Grid:
    """Axes in alphabetical order of their paths; the last axis runs fastest."""

    space: Mapping[str, Any]
    axes: tuple[tuple[Path, tuple[Any, ...]], ...]

    @classmethod
    def of(cls, space: Mapping[str, Any]) -> Grid:
        """Raises ConfigError for a range without a count, and for a grid of more than ``MOST_POINTS``."""
        found: list[tuple[Path, tuple[Any, ...]]] = []
        _collect(space, (), found)
        grid = cls(space, tuple(found))
        if grid.size > MOST_POINTS:
            raise ConfigError("the grid has too many points", got=grid.size, expected=f"at most {MOST_POINTS}")
        return grid

    @property
    def size(self) -> int:
        """How many points there are."""
        return math.prod(len(values) for _, values in self.axes)

    def point(self, number: int) -> dict[str, Any]:
        """The hyperparameters of point ``number``, 0 to size - 1."""
        chosen: dict[Path, Any] = {}
        for path, values in reversed(self.axes):
            number, index = divmod(number, len(values))
            chosen[path] = values[index]
        return _with(self.space, (), chosen)


def axis_values(spec: Mapping[str, Any]) -> tuple[Any, ...]:
    """``count`` values from minval to maxval, both included, evenly spaced (for log: in the exponent); a count of 1 is the middle.

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
