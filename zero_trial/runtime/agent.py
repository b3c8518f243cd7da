"""torch.distributed.run under the supervisor: ``python -m zero_trial.runtime.agent RECORD
ARGUMENTS-OF-TORCHRUN``.

It starts the ranks of one host and meets the agents of other hosts, as torch's own command does.
For the supervisor it also writes RECORD: whether it has begun to end its ranks, and which of them
failed, in order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from zero_trial.errors import StorageError
from zero_trial.runs.records import AgentRecord, RankExit, write_agent


def main(argv: Sequence[str]) -> None:
    """Run the ranks to their end. Raises ChildFailedError when one fails."""
    record, *arguments = argv
    _note_closing(Path(record))
    try:
        torchrun.main(list(arguments))
    except ChildFailedError as error:
        # a full disk changes neither the end of the ranks nor the error
        with suppress(StorageError):
            write_agent(Path(record), AgentRecord(closing=True, failures=failures_of(error)))
        raise


def _note_closing(record: Path) -> None:
    """Make torch's agent write down that it ends its ranks, before it waits for them.

    Torch has no hook for that: its agent makes the SubprocessContext itself, deep below ``main``,
    and takes no class or callback for it. So the method of torch's class is replaced, here only, in
    a process that runs nothing else.

    ``SubprocessContext.close`` is also called after a success, when all ranks of this host have
    ended and other hosts may still work: nothing is written then, or the supervisor would take a
    rank that left by ``os._exit(0)`` for a killed one.
    """
    close = SubprocessContext.close

    def noted(self: SubprocessContext, *args: Any, **options: Any) -> None:
        if any(handler.proc.poll() is None for handler in self.subprocess_handlers.values()):
            with suppress(StorageError):  # a full disk does not keep the ranks alive
                write_agent(record, AgentRecord(closing=True))
        close(self, *args, **options)

    setattr(SubprocessContext, "close", noted)  # noqa: B010 - mypy would not let a method be assigned


def failures_of(error: ChildFailedError) -> tuple[RankExit, ...]:
    """Return how the failed ranks ended: the first one, then those that ended because of it."""
    _, first = error.get_first_failure()
    others = [failure for failure in error.failures.values() if failure is not first]
    return tuple(RankExit(failure.local_rank, failure.pid, failure.exitcode) for failure in (first, *others))


if __name__ == "__main__":
    main(sys.argv[1:])
