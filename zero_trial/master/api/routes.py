"""Every route that is answered, in one list."""

from __future__ import annotations

from collections.abc import Iterator

from zero_trial.master.api import (
    routes_checkpoints,
    routes_experiments,
    routes_logs,
    routes_machine,
    routes_tasks,
    routes_trials,
    routes_users,
)
from zero_trial.master.api.router import Route


def all_routes() -> Iterator[Route]:
    """The routes of all parts; their order does not matter."""
    for part in (
        routes_experiments,
        routes_trials,
        routes_checkpoints,
        routes_logs,
        routes_tasks,
        routes_machine,
        routes_users,
    ):
        yield from part.ROUTES
