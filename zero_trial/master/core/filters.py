"""The filters and sort orders with which runs and experiments are searched, in Determined's words.

A filter is JSON text: ``{"filterGroup": GROUP, "showArchived": false}``. A group is ``{"kind":
"group", "conjunction": "and" or "or", "children": [...]}``; an empty one takes everything. A field
is ``{"kind": "field", "columnName", "operator", "value", "location", "type"}``; without a value it
takes everything, unless its operator is isEmpty or notEmpty. A sort order is
``column=asc,column=desc``.

A missing value fulfills no comparison, ``!=`` and notContains included, and is sorted last in both
directions. NaN equals itself and is the largest number. Columns are compared by their own kind;
metrics, hyperparameters and metadata by the field's ``type``, as numbers, as texts, or as booleans
where it is neither. For these a row has ``summary`` (of each metric of each group), ``config`` (the
experiment's, completed), and ``hparams`` and ``metadata`` (the run's, see `flatten`).
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from zero_trial.master.records import Invalid, Json, as_number, read_date

Test = Callable[[Any], bool]
R = TypeVar("R")

NUMBER, TEXT, DATE, BOOLEAN = "NUMBER", "TEXT", "DATE", "BOOLEAN"
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_OPERATORS = (*_COMPARISONS, "contains", "notContains", "isEmpty", "notEmpty")
_DEEPEST = 50  # groups inside of each other
_MOST = 1000  # fields and groups of a filter
_MOST_ORDERS = 50  # columns of a sort order
STATISTICS = ("last", "max", "mean", "min")  # of a metric, that tables show
_METRIC_LOCATIONS = ("VALIDATIONS", "TRAINING", "CUSTOM_METRIC")
# the names that groups have in a trial's summary on a cluster, and here
GROUPS = {"avg_metrics": "training", "validation_metrics": "validation"}


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: as people read it; "" for a column that is not listed, but may be asked for.
        kind: how its values are compared: NUMBER, TEXT, DATE (seconds) or BOOLEAN.
        value: a row -> its value, None if there is none.
        order: a row -> what it is sorted by, if that is not its value.
        shown: the kind that is listed, if it is not its own.
    """

    title: str
    kind: str
    value: Callable[[Any], Any]
    order: Callable[[Any], Any] | None = None
    shown: str = ""


Columns = Mapping[str, Column]


@dataclass(frozen=True)
class Filter:
    """A filter that has been read: ``matches`` of a row, and whether archived rows are taken."""

    matches: Test
    archived: bool


def read_filter(text: str, tables: Mapping[str, Columns]) -> Filter:
    """Read a filter. Raises Invalid with the place of what is wrong.

    Args:
        tables: the columns that may be asked for, by their location without ``LOCATION_TYPE_``.
    """
    try:
        root = json.loads(text)
    except (ValueError, RecursionError):
        raise Invalid("not JSON", where="filter") from None
    if not isinstance(root, dict):
        raise Invalid("must be an object", where="filter")
    archived = root.get("showArchived", False)
    if not isinstance(archived, bool | None):
        raise Invalid("must be true or false", where="filter.showArchived", got=repr(archived)[:60])
    if root.get("filterGroup") is None:
        return Filter(_everything, bool(archived))
    left = iter(range(_MOST))
    return Filter(_Reader(tables, left).node(root["filterGroup"], "filterGroup", 0), bool(archived))


class _Reader:
    """Reads the tree of a filter into one test."""

    def __init__(self, tables: Mapping[str, Columns], left: Iterator[int]) -> None:
        self._tables = tables
        self._left = left

    def node(self, node: Any, where: str, depth: int) -> Test:
        """Return the test of a group or a field."""
        if not isinstance(node, dict):
            raise Invalid("must be an object", where=where)
        if depth > _DEEPEST or next(self._left, None) is None:
            raise Invalid(f"a filter has at most {_MOST} fields and groups, {_DEEPEST} inside of each other")
        if node.get("kind") == "group":
            return self._group(node, where, depth)
        if node.get("kind") == "field":
            return self._field(node, where)
        raise Invalid("unknown kind", where=f"{where}.kind", got=_shown(node.get("kind")), expected="group or field")

    def _group(self, node: Json, where: str, depth: int) -> Test:
        children, conjunction = node.get("children"), node.get("conjunction")
        children = [] if children is None else children
        if not isinstance(children, list):
            raise Invalid("must be a list", where=f"{where}.children")
        if conjunction not in ("and", "or"):
            raise Invalid(
                "unknown conjunction", where=f"{where}.conjunction", got=_shown(conjunction), expected="and or or"
            )
        tests = [self.node(child, f"{where}.children[{at}]", depth + 1) for at, child in enumerate(children)]
        if not tests:
            return _everything
        join = all if conjunction == "and" else any
        return lambda row: join(test(row) for test in tests)

    def _field(self, node: Json, where: str) -> Test:
        name, sign, value = node.get("columnName"), node.get("operator"), node.get("value")
        if not isinstance(name, str) or not name:
            raise Invalid("must be the name of a column", where=f"{where}.columnName", got=_shown(name))
        if sign not in _OPERATORS:
            raise Invalid(
                "unknown operator", where=f"{where}.operator", got=_shown(sign), expected=", ".join(_OPERATORS)
            )
        if value is None and sign not in ("isEmpty", "notEmpty"):
            return _everything
        location = str(node.get("location") or "LOCATION_TYPE_EXPERIMENT").removeprefix("LOCATION_TYPE_")
        word = str(node.get("type") or "").removeprefix("COLUMN_TYPE_")
        kind = word if word in (NUMBER, TEXT, DATE) else BOOLEAN
        if location in self._tables:
            column = self._tables[location].get(name)
            if column is None:
                raise Invalid("unknown column", where=f"{where}.columnName", got=_shown(name))
            return _of_value(column.value, _test(sign, value, column.kind, where, fold=True))
        if location in _METRIC_LOCATIONS:
            return _of_value(_metric(name, where), _test(sign, value, NUMBER if kind == NUMBER else TEXT, where))
        if location == "HYPERPARAMETERS" and "EXPERIMENT" in self._tables:
            return _of_space(name.removeprefix("hp."), sign, value, TEXT if kind in (TEXT, DATE) else NUMBER, where)
        if location == "RUN_HYPERPARAMETERS" and "RUN" in self._tables:
            own = kind if kind in (NUMBER, TEXT) else BOOLEAN
            return _of_values("hparams", name.removeprefix("hp."), sign, value, own, where)
        if location == "RUN_METADATA" and "RUN" in self._tables:
            return _of_values("metadata", name.removeprefix("metadata."), sign, value, kind, where)
        raise Invalid("unknown location", where=f"{where}.location", got=_shown(node.get("location")))


def _everything(row: Any) -> bool:
    return True


def _shown(value: Any) -> str:
    return repr(value)[:60]


def _of_value(get: Callable[[Any], Any], test: Test) -> Test:
    return lambda row: test(get(row))


def _test(sign: str, wanted: Any, kind: str, where: str, *, fold: bool = False) -> Test:
    """Return the test of one value. ``fold``: contains ignores case."""
    if sign in ("isEmpty", "notEmpty"):
        return lambda value: (value is None or value in ("", "[]")) == (sign == "isEmpty")
    target = _as_kind(wanted, kind)
    if target is None:
        raise Invalid(
            f"cannot be compared with a column of the type {kind}", where=f"{where}.value", got=_shown(wanted)
        )
    if sign in ("contains", "notContains"):
        if kind != TEXT:
            raise Invalid("only texts can be searched", where=f"{where}.operator", got=f"{sign} of the type {kind}")
        part = target.lower() if fold else target

        def contains(value: Any) -> bool:
            text = _as_kind(value, TEXT)
            return text is not None and (part in (text.lower() if fold else text)) == (sign == "contains")

        return contains
    compare, bound = _COMPARISONS[sign], _ordered(target)

    def compared(value: Any) -> bool:
        own = _as_kind(value, kind)
        return own is not None and compare(_ordered(own), bound)

    return compared


def _ordered(value: Any) -> tuple[bool, Any]:
    """Return what orders two values of one kind: NaN after all numbers."""
    return (True, 0.0) if isinstance(value, float) and math.isnan(value) else (False, value)


def _as_kind(value: Any, kind: str) -> Any:
    """Return a value as it is compared; None if it is not of this kind."""
    if kind == NUMBER:
        return as_number(_read_number(value) if isinstance(value, str) else value)
    if kind == BOOLEAN:
        return {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else _bool(value)
    if kind == DATE:
        return read_date(value) if isinstance(value, str) else as_number(value)
    if isinstance(value, str):
        return str(value)
    return None


def _read_number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _metric(name: str, where: str) -> Callable[[Any], Any]:
    """Return how a metric such as ``validation.loss.min`` is read from a row. Raises Invalid."""
    end, statistic = max((name.rfind(f".{each}"), each) for each in STATISTICS)
    dot = name.find(".", 1)
    if not (name.isascii() and name.isprintable() and 0 < dot < end - 1):
        raise Invalid(
            "not the name of a metric", where=where, got=_shown(name), expected="GROUP.METRIC.(min, max, mean or last)"
        )
    group, metric = GROUPS.get(name[:dot], name[:dot]), name[dot + 1 : end]

    def value(row: Any) -> Any:
        entry = row.summary.get(group, {}).get(metric)
        return None if entry is None else entry.get(statistic)

    return value


def flatten(value: Any, name: str = "") -> dict[str, list[Any]]:
    """Return the values inside of nested maps by their names with dots; a list's elements are
    values of one name, what is empty has the value None.
    """
    found: dict[str, list[Any]] = {}
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            found.update(flatten(inner, f"{name}.{key}" if name else str(key)))
    elif name:
        items = list(value) if isinstance(value, list) and value else [value]
        found[name] = [None if item in ({}, []) else item for item in items]
    return found


def _of_values(source: str, key: str, sign: str, wanted: Any, kind: str, where: str) -> Test:
    """Return the test of whether one of the values of a name fulfills it.

    Args:
        source: ``hparams`` or ``metadata`` of a row. A text that is a date is none in metadata.
    """
    read, dates = operator.attrgetter(source), source == "metadata"
    if sign in ("isEmpty", "notEmpty"):
        return lambda row: (key in read(row)) == (sign == "notEmpty")
    test = _test(sign, wanted, kind, where)
    return lambda row: any(kind_of(value, dates=dates) == kind and test(value) for value in read(row).get(key, ()))


def kind_of(value: Any, *, dates: bool) -> str:
    """Return the kind of a value; "" for null, lists and maps. ``dates``: texts that are dates have
    the kind DATE.
    """
    if isinstance(value, bool):
        return BOOLEAN
    if isinstance(value, int | float):
        return NUMBER
    if isinstance(value, str):
        return DATE if dates and read_date(value) is not None else TEXT
    return ""


def _of_space(name: str, sign: str, wanted: Any, kind: str, where: str) -> Test:
    """Return the test of an experiment by the section of a hyperparameter in its configuration.

    A const is compared by its value, a range by either of its bounds (``> 3``: it has points above
    3); a range contains the numbers between them, a categorical one its values.
    """
    path = name.split(".")

    def section(row: Any) -> Any:
        found: Any = row.config.get("hyperparameters")
        for part in path:
            found = found.get(part) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) and "type" in found else None

    if sign in ("isEmpty", "notEmpty"):

        def empty(row: Any) -> bool:
            found = section(row)
            return found is None or (found["type"] == "const" and found.get("val") is None)

        return lambda row: empty(row) == (sign == "isEmpty")
    element = sign in ("contains", "notContains")
    if element and kind == NUMBER:
        target = _as_kind(wanted, NUMBER)
        inside: Test = lambda value: _as_kind(value, NUMBER) == target  # noqa: E731
        if target is None:
            raise Invalid("must be a number", where=f"{where}.value", got=_shown(wanted))
    else:
        inside = _test("contains" if element else sign, wanted, kind, where)

    def test(row: Any) -> bool:
        found = section(row)
        if found is None:
            return False
        if found["type"] == "const":
            value = found.get("val")
            return inside(value) if sign != "notContains" else _as_kind(value, kind) is not None and not inside(value)
        if found["type"] == "categorical":
            if not element:
                return False
            values = found.get("vals") or []
            return any(_as_kind(each, kind) == _as_kind(wanted, kind) for each in values) == (sign == "contains")
        if kind != NUMBER:
            return False
        low, high = found.get("minval"), found.get("maxval")
        if not element:
            return inside(low) or inside(high)
        low, high, point = as_number(low), as_number(high), as_number(_as_kind(wanted, NUMBER))
        if low is None or high is None or point is None:
            return False
        return (low <= point <= high) == (sign == "contains")

    return test


# -- sort orders


def sort_rows(rows: Sequence[R], text: str, columns: Columns) -> list[R]:
    """Return the rows, which come by their ids, in the order of ``text``. Raises Invalid."""
    found, parts = list(rows), text.split(",") if text else []
    if len(parts) > _MOST_ORDERS:
        raise Invalid(f"a sort order has at most {_MOST_ORDERS} columns", where="sort", got=len(parts))
    for key, descending in reversed([_order(part, columns) for part in parts]):
        ranked = [(_rank(key(row)), row) for row in found]
        there = sorted(((rank, row) for rank, row in ranked if rank), key=lambda item: item[0], reverse=descending)
        found = [row for _, row in there] + [row for rank, row in ranked if not rank]
    return found


def _order(part: str, columns: Columns) -> tuple[Callable[[Any], Any], bool]:
    """Read one part of a sort order: what rows are sorted by, and whether the largest is first."""
    name, _, direction = part.partition("=")
    if direction not in ("asc", "desc"):
        raise Invalid("not a sort order", where="sort", got=_shown(part), expected="COLUMN=asc or COLUMN=desc")
    if name.startswith("hp."):
        key, kind = name.removeprefix("hp."), "hparams"
    elif name.startswith("metadata."):
        key, kind = name.removeprefix("metadata."), "metadata"
    elif "." in name:
        return _metric(name, "sort"), direction == "desc"
    elif name in columns:
        column = columns[name]
        return column.order or column.value, direction == "desc"
    else:
        raise Invalid("unknown column", where="sort", got=_shown(name))
    return lambda row: next(iter(getattr(row, kind).get(key, ())), None), direction == "desc"


def _rank(value: Any) -> tuple[int, Any, bool] | None:
    """Return what orders values of all kinds: texts, numbers (NaN last), booleans, all others by
    their JSON; None for a missing value."""
    if value is None:
        return None
    if isinstance(value, bool):
        return 2, value, False
    number = as_number(value)
    if number is not None:
        return 1, math.inf if math.isnan(number) else number, math.isnan(number)
    if isinstance(value, str):
        return 0, value, False
    return 3, json.dumps(value, sort_keys=True, default=str), False
