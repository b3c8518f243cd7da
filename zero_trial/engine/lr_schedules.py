"""Learning rate schedules with the names and arithmetic of DeepSpeed 0.19.8, for ds_config and for
any torch optimizer; torch's own schedulers by name.

``last_batch_iteration`` counts scheduler steps: -1 before the first, then 0, 1, 2 ... A schedule
returns one lr per parameter group. As in DeepSpeed, the first optimizer step runs at iteration -1
and the second at 0, so warmups use the minimum twice.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zero_trial.ds_config.keys_training import unknown_parameters
from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.util.text import did_you_mean

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "LRSchedule",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_scheduler",
]

log = logging.getLogger("zero_trial")

# a number, or a tensor if the optimizer's lr is a tensor
Rate = Any
Momenta = list[tuple[float, float]]


class _ParameterError(ConfigError, ValueError):
    """Invalid parameter of a schedule. Scripts catch ValueError, which DeepSpeed raises."""


class LRSchedule:
    """Base of DeepSpeed's schedules: call ``step`` once per applied optimizer step.

    The constructor writes the values of the first optimizer step into the optimizer's groups,
    unless it resumes at a ``last_batch_iteration``: then the groups have their values from a
    checkpoint. If an lr is a tensor, it is filled in place.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = _with_groups(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[Rate] | None = None
        if last_batch_iteration == -1:
            self._write()

    def get_lr(self) -> list[Rate]:
        """Return the schedule's current value, one per group."""
        raise NotImplementedError

    def get_last_lr(self) -> list[Rate]:
        """Return the values that were last written into the groups."""
        return self._last_lr if self._last_lr is not None else [group["lr"] for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next iteration, or to the given iteration."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def state_dict(self) -> dict[str, int]:
        """Return the iteration as JSON values; the parameters come from the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved iteration, and write its values into the groups at once."""
        if "last_batch_iteration" not in state:
            raise CheckpointError(
                "this is not the state of one of DeepSpeed's schedules",
                where="lr_scheduler",
                got=sorted(state),
                expected=["last_batch_iteration"],
            )
        self.last_batch_iteration = int(state["last_batch_iteration"])
        self._write()

    def _write(self) -> None:
        groups = self.optimizer.param_groups
        for group, lr in zip(groups, self.get_lr(), strict=True):
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"].fill_(lr.squeeze() if isinstance(lr, torch.Tensor) else lr)
            else:
                group["lr"] = lr
        self._last_lr = [group["lr"] for group in groups]


class WarmupLR(LRSchedule):
    """Rise from ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps``, then stay constant.
    Both are numbers, or one number per parameter group; without a maximum, every group rises to its
    own lr.

    Args:
        warmup_num_steps: 0 starts with the maximum; 1 is read as 2, as in DeepSpeed.
        warmup_type: ``log`` (fast at first, and complete one step earlier) or ``linear``.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        if warmup_max_lr is None:
            warmup_max_lr = _own_rates(optimizer)
        self.min_lrs = _per_group(optimizer, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = _per_group(optimizer, warmup_max_lr, "warmup_max_lr")
        self.delta_lrs = [high - low for high, low in zip(self.max_lrs, self.min_lrs, strict=True)]
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[Rate]:
        if self.last_batch_iteration < 0 and self.warmup_num_steps:
            return list(self.min_lrs)
        factor = self._factor(max(0, self.last_batch_iteration))
        return [low + delta * factor for low, delta in zip(self.min_lrs, self.delta_lrs, strict=True)]

    def _factor(self, iteration: int) -> float:
        """Return the lr's position between minimum (0) and maximum (1), starting at iteration 0."""
        if iteration < self.warmup_num_steps:
            return _warmup_factor(iteration, self.warmup_num_steps, self.warmup_type)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Rise as :class:`WarmupLR` does, then decay linearly to ``warmup_min_lr`` at
    ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _total_steps(total_num_steps, warmup_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _factor(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return super()._factor(iteration)
        left, decay = self.total_num_steps - iteration, self.total_num_steps - self.warmup_num_steps
        return max(0.0, float(left) / float(max(1.0, decay)))


class WarmupCosineLR(LRSchedule):
    """Scale each group's own lr by a ratio that rises from ``warmup_min_ratio`` to 1 in
    ``warmup_num_steps``, then follows half a cosine down to ``cos_min_ratio`` at
    ``total_num_steps``.

    Loshchilov & Hutter 2017, equation 5, without restarts. Before the first scheduler step the lr
    is 0, or the group's own lr if ``warmup_num_steps`` is 0.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.org_lrs = _own_rates(optimizer)
        self.total_num_steps = _total_steps(total_num_steps, warmup_num_steps)
        self.warmup_min_ratio: float = _number(warmup_min_ratio, "warmup_min_ratio")
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.cos_min_ratio: float = _number(cos_min_ratio, "cos_min_ratio")
        self.warmup_type = _warmup_type(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr_ratio(self) -> float:
        """Return the factor on each group's own lr."""
        iteration = self.last_batch_iteration
        if iteration < 0 and self.warmup_num_steps:
            return 0.0
        if 0 <= iteration < self.warmup_num_steps:
            rise = _warmup_factor(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + rise * (1.0 - self.warmup_min_ratio)
        decay = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (iteration - self.warmup_num_steps + 1) / decay)
        height = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)

    def get_lr(self) -> list[Rate]:
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]


class LRRangeTest(LRSchedule):
    """Increase the lr without limit, to find where training breaks (Smith 2018, section 4.1): min *
    (1 + rate * steps / step_size), optionally in stairs."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lr = _per_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _count(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate = _number(lr_range_test_step_rate, "lr_range_test_step_rate")
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[Rate]:
        interval = float(self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [lr * increase for lr in self.min_lr]


class OneCycle(LRSchedule):
    """Raise and lower the lr once while the momentum falls and rises, then decay (Smith 2018,
    section 4).

    Rates and momenta are numbers, or one number per parameter group. The momentum is the first of
    ``betas``, with 0.99 as the second. If the optimizer has no momentum, it is not changed, and a
    warning is logged.

    Args:
        cycle_first_step_size: the number of steps up, and also down unless
            ``cycle_second_step_size`` is set.
        cycle_first_stair_count: the number of stairs on the way up (0: none); the same on the way
            down.
        decay_step_size: the number of steps after which the decay rates apply again; 0: no
            decay.
    """

    _BETA2 = 0.99

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.first_step_size = _length(cycle_first_step_size, "cycle_first_step_size")
        self.second_step_size = _length(second, "cycle_second_step_size", or_none=True)
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = (
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        self.min_lrs = _per_group(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = _per_group(optimizer, cycle_max_lr, "cycle_max_lr")
        self.decay_lr_rate = _number(decay_lr_rate, "decay_lr_rate")
        self.decay_step_size: float = _number(decay_step_size, "decay_step_size")
        self.decay_mom_rate = _number(decay_mom_rate, "decay_mom_rate")
        self._min_moms = _per_group(optimizer, cycle_min_mom, "cycle_min_mom")
        self._max_moms = _per_group(optimizer, cycle_max_mom, "cycle_max_mom")
        groups = _with_groups(optimizer).param_groups
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in groups)
        if cycle_momentum and not self.cycle_momentum:
            log.warning("OneCycle: %s has no betas, so its momentum is not cycled", type(optimizer).__name__)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[Rate]:
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [low / self._decay(self.decay_lr_rate) for low in self.min_lrs]

    def get_mom(self) -> Momenta | None:
        """Return the betas that the schedule sets, one pair per group; None if it sets none."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            height, pairs = self._height(), zip(self._min_moms, self._max_moms, strict=True)
            return [(high - (high - low) * height, self._BETA2) for low, high in pairs]
        return [(high * self._decay(self.decay_mom_rate), self._BETA2) for high in self._max_moms]

    def _write(self) -> None:
        super()._write()
        if (momenta := self.get_mom()) is not None:
            if self.last_batch_iteration < 0:  # as in DeepSpeed, before the first step
                momenta = [(low, self._BETA2) for low in self._min_moms]
            for group, betas in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = betas

    def _height(self) -> float:
        """Return 0 at the foot of the cycle, 1 at its peak."""
        step = self.last_batch_iteration + 1
        x = 1.0 + step / self.total_size - math.floor(1 + step / self.total_size)
        rising = x <= self.step_ratio
        stairs = self.first_stair_count if rising else self.second_stair_count
        if stairs > 0:
            # floor the steps, not x: rounding just below a stair would lose the whole stair
            at = step % self.total_size
            if at <= self.first_step_size:
                return math.floor(at * stairs / self.first_step_size) / stairs
            return math.floor((self.total_size - at) * stairs / self.second_step_size) / stairs
        return x / self.step_ratio if rising else (x - 1) / (self.step_ratio - 1)

    def _decay(self, rate: float) -> float:
        """Return the factor after the cycle: 1 + rate * intervals of ``decay_step_size`` steps."""
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return 1.0
        return 1 + rate * ((self.last_batch_iteration - self.total_size + 1) / self.decay_step_size)


_DEEPSPEED: dict[str, Callable[..., LRSchedule]] = {
    schedule.__name__: schedule for schedule in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(_DEEPSPEED)


# --- from ds_config's scheduler name and params to a scheduler on an optimizer --------------------

WHERE = "scheduler.params"


def build_scheduler(name: str, params: Mapping[str, Any] | None, optimizer: Any) -> Any:
    """Return the scheduler for ``{"type": name, "params": params}``, bound to ``optimizer``.

    ``optimizer`` is any object with ``param_groups``; torch's own schedulers need a
    torch.optim.Optimizer. Names are case-sensitive, as in DeepSpeed. Raises ConfigError for an
    unknown name or parameter, or an invalid value.
    """
    given, make = dict(params or {}), _DEEPSPEED.get(name) or _torch_by_name(name)
    _check_names(name, given, make)
    try:
        return make(optimizer, **given)
    except ConfigError:
        raise
    except (TypeError, ValueError) as refusal:
        raise ConfigError(f"{name} does not accept its parameters", where=WHERE, got=str(refusal)) from refusal


def torch_scheduler_names() -> list[str]:
    """Return every scheduler of torch that a ds_config can name."""
    return sorted(name for name, value in vars(torch.optim.lr_scheduler).items() if _is_scheduler(value))


def _is_scheduler(value: object) -> bool:
    scheduler = torch.optim.lr_scheduler
    composed = (scheduler.SequentialLR, scheduler.ChainedScheduler, scheduler.LambdaLR, scheduler.MultiplicativeLR)
    if not isinstance(value, type) or issubclass(value, composed) or value is scheduler.LRScheduler:
        return False
    return issubclass(value, scheduler.LRScheduler) and not value.__name__.startswith("_")


def _torch_by_name(name: str) -> Callable[..., Any]:
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
    return make


def _check_names(name: str, given: dict[str, Any], make: Callable[..., Any]) -> None:
    parameters = inspect.signature(make).parameters
    known = [key for key in parameters if key not in ("self", "optimizer", "verbose")]
    faults = unknown_parameters(name, WHERE, given, known)
    required = [key for key in known if parameters[key].default is inspect.Parameter.empty and key not in given]
    faults += [
        ConfigError(f"{name} needs it", where=f"{WHERE}.{key}", got="nothing", expected="a number") for key in required
    ]
    if faults:
        raise ConfigError.many(faults)


def _with_groups(optimizer: Any) -> Any:
    """Return ``optimizer``, or the torch optimizer inside a wrapper without groups of its own."""
    if hasattr(optimizer, "param_groups"):
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        return inner
    raise TypeError(f"{type(optimizer).__name__} is not a subclass of torch.optim.Optimizer")


def _own_rates(optimizer: Any) -> list[Rate]:
    """Return the groups' current learning rates; tensors are copied."""
    rates = [group["lr"] for group in _with_groups(optimizer).param_groups]
    return [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]


def _per_group(optimizer: Any, value: Any, key: str) -> list[Rate]:
    groups = len(_with_groups(optimizer).param_groups)
    if not isinstance(value, (list, tuple)):
        return [_number(value, key)] * groups
    _valid(list(value), key, len(value) == groups, f"a number, or one for each of {groups} parameter groups")
    return [_number(item, key) for item in value]


def _valid(value: Any, key: str, valid: bool, expected: str) -> Any:
    """Return ``value``. Raises ConfigError, which is a ValueError too, if it is not ``valid``."""
    if not valid:
        raise _ParameterError("invalid value", where=f"{WHERE}.{key}", got=repr(value), expected=expected)
    return value


def _number(value: Any, key: str) -> Rate:
    is_number = isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)
    return _valid(value, key, is_number, "a number, without quotes")


def _length(value: Any, key: str, *, or_none: bool = False) -> float:
    number = float(_number(value, key))
    _valid(number, key, number > 0 or (or_none and number == 0), "a number of steps above 0")
    return number


def _count(value: Any, key: str) -> int:
    number = _number(value, key)
    return int(_valid(number, key, number > 0 and number == int(number), "a positive integer"))


def _warmup_steps(value: Any) -> int:
    # log(1) would be a division by zero
    return max(2, _count(value, "warmup_num_steps")) if value != 0 else 0


def _total_steps(total: Any, warmup: Any) -> int:
    count = _count(total, "total_num_steps")
    if count < _warmup_steps(warmup):
        log.warning("total_num_steps %s is less than warmup_num_steps %s", total, warmup)
    return count


def _warmup_type(value: Any) -> str:
    return str(_valid(value, "warmup_type", value in ("log", "linear"), "log or linear"))


def _warmup_factor(iteration: int, num_steps: int, kind: str) -> float:
    """Return 0 at iteration 0, 1 at ``num_steps`` (linear) or one before (log); at least 2."""
    if kind == "log":
        return (1.0 / math.log(num_steps)) * math.log(iteration + 1)
    return iteration / num_steps


# --- which scheduler an engine has, and who steps it ----------------------------------------------


_VARYING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def require_one_scheduler(client: Any, settings: DsConfig) -> None:
    """Raise ConfigError if both the client and ds_config have an LR scheduler. (DeepSpeed uses
    ds_config's scheduler, although a client's optimizer overrides ds_config's.)"""
    if client is not None and settings.scheduler is not None:
        raise ConfigError(
            "there are two LR schedulers",
            where="initialize(lr_scheduler)",
            got=f"{getattr(client, '__name__', type(client).__name__)}, and {settings.scheduler.type} in ds_config",
            expected="only one of them",
            fix='Omit lr_scheduler=, or remove "scheduler" from ds_config.',
        )


def choose_lr_scheduler(optimizer: torch.optim.Optimizer | None, client: Any, settings: DsConfig) -> Any:
    """Return the client's scheduler, else ds_config's, else None. Raises ConfigError."""
    if client is not None:
        return lr_scheduler_of(optimizer, client, "initialize(lr_scheduler)")
    if settings.scheduler is None or optimizer is None:
        return None
    return build_scheduler(settings.scheduler.type, settings.scheduler.params, optimizer)


def lr_scheduler_of(optimizer: torch.optim.Optimizer | None, client: Any, where: str) -> Any:
    """Return the client's scheduler, or the scheduler that its class or function creates for
    ``optimizer``. Raises ConfigError for a scheduler that is bound to another optimizer."""
    if isinstance(client, type) or not hasattr(client, "step"):
        if optimizer is None:
            return client
        client = _made_lr_scheduler(client, optimizer, where)
    theirs = getattr(client, "optimizer", None)
    ours = optimizer.param_groups if optimizer is not None else None
    # a wrapper around our optimizer has the same groups, so its changes reach ours
    if ours is not None and isinstance(theirs, torch.optim.Optimizer) and theirs.param_groups is not ours:
        kind = type(client).__name__
        raise ConfigError(
            "the LR scheduler changes a different optimizer, not the engine's, so it would have no effect",
            where=where,
            got=f"{kind} of {type(theirs).__name__}",
            fix=f"Pass a function of the optimizer: lr_scheduler=lambda optimizer: {kind}(optimizer, ...); or also pass the scheduler's "
            "optimizer to initialize().",
        )
    return client


def _made_lr_scheduler(make: Any, optimizer: torch.optim.Optimizer, where: str) -> Any:
    """Return what the client's class or function creates for ``optimizer``. Raises ConfigError if
    that is no LR scheduler: otherwise every learning rate would silently stay constant."""
    name = getattr(make, "__name__", type(make).__name__)
    kind = name if isinstance(make, type) else "StepLR"
    fix = f"Pass a function that returns a scheduler: lr_scheduler=lambda optimizer: {kind}(optimizer, ...)."
    if not callable(make):
        raise ConfigError("this is neither an LR scheduler nor callable", where=where, got=repr(make), fix=fix)
    if isinstance(make, type):
        try:
            inspect.signature(make).bind(optimizer)
        except TypeError as error:
            raise ConfigError(
                f"{name} cannot be built from the optimizer alone: {error}", where=where, fix=fix
            ) from None
    made = make(optimizer)
    if isinstance(made, type) or not hasattr(made, "step"):
        raise ConfigError("this callable does not return an LR scheduler", where=where, got=repr(made), fix=fix)
    return made


# --- who steps it ---------------------------------------------------------------------------------


def stepped_by_engine(lr_scheduler: Any, given: Mapping[str, Any]) -> Any:
    """Return the scheduler that an engine step advances with the arguments ``given``, or None if
    its ``step`` needs arguments and none are given. Raises ConfigError if the given arguments are
    not sufficient: an error after the update would be too late."""
    if not (missing := missing_arguments(lr_scheduler, given)):
        return lr_scheduler
    if not given:
        return None
    entries = ", ".join(f"{name!r}: ..." for name in missing)
    raise ConfigError(
        f"the LR scheduler cannot be stepped without {', '.join(missing)}",
        where="engine.step(lr_kwargs)",
        got=f"{type(lr_scheduler).__name__} and {', '.join(given)}",
        fix=f"Add {{{entries}}}, or omit lr_kwargs, and call engine.lr_scheduler.step({', '.join(missing)}) yourself.",
    )


def log_who_steps(lr_scheduler: Any) -> None:
    """Log a line if the engine does not step the scheduler."""
    if lr_scheduler is None or isinstance(lr_scheduler, type):  # of an engine without an optimizer
        return
    if missing := missing_arguments(lr_scheduler, {}):
        log.warning(
            "step() of %s needs %s, so engine.step() does not call it: call engine.lr_scheduler.step(%s) yourself, e.g. after a validation, with "
            "the same values on every rank, or pass engine.step(lr_kwargs={...})",
            *(type(lr_scheduler).__name__, " and ".join(missing), ", ".join(missing)),
        )


class HandSteps:
    """Logs, once, that user code steps a schedule in addition to ``engine.step()``."""

    def __init__(self) -> None:
        self._step, self._count, self._logged = -1, 0, False

    def see(self, lr_scheduler: Any, step: int) -> None:
        """Compare the schedule's own count before and after each step; a load replaces ``step``."""
        count = getattr(lr_scheduler, "last_epoch", getattr(lr_scheduler, "last_batch_iteration", None)) or 0
        if step == self._step and count > self._count and not self._logged:
            self._logged = True
            log.warning(
                "%s was stepped between two steps of the engine, which steps it too: the schedule runs ahead. "
                "Remove lr_scheduler.step() from the loop, or do not give the schedule to initialize()",
                type(lr_scheduler).__name__,
            )
        self._step, self._count = step, count


def missing_arguments(lr_scheduler: Any, given: Mapping[str, Any]) -> list[str]:
    """List the arguments that the scheduler's ``step`` needs and that are not ``given``. A
    ``step(*args, **kwargs)``, as in a wrapper, needs the arguments of its ``scheduler``. A ``step``
    that names an argument may supply the others itself."""
    needed: list[str] = []
    while lr_scheduler is not None:
        try:
            parameters = inspect.signature(lr_scheduler.step).parameters.values()
        except (AttributeError, TypeError, ValueError):  # no step, or not written in Python
            break
        needed += [each.name for each in parameters if each.default is each.empty and each.kind not in _VARYING]
        passes_on = tuple(each.kind for each in parameters) == _VARYING
        lr_scheduler = getattr(lr_scheduler, "scheduler", None) if passes_on else None
    return [name for name in dict.fromkeys(needed) if name not in given]
