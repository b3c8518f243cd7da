"""``hyperparameters``: names with values, search ranges, or nested maps; and the points of a
search: a random draw, the points of a grid by number, and the points for a check.

A nested key "type" is the kind of a range.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from zero_trial.errors import ConfigError
from zero_trial.schema.document import Document, Location, shown
from zero_trial.schema.types import (
    CLUSTER,
    MISSING,
    RULE,
    TYPE,
    Field,
    Fields,
    Issue,
    Opaque,
    Path,
    Type,
    dotted,
    exact_float,
    exact_int,
    exact_text,
    not_a_map,
)

_SEARCHED = ("int", "double", "log", "categorical")
Names = tuple[str, ...]


def read_hyperparameters(document: Document) -> Document:
    """Return ``document`` with every const replaced by its value; ranges are unchanged."""
    places: dict[Names, Location] = {}

    def walk(value: Any, raw: Names, path: Names) -> Any:
        if path:
            places[path] = document.at(raw)
        if not isinstance(value, Mapping):
            return copy.deepcopy(value)
        if path and is_const(value) and "val" in value:
            places.update({(*path, *rest): place for rest, place in document.inside((*raw, "val"))})
            return copy.deepcopy(value["val"])
        if path and "type" in value:
            return copy.deepcopy(dict(value))
        return {str(key): walk(inner, (*raw, str(key)), (*path, str(key))) for key, inner in value.items()}

    return Document(walk(document.value, (), ()), places, document.place)


def located(issue: Issue, document: Document) -> ConfigError:
    """Return the issue as an error with the file and line of its key in ``document``."""
    place = document.at(tuple(str(step) for step in issue.path if not isinstance(step, int)))
    where = place.where(dotted(issue.path).removeprefix(".")) if issue.path else place.spot()
    return ConfigError(issue.text, where=where or None)


def is_const(spec: Any) -> bool:
    """Return whether ``spec`` is written ``{type: const, val: ...}``."""
    return isinstance(spec, Mapping) and spec.get("type") == "const"


def find_ranges(section: Mapping[str, Any], above: Names = ()) -> Iterator[tuple[Names, Mapping[str, Any]]]:
    """Yield the path and spec of every range, in the order of the YAML."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value.get("type") in _SEARCHED:
            yield (*above, key), value
        elif isinstance(value, Mapping) and not is_const(value):
            yield from find_ranges(value, (*above, key))


# The exact message of Determined's master, missing quote included, so that a search finds it.
NESTED_TYPE = (
    'if a hyperparameter object\'s ["type"] is set, it must be one of "int", "double", "log", const", or "categorical"'
)

NO_COUNT = "grid search is in use but count was not provided"


class _Values(Type):
    """A list of at least one value."""

    def check(self, value: Any, path: Path) -> list[Issue]:
        good = isinstance(value, list) and value
        return [] if good else [Issue(path, TYPE, f"{shown(value)} is not a list of values")]


def _ascending(section: Mapping[str, Any]) -> str | None:
    return None if section["minval"] < section["maxval"] else "minval must be less than maxval"


def _finite(section: Mapping[str, Any]) -> str | None:
    """Return an error message if the range has values that are not finite numbers."""
    try:
        ends = [float(section.get("base", 1)) ** float(section[name]) for name in ("minval", "maxval")]
    except (OverflowError, ZeroDivisionError):
        return "base to the power of minval or maxval is not a finite number"
    width = float(section["maxval"]) - float(section["minval"])
    return None if all(math.isfinite(value) for value in (*ends, width)) else "the range is not finite"


def _range(kind: str, bound: Type, **more: Field) -> Fields:
    keys = {
        "type": Field(exact_text((kind,)), required=True),
        "minval": Field(bound, required=True),
        "maxval": Field(bound, required=True),
        "count": Field(exact_int(1), shown=False),
        **more,
    }
    return Fields(keys, (_ascending, _finite))


_RANGES: Mapping[str, Fields] = {
    "int": _range("int", exact_int()),
    "double": _range("double", exact_float()),
    "log": _range("log", exact_float(), base=Field(exact_float(above=0), required=True)),
    "categorical": Fields(
        {"type": Field(exact_text(("categorical",)), required=True), "vals": Field(_Values(), required=True)},
    ),
    "const": Fields({"type": Field(exact_text(("const",)), required=True), "val": Field(Opaque())}),
}

COUNTED = ("int", "double", "log")


class Hyperparameters(Type):
    """The whole section. Completion turns every plain value into ``{type: const, val: ...}``."""

    def check(self, value: Any, path: Path) -> list[Issue]:
        if not isinstance(value, Mapping):
            return not_a_map(value, path)
        return [fault for name, inner in value.items() for fault in _check(inner, (*path, name), (str(name),))]

    def fill(self, value: Any) -> Any:
        return {name: _fill(inner) for name, inner in value.items()}


def _fill(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return {"type": "const", "val": copy.deepcopy(value)}
    if "type" in value:
        return _RANGES[value["type"]].fill(value)
    return {name: _fill(inner) for name, inner in value.items()}


def _check(value: Any, path: Path, names: tuple[str, ...]) -> Iterator[Issue]:
    if not isinstance(value, Mapping):  # a list counts as one value
        return
    if "type" not in value:
        for name, inner in value.items():
            yield from _check(inner, (*path, name), (*names, str(name)))
        return
    kind = value["type"]
    if not isinstance(kind, str) or kind not in _RANGES:
        text = f'a nested key "type" selects a kind of hyperparameter here ({NESTED_TYPE}). '
        yield Issue(path, RULE, f"{text}Write {_accepted_form(value, names)}")
    elif kind == "const" and "val" not in value:
        yield Issue((*path, "val"), MISSING, "is a required property")
    else:
        yield from _RANGES[kind].check(value, path)


def _accepted_form(value: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return the accepted way to write a map with its own key "type"."""
    inside = ", ".join(
        f"{key}: {shown(inner)}" for key, inner in sorted(value.items(), key=lambda item: item[0] != "type")
    )
    const = f"{names[-1]}: {{type: const, val: {{{inside}}}}}"
    if names in (("ds_config", "optimizer"), ("ds_config", "scheduler")) and isinstance(value["type"], str):
        const = f"{names[-1]}: {{type_: {value['type']}, ...}} for ds_config's type, or {const}"
    return const


def check_counts(value: Any, path: Path) -> list[Issue]:
    """Return an issue for each grid range without a count of values, also inside maps and lists."""
    if isinstance(value, list):
        return [fault for index, inner in enumerate(value) for fault in check_counts(inner, (*path, index))]
    if not isinstance(value, Mapping):
        return []
    kind = value.get("type")
    if isinstance(kind, str):
        return [Issue(path, CLUSTER, NO_COUNT)] if kind in COUNTED and value.get("count") is None else []
    return [fault for name, inner in value.items() for fault in check_counts(inner, (*path, name))]


# The points of a search.


class RandomNumbers(Protocol):
    """Random numbers for `sample`."""

    def below(self, count: int) -> int:
        """Return an integer in [0, count)."""

    def unit(self) -> float:
        """Return a number in [0, 1)."""


def sample(space: Mapping[str, Any], numbers: RandomNumbers) -> dict[str, Any]:
    """Return ``space`` with every range replaced by a value.

    Visits names in byte order, regardless of their order in the YAML. The top level is a map of
    names even if one of them is ``type``, as in Determined.
    """
    found = sorted(find_ranges(space), key=lambda pair: pair[0])
    return _with(space, (), {path: _draw(spec, numbers) for path, spec in found})


def _draw(spec: Mapping[str, Any], numbers: RandomNumbers) -> Any:
    match spec["type"]:
        case "categorical":
            return copy.deepcopy(spec["vals"][numbers.below(len(spec["vals"]))])
        case "int":
            return spec["minval"] + numbers.below(spec["maxval"] - spec["minval"] + 1)
        case "double":
            return as_sent(_uniform(spec, numbers))
        case _:  # log
            return as_sent(power(float(spec["base"]), _uniform(spec, numbers)))


def as_sent(value: Any) -> Any:
    """Return ``value`` as Go's JSON sends it to a trial: 1.0 becomes 1."""
    if isinstance(value, dict):
        return {key: as_sent(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [as_sent(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e21 else value


def _uniform(spec: Mapping[str, Any], numbers: RandomNumbers) -> float:
    low, high = float(spec["minval"]), float(spec["maxval"])
    return low + (high - low) * numbers.unit()


def power(base: float, exponent: float) -> float:
    """Return ``base`` (positive) to the power of ``exponent``, bit-identical to a Determined master
    on an x86-64 processor.

    Go's math library multiplies squares of the base for the integer part of the exponent, and
    applies ``exp(rest * log(base))`` for the rest, with |rest| at most 1/2. The result differs from
    the correctly rounded one by up to two units in the last place.
    """
    if abs(exponent) == 0.5:
        return math.sqrt(base) if exponent > 0 else 1.0 / math.sqrt(base)
    rest, whole = math.modf(abs(exponent))
    if rest > 0.5:
        rest, whole = rest - 1.0, whole + 1.0
    result = _exp(rest * math.log(base)) if rest else 1.0
    factor, bits = math.frexp(base)  # base = factor 2^bits, and so for its squares
    shift, left = 0, int(whole)
    while left:
        if left & 1:
            result, shift = result * factor, shift + bits
        factor, bits = factor * factor, 2 * bits
        if factor < 0.5:
            factor, bits = 2.0 * factor, bits - 1
        left >>= 1
    return math.ldexp(result, shift) if exponent >= 0 else math.ldexp(1.0 / result, -shift)


_LN2 = (0.69314718055966295651160180568695068359375, 0.28235290563031577122588448175013436025525412068e-12)
"""ln 2 in two parts; the product of the first with a small integer is exact."""

_TAYLOR = tuple(1.0 / math.factorial(order) for order in range(8, 0, -1))


def _exp(number: float) -> float:
    """Return e to the power of ``number``.

    N. Shibata, "Efficient evaluation methods of elementary functions suitable for SIMD
    computation", 2010: exp(16 r) 2^k with a Taylor series for y = exp(r) - 1, doubled four times by
    exp(2 r) - 1 = y (y + 2). Every multiply-add is fused.
    """
    twos = round(number * math.log2(math.e))
    rest = number
    for part in _LN2:
        rest = _fused(-twos, part, rest)
    rest /= 16.0
    series = _TAYLOR[0]
    for term in _TAYLOR[1:]:
        series = _fused(series, rest, term)
    y = rest * series
    for _ in range(3):
        y *= y + 2.0
    return math.ldexp(_fused(y, y + 2.0, 1.0), twos)


def _fused(a: float, b: float, c: float) -> float:
    """Return a b + c with a single rounding, which the quotient of two integers has."""
    (x, under_x), (y, under_y), (z, under_z) = a.as_integer_ratio(), b.as_integer_ratio(), c.as_integer_ratio()
    return (x * y * under_z + z * under_x * under_y) / (under_x * under_y * under_z)


# The points of a grid, by number: the cartesian product of the axes, which is never materialized.


MOST_POINTS = 1_000_000
"""A grid that is larger than this is a slip: it would not end, and its axes would fill the
memory."""


@dataclass(frozen=True)
class Grid:
    """Axes in alphabetical order of their paths; the last axis varies fastest."""

    space: Mapping[str, Any]
    axes: tuple[tuple[Names, tuple[Any, ...]], ...]

    @classmethod
    def of(cls, space: Mapping[str, Any]) -> Grid:
        """Return the grid of ``space``. Raises ConfigError if it is too large or lacks a count."""
        found = sorted(find_ranges(space), key=lambda pair: pair[0])
        grid = cls(space, tuple((path, axis_values(spec)) for path, spec in found))
        if grid.size > MOST_POINTS:
            raise ConfigError("the grid has too many points", got=grid.size, expected=f"at most {MOST_POINTS}")
        return grid

    @property
    def size(self) -> int:
        """Return the number of points."""
        return math.prod(len(values) for _, values in self.axes)

    def values(self, number: int) -> dict[Names, Any]:
        """Return the value of every axis at point ``number`` (0 to size - 1)."""
        chosen: dict[Names, Any] = {}
        for path, values in reversed(self.axes):
            number, index = divmod(number, len(values))
            chosen[path] = values[index]
        return {path: chosen[path] for path, _ in self.axes}

    def point(self, number: int) -> dict[str, Any]:
        """Return the hyperparameters of point ``number`` (0 to size - 1)."""
        return _with(self.space, (), self.values(number))


def axis_values(spec: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return ``count`` values from minval to maxval (inclusive), evenly spaced (for log: in the
    exponent); for a count of 1, the middle.

    Rounds an int axis, halves away from zero, to at most maxval - minval + 1 values.
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
        return as_sent(power(float(spec["base"]), value))
    return int(math.copysign(math.floor(abs(value) + 0.5), value)) if spec["type"] == "int" else as_sent(float(value))


def _with(section: Mapping[str, Any], above: Names, chosen: Mapping[Names, Any]) -> dict[str, Any]:
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


# The points for a check.


@dataclass(frozen=True)
class Point:
    """One set of hyperparameters: ``values`` by dotted name, and the whole section."""

    number: int
    values: Mapping[str, Any]
    hyperparameters: Mapping[str, Any]

    def describe(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.values.items())


@dataclass(frozen=True)
class Space:
    """``points``: the points to check; ``total``: the number of all points, None if unknown."""

    points: tuple[Point, ...]
    total: int | None

    @property
    def complete(self) -> bool:
        return self.total == len(self.points)


def explore(hyperparameters: Mapping[str, Any], searcher: str, most: int, seed: int = 0) -> Space:
    """Return at most ``most`` points of a search by ``searcher``.

    Pure: the same seed gives the same points.

    Points of a grid are those that the master starts, in its order. Points of another search
    include the ends of every range and, as far as ``most`` allows, every value of a categorical.
    Raises ConfigError like ``Grid.of``.
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


def _sampled(spec: Mapping[str, Any], count: int, rng: random.Random) -> list[Any]:
    """Return ``count`` values of an axis: the ends, then random ones; cycle a categorical."""
    if spec["type"] == "categorical":
        values = list(spec["vals"])
        rng.shuffle(values)
        return [values[number % len(values)] if number < len(values) else rng.choice(values) for number in range(count)]
    low, high = spec["minval"], spec["maxval"]
    inner = [rng.randint(low, high) if spec["type"] == "int" else rng.uniform(low, high) for _ in range(count)]
    return [_written(spec, value) for value in [low, high, *inner][:count]]


def _points(hyperparameters: Mapping[str, Any], rows: list[dict[Names, Any]]) -> tuple[Point, ...]:
    names = [{".".join(path): value for path, value in row.items()} for row in rows]
    wholes = [_with(hyperparameters, (), row) for row in rows]
    return tuple(Point(number, *pair) for number, pair in enumerate(zip(names, wholes, strict=True), 1))
