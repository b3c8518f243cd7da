"""Fail on all ranks together: the fault of one is raised by all, so that none waits for the next collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zero_trial.comm import AxisComm
from zero_trial.errors import CheckpointError, MeshError, ZeroTrialError

T = TypeVar("T")


def fail_together(
    world: AxisComm, act: Callable[[], T], label: str, others: Callable[[str], ZeroTrialError] | None = None
) -> T:
    """Return what ``act`` returns on this rank; if it fails on any rank, raise on every rank. Collective over ``world``.

    Every rank raises a CheckpointError with the first fault. With ``others`` a rank that failed raises its own error instead, and the other
    ranks raise ``others(fault)``. An error that is not a ZeroTrialError or OSError is a mistake in a program: its own rank raises it unchanged.
    A MeshError passes at once, because the ranks can no longer be asked.
    """
    try:
        result = act()
    except MeshError:
        raise
    except Exception as error:
        known = isinstance(error, ZeroTrialError | OSError)
        fault = str(error) if known else f"rank {world.ranks[world.index]}: {type(error).__name__}: {error}"
        if known and others is None:
            raise_together(world, fault, label)
        world.gather_json(fault, label)
        raise
    raise_together(world, None, label, others or CheckpointError)
    return result


def raise_together(
    world: AxisComm, fault: str | None, label: str, error: Callable[[str], ZeroTrialError] = CheckpointError
) -> None:
    """Raise the first rank's fault, if there is one. Collective over ``world``."""
    faults = [found for found in world.gather_json(fault, label) if found is not None]
    if faults:
        raise error(faults[0])
