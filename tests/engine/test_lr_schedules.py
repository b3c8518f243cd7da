"""Schedulers by ds_config name: DeepSpeed's five, torch's by class name, and clear answers to everything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zero_trial.engine.lr_schedules import CurveScheduler, build_scheduler, torch_scheduler_names
from zero_trial.errors import ConfigError


def optimizer(*lrs: float, cls: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in lrs or (0.5,)]
    built: torch.optim.Optimizer = cls(groups, lr=0.1)
    return built


def lrs(scheduler: Any, optimizer_: torch.optim.Optimizer, count: int) -> list[float]:
    out = []
    for _ in range(count):
        out.append(optimizer_.param_groups[0]["lr"])
        scheduler.step()
    return out


def test_warmup_lr_rises_to_each_groups_own_lr() -> None:
    adamw = optimizer(0.4, 0.2)
    scheduler = build_scheduler("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"}, adamw)
    assert isinstance(scheduler, CurveScheduler)
    assert scheduler.get_lr() == [0.0, 0.0]
    scheduler.step(1)
    assert [group["lr"] for group in adamw.param_groups] == [0.2, 0.1]
    scheduler.step(2)
    assert [group["lr"] for group in adamw.param_groups] == [0.4, 0.2]


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("WarmupDecayLR", {"total_num_steps": 4, "warmup_num_steps": 2, "warmup_type": "linear"},
         [0, 0, 0.0005, 0.001, 0.0005, 0]),  # its maximum is 0.001, not the group's lr
        ("WarmupCosineLR", {"total_num_steps": 4, "warmup_num_steps": 2, "warmup_type": "linear", "cos_min_ratio": 0.0},
         [0, 0, 0.25, 0.25, 0]),
        ("LRRangeTest", {"lr_range_test_step_size": 1}, [0.001, 0.002, 0.003]),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3, "cycle_first_step_size": 2}, [0.1, 0.2, 0.3, 0.2, 0.1]),
        ("WarmupLR", {"warmup_num_steps": 1}, [0, 0, 0.5]),  # one step is read as two, as in DeepSpeed
    ],
)  # fmt: skip
def test_the_five_by_name(name: str, params: dict[str, Any], expected: list[float]) -> None:
    adamw = optimizer(0.5)
    assert lrs(build_scheduler(name, params, adamw), adamw, len(expected)) == pytest.approx(expected, abs=1e-12)


def test_one_cycle_leaves_momentum_of_sgd_alone() -> None:
    sgd = optimizer(0.5, cls=torch.optim.SGD)
    scheduler = build_scheduler("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3}, sgd)
    assert scheduler.get_mom() is None
    assert "betas" not in sgd.param_groups[0]


def test_torch_schedulers_by_name() -> None:
    adamw = optimizer(1.0)
    scheduler = build_scheduler("StepLR", {"step_size": 2, "gamma": 0.5}, adamw)
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    names = torch_scheduler_names()
    assert {"CosineAnnealingLR", "OneCycleLR", "LinearLR", "PolynomialLR"} <= set(names)
    assert not {"LRScheduler", "SequentialLR", "LambdaLR"} & set(names)


@pytest.mark.parametrize(
    ("name", "params", "where", "words"),
    [
        ("WarmupRL", {}, "scheduler.type", "Did you mean WarmupLR?"),
        ("warmuplr", {}, "scheduler.type", "Did you mean WarmupLR?"),
        ("LambdaLR", {}, "scheduler.type", "no such scheduler"),
        ("WarmupLR", {"warmup_steps": 3}, "scheduler.params.warmup_steps", "warmup_num_steps?"),
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps", "needs it"),
        ("WarmupLR", {"warmup_num_steps": 0}, "scheduler.params.warmup_num_steps", "positive integer"),
        ("WarmupLR", {"warmup_num_steps": "10"}, "scheduler.params.warmup_num_steps", "'10'"),
        ("WarmupLR", {"warmup_type": "cubic"}, "scheduler.params.warmup_type", "log or linear"),
        ("WarmupLR", {"warmup_max_lr": [0.1, 0.2]}, "scheduler.params.warmup_max_lr", "2 values"),
        ("OneCycle", {"cycle_min_lr": 0.1}, "scheduler.params.cycle_max_lr", "needs it"),
        ("StepLR", {}, "scheduler.params.step_size", "needs it"),
        ("StepLR", {"step_sise": 3, "step_size": 3}, "scheduler.params.step_sise", "Did you mean step_size?"),
    ],
)
def test_refusals_say_where_and_what_to_do(name: str, params: dict[str, Any], where: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_scheduler(name, params, optimizer())
    assert raised.value.where == where
    assert words in str(raised.value)
