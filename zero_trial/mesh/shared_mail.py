"""Tickets between ranks of one host through shared memory: where a payload lies, told without a socket or a thread.

Every rank has one block that it alone writes and all others read: a ring of the tickets of its last collectives, numbered.

    | number up to which I have read everyone's | slot 0: number, tag, ticket | slot 1 ... | slot SLOTS - 1 |

All ranks of the axis start their collectives in one order (also those of several engines on the same ranks), so number k is the same collective
everywhere. Its ticket goes into slot k mod SLOTS once everybody has read what was there: nobody ever is SLOTS collectives ahead.

Price: about 2 microseconds to tell, and as much per peer to be told; a message through a socket costs 100 and more on both sides.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Mapping
from datetime import timedelta

from zero_trial.mesh.peers import ELSEWHERE, Peers
from zero_trial.mesh.shared_memory import Ticket

SLOTS = 1024
_SLOT = struct.Struct(
    "=qqqqqqqq"
)  # number, tag, process, descriptor, generation, offset, gap, nothing: 64 bytes, a line of the cache
_FIRST = 64
BLOCK_BYTES = _FIRST + SLOTS * _SLOT.size


class SharedMail:
    """This rank's ring of tickets and its view of the others'."""

    def __init__(self, own: mmap.mmap, others: Mapping[int, mmap.mmap], peers: Peers, timeout: float) -> None:
        self._own = own
        self._others = dict(others)
        self._numbers = {index: memoryview(block).cast("q") for index, block in others.items()}
        self._own_numbers = memoryview(own).cast("q")
        self.peers = peers
        self._timeout = timeout
        self._number = 0
        self._unread: set[int] = set()  # collectives whose tickets this rank has not read yet

    def post(self, ticket: Ticket | None, tag: int, sources: Iterable[int]) -> Letters:
        """Starts the next collective: tells ``ticket``, if this rank has something to tell, and expects one from each of ``sources``."""
        self._number += 1
        number = self._number
        for index, numbers in self._numbers.items():
            if numbers[0] < number - SLOTS:
                self.peers.await_(index, lambda numbers=numbers: numbers[0] >= number - SLOTS, self._timeout)  # type: ignore[misc]
        if ticket is not None:
            start = _FIRST + number % SLOTS * _SLOT.size
            fields = (ticket.process, ticket.descriptor, ticket.generation, ticket.offset, ticket.gap, 0)
            _SLOT.pack_into(self._own, start, -1, tag, *fields)
            self._own_numbers[start // 8] = number  # last: who sees it sees the rest
        self._unread.add(number)
        return Letters(self, number, tag, tuple(sources))

    def collect(self, number: int, tag: int, sources: Iterable[int], timeout: float) -> dict[int, Ticket]:
        """The tickets of collective ``number`` by axis index. Raises RuntimeError where one does not come, or belongs to another operation."""
        start = _FIRST + number % SLOTS * _SLOT.size
        at = start // 8
        found = {}
        for index in sources:
            numbers = self._numbers[index]
            if numbers[at] != number:
                self.peers.await_(index, lambda numbers=numbers: numbers[at] == number, timeout)  # type: ignore[misc]
            _, other_tag, *fields, _ = _SLOT.unpack_from(self._others[index], start)
            if other_tag != tag:
                raise RuntimeError(f"another rank of this axis (index {index}) {ELSEWHERE}")
            found[index] = Ticket(*fields)
        self.forget(number)
        return found

    def forget(self, number: int) -> None:
        """Nothing of collective ``number`` will be read here any more."""
        if number in self._unread:
            self._unread.remove(number)
            self._own_numbers[0] = min(self._unread, default=self._number + 1) - 1


class Letters:
    """The tickets of one collective, on their way; waited for like a work of torch.distributed."""

    def __init__(self, mail: SharedMail, number: int, tag: int, sources: tuple[int, ...]) -> None:
        self._mail = mail
        self._number = number
        self._tag = tag
        self._sources = sources
        self.tickets: dict[int, Ticket] = {}

    def wait(self, timeout: timedelta) -> None:
        self.tickets = self._mail.collect(self._number, self._tag, self._sources, timeout.total_seconds())

    def __del__(self) -> None:
        self._mail.forget(
            self._number
        )  # also where an error kept the caller from waiting: nobody is to be held up by it
