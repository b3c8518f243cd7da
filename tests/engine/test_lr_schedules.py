"""Learning rate schedules: the curves as tables, the scheduler that steps along them, and their
names in ds_config."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.late import make_late
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.engine.build import choose_lr_scheduler
from zero_trial.engine.lr_schedules import (
    Curve,
    CurveScheduler,
    Cycle,
    OneCycle,
    RangeTest,
    Warmup,
    WarmupCosine,
    WarmupType,
    build_scheduler,
    torch_scheduler_names,
)
from zero_trial.errors import CheckpointError, ConfigError


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
        # one step is read as two, as in DeepSpeed
        ("WarmupLR", {"warmup_num_steps": 1}, [0, 0, 0.5]),
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


LINEAR = WarmupType.LINEAR


def table(curve: Curve, start: int = -1, count: int = 8) -> list[float]:
    return [curve.lrs(iteration)[0] for iteration in range(start, start + count)]


def test_linear_warmup_starts_at_the_minimum_twice() -> None:
    curve = Warmup([0.0], [1.0], num_steps=4, kind=LINEAR)
    assert table(curve) == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_log_warmup_is_full_one_step_earlier() -> None:
    curve = Warmup([0.0], [1.0], num_steps=8)
    expected = [0.0, 0.0] + [math.log(i) / math.log(8) for i in range(2, 9)] + [1.0]
    assert table(curve, count=10) == pytest.approx(expected, abs=1e-15)
    assert curve.lrs(3)[0] == pytest.approx(2 / 3)  # log 4 / log 8


def test_groups_have_their_own_ends() -> None:
    curve = Warmup([0.0, 1.0], [1.0, 3.0], num_steps=2, kind=LINEAR)
    assert [curve.lrs(i) for i in (-1, 1, 2)] == [[0.0, 1.0], [0.5, 2.0], [1.0, 3.0]]


def test_decay_is_linear_to_the_minimum_and_stays() -> None:
    curve = Warmup([0.1], [1.1], num_steps=2, kind=LINEAR, total_steps=6)
    assert table(curve, count=9) == pytest.approx([0.1, 0.1, 0.6, 1.1, 0.85, 0.6, 0.35, 0.1, 0.1])


@pytest.mark.parametrize("total", [1, 2, 3])
def test_a_total_within_the_warmup_jumps_to_the_minimum(total: int) -> None:
    curve = Warmup([0.0], [1.0], num_steps=3, kind=LINEAR, total_steps=total)
    assert table(curve, count=6) == pytest.approx([0.0, 0.0, 1 / 3, 2 / 3, 0.0, 0.0])


def test_cosine_halfway_and_floor() -> None:
    curve = WarmupCosine([2.0], num_steps=2, total_steps=6, min_ratio=0.5, end_ratio=0.1, kind=LINEAR)
    ratios = [0.0, 0.5, 0.75]  # before the first step, then the warmup
    ratios += [0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2 for progress in (0.25, 0.5, 0.75, 1.0, 1.0)]
    assert table(curve) == pytest.approx([2.0 * ratio for ratio in ratios])
    assert curve.ratio(3) == pytest.approx(0.55)


def test_range_test_rises_evenly_or_in_stairs() -> None:
    even = RangeTest([0.1], step_size=2, step_rate=1.0)
    stairs = RangeTest([0.1], step_size=2, step_rate=1.0, staircase=True)
    assert table(even, count=5) == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3])
    assert table(stairs, count=5) == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3])


def test_one_cycle_up_down_then_decay() -> None:
    curve = OneCycle(1, Cycle(2.0, 4.0), min_lr=1.0, max_lr=3.0, decay_lr_rate=1.0, decay_step_size=2.0)
    #                                  up        down                  foot  decay: 1/(1+n/2)
    expected = [1.0, 2.0, 3.0, 2.5, 2.0, 1.5, 1.0, 1 / 1.5, 1 / 2.0, 1 / 2.5]
    assert table(curve, count=10) == pytest.approx(expected)


def test_one_cycle_momentum_runs_against_the_lr() -> None:
    curve = OneCycle(2, Cycle(2.0, 2.0), 1.0, 3.0, decay_step_size=1.0, momentum=(0.8, 0.9, 0.5))
    betas = [curve.betas(i) for i in range(-1, 6)]
    first = [pair[0][0] for pair in betas if pair is not None]
    assert first == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.5, 0.9 * 2.0])
    assert betas[0] == [(0.8, 0.99)] * 2
    assert OneCycle(1, Cycle(), 1.0, 3.0).betas(0) is None


def test_no_decay_without_interval_or_rate() -> None:
    for rate, size in ((0.0, 2.0), (1.0, 0.0)):
        curve = OneCycle(1, Cycle(1.0, 1.0), 1.0, 3.0, decay_lr_rate=rate, decay_step_size=size)
        assert table(curve, start=2, count=3) == [1.0, 1.0, 1.0]


def test_stairs_reach_the_peak_even_in_an_uneven_cycle() -> None:
    cycle = Cycle(7.0, 5.0, first_stairs=3, second_stairs=2)
    heights = [cycle.height(i) for i in range(-1, 11)]
    assert heights == pytest.approx([0, 0, 0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1, 0.5, 0.5, 0, 0])


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


PLAIN: dict[str, Any] = {"train_batch_size": 1}
WARM = PLAIN | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)


def test_a_clients_wins_over_ds_configs() -> None:
    base = sgd()
    own = torch.optim.lr_scheduler.StepLR(base, 1)
    assert choose_lr_scheduler(base, own, read_ds_config(WARM)) is own
    made = choose_lr_scheduler(
        base, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1), read_ds_config(WARM)
    )
    assert made.optimizer is base
    theirs = choose_lr_scheduler(base, None, read_ds_config(WARM))
    assert theirs.get_last_lr() != [1.0], "it warms up from the start"


def test_none_where_there_is_nothing_to_schedule() -> None:
    assert choose_lr_scheduler(sgd(), None, read_ds_config(PLAIN)) is None
    assert choose_lr_scheduler(None, None, read_ds_config(WARM)) is None


def test_that_of_another_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="belongs to another optimizer"):
        choose_lr_scheduler(sgd(), torch.optim.lr_scheduler.StepLR(sgd(), 1), read_ds_config(PLAIN))


class Wrapper(torch.optim.Optimizer):
    """As launchers of several frameworks put one around an optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults, self.state = inner, inner.defaults, inner.state
        self.param_groups = inner.param_groups


def test_that_of_a_wrapper_around_the_engines_is_taken() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    theirs = torch.optim.lr_scheduler.ConstantLR(Wrapper(optimizer), factor=0.5)
    assert choose_lr_scheduler(optimizer, theirs, read_ds_config(PLAIN)) is theirs
    assert optimizer.param_groups[0]["lr"] == 0.5


# --- what is said of them -------------------------------------------------------------------------


TO_HALF = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 10}}}


def said(caplog: pytest.LogCaptureFixture, optimizer: Any, *, rates: tuple[float | None, ...] = (), **more: Any) -> str:
    """The warnings of an engine that is built; ``rates`` of the weight's and the bias' group."""
    net = nn.Linear(2, 2)
    groups = [
        {"params": [p]} | ({"lr": rate} if rate else {}) for p, rate in zip(net.parameters(), rates, strict=False)
    ]
    caplog.clear()
    with caplog.at_level("WARNING", "zero_trial"):
        given = optimizer(groups or net.parameters()) if callable(optimizer) else None
        config = {"train_batch_size": 1} | ({} if given else {"optimizer": optimizer}) | more
        zero_trial.initialize(model=net, config=config, optimizer=given, model_parameters=groups or None)[0].destroy()
    return "\n".join(caplog.messages)


def test_rates_of_code_that_the_scheduler_replaces_are_said(caplog: pytest.LogCaptureFixture) -> None:
    text = said(caplog, lambda params: torch.optim.SGD(params, lr=0.02), **TO_HALF)
    assert "0.02 of group 0" in text and "warmup_max_lr" in text
    named = {"type": "SGD", "params": {"lr": 0.5}}
    assert "0.03 of group 1" in said(caplog, named, rates=(None, 0.03), **TO_HALF)
    silent = [
        said(caplog, named, **TO_HALF),
        said(caplog, named, rates=(0.5, 0.5), **TO_HALF),
        said(caplog, {"type": "SGD", "params": {}}, **TO_HALF),
        said(caplog, lambda params: torch.optim.AdamW(params), **TO_HALF),
        said(caplog, lambda params: torch.optim.SGD(params, lr=0.02)),
        said(caplog, lambda params: torch.optim.SGD(params, lr=0.02), scheduler={"type": "WarmupLR", "params": {}}),
    ]
    assert not any("set in code" in text for text in silent)


@pytest.mark.parametrize("late", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("both", [False, True])
def test_a_scheduler_that_two_step_is_said_once(caplog: pytest.LogCaptureFixture, both: bool, late: bool) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine = zero_trial.initialize(
        model=net, optimizer=optimizer, lr_scheduler=scheduler, config={"train_batch_size": 1}
    )[0]
    if late:
        make_late(engine)
    with caplog.at_level("WARNING", "zero_trial"):
        for _ in range(4):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
            if both:
                scheduler.step()
    assert sum("StepLR" in line for line in caplog.messages) == both
