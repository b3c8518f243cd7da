"""A dict that also answers to attributes."""

from __future__ import annotations

import json

import pytest
from attrdict import AttrDict

from zero_trial.trial.context import HParams

VALUES = {"lr": 0.1, "model": {"width": 8, "keys": [1, {"deep": 2}]}}


def test_keys_are_attributes_at_every_depth() -> None:
    h = HParams(VALUES)
    assert h.lr == 0.1 and h.model.width == 8 and h.model["keys"][1].deep == 2


def test_it_is_a_plain_dict() -> None:
    h = HParams(VALUES)
    assert h == VALUES and isinstance(h, dict) and json.loads(json.dumps(h)) == VALUES
    assert {**h} == VALUES


def test_writing_reaches_the_dict() -> None:
    h = HParams(VALUES)
    h.model.width = 16
    assert h["model"]["width"] == 16 and VALUES["model"]["width"] == 8  # type: ignore[index]


def test_a_missing_one_names_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no hyperparameter 'learning_rate'; there are \['lr', 'model'\]"):
        _ = HParams(VALUES).learning_rate


def test_attrdict_takes_it() -> None:
    args = AttrDict(HParams(VALUES))
    assert args.lr == 0.1 and args.model.width == 8
