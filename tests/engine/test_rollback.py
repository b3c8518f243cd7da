"""Schedules and settings that go back to what they were before a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from zero_trial.engine.lr_schedules import build_scheduler
from zero_trial.engine.step import can_undo, step_with_undo

Build = Callable[[torch.optim.Optimizer], Any]

SCHEDULES: dict[str, Build] = {
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.9**n, lambda n: 0.8**n]),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "WarmupLR": lambda o: build_scheduler("WarmupLR", {"warmup_num_steps": 4, "warmup_max_lr": 0.1}, o),
    "OneCycle": lambda o: build_scheduler("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1}, o),
}


def optimizer() -> torch.optim.Optimizer:
    parts = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    return torch.optim.AdamW([{"params": parts[:1], "lr": 0.1}, {"params": parts[1:], "lr": 0.2}])


def seen(made: torch.optim.Optimizer, schedule: Any) -> str:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in made.param_groups]
    return json.dumps([groups, schedule.state_dict()], default=repr, sort_keys=True)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_that_is_taken_back_leaves_no_trace(name: str) -> None:
    """One pair goes forward only; the other takes every second step back."""
    plain, tried = optimizer(), optimizer()
    schedule, other = SCHEDULES[name](plain), SCHEDULES[name](tried)
    assert can_undo(other)
    for _ in range(6):
        before = seen(tried, other)
        go_back = step_with_undo(other, tried.param_groups)
        go_back()
        assert seen(tried, other) == before
        other.step()
        schedule.step()
        assert seen(tried, other) == seen(plain, schedule)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_a_rate_in_a_tensor_goes_back_as_well():
    made = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1))
    schedule = lr_scheduler.ExponentialLR(made, 0.5)
    go_back = step_with_undo(schedule, made.param_groups)
    assert float(made.param_groups[0]["lr"]) == pytest.approx(0.05)
    go_back()
    assert float(made.param_groups[0]["lr"]) == pytest.approx(0.1)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_what_the_groups_hold_besides_stays_theirs():
    made = optimizer()
    schedule = lr_scheduler.ExponentialLR(made, 0.9)
    go_back, params = step_with_undo(schedule, made.param_groups), made.param_groups[0]["params"]
    made.param_groups[0].update(note=1, weight_decay=0.3)
    made.param_groups[1]["lr"] = 7.0
    go_back()
    assert made.param_groups[0]["params"] is params and made.param_groups[0]["note"] == 1
    assert [group["weight_decay"] for group in made.param_groups] == [0.3, 0.01]
    assert [group["lr"] for group in made.param_groups] == [0.1, 7.0]


def test_a_schedule_without_a_state_cannot_go_back():
    class Steps:
        def step(self) -> None: ...

    assert not can_undo(Steps())
