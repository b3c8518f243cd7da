"""From ds_config's scheduler name and params to a scheduler on an optimizer."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zero_trial.engine.schedules.curves import Cycle, OneCycle, RangeTest, Warmup, WarmupCosine, WarmupType
from zero_trial.engine.schedules.scheduler import CurveScheduler, HasGroups
from zero_trial.errors import ConfigError

WHERE = "scheduler.params"


def build_scheduler(name: str, params: Mapping[str, Any] | None, optimizer: Any) -> Any:
    """The scheduler that ``{"type": name, "params": params}`` means, bound to ``optimizer``.

    ``optimizer`` is anything with ``param_groups``; torch's own schedulers want a torch.optim.Optimizer. Names are in
    exact case, as in DeepSpeed. Raises ConfigError for an unknown name or parameter, or a value without meaning.
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
    """WarmupLR. Without ``warmup_max_lr`` every group rises to its own lr."""
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
    """WarmupDecayLR: to the maximum, then linearly to ``warmup_min_lr`` at ``total_num_steps``."""
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
    """WarmupCosineLR, in ratios of each group's own lr."""
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
    """LRRangeTest."""
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
    """OneCycle. The momentum is cycled where the optimizer has ``betas`` in every group, and left alone elsewhere."""
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
    """Every scheduler of torch that a ds_config can name (those that need other objects cannot be named)."""
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
            fix=_did_you_mean(name, known),
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
            fix=_did_you_mean(key, known),
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


def _did_you_mean(word: str, known: list[str]) -> str | None:
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f"Did you mean {by_lower[close[0]]}?" if close else None


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
