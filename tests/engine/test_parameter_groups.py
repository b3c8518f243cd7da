"""Tests for zero_trial/engine/optimizers.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zero_trial.engine.optimizers import groups_over, parameter_groups
from zero_trial.errors import ConfigError


def test_without_any_all_that_is_trained_is_one_group() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(False))
    (group,) = parameter_groups(model, None, None)
    assert [id(p) for p in group["params"]] == [id(p) for p in model[0].parameters()]


def test_a_clients_groups_keep_their_settings() -> None:
    model = nn.Linear(3, 2)
    given = [{"params": model.weight, "lr": 0.5}, {"params": [("bias", model.bias)]}]
    first, second = parameter_groups(model, None, given)
    assert (first["lr"], id(first["params"][0])) == (0.5, id(model.weight))
    assert id(second["params"][0]) == id(model.bias)
    base = torch.optim.SGD(model.parameters(), lr=0.25)
    (group,) = parameter_groups(model, base, None)
    assert group["lr"] == 0.25 and group is not base.param_groups[0]


def test_doubles_and_strangers_are_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match="in two optimizer groups"):
        parameter_groups(model, None, [{"params": [model.weight]}, {"params": [model.weight]}])
    with pytest.raises(ConfigError, match="not all parameters of the model"):
        parameter_groups(model, None, nn.Linear(3, 2).parameters())


def test_groups_over_pieces_of_their_own() -> None:
    pieces: Any = [SimpleNamespace(opt_group=index, weight=weight) for index, weight in ((0, "a"), (1, "b"), (0, "c"))]
    found = groups_over(pieces, [{"params": [1], "lr": 0.5}, {"params": [2]}, {"params": []}])
    assert found == [{"params": ["a", "c"], "lr": 0.5}, {"params": ["b"]}, {"params": []}]
