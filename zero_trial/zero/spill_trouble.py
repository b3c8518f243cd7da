"""The first failure of a disk, after which nothing that lives there is used again."""

from __future__ import annotations

from collections.abc import Sequence

from zero_trial.errors import StorageError
from zero_trial.zero.spill_file import Ticket


class Trouble:
    """Shared by all whose values lie in a rank's files: half a step in one of them is half a step for all."""

    def __init__(self) -> None:
        self.first: StorageError | None = None

    def wait(self, tickets: Sequence[Ticket]) -> None:
        """For all of them. Raises StorageError, and remembers it: what did not reach the disk, or a step that ended there, is not to be mended."""
        fault: StorageError | None = None
        for ticket in tickets:
            try:
                ticket.wait()
            except StorageError as found:
                fault = fault or found
        if fault is not None:
            self.remember(fault)
            raise fault

    def remember(self, fault: StorageError) -> None:
        self.first = self.first or fault

    def require_none(self) -> None:
        """A checkpoint of half a step, or a step from it, would be wrong without a word."""
        if self.first is not None:
            raise StorageError(
                "the disk has failed, and offloaded state is lost",
                where=self.first.where,
                got=self.first.got,
                fix="Mend the disk or name another one in nvme_path, and go on from the last checkpoint in a new engine.",
            ) from self.first
