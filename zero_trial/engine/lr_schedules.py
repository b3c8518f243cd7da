"""Learning rate as a pure function of the iteration, with DeepSpeed 0.19.8's arithmetic.

``iteration`` counts scheduler steps: -1 before the first, then 0, 1, 2 ... A curve gives one lr per
parameter group. As in DeepSpeed the first optimizer step runs at iteration -1 and the second at 0,
which for the warmups is the minimum twice.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.util.text import did_you_mean

__all__ = ["CurveScheduler", "build_scheduler"]

Momenta = list[tuple[float, float]]


class WarmupType(Enum):
    """How the warmup rises: ``log`` fast first, ``linear`` evenly."""

    LOG = "log"
    LINEAR = "linear"


class Curve(Protocol):
    """What a scheduler steps along."""

    def lrs(self, iteration: int) -> list[float]:
        """Return one learning rate per parameter group."""

    def betas(self, iteration: int) -> Momenta | None:
        """Return one pair of betas per parameter group; None leaves the optimizer's own."""


def warmup_factor(iteration: int, num_steps: int, kind: WarmupType) -> float:
    """Return 0 at iteration 0, 1 at ``num_steps`` (linear) or one before it (log: log(i + 1) /
    log(num_steps)); num_steps >= 2."""
    if kind is WarmupType.LOG:
        return (1.0 / math.log(num_steps)) * math.log(iteration + 1)
    return iteration / num_steps


@dataclass(frozen=True)
class Warmup:
    """From ``min_lrs`` to ``max_lrs`` in ``num_steps``, then constant; or, with ``total_steps``,
    linear to 0 there."""

    min_lrs: Sequence[float]
    max_lrs: Sequence[float]
    num_steps: int
    kind: WarmupType = WarmupType.LOG
    total_steps: int | None = None

    def factor(self, iteration: int) -> float:
        """Return the lr's place between minimum (0) and maximum (1), from iteration 0 on."""
        if iteration < self.num_steps:
            return warmup_factor(iteration, self.num_steps, self.kind)
        if self.total_steps is None:
            return 1.0
        return max(0.0, float(self.total_steps - iteration) / float(max(1.0, self.total_steps - self.num_steps)))

    def lrs(self, iteration: int) -> list[float]:
        if iteration < 0:
            return list(self.min_lrs)
        factor = self.factor(iteration)
        return [low + (high - low) * factor for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def betas(self, iteration: int) -> Momenta | None:
        return None


@dataclass(frozen=True)
class WarmupCosine:
    """Ratios of each group's own lr: ``min_ratio`` to 1 in ``num_steps``, then half a cosine down
    to ``end_ratio``.

    Loshchilov & Hutter 2017, equation 5, without restarts. Before the first scheduler step the lr
    is 0.
    """

    own_lrs: Sequence[float]
    num_steps: int
    total_steps: int
    min_ratio: float = 0.0
    end_ratio: float = 1e-4
    kind: WarmupType = WarmupType.LOG

    def ratio(self, iteration: int) -> float:
        """Return the factor on each group's own lr."""
        if iteration < 0:
            return 0.0
        if iteration < self.num_steps:
            return self.min_ratio + warmup_factor(iteration, self.num_steps, self.kind) * (1.0 - self.min_ratio)
        progress = min(1.0, (iteration - self.num_steps + 1) / max(1, self.total_steps - self.num_steps))
        return max(0.0, self.end_ratio + (1.0 - self.end_ratio) * (1 + math.cos(math.pi * progress)) / 2)

    def lrs(self, iteration: int) -> list[float]:
        ratio = self.ratio(iteration)
        return [lr * ratio for lr in self.own_lrs]

    def betas(self, iteration: int) -> Momenta | None:
        return None


@dataclass(frozen=True)
class RangeTest:
    """Ever rising lr, to find where training breaks (Smith 2018, section 4.1): min * (1 + rate *
    steps / step_size)."""

    min_lrs: Sequence[float]
    step_size: int = 2000
    step_rate: float = 1.0
    staircase: bool = False

    def lrs(self, iteration: int) -> list[float]:
        interval = float(iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [lr * increase for lr in self.min_lrs]

    def betas(self, iteration: int) -> Momenta | None:
        return None


@dataclass(frozen=True)
class Cycle:
    """One rise and one fall in ``first_size`` and ``second_size`` steps, optionally in stairs."""

    first_size: float = 2000.0
    second_size: float = 2000.0
    first_stairs: int = 0
    second_stairs: int = 0

    @property
    def size(self) -> float:
        return self.first_size + self.second_size

    def height(self, iteration: int) -> float:
        """Return 0 at the foot, 1 at the peak; periodic."""
        step, ratio = iteration + 1, self.first_size / self.size
        x = 1.0 + step / self.size - math.floor(1 + step / self.size)
        rising = x <= ratio
        stairs = self.first_stairs if rising else self.second_stairs
        if stairs > 0:
            return math.floor(self._stair(step % self.size, stairs)) / stairs
        return x / ratio if rising else (x - 1) / (ratio - 1)

    def _stair(self, step: float, stairs: int) -> float:
        # from the whole step, not from the height: rounding just below a stair would lose a whole
        # one
        if step <= self.first_size:
            return step * stairs / self.first_size
        return (self.size - step) * stairs / self.second_size


@dataclass(frozen=True)
class OneCycle:
    """lr up and down once while the momentum goes down and up, then decay (Smith 2018, section 4).

    ``momentum`` is None (left alone) or (min, max, decay rate) of beta1; beta2 is 0.99 then, as in
    DeepSpeed.
    """

    groups: int
    cycle: Cycle
    min_lr: float
    max_lr: float
    decay_lr_rate: float = 0.0
    decay_step_size: float = 0.0
    momentum: tuple[float, float, float] | None = None

    BETA2 = 0.99

    def lrs(self, iteration: int) -> list[float]:
        return [self._lr(iteration)] * self.groups

    def _lr(self, iteration: int) -> float:
        if iteration < 0:
            return self.min_lr
        if iteration < self.cycle.size:
            return self.min_lr + (self.max_lr - self.min_lr) * self.cycle.height(iteration)
        return self.min_lr / self._decay(iteration, self.decay_lr_rate)

    def betas(self, iteration: int) -> Momenta | None:
        if self.momentum is None:
            return None
        low, high, decay_rate = self.momentum
        if iteration < 0:
            beta1 = low
        elif iteration < self.cycle.size:
            beta1 = high - (high - low) * self.cycle.height(iteration)
        else:
            beta1 = high * self._decay(iteration, decay_rate)
        return [(beta1, self.BETA2)] * self.groups

    def _decay(self, iteration: int, rate: float) -> float:
        """Return the divisor after the cycle: 1 + rate * intervals of ``decay_step_size`` steps; a
        size of 0 means no decay."""
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return 1.0
        return 1 + rate * ((iteration - self.cycle.size + 1) / self.decay_step_size)


# Steps along a curve and writes its values into an optimizer's parameter groups.


class HasGroups(Protocol):
    """What a scheduler needs of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class CurveScheduler:
    """The scheduler object that the engine and the user see: ``step`` once per applied optimizer
    step.

    Construction writes the values of iteration -1, the ones of the first optimizer step.
    """

    def __init__(self, optimizer: HasGroups, curve: Curve, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.curve = curve
        self.last_batch_iteration = last_batch_iteration
        self._write()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to the given one."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def get_lr(self) -> list[float]:
        """Return the curve's value now, one per group."""
        return self.curve.lrs(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Return the same under torch's name."""
        return self.get_lr()

    def get_mom(self) -> Momenta | None:
        """Return the betas that the curve sets, or None where it leaves them alone."""
        return self.curve.betas(self.last_batch_iteration)

    def state_dict(self) -> dict[str, int]:
        """Return the iteration, as JSON values; the curve itself comes from the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved iteration; the groups get its values at once."""
        if "last_batch_iteration" not in state:
            raise CheckpointError(
                "this is not the state of a schedule by DeepSpeed's name",
                where="lr_scheduler",
                got=sorted(state),
                expected=["last_batch_iteration"],
            )
        self.last_batch_iteration = int(state["last_batch_iteration"])
        self._write()

    def _write(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            own = group.get("lr")
            group["lr"] = torch.full_like(own, lr) if isinstance(own, torch.Tensor) else lr
        momenta = self.get_mom()
        if momenta is not None:
            for group, betas in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = betas


# From ds_config's scheduler name and params to a scheduler on an optimizer.


WHERE = "scheduler.params"


def build_scheduler(name: str, params: Mapping[str, Any] | None, optimizer: Any) -> Any:
    """Return the scheduler that ``{"type": name, "params": params}`` means, bound to ``optimizer``.

    ``optimizer`` is anything with ``param_groups``; torch's own schedulers want a
    torch.optim.Optimizer. Names are in exact case, as in DeepSpeed. Raises ConfigError for an
    unknown name or parameter, or a value without meaning.
    """
    given = dict(params or {})
    rule = _DEEPSPEED.get(name)
    if rule is None:
        return _torch_by_name(name, given, optimizer)
    _check_names(name, given, rule)
    try:
        return rule(optimizer, **given)
    except TypeError as refusal:
        raise ConfigError(f"{name} cannot use its parameters", where=WHERE, got=str(refusal)) from refusal


def warmup_lr(
    optimizer: HasGroups,
    *,
    warmup_min_lr: float | Sequence[float] = 0.0,
    warmup_max_lr: float | Sequence[float] | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> CurveScheduler:
    """Build WarmupLR. Without ``warmup_max_lr`` every group rises to its own lr."""
    high = [float(group["lr"]) for group in optimizer.param_groups] if warmup_max_lr is None else warmup_max_lr
    curve = Warmup(
        _per_group(optimizer, warmup_min_lr, "warmup_min_lr"),
        _per_group(optimizer, high, "warmup_max_lr"),
        _warmup_steps(warmup_num_steps),
        _warmup_type(warmup_type),
    )
    return CurveScheduler(optimizer, curve, last_batch_iteration)


def warmup_decay_lr(
    optimizer: HasGroups,
    *,
    total_num_steps: int,
    warmup_min_lr: float | Sequence[float] = 0.0,
    warmup_max_lr: float | Sequence[float] = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> CurveScheduler:
    """Build WarmupDecayLR: to the maximum, then linearly to ``warmup_min_lr`` at
    ``total_num_steps``."""
    curve = Warmup(
        _per_group(optimizer, warmup_min_lr, "warmup_min_lr"),
        _per_group(optimizer, warmup_max_lr, "warmup_max_lr"),
        _warmup_steps(warmup_num_steps),
        _warmup_type(warmup_type),
        _count(total_num_steps, "total_num_steps"),
    )
    return CurveScheduler(optimizer, curve, last_batch_iteration)


def warmup_cosine_lr(
    optimizer: HasGroups,
    *,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> CurveScheduler:
    """Build WarmupCosineLR, in ratios of each group's own lr."""
    own = [float(group["lr"]) for group in optimizer.param_groups]
    curve = WarmupCosine(
        own,
        _warmup_steps(warmup_num_steps),
        _count(total_num_steps, "total_num_steps"),
        _number(warmup_min_ratio, "warmup_min_ratio"),
        _number(cos_min_ratio, "cos_min_ratio"),
        _warmup_type(warmup_type),
    )
    return CurveScheduler(optimizer, curve, last_batch_iteration)


def lr_range_test(
    optimizer: HasGroups,
    *,
    lr_range_test_min_lr: float | Sequence[float] = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
    last_batch_iteration: int = -1,
) -> CurveScheduler:
    """Build LRRangeTest."""
    curve = RangeTest(
        _per_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr"),
        _count(lr_range_test_step_size, "lr_range_test_step_size"),
        _number(lr_range_test_step_rate, "lr_range_test_step_rate"),
        lr_range_test_staircase,
    )
    return CurveScheduler(optimizer, curve, last_batch_iteration)


def one_cycle(
    optimizer: HasGroups,
    *,
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: float = 2000,
    cycle_second_step_size: float | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: float = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
    decay_mom_rate: float = 0.0,
    last_batch_iteration: int = -1,
) -> CurveScheduler:
    """Build OneCycle. The momentum is cycled where the optimizer has ``betas`` in every group, and
    left alone elsewhere."""
    first = _positive(cycle_first_step_size, "cycle_first_step_size")
    second = first if cycle_second_step_size is None else _positive(cycle_second_step_size, "cycle_second_step_size")
    second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
    has_betas = all("betas" in group for group in optimizer.param_groups)
    momentum = (cycle_min_mom, cycle_max_mom, decay_mom_rate) if cycle_momentum and has_betas else None
    curve = OneCycle(
        len(optimizer.param_groups),
        Cycle(first, second, cycle_first_stair_count, second_stairs),
        _number(cycle_min_lr, "cycle_min_lr"),
        _number(cycle_max_lr, "cycle_max_lr"),
        _number(decay_lr_rate, "decay_lr_rate"),
        _number(decay_step_size, "decay_step_size"),
        momentum,
    )
    return CurveScheduler(optimizer, curve, last_batch_iteration)


_DEEPSPEED: dict[str, Callable[..., CurveScheduler]] = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
    "LRRangeTest": lr_range_test,
    "OneCycle": one_cycle,
}


def torch_scheduler_names() -> list[str]:
    """Return every scheduler of torch that a ds_config can name (those that need other objects
    cannot be named)."""
    return sorted(name for name, value in vars(torch.optim.lr_scheduler).items() if _is_scheduler(value))


def _is_scheduler(value: object) -> bool:
    scheduler = torch.optim.lr_scheduler
    composed = (scheduler.SequentialLR, scheduler.ChainedScheduler, scheduler.LambdaLR, scheduler.MultiplicativeLR)
    if not isinstance(value, type) or issubclass(value, composed) or value is scheduler.LRScheduler:
        return False
    return issubclass(value, scheduler.LRScheduler) and not value.__name__.startswith("_")


def _torch_by_name(name: str, given: dict[str, Any], optimizer: Any) -> Any:
    found = getattr(torch.optim.lr_scheduler, name, None)
    if not _is_scheduler(found):
        known = [*_DEEPSPEED, *torch_scheduler_names()]
        raise ConfigError(
            "no such scheduler",
            where="scheduler.type",
            got=repr(name),
            expected="one of " + ", ".join(known),
            fix=did_you_mean(name, known),
        )
    make: Callable[..., Any] = found  # type: ignore[assignment]
    _check_names(name, given, make)
    try:
        return make(optimizer, **given)
    except (TypeError, ValueError) as refusal:
        raise ConfigError(f"{name} cannot use its parameters", where=WHERE, got=str(refusal)) from refusal


def _check_names(name: str, given: dict[str, Any], make: Callable[..., Any]) -> None:
    parameters = inspect.signature(make).parameters
    known = [key for key in parameters if key not in ("self", "optimizer", "verbose")]
    faults = [
        ConfigError(
            f"{name} has no parameter {key!r}",
            where=f"{WHERE}.{key}",
            expected=", ".join(known),
            fix=did_you_mean(key, known),
        )
        for key in given
        if key not in known
    ]
    required = [key for key in known if parameters[key].default is inspect.Parameter.empty and key not in given]
    faults += [
        ConfigError(f"{name} needs it", where=f"{WHERE}.{key}", got="nothing", expected="a number") for key in required
    ]
    if faults:
        raise ConfigError.many(faults)


def _per_group(optimizer: HasGroups, value: Any, key: str) -> tuple[float, ...]:
    groups = len(optimizer.param_groups)
    if not isinstance(value, (list, tuple)):
        return (_number(value, key),) * groups
    if len(value) != groups:
        raise ConfigError(
            "one value per parameter group", where=f"{WHERE}.{key}", got=f"{len(value)} values", expected=f"{groups}"
        )
    return tuple(_number(item, key) for item in value)


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError("not a number", where=f"{WHERE}.{key}", got=repr(value), expected="a number, without quotes")
    return value


def _positive(value: Any, key: str) -> float:
    if _number(value, key) <= 0:
        raise ConfigError("not a length", where=f"{WHERE}.{key}", got=value, expected="a number of steps above 0")
    return float(value)


def _count(value: Any, key: str) -> int:
    number = _number(value, key)
    if number <= 0 or number != int(number):
        raise ConfigError("not a number of steps", where=f"{WHERE}.{key}", got=value, expected="a positive integer")
    return int(number)


def _warmup_steps(value: Any) -> int:
    return max(2, _count(value, "warmup_num_steps"))  # log(1) would be a division by zero


def _warmup_type(value: Any) -> WarmupType:
    try:
        return WarmupType(value)
    except ValueError:
        raise ConfigError(
            "not a way to warm up", where=f"{WHERE}.warmup_type", got=repr(value), expected="log or linear"
        ) from None
