"""Tests for zero_trial/engine/lr_schedules.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.engine.lr_schedules import choose_schedule
from zero_trial.errors import ConfigError

PLAIN: dict[str, Any] = {"train_batch_size": 1}
WARM = PLAIN | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)


def test_a_clients_wins_over_ds_configs() -> None:
    base = sgd()
    own = torch.optim.lr_scheduler.StepLR(base, 1)
    assert choose_schedule(base, own, read_ds_config(WARM)) is own
    made = choose_schedule(base, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1), read_ds_config(WARM))
    assert made.optimizer is base
    theirs = choose_schedule(base, None, read_ds_config(WARM))
    assert theirs.get_last_lr() != [1.0], "it warms up from the start"


def test_none_where_there_is_nothing_to_schedule() -> None:
    assert choose_schedule(sgd(), None, read_ds_config(PLAIN)) is None
    assert choose_schedule(None, None, read_ds_config(WARM)) is None


def test_that_of_another_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="belongs to another optimizer"):
        choose_schedule(sgd(), torch.optim.lr_scheduler.StepLR(sgd(), 1), read_ds_config(PLAIN))


class Wrapper(torch.optim.Optimizer):
    """As launchers of several frameworks put one around an optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults, self.state = inner, inner.defaults, inner.state
        self.param_groups = inner.param_groups


def test_that_of_a_wrapper_around_the_engines_is_taken() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    theirs = torch.optim.lr_scheduler.ConstantLR(Wrapper(optimizer), factor=0.5)
    assert choose_schedule(optimizer, theirs, read_ds_config(PLAIN)) is theirs
    assert optimizer.param_groups[0]["lr"] == 0.5
