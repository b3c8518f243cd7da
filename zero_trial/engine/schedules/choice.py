"""Which schedule an engine follows: the client's, or ds_config's."""

from __future__ import annotations

from typing import Any

import torch

from zero_trial.config.sections import DsConfig
from zero_trial.engine.schedules import build_scheduler
from zero_trial.errors import ConfigError


def choose_schedule(optimizer: torch.optim.Optimizer | None, client: Any, settings: DsConfig) -> Any:
    """The client's (an object, or a function of ``optimizer``), else ds_config's, else None. Raises ConfigError."""
    if client is not None:
        if not hasattr(client, "step"):
            return client if optimizer is None else client(optimizer)
        _require_own(client, optimizer)
        return client
    if settings.scheduler is None or optimizer is None:
        return None
    return build_scheduler(settings.scheduler.type, settings.scheduler.params, optimizer)


def _require_own(schedule: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """A schedule of torch's is bound to an optimizer; if that is another one, every learning rate would stay as it is, without a word."""
    theirs = getattr(schedule, "optimizer", None)
    if optimizer is None or not isinstance(theirs, torch.optim.Optimizer) or theirs is optimizer:
        return
    if theirs.param_groups is optimizer.param_groups:  # a wrapper around ours: what it changes is ours
        return
    kind = type(schedule).__name__
    raise ConfigError(
        "the schedule belongs to another optimizer than the engine's, and would change nothing",
        where="initialize(lr_scheduler)",
        got=f"{kind} of {type(theirs).__name__}",
        fix=f"Give a function of the optimizer: lr_scheduler=lambda optimizer: {kind}(optimizer, ...); or pass that optimizer as well.",
    )
