"""The filters and sort orders of runs and experiments, on rows that are written down here."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from zero_trial.master.core.filters import Column, flatten, read_filter, sort_rows
from zero_trial.master.records import Invalid, read_date

NOON = 1_700_000_000.0  # 2023-11-14T22:13:20Z


@dataclass
class Sample:
    number: int
    name: str | None = None
    begun: float = NOON
    done: bool = False
    value: float | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    hparams: dict[str, list[Any]] = field(default_factory=dict)
    metadata: dict[str, list[Any]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


COLUMNS = {
    "id": Column("ID", "NUMBER", lambda row: row.number),
    "name": Column("Name", "TEXT", lambda row: row.name, order=lambda row: row.number % 2),
    "begun": Column("Begun", "DATE", lambda row: row.begun),
    "done": Column("Done", "BOOLEAN", lambda row: row.done),
    "value": Column("Value", "NUMBER", lambda row: row.value),
    "tags": Column("Tags", "TEXT", lambda row: '["a"]' if row.number == 1 else "[]"),
}
TABLES = {"RUN": COLUMNS, "EXPERIMENT": {"id": Column("ID", "NUMBER", lambda row: 10 * row.number)}}
ROWS = [
    Sample(
        1,
        "Alpha beta",
        value=0.5,
        summary={"validation": {"loss": {"type": "number", "min": 0.5, "last": 0.75}, "kind": {"last": "good"}}},
        hparams=flatten({"lr": 0.1, "model": {"depth": 2, "act": "relu"}, "bias": True}),
        metadata=flatten({"a": {"b": [1, "two", "2024-05-01"]}, "day": "2024-05-01", "ok": False}),
        config={
            "hyperparameters": {
                "lr": {"type": "log", "minval": -4, "maxval": -1, "base": 10},
                "act": {"type": "categorical", "vals": ["relu", "gelu", 3]},
                "model": {"depth": {"type": "const", "val": 2}, "name": {"type": "const", "val": "resnet"}},
            }
        },
    ),
    Sample(2, "alpha", begun=NOON + 86400, done=True, summary={"training": {"loss": {"type": "number", "min": 2}}}),
    Sample(3, None, value=float("nan"), metadata=flatten({"a": {}})),
    Sample(4, "", value=-1.0, hparams=flatten({"lr": 1})),
]


def leaf(column: str, sign: str, value: Any = None, location: str = "RUN", kind: str = "") -> dict[str, Any]:
    return {
        "kind": "field",
        "columnName": column,
        "operator": sign,
        "value": value,
        "location": f"LOCATION_TYPE_{location}",
        "type": f"COLUMN_TYPE_{kind}",
    }


def group(conjunction: str, *children: Any) -> dict[str, Any]:
    return {"kind": "group", "conjunction": conjunction, "children": list(children)}


def taken(node: Any) -> list[int]:
    found = read_filter(json.dumps({"filterGroup": node}), TABLES)
    return [row.number for row in ROWS if found.matches(row)]


@pytest.mark.parametrize(
    ("node", "numbers"),
    [
        (leaf("id", "=", 2), [2]),
        (leaf("id", "=", "2"), [2]),
        (leaf("id", "!=", 2), [1, 3, 4]),
        (leaf("id", "<", 2), [1]),
        (leaf("id", "<=", 2.0), [1, 2]),
        (leaf("id", ">", 3), [4]),
        (leaf("id", ">=", 3), [3, 4]),
        (leaf("id", "=", 20, "EXPERIMENT"), [2]),
        (leaf("id", ">", None), [1, 2, 3, 4]),  # not filled in yet
        (leaf("value", "<=", 0.5), [1, 4]),
        (leaf("value", "!=", 7), [1, 3, 4]),  # a missing value fulfills nothing
        (leaf("value", "isEmpty"), [2]),
        (leaf("value", "notEmpty"), [1, 3, 4]),
        (leaf("name", "=", "alpha"), [2]),
        (leaf("name", "contains", "ALPHA"), [1, 2]),
        (leaf("name", "notContains", "beta"), [2, 4]),
        (leaf("name", "isEmpty"), [3, 4]),
        (leaf("tags", "isEmpty"), [2, 3, 4]),
        (leaf("done", "=", True), [2]),
        (leaf("done", "!=", "true"), [1, 3, 4]),
        (leaf("begun", ">", "2023-11-15"), [2]),
        (leaf("begun", "=", "2023-11-14T22:13:20Z"), [1, 3, 4]),
        (leaf("begun", "<", "2023-11-14T22:13:21+00:00"), [1, 3, 4]),
    ],
)
def test_columns_are_compared_by_their_own_kind(node: Any, numbers: list[int]) -> None:
    assert taken(node) == numbers


@pytest.mark.parametrize(
    ("node", "numbers"),
    [
        (leaf("validation.loss.min", "<", 0.6, "VALIDATIONS", "NUMBER"), [1]),
        (leaf("validation_metrics.loss.last", ">", 0.6, "VALIDATIONS", "NUMBER"), [1]),
        (leaf("training.loss.min", "=", 2, "TRAINING", "NUMBER"), [2]),
        (leaf("validation.loss.min", "isEmpty", None, "VALIDATIONS", "NUMBER"), [2, 3, 4]),
        (leaf("validation.kind.last", "contains", "oo", "CUSTOM_METRIC", "TEXT"), [1]),
        (leaf("validation.kind.last", "contains", "OO", "CUSTOM_METRIC", "TEXT"), []),
        (leaf("lr", ">=", 0.1, "RUN_HYPERPARAMETERS", "NUMBER"), [1, 4]),
        (leaf("hp.model.depth", "=", 2, "RUN_HYPERPARAMETERS", "NUMBER"), [1]),
        (leaf("hp.model.act", "contains", "el", "RUN_HYPERPARAMETERS", "TEXT"), [1]),
        (leaf("bias", "=", True, "RUN_HYPERPARAMETERS"), [1]),
        (leaf("lr", "=", True, "RUN_HYPERPARAMETERS"), []),
        (leaf("lr", "isEmpty", None, "RUN_HYPERPARAMETERS", "NUMBER"), [2, 3]),
        (leaf("metadata.a.b", "=", 1, "RUN_METADATA", "NUMBER"), [1]),
        (leaf("metadata.a.b", "contains", "wo", "RUN_METADATA", "TEXT"), [1]),
        (leaf("metadata.day", "contains", "2024", "RUN_METADATA", "TEXT"), []),  # a date, not a text
        (leaf("metadata.day", ">", "2024-04-30", "RUN_METADATA", "DATE"), [1]),
        (leaf("metadata.ok", "=", False, "RUN_METADATA"), [1]),
        (leaf("metadata.a", "notEmpty", None, "RUN_METADATA"), [3]),
        (leaf("hp.model.depth", "<", 3, "HYPERPARAMETERS", "NUMBER"), [1]),
        (leaf("hp.model.name", "contains", "net", "HYPERPARAMETERS", "TEXT"), [1]),
        (leaf("hp.act", "contains", "gelu", "HYPERPARAMETERS", "TEXT"), [1]),
        (leaf("hp.act", "notContains", "gelu", "HYPERPARAMETERS", "TEXT"), []),
        (leaf("hp.act", "contains", 3, "HYPERPARAMETERS", "NUMBER"), [1]),
        (leaf("hp.lr", "contains", -2, "HYPERPARAMETERS", "NUMBER"), [1]),
        (leaf("hp.lr", "contains", 2, "HYPERPARAMETERS", "NUMBER"), []),
        (leaf("hp.lr", ">", -2, "HYPERPARAMETERS", "NUMBER"), [1]),
        (leaf("hp.lr", "<", -4, "HYPERPARAMETERS", "NUMBER"), []),
        (leaf("hp.lr", "notEmpty", None, "HYPERPARAMETERS", "NUMBER"), [1]),
    ],
)
def test_what_a_run_has_by_itself_is_compared_by_the_fields_type(node: Any, numbers: list[int]) -> None:
    assert taken(node) == numbers


@pytest.mark.parametrize(
    ("node", "numbers"),
    [
        (group("and"), [1, 2, 3, 4]),
        (group("or"), [1, 2, 3, 4]),
        (group("and", leaf("id", ">", 1), leaf("id", "<", 4)), [2, 3]),
        (group("or", leaf("id", "=", 1), leaf("id", "=", 4)), [1, 4]),
        (group("or", leaf("id", "=", 1), group("and", leaf("id", ">", 1), leaf("done", "=", True))), [1, 2]),
        (group("and", group("or"), leaf("id", "=", 3)), [3]),
    ],
)
def test_groups(node: Any, numbers: list[int]) -> None:
    assert taken(node) == numbers


@pytest.mark.parametrize(
    "node",
    [
        [],
        {"kind": "other"},
        {"kind": "group", "children": []},
        group("xor", leaf("id", "=", 1)),
        {**group("and"), "children": {}},
        leaf("unknown", "=", 1),
        leaf("id; DROP TABLE trials", "=", 1),
        leaf("id", "~", 1),
        leaf("id", "=", "x"),
        leaf("id", "=", True),
        leaf("id", "contains", 1),
        leaf("name", "=", 3),
        leaf("done", "=", 1),
        leaf("begun", ">", "yesterday"),
        leaf("id", "=", 1, "NOWHERE"),
        leaf("loss", "=", 1, "VALIDATIONS", "NUMBER"),
        leaf("lr", "contains", "0", "RUN_HYPERPARAMETERS", "NUMBER"),
        leaf("hp.act", "contains", "x", "HYPERPARAMETERS", "NUMBER"),
        group("and", group("or", leaf("unknown", "=", 1))),
    ],
)
def test_what_makes_no_sense_is_refused(node: Any) -> None:
    """Also where no row would be asked."""
    with pytest.raises(Invalid):
        read_filter(json.dumps({"filterGroup": node}), TABLES)


def test_a_tree_without_end_and_a_text_that_is_no_filter_are_refused() -> None:
    deep: Any = leaf("id", "=", 1)
    for _ in range(60):
        deep = group("and", deep)
    for node in (deep, group("and", *[leaf("id", "=", 1)] * 1001)):
        with pytest.raises(Invalid):
            read_filter(json.dumps({"filterGroup": node}), TABLES)
    for text in ("", "{", "[]", '{"filterGroup": {}, "showArchived": 1}', "[" * 100_000):
        with pytest.raises(Invalid):
            read_filter(text, TABLES)


def test_a_table_without_runs_has_no_columns_of_runs() -> None:
    node = leaf("lr", "=", 1, "RUN_HYPERPARAMETERS", "NUMBER")
    with pytest.raises(Invalid):
        read_filter(json.dumps({"filterGroup": node}), {"EXPERIMENT": COLUMNS})


def test_any_value_at_any_place_is_read_or_refused() -> None:
    """Every field of every sort, with every odd value in each of its places."""
    odd = [None, True, 0, -1.5, 1e999, "", "x", "LOCATION_TYPE_RUN", "COLUMN_TYPE_DATE", [], {}, [1], {"a": 1}]
    locations = ("RUN", "VALIDATIONS", "RUN_HYPERPARAMETERS", "RUN_METADATA", "HYPERPARAMETERS")
    read = 0
    for location in locations:
        for name in ("id", "name", "begun", "validation.loss.min", "hp.act", "lr", "metadata.a.b"):
            for sign in ("=", "<", "contains", "notContains", "isEmpty"):
                for kind in ("NUMBER", "TEXT", "DATE", ""):
                    good = leaf(name, sign, "2", location, kind)
                    for key in good:
                        for value in odd if key in ("value", "columnName") else odd[::5]:
                            try:
                                taken({**good, key: value})
                                read += 1
                            except Invalid:
                                pass
    assert read > 1000


def test_archived_rows_are_taken_where_it_says_so() -> None:
    node = group("and")
    assert not read_filter(json.dumps({"filterGroup": node}), TABLES).archived
    assert read_filter(json.dumps({"filterGroup": node, "showArchived": True}), TABLES).archived


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", [1, 2, 3, 4]),
        ("id=desc", [4, 3, 2, 1]),
        ("value=asc", [4, 1, 3, 2]),  # NaN after the numbers, what is missing last
        ("value=desc", [3, 1, 4, 2]),
        ("done=desc,id=desc", [2, 4, 3, 1]),
        ("name=asc", [2, 4, 1, 3]),  # by the order that the column has
        ("hp.lr=desc", [4, 1, 2, 3]),
        ("metadata.day=asc,id=desc", [1, 4, 3, 2]),
        ("validation.loss.min=asc", [1, 2, 3, 4]),
        ("training.loss.min=asc", [2, 1, 3, 4]),
    ],
)
def test_sort_orders(text: str, numbers: list[int]) -> None:
    assert [row.number for row in sort_rows(copy.copy(ROWS), text, COLUMNS)] == numbers


@pytest.mark.parametrize("text", ["id", "id=up", "other=asc", "id=asc,", "=asc", "a.b=asc"])
def test_a_sort_order_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        sort_rows(ROWS, text, COLUMNS)


def test_nan_is_the_largest_number_and_equals_itself() -> None:
    for sign, numbers in ((">", [1, 3]), ("<", [4]), ("!=", [1, 3, 4]), ("=", [])):
        assert taken(leaf("value", sign, 0)) == numbers
    assert taken(leaf("value", "=", "NaN")) == [3] and taken(leaf("value", "<", "NaN")) == [1, 4]


@pytest.mark.parametrize(
    ("name", "group", "metric"),
    [("a.b.min", "a", "b"), (".a.b.last", ".a", "b"), ("a.b.c.max", "a", "b.c"), ("a.min.mean", "a", "min")],
)
def test_names_of_metrics(name: str, group: str, metric: str) -> None:
    row = Sample(1, summary={group: {metric: {name.rpartition(".")[2]: 5}}})
    found = read_filter(json.dumps({"filterGroup": leaf(name, "=", 5, "CUSTOM_METRIC", "NUMBER")}), TABLES)
    assert found.matches(row)


@pytest.mark.parametrize("name", ["." * 100_000, "a." * 50_000, "a.min", "a..min", "a\n.b.min", "ä.b.min"])
def test_what_names_no_metric_is_refused_at_once(name: str) -> None:
    with pytest.raises(Invalid, match="not the name of a metric"):
        taken(leaf(name, "=", 5, "CUSTOM_METRIC"))


def test_a_filter_without_a_group_takes_everything() -> None:
    for text in ("{}", '{"filterGroup": null, "showArchived": true}'):
        assert all(map(read_filter(text, TABLES).matches, ROWS))


def test_a_sort_order_has_an_end() -> None:
    with pytest.raises(Invalid):
        sort_rows(ROWS, ",".join(["id=asc"] * 51), COLUMNS)


def test_dates_without_a_zone_are_in_utc() -> None:
    assert read_date("2023-11-14T22:13:20") == read_date("2023-11-14T23:13:20+01:00") == NOON
    assert read_date("2023") is None
