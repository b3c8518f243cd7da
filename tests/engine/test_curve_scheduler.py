"""The scheduler writes into groups, counts, saves as JSON and continues where it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from zero_trial.engine.lr_schedules import CurveScheduler, Cycle, OneCycle, Warmup, WarmupType
from zero_trial.errors import CheckpointError


class Groups:
    """Not a torch optimizer: only the groups."""

    def __init__(self, *groups: dict[str, Any]) -> None:
        self.param_groups = list(groups)


def warmup() -> Warmup:
    return Warmup([0.0], [1.0], num_steps=4, kind=WarmupType.LINEAR)


def test_constructing_writes_the_first_lr() -> None:
    optimizer = Groups({"lr": 7.0})
    scheduler = CurveScheduler(optimizer, warmup())
    assert optimizer.param_groups[0]["lr"] == 0.0
    for _ in range(3):
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert scheduler.get_last_lr() == scheduler.get_lr() == [0.5]


def test_step_to_a_given_iteration() -> None:
    scheduler = CurveScheduler(Groups({"lr": 7.0}), warmup())
    scheduler.step(3)
    assert scheduler.get_lr() == [0.75]


def test_tensor_lr_stays_a_tensor() -> None:
    optimizer = Groups({"lr": torch.tensor(7.0)})
    CurveScheduler(optimizer, warmup()).step(2)
    assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.5))


def test_state_is_json_and_resumes_in_the_middle() -> None:
    scheduler = CurveScheduler(Groups({"lr": 7.0}), warmup())
    for _ in range(3):
        scheduler.step()
    optimizer = Groups({"lr": 7.0})
    other = CurveScheduler(optimizer, warmup())
    other.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    assert optimizer.param_groups[0]["lr"] == 0.5
    scheduler.step()
    other.step()
    assert other.get_lr() == scheduler.get_lr() == [0.75]


def test_foreign_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match="last_batch_iteration"):
        CurveScheduler(Groups({"lr": 1.0}), warmup()).load_state_dict({"last_epoch": 3})


def test_betas_are_written_where_the_curve_has_them() -> None:
    optimizer = Groups({"lr": 1.0, "betas": (0.9, 0.999)})
    curve = OneCycle(1, Cycle(2.0, 2.0), 0.1, 0.3, momentum=(0.8, 0.9, 0.0))
    scheduler = CurveScheduler(optimizer, curve)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    scheduler.step()
    assert optimizer.param_groups[0]["betas"] == pytest.approx((0.85, 0.99))
    assert scheduler.get_mom() == [optimizer.param_groups[0]["betas"]]
    assert CurveScheduler(Groups({"lr": 1.0}), warmup()).get_mom() is None
