"""Hyperparameters as Determined reads them."""

from __future__ import annotations

from typing import Any

from zero_trial.experiment.space import is_range, ranges, read_hyperparameters
from zero_trial.schema.document import Document, Location


def read(value: dict[str, Any]) -> dict[str, Any]:
    return read_hyperparameters(Document.of(value, Location(prefix="hyperparameters"))).value


def test_consts_become_values_and_ranges_stay():
    lr = {"type": "log", "base": 10, "minval": -5, "maxval": -3}
    value = read(
        {"a": 1, "b": {"type": "const", "val": [1]}, "model": {"depth": {"type": "const", "val": 3}, "lr": lr}}
    )
    assert value == {"a": 1, "b": [1], "model": {"depth": 3, "lr": lr}}
    assert ranges(value) == ["model.lr"]
    assert is_range(lr) and not is_range({"type": "const"}) and not is_range(3)


def test_a_const_may_hold_anything():
    inner = {"optimizer": {"type": "Adam", "params": {"lr": 1}}}
    assert read({"ds_config": {"type": "const", "val": inner}}) == {"ds_config": inner}


def test_places_move_with_a_const():
    document = Document(
        {"ds_config": {"type": "const", "val": {"train_batch_size": 4}}},
        {("ds_config", "val", "train_batch_size"): Location("const.yaml", 9)},
    )
    resolved = read_hyperparameters(document)
    assert resolved.at(("ds_config", "train_batch_size")).line == 9


def test_a_top_level_hyperparameter_may_be_called_type():
    for space in ({"type": "big"}, {"type": "const", "val": 1}):
        assert read(space) == space
