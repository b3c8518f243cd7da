"""A run's folder that all ranks of a script hold together: rank 0 holds it, and a second run of the script ends on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from zero_trial.errors import ConfigError
from zero_trial.launch.held import held
from zero_trial.platform.protocols import Distributed


@contextmanager
def held_together(folder: Path, ranks: Distributed) -> Iterator[None]:
    """Collective at its beginning. Raises ConfigError on every rank if another process holds ``folder`` (see :func:`held`)."""
    with ExitStack() as stack:
        fault: str | None = None
        if ranks.rank == 0:
            try:
                stack.enter_context(held(folder))
            except ConfigError as error:
                fault = str(error)
        fault = ranks.broadcast(fault)
        if fault is not None:
            raise ConfigError(fault)
        yield
