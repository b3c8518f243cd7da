"""Ranks that fail together: a fault of one is raised by all, so that none waits for the next collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zero_trial.errors import CheckpointError, ZeroTrialError
from zero_trial.mesh import AxisComm


def together(world: AxisComm, act: Callable[[], Any], label: str) -> Any:
    """What ``act`` returns on this rank. Raises CheckpointError on every rank if it fails on any. Collective over ``world``."""
    fault, result = None, None
    try:
        result = act()
    except (ZeroTrialError, OSError) as error:
        fault = str(error)
    agree(world, fault, label)
    return result


def agree(world: AxisComm, fault: str | None, label: str) -> None:
    """Raises the first rank's fault, if there is one. Collective over ``world``."""
    faults = [found for found in world.gather_json(fault, label) if found is not None]
    if faults:
        raise CheckpointError(faults[0])
