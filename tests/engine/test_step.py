"""Steps that the host decides: applied, skipped, undone; what a gradient that is not finite is
called; the read-back of a device's numbers.

Overflows on several ranks: test_behaviour_precision; steps that the device decides:
test_deferred_step.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import zero_trial
from tests.support.models import make_engine
from zero_trial.engine.lr_schedules import build_scheduler
from zero_trial.engine.outcome import (
    NonFiniteStep,
    PinnedReadback,
    agree_on_culprit,
    can_undo,
    local_culprits,
    step_with_undo,
    with_culprit,
)
from zero_trial.errors import Diverged, TrialError
from zero_trial.sharding.guards.freed import unasked


def one_weight(value: float = 3.0, **config: object) -> zero_trial.Engine:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([value]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).sum()

    defaults = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    return make_engine(Model, defaults | config)


def step(engine: zero_trial.Engine, gradient: float) -> float:
    engine.backward(engine(torch.tensor([gradient])))
    engine.step()
    return float(engine.module.weight.detach())


def test_a_step_is_applied_clipped_and_counted():
    engine = one_weight(gradient_clipping=0.5)
    result = engine.outcome.result()
    assert not engine.outcome.deferred and result.norm is None and not result.applied and not engine.outcome.open
    assert step(engine, 2.0) == pytest.approx(2.5)
    assert engine.outcome.result() is result
    assert (result.norm, result.applied, result.skipped, result.nonfinite) == (2.0, True, 0, None)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_step_without_a_finite_norm_is_skipped(bad: float) -> None:
    engine = one_weight()
    assert step(engine, bad) == 3.0
    result = engine.outcome.result()
    assert not result.applied and result.skipped == 1 and not math.isfinite(result.norm or 0.0)
    assert result.nonfinite is not None and result.nonfinite.parameter == "weight"
    assert step(engine, 1.0) == 2.0 and result.applied and result.skipped == 1


def test_gradients_are_divided_by_ranks_wire_and_loss_scale():
    engine = one_weight(fp16={"enabled": True, "loss_scale": 8})
    assert engine.outcome.gradient_multiplier() == 1 / 8
    assert engine.sharded.param_grads.multiplier() == 1 / 8


def test_the_engine_shows_the_outcome():
    engine = one_weight()
    step(engine, math.inf)
    assert (engine.skipped_steps, engine.was_step_applied()) == (1, False)
    result = engine.outcome.result()
    assert (
        engine.last_nonfinite is result.nonfinite and engine.loss_scale == engine.cur_scale == result.loss_scale.scale
    )


def test_between_boundaries_no_step_was_applied():
    engine = one_weight(train_batch_size=2, train_micro_batch_size_per_gpu=1)
    step(engine, 1.0)
    assert not engine.was_step_applied()
    step(engine, 1.0)
    assert engine.was_step_applied()
    step(engine, 1.0)
    assert not engine.was_step_applied()


def test_which_steps_were_skipped():
    engine = one_weight()
    for gradient in (math.inf, 1.0, math.nan, 1.0):
        step(engine, gradient)
    ranges = ((0, 4), (0, 1), (1, 2), (2, 3), (3, 4), (0, 0))
    assert [engine.skipped_between(first, end) for first, end in ranges] == [2, 1, 0, 1, 0, 0]


@pytest.mark.parametrize(("rank", "who"), [(3, "on rank 3"), (0, "on rank 0"), (None, "in the sum over ranks")])
def test_one_line_says_which_step_parameter_and_rank(rank: int | None, who: str):
    assert (
        NonFiniteStep(7, rank, "head.weight").describe() == f"step 7: the gradient of head.weight is not finite {who}"
    )


def test_the_end_of_a_run_names_the_culprit():
    error = Diverged("no scale left", where="loss scale", got="scale 1", expected="more", fix="Use bf16.")
    assert with_culprit(error, None) is error
    text = str(with_culprit(error, NonFiniteStep(2, 1, "a.b")))
    assert (
        text
        == "loss scale: no scale left: got scale 1, and step 2: the gradient of a.b is not finite on rank 1, expected more. Use bf16."
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["0.bias", "2.weight"])
def test_a_single_rank_names_itself(stage: int, name: str):
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2))
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 0},
    }
    engine = zero_trial.initialize(model=model, config=config)[0]
    before = engine.module_state_dict()
    before = {key: value.clone() for key, value in before.items()}
    dict(model.named_parameters())[name].register_hook(lambda grad: grad * float("nan"))
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    assert engine.last_nonfinite == NonFiniteStep(0, 0, name)
    assert not engine.was_step_applied()
    assert engine.skipped_steps == engine.global_steps == 1
    assert all(torch.equal(value, before[key]) for key, value in engine.module_state_dict().items())


class Outside(nn.Module):
    """Reads the weights of blocks whose forward never runs; ``unasked``: as the functions of a C++
    extension do it."""

    def __init__(self, unasked: bool) -> None:
        super().__init__()
        self.unasked = unasked
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with unasked() if self.unasked else contextlib.nullcontext():
            for layer in self.layers:
                x = nn.functional.linear(x, layer.weight, layer.bias)
        return x.sum()


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize(("threshold", "reported"), [(0, True), (1000, False)])
def test_weights_read_outside_their_forward_are_named(threshold: int, reported: bool, asked: bool):
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": 3, "param_persistence_threshold": threshold, "module_granularity_threshold": 1},
    }
    engine = zero_trial.initialize(model=Outside(not asked), config=config)[0]
    if reported and asked:
        with pytest.raises(TrialError, match=r"linear: .*got layers.0.weight"):
            engine(torch.ones(1, 4))
        return
    engine.backward(engine(torch.ones(1, 4)))
    engine.step()
    assert engine.was_step_applied() != reported
    if reported:
        assert engine.last_nonfinite is not None
        text = engine.last_nonfinite.describe()
        assert "the forward of layers." in text
        assert "stage3_param_persistence_threshold" in text


@pytest.mark.parametrize("stage", [0, 2])
def test_evidence_after_something_else_has_landed(stage: int) -> None:
    """On CUDA nobody looks while gradients are reduced: the shards tell, and when they were
    overwritten, the sums tell the unit."""
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2))
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 130},
    }
    engine = zero_trial.initialize(model=model, config=config)[0]
    model.get_parameter("2.weight").register_hook(lambda grad: grad * float("nan"))
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.sharded.reducer.reduce_missing()
    sums, sharded = dict(engine.sharded.reducer.square_sums), engine.sharded
    assert len(sharded.groups) > 1
    (row,) = local_culprits(sharded, [], sums)
    assert row == local_culprits(sharded, [])[0]
    number = row[2]
    assert row == (2, 0, number, "2.weight")
    for landing in sharded.grad_buffers:
        landing.shard.zero_()
    assert local_culprits(sharded, []) == []
    unit = sharded.groups[number]
    assert local_culprits(sharded, [], sums) == [(3, 0, number, unit.name)]
    assert agree_on_culprit(sharded, 4, [(3, 0, number, unit.name)], lambda block: True) == NonFiniteStep(
        4, None, unit.name
    )


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


def test_what_is_received_is_what_was_there_when_it_was_sent():
    courier = PinnedReadback(torch.device("cpu"), 3)
    courier.there.copy_(torch.tensor([1.0, 2.0, 3.0]))
    courier.send()
    courier.there.zero_()
    assert courier.received == 0
    assert courier.receive().tolist() == [1.0, 2.0, 3.0]
    assert courier.received == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sending_from_a_busy_device_does_not_wait():
    courier = PinnedReadback(torch.device("cuda", 0), 1)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = torch.nn.functional.normalize(busy @ busy)
    courier.there.copy_(busy[0, :1])
    torch.cuda.set_sync_debug_mode("error")
    try:
        courier.send()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert courier.receive().item() == busy[0, 0].item()
