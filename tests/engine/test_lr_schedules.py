"""Learning rate schedules: their values as tables, around any optimizer and by their names in
ds_config."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.engine.lr_schedules import OneCycle, WarmupLR, build_scheduler, choose_lr_scheduler, missing_arguments
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


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        # one step is read as two, as in DeepSpeed
        ("WarmupLR", {"warmup_num_steps": 1}, [0, 0, 0.5]),
        ("WarmupLR", {"warmup_num_steps": 0}, [0.5, 0.5, 0.5]),
        ("WarmupDecayLR", {"total_num_steps": 2, "warmup_num_steps": 0}, [0.001, 0.001, 0.0005, 0]),
        ("WarmupCosineLR", {"total_num_steps": 2, "warmup_num_steps": 0, "cos_min_ratio": 0.0}, [0.5, 0.25, 0, 0]),
    ],
)  # fmt: skip
def test_warm_ups_of_no_step_and_of_one(name: str, params: dict[str, Any], expected: list[float]) -> None:
    adamw = optimizer(0.5)
    assert lrs(build_scheduler(name, params, adamw), adamw, len(expected)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "params", "where", "words"),
    [
        ("WarmupRL", {}, "scheduler.type", "Did you mean WarmupLR?"),
        ("warmuplr", {}, "scheduler.type", "Did you mean WarmupLR?"),
        ("LambdaLR", {}, "scheduler.type", "no such scheduler"),
        ("WarmupLR", {"warmup_steps": 3}, "scheduler.params.warmup_steps", "warmup_num_steps?"),
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps", "needs it"),
        ("WarmupLR", {"warmup_num_steps": -1}, "scheduler.params.warmup_num_steps", "positive integer"),
        ("WarmupLR", {"warmup_num_steps": "10"}, "scheduler.params.warmup_num_steps", "'10'"),
        ("WarmupLR", {"warmup_type": "cubic"}, "scheduler.params.warmup_type", "log or linear"),
        (
            "WarmupLR",
            {"warmup_max_lr": [0.1, 0.2]},
            "scheduler.params.warmup_max_lr",
            "got [0.1, 0.2], expected a number, or one for each of 1",
        ),
        ("OneCycle", {"cycle_min_lr": 0.1}, "scheduler.params.cycle_max_lr", "needs it"),
        ("StepLR", {}, "scheduler.params.step_size", "needs it"),
        ("StepLR", {"step_sise": 3, "step_size": 3}, "scheduler.params.step_sise", "Did you mean step_size?"),
    ],
)
def test_refusals_say_where_and_what_to_do(name: str, params: dict[str, Any], where: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_scheduler(name, params, optimizer())
    assert raised.value.where == where and words in str(raised.value)


class Groups:
    """Not a torch optimizer: only the groups."""

    def __init__(self, *groups: dict[str, Any]) -> None:
        self.param_groups = list(groups)


def two_groups() -> Groups:
    return Groups({"lr": 0.4, "betas": (0.9, 0.999)}, {"lr": 0.1, "betas": (0.5, 0.999)})


# DeepSpeed 0.19.8's own expressions, in its order of operations, for one group: i is the iteration,
# own the group's lr. Its objects give the same bits (compared by hand over these parameters).


def rise(i: int, steps: int, kind: str) -> float:
    return (1.0 / math.log(steps)) * math.log(i + 1) if kind == "log" else i / steps


def warmed(i: int, low: float, high: float, steps: int, kind: str, total: int | None = None) -> float:
    if i < 0:
        return low
    left = 1.0 if total is None else max(0.0, float(total - i) / float(max(1.0, total - steps)))
    return low + (high - low) * (rise(i, steps, kind) if i < steps else left)


def cosine(i: int, own: float, steps: int, total: int, low: float, end: float, kind: str) -> float:
    if i < 0:
        return own * 0.0
    if i < steps:
        return own * (low + rise(i, steps, kind) * (1.0 - low))
    progress = min(1.0, (i - steps + 1) / max(1, total - steps))
    return own * max(0.0, end + (1.0 - end) * ((1 + math.cos(math.pi * progress)) / 2))


def height(i: int, up: float, down: float, stairs: tuple[int, int] = (0, 0)) -> float:
    step, size = i + 1, up + down
    x = 1.0 + step / size - math.floor(1 + step / size)
    rising = x <= up / size
    if count := stairs[0 if rising else 1]:
        at = step % size
        return math.floor(at * count / up if at <= up else (size - at) * count / down) / count
    return x / (up / size) if rising else (x - 1) / (up / size - 1)


def cycled(i: int, low: float, high: float, up: float, down: float, rate: float = 0.0, every: float = 0.0,
           stairs: tuple[int, int] = (0, 0)) -> float:  # fmt: skip
    if i < up + down:
        return low + (high - low) * height(i, up, down, stairs)
    return low / (1 + rate * ((i - (up + down) + 1) / every)) if rate and every else low


CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("WarmupLR", {"warmup_num_steps": 37}, lambda i, g, own: warmed(i, 0.0, own, 37, "log")),
    ("WarmupLR", {"warmup_min_lr": [0.01, 0.02], "warmup_max_lr": 0.3, "warmup_num_steps": 41, "warmup_type": "linear"},
     lambda i, g, own: warmed(i, [0.01, 0.02][g], 0.3, 41, "linear")),
    ("WarmupDecayLR", {"total_num_steps": 173, "warmup_num_steps": 29, "warmup_max_lr": [0.7, 0.3]},
     lambda i, g, own: warmed(i, 0.0, [0.7, 0.3][g], 29, "log", 173)),
    ("WarmupDecayLR", {"total_num_steps": 20, "warmup_num_steps": 60, "warmup_type": "linear"},
     lambda i, g, own: warmed(i, 0.0, 0.001, 60, "linear", 20)),
    ("WarmupCosineLR", {"total_num_steps": 171, "warmup_num_steps": 31, "warmup_min_ratio": 0.1},
     lambda i, g, own: cosine(i, own, 31, 171, 0.1, 0.0001, "log")),
    ("WarmupCosineLR", {"total_num_steps": 300, "warmup_num_steps": 7, "cos_min_ratio": 0.3, "warmup_type": "linear"},
     lambda i, g, own: cosine(i, own, 7, 300, 0.0, 0.3, "linear")),
    ("LRRangeTest", {"lr_range_test_min_lr": [0.1, 0.003], "lr_range_test_step_size": 7, "lr_range_test_step_rate": 1.3},
     lambda i, g, own: [0.1, 0.003][g] * (1 + 1.3 * (float(i + 1) / 7))),
    ("LRRangeTest", {"lr_range_test_step_size": 9, "lr_range_test_staircase": True},
     lambda i, g, own: 1e-3 * (1 + 1.0 * math.floor(float(i + 1) / 9))),
    ("OneCycle", {"cycle_min_lr": [0.01, 0.03], "cycle_max_lr": [0.3, 0.1], "cycle_first_step_size": 47,
                  "cycle_second_step_size": 83, "decay_lr_rate": 0.3, "decay_step_size": 11},
     lambda i, g, own: cycled(i, [0.01, 0.03][g], [0.3, 0.1][g], 47.0, 83.0, 0.3, 11)),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.3, "cycle_first_step_size": 70, "cycle_first_stair_count": 9,
                  "cycle_second_stair_count": 4},
     lambda i, g, own: cycled(i, 0.01, 0.3, 70.0, 70.0, stairs=(9, 4))),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.3, "cycle_first_step_size": 90, "cycle_second_step_size": 0},
     lambda i, g, own: cycled(i, 0.01, 0.3, 90.0, 0.0)),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.3, "cycle_first_step_size": 9, "decay_lr_rate": 1.0},
     lambda i, g, own: cycled(i, 0.01, 0.3, 9.0, 9.0)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "params", "expected"), CASES)
def test_two_hundred_steps_have_deepspeeds_bits(name: str, params: dict[str, Any], expected: Any) -> None:
    optimizer = two_groups()
    scheduler = build_scheduler(name, params, optimizer)
    for iteration in range(-1, 200):
        wanted = [expected(iteration, index, own) for index, own in enumerate((0.4, 0.1))]
        assert [group["lr"] for group in optimizer.param_groups] == wanted, iteration
        assert scheduler.get_lr() == scheduler.get_last_lr() == wanted
        if iteration == 50:  # another one goes on with its state, which is JSON
            state = json.loads(json.dumps(scheduler.state_dict()))
            optimizer = two_groups()
            scheduler = build_scheduler(name, params, optimizer)
            scheduler.load_state_dict(state)
            assert [group["lr"] for group in optimizer.param_groups] == wanted
        scheduler.step()


def test_one_cycle_momenta_have_deepspeeds_bits() -> None:
    optimizer = two_groups()
    low, high = (0.8, 0.7), (0.9, 0.95)
    scheduler = OneCycle(optimizer, 0.01, 0.3, cycle_first_step_size=31, cycle_second_step_size=44, decay_step_size=13,
                         cycle_min_mom=list(low), cycle_max_mom=list(high), decay_mom_rate=0.01)  # fmt: skip
    assert [group["betas"] for group in optimizer.param_groups] == [(0.8, 0.99), (0.7, 0.99)]
    assert scheduler.get_mom() == [(0.9, 0.99), (0.95, 0.99)]  # as in DeepSpeed, until the first step
    for iteration in range(200):
        scheduler.step()
        if iteration < 75:
            wanted = [top - (top - foot) * height(iteration, 31.0, 44.0) for foot, top in zip(low, high, strict=True)]
        else:
            wanted = [top * (1 + 0.01 * ((iteration - 75.0 + 1) / 13)) for top in high]
        assert [group["betas"] for group in optimizer.param_groups] == [(beta, 0.99) for beta in wanted], iteration


def test_a_wrapper_without_groups_gives_its_optimizer() -> None:
    class Wrapped:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)

    assert WarmupLR(Wrapped(), warmup_num_steps=4).optimizer is Wrapped.optimizer  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is not a subclass"):
        WarmupLR(object())  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "params", "expected"), CASES[::4])
def test_a_tensor_lr_is_filled_in_place(name: str, params: dict[str, Any], expected: Any) -> None:
    rates = [torch.full((), own, dtype=torch.float64) for own in (0.4, 0.1)]
    scheduler = build_scheduler(name, params, Groups(*({"lr": rate, "betas": (0.9, 0.99)} for rate in rates)))
    scheduler.step(3)
    assert [group["lr"] for group in scheduler.optimizer.param_groups] == rates
    assert all(group["lr"] is rate for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True))
    for index, own in enumerate((0.4, 0.1)):
        assert rates[index].item() == pytest.approx(expected(3, index, own), rel=1e-15)


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


@pytest.mark.parametrize(
    "client",
    [
        torch.optim.lr_scheduler.StepLR,  # needs a step_size
        lambda optimizer: None,
        lambda optimizer: torch.optim.lr_scheduler.ConstantLR,
        lambda optimizer: torch.optim.lr_scheduler.ConstantLR(sgd()),
        "cosine",
    ],
)
def test_what_gives_no_scheduler_of_the_engines_optimizer_is_refused(client: Any) -> None:
    with pytest.raises(ConfigError, match=r"lr_scheduler=lambda optimizer"):
        choose_lr_scheduler(sgd(), client, read_ds_config(PLAIN))


class PassesAll:
    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self, *args: Any, **kwargs: Any) -> None: ...


class HasItsOwn(PassesAll):
    def step(self, metrics: Any = None, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(("outside", "needed"), [(PassesAll, ["metrics"]), (HasItsOwn, [])])
def test_the_metric_that_a_wrapper_passes_on(outside: type[PassesAll], needed: list[str]) -> None:
    inside = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd())
    assert missing_arguments(outside(inside), {}) == needed
    assert missing_arguments(outside(inside), {"metrics": 1.0}) == [] and missing_arguments(outside(None), {}) == []
