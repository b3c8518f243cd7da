"""Hyperparameters as Determined reads them."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.errors import ConfigError
from zero_trial.experiment.hyperparameters import is_range, ranges, read_hyperparameters
from zero_trial.schema.document import Document, Location


def read(value: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    faults: list[ConfigError] = []
    document = read_hyperparameters(Document.of(value, Location(prefix="hyperparameters")), faults)
    return document.value, [str(fault) for fault in faults]


def test_consts_become_values_and_ranges_stay():
    lr = {"type": "log", "base": 10, "minval": -5, "maxval": -3}
    value, faults = read(
        {"a": 1, "b": {"type": "const", "val": [1]}, "model": {"depth": {"type": "const", "val": 3}, "lr": lr}}
    )
    assert value == {"a": 1, "b": [1], "model": {"depth": 3, "lr": lr}}
    assert faults == []
    assert ranges(value) == ["model.lr"]
    assert is_range(lr) and not is_range({"type": "const"}) and not is_range(3)


def test_a_const_may_hold_anything():
    inner = {"optimizer": {"type": "Adam", "params": {"lr": 1}}}
    assert read({"ds_config": {"type": "const", "val": inner}}) == ({"ds_config": inner}, [])
    choices = {"type": "categorical", "vals": [{"type": "Adam"}, {"type": "Lamb"}]}
    assert read({"ds_config": {"optimizer": choices}})[1] == []


def test_places_move_with_a_const():
    document = Document(
        {"ds_config": {"type": "const", "val": {"train_batch_size": 4}}},
        {("ds_config", "val", "train_batch_size"): Location("const.yaml", 9)},
    )
    resolved = read_hyperparameters(document, [])
    assert resolved.at(("ds_config", "train_batch_size")).line == 9


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (
            {"ds_config": {"optimizer": {"type": "Adam", "params": {"lr": 1}}}},
            'hyperparameters.ds_config.optimizer.type: a nested key "type" is read as the type of a hyperparameter: got "Adam", '
            "expected one of int, double, log, categorical, const. Write optimizer: {type_: Adam}, "
            "or optimizer: {type: const, val: {type: Adam, params: {lr: 1}}}.",
        ),
        (
            {"model": {"type": "big"}},
            'hyperparameters.model.type: a nested key "type" is read as the type of a hyperparameter: got "big", '
            "expected one of int, double, log, categorical, const. Write model: {type: const, val: {type: big}}, or another key than type.",
        ),
        ({"a": {"type": {"type": "const"}}}, 'hyperparameters.a.type: a nested key "type"'),
        ({"a": {"type": "int", "minval": 1}}, "hyperparameters.a.maxval: is a required property."),
        ({"a": {"type": "double", "minval": 2, "maxval": 1}}, "hyperparameters.a: minval must be less than maxval."),
        ({"a": {"type": "int", "minval": "x", "maxval": 1}}, 'hyperparameters.a.minval: "x" is not an integer.'),
        ({"a": {"type": "const", "vals": [1]}}, "hyperparameters.a.val: is a required property."),
        ({"a": {"type": "categorical", "vals": []}}, "hyperparameters.a.vals: [] is not a list of values."),
        ({"a": {"type": "const", "val": 1, "x": 1}}, "hyperparameters.a.x: unknown property."),
    ],
)  # fmt: skip
def test_faults(value: dict[str, Any], fault: str):
    assert read(value)[1][0].startswith(fault)


def test_a_top_level_hyperparameter_may_be_called_type():
    assert read({"type": "big"}) == ({"type": "big"}, [])
