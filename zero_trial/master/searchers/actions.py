"""What a searcher wants done: a trial created or stopped, or the search ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias


class ExitReason(str, Enum):
    """Why a trial is over for its searcher."""

    COMPLETED = "completed"  # it came to its end, or was stopped by the searcher
    INVALID_HP = "invalid_hp"  # these hyperparameters cannot be trained
    ERRORED = "errored"  # it failed and has no restarts left
    CANCELED = "canceled"  # its user ended it


@dataclass(frozen=True)
class Create:
    """Start a trial with ``hparams`` and this seed. ``request_id`` is the searcher's name for the trial from now on."""

    request_id: str
    hparams: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class Stop:
    """End a trial as by a preemption, with a checkpoint, and do not start it again; its exit is reported as COMPLETED."""

    request_id: str


@dataclass(frozen=True)
class Shutdown:
    """The search is over: no trial is left and none will be created. ``failed``: no trial came to anything."""

    failed: bool


Action: TypeAlias = Create | Stop | Shutdown
