"""Which LR scheduler an engine has, the client's or that of ds_config, and who steps it.

The engine steps it at each of its own steps. One whose ``step`` needs arguments, as that of
ReduceLROnPlateau does, is stepped by its user, who has them: after a validation, say.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch

from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.lr_schedules import build_scheduler
from zero_trial.errors import ConfigError

log = logging.getLogger("zero_trial")

_VARYING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def require_one_scheduler(client: Any, settings: DsConfig) -> None:
    """Raise ConfigError if both the client and ds_config have an LR scheduler. DeepSpeed uses
    ds_config's, although a client's optimizer overrides ds_config's."""
    if client is not None and settings.scheduler is not None:
        raise ConfigError(
            "there are two LR schedulers",
            where="initialize(lr_scheduler)",
            got=f"{getattr(client, '__name__', type(client).__name__)}, and {settings.scheduler.type} in ds_config",
            expected="one of them",
            fix='Leave lr_scheduler= out, or remove "scheduler" from ds_config.',
        )


def choose_lr_scheduler(optimizer: torch.optim.Optimizer | None, client: Any, settings: DsConfig) -> Any:
    """Return the client's (an object, or a class or function of ``optimizer``), else ds_config's,
    else None. Raises ConfigError."""
    if client is not None:
        return lr_scheduler_of(optimizer, client, "initialize(lr_scheduler)")
    if settings.scheduler is None or optimizer is None:
        return None
    return build_scheduler(settings.scheduler.type, settings.scheduler.params, optimizer)


def lr_scheduler_of(optimizer: torch.optim.Optimizer | None, client: Any, where: str) -> Any:
    """Return the client's scheduler, or what its class or function makes of ``optimizer``. Raises
    ConfigError for one that is bound to another optimizer."""
    if isinstance(client, type) or not hasattr(client, "step"):
        if optimizer is None:
            return client
        client = _made_lr_scheduler(client, optimizer, where)
    theirs = getattr(client, "optimizer", None)
    ours = optimizer.param_groups if optimizer is not None else None
    # a wrapper around ours has the same groups: what it changes is ours
    if ours is not None and isinstance(theirs, torch.optim.Optimizer) and theirs.param_groups is not ours:
        kind = type(client).__name__
        raise ConfigError(
            "the LR scheduler belongs to another optimizer than the engine's, and would change nothing",
            where=where,
            got=f"{kind} of {type(theirs).__name__}",
            fix=f"Give a function of the optimizer: lr_scheduler=lambda optimizer: {kind}(optimizer, ...); or pass that optimizer as well.",
        )
    return client


def _made_lr_scheduler(make: Any, optimizer: torch.optim.Optimizer, where: str) -> Any:
    """Return what the client's class or function makes of ``optimizer``. Raises ConfigError where
    that is no LR scheduler: every learning rate would silently stay as it is."""
    name = getattr(make, "__name__", type(make).__name__)
    fix = f"Give a function that returns one: lr_scheduler=lambda optimizer: {name if isinstance(make, type) else 'StepLR'}(optimizer, ...)."
    if not callable(make):
        raise ConfigError("this is neither an LR scheduler nor callable", where=where, got=repr(make), fix=fix)
    if isinstance(make, type):
        try:
            inspect.signature(make).bind(optimizer)
        except TypeError as error:
            raise ConfigError(f"{name} cannot be made of the optimizer alone: {error}", where=where, fix=fix) from None
    made = make(optimizer)
    if isinstance(made, type) or not hasattr(made, "step"):
        raise ConfigError("this callable does not return an LR scheduler", where=where, got=repr(made), fix=fix)
    return made


# --- who steps it ---------------------------------------------------------------------------------


def stepped_by_engine(lr_scheduler: Any, given: Mapping[str, Any]) -> Any:
    """Return the scheduler that a step of the engine advances with the arguments ``given``: None
    where its ``step`` needs some and none are given. Raises ConfigError where those that are given
    are not enough: after the update it would be too late."""
    if not (missing := missing_arguments(lr_scheduler, given)):
        return lr_scheduler
    if not given:
        return None
    entries = ", ".join(f"{name!r}: ..." for name in missing)
    raise ConfigError(
        f"the LR scheduler cannot be stepped without {', '.join(missing)}",
        where="engine.step(lr_kwargs)",
        got=f"{type(lr_scheduler).__name__} and {', '.join(given)}",
        fix=f"Add {{{entries}}}, or leave lr_kwargs out, and call engine.lr_scheduler.step({', '.join(missing)}) yourself.",
    )


def log_who_steps(lr_scheduler: Any) -> None:
    """Log a line where the engine does not step the scheduler."""
    if lr_scheduler is None or isinstance(lr_scheduler, type):  # of an engine without an optimizer
        return
    if missing := missing_arguments(lr_scheduler, {}):
        log.warning(
            "%s needs %s to step, so that engine.step() leaves it alone: call engine.lr_scheduler.step(%s) after a validation, "
            "say, with the same values on every rank, or engine.step(lr_kwargs={...})",
            *(type(lr_scheduler).__name__, " and ".join(missing), ", ".join(missing)),
        )


def missing_arguments(lr_scheduler: Any, given: Mapping[str, Any]) -> list[str]:
    """List the arguments that the scheduler's ``step`` needs and that are not ``given``. A
    ``step(*args, **kwargs)``, as that of a wrapper, needs those of its ``scheduler``; one that
    names an argument may find the others itself."""
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
