"""Every optimizer and schedule that ds_config or the client can give, on shards, against the same
class in plain torch.

Clipping is on throughout: unscaling and clipping reach the different optimizers by different ways.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.dense import (
    STAGES,
    TOLERANCE,
    Case,
    build_engine,
    compare,
    difference,
    train_dense,
    train_ranks,
)
from tests.support.dense import tower_loss as loss
from tests.support.models import Tower, adamw
from tests.support.pool import Pools
from zero_trial.ops.optimizers import FusedLamb, FusedLion


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0, "lr": 0.004},
        {"params": [p for n, p in named if not n.endswith("bias")]},
    ]


OPTIMIZERS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "Adam": ("Adam", {"lr": 2e-3, "weight_decay": 0.1, "betas": [0.8, 0.95], "eps": 1e-6}, torch.optim.AdamW),
    "Adam L2": ("Adam", {"lr": 2e-3, "weight_decay": 0.1, "adam_w_mode": False}, torch.optim.Adam),
    "AdamW amsgrad": ("AdamW", {"lr": 2e-3, "amsgrad": True, "torch_adam": True}, torch.optim.AdamW),
    "SGD": ("SGD", {"lr": 0.05}, torch.optim.SGD),
    "SGD nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, torch.optim.SGD),
    "SGD dampening": ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}, torch.optim.SGD),
    "Adagrad": ("Adagrad", {"lr": 0.02, "lr_decay": 0.1, "initial_accumulator_value": 0.2}, torch.optim.Adagrad),
    "RMSprop": ("RMSprop", {"lr": 0.002, "momentum": 0.5, "centered": True}, torch.optim.RMSprop),
    "NAdam": ("NAdam", {"lr": 0.002}, torch.optim.NAdam),
    "RAdam": ("RAdam", {"lr": 0.002}, torch.optim.RAdam),
    "Adamax": ("Adamax", {"lr": 0.002}, torch.optim.Adamax),
    "Adadelta": ("Adadelta", {"lr": 0.5}, torch.optim.Adadelta),
    "ASGD": ("ASGD", {"lr": 0.02, "t0": 2}, torch.optim.ASGD),
    "Lion": ("Lion", {"lr": 3e-4, "weight_decay": 0.1}, FusedLion),
    "Lamb": ("Lamb", {"lr": 3e-3, "weight_decay": 0.01}, FusedLamb),
}


def by_name(name: str) -> Case:
    kind, params, cls = OPTIMIZERS[name]
    own = {"adam_w_mode", "torch_adam"}
    theirs = {
        key: tuple(value) if isinstance(value, list) else value for key, value in params.items() if key not in own
    }
    if kind == "AdamW" and "torch_adam" not in params:
        theirs.setdefault("weight_decay", 0.0)
    optimizer = {"type": kind, "params": params}
    return Case(
        Tower,
        loss,
        groups=two_groups,
        optimizer=optimizer,
        dense_optimizer=lambda g: cls(g, **theirs),
        clip=0.2,
        steps=5,
    )


def train_named(name: str, stage: str) -> float:
    return compare(by_name(name), STAGES[stage])


@pytest.mark.parametrize("stage", ["zero0", "zero1", "zero3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_by_name(ranks: Pools, name: str, stage: str) -> None:
    for gap in ranks(2).run(train_named, name, stage):
        assert gap <= TOLERANCE


class Mine(torch.optim.SGD):
    """A client's own class; elementwise like its base."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad.sign() * param.grad.abs().log1p(), alpha=group["lr"])


# Each passes the rounding of a gradient on at no more than its own size: see
# tests/support/models.py.
CLIENTS: dict[str, Any] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.1, eps=1e-3),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.1, eps=1e-3, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.02, initial_accumulator_value=0.2),
    "Lamb": lambda groups: FusedLamb(groups, lr=3e-3, eps=1e-3),
    "own class": lambda groups: Mine(groups, lr=0.01),
}


def train_client(name: str, stage: str, as_object: bool) -> float:
    make = CLIENTS[name]
    case = Case(Tower, loss, groups=two_groups, dense_optimizer=make, clip=0.2)
    torch.manual_seed(1)
    model = Tower()
    case_here = Case(lambda: model, loss, clip=0.2, config={"optimizer": None})
    given = (
        {"optimizer": make(two_groups(model))}
        if as_object
        else {"optimizer": make, "model_parameters": two_groups(model)}
    )
    engine = build_engine(case_here, STAGES[stage], **given)
    assert not as_object or engine.optimizer.base is given["optimizer"]
    steps = list(zip(train_dense(case, 2), train_ranks(case, engine), strict=True))
    return difference(engine, steps[-1][0])


@pytest.mark.parametrize("as_object", [True, False], ids=["object", "callable"])
@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3"])
@pytest.mark.parametrize("name", CLIENTS)
def test_client_optimizer(ranks: Pools, name: str, stage: str, as_object: bool) -> None:
    for gap in ranks(2).run(train_client, name, stage, as_object):
        assert gap <= TOLERANCE


# --- schedules ------------------------------------------------------------------------------------


def lr_lambda(step: int) -> float:
    return 1.0 / (1 + step)


def half_way(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)


TORCH_SCHEDULES: dict[str, tuple[dict[str, Any], Any]] = {
    "StepLR": ({"step_size": 2, "gamma": 0.1}, torch.optim.lr_scheduler.StepLR),
    "CosineAnnealingLR": ({"T_max": 5}, torch.optim.lr_scheduler.CosineAnnealingLR),
    "OneCycleLR": ({"max_lr": 0.01, "total_steps": 10}, torch.optim.lr_scheduler.OneCycleLR),
    "ExponentialLR": ({"gamma": 0.5}, torch.optim.lr_scheduler.ExponentialLR),
}


def scheduled(name: str, stage: str) -> tuple[float, list[float], list[float]]:
    """(difference of parameters, our lr of the second group before every step, plain torch's)."""
    params, cls = TORCH_SCHEDULES[name]
    case = Case(
        Tower,
        loss,
        groups=two_groups,
        dense_schedule=lambda optimizer: cls(optimizer, **params),
        config={"scheduler": {"type": name, "params": params}},
        accumulation=2,
    )
    return follow(case, stage)


def client_schedule(kind: str, stage: str) -> tuple[float, list[float], list[float]]:
    case = Case(Tower, loss, groups=two_groups, dense_schedule=half_way, accumulation=2)
    torch.manual_seed(1)
    model = Tower()
    here = Case(lambda: model, loss, accumulation=2)
    if kind == "callable":
        return follow(
            case, stage, build_engine(here, STAGES[stage], model_parameters=two_groups(model), lr_scheduler=half_way)
        )
    optimizer = adamw(two_groups(model))
    return follow(case, stage, build_engine(here, STAGES[stage], optimizer=optimizer, lr_scheduler=half_way(optimizer)))


def follow(case: Case, stage: str, engine: Any = None) -> tuple[float, list[float], list[float]]:
    engine = engine if engine is not None else build_engine(case, STAGES[stage])
    plain = torch.optim.AdamW(two_groups(Tower()), lr=1e-3)
    assert case.dense_schedule is not None
    schedule, ours, theirs = case.dense_schedule(plain), [], []
    dense = train_dense(case, 2)
    for _ in train_ranks(case, engine):
        reference = next(dense)
        plain.step()
        schedule.step()
        ours.append(engine.get_lr()[1])
        theirs.append(plain.param_groups[1]["lr"])
    return difference(engine, reference), ours, theirs


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@pytest.mark.parametrize("name", TORCH_SCHEDULES)
def test_torch_schedule_by_name(ranks: Pools, name: str, stage: str) -> None:
    for gap, ours, theirs in ranks(2).run(scheduled, name, stage):
        assert gap <= TOLERANCE
        assert ours == theirs


@pytest.mark.parametrize("stage", ["zero0", "zero3"])
@pytest.mark.parametrize("kind", ["object", "callable"])
def test_client_schedule(ranks: Pools, kind: str, stage: str) -> None:
    for gap, ours, theirs in ranks(2).run(client_schedule, kind, stage):
        assert gap <= TOLERANCE
        assert ours == theirs
