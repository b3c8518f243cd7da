"""One place that scalars are written to, and how its package is found."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from zero_trial.errors import ConfigError

# (name, value, step); the step of the engine's own events is the number of global samples.
Event = tuple[str, float, int]


class Writer(Protocol):
    """What a monitor writes through."""

    def write(self, events: Sequence[Event]) -> None:
        """Takes ``events``; they can be seen after :meth:`flush`."""

    def flush(self) -> None:
        """Everything taken so far can be read."""

    def close(self) -> None:
        """Flushes; nothing is written afterwards."""


def require(package: str, section: str, install: str) -> None:
    """ConfigError, where ``section`` of ds_config needs a ``package`` that is not installed."""
    try:
        found = find_spec(package) is not None
    except (ModuleNotFoundError, ValueError):  # a parent is missing, or a stand-in without a spec is loaded
        found = False
    if not found:
        raise ConfigError(
            f"the package {package} is not installed",
            where=f"{section}.enabled",
            fix=f"Run: pip install {install}; or set {section}.enabled to false.",
        )


def load(package: str) -> Any:
    """The package, once :func:`require` has found it."""
    return import_module(package)
