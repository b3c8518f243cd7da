"""Waits for other ranks of this host, which write numbers into memory that this rank reads, and
small values of all of them."""

from __future__ import annotations

import os
import platform
import select
import struct
import time
import weakref
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress

ELSEWHERE = "is at another operation"  # in the text of an error: a rank has come, with another call
CROSSED = "the ranks wait for each other"  # in the text of an error: each in another collective

# ranks that arrive together meet within this; then the core is given to others
_SPIN_SECONDS = 1e-4
_LONGEST_NAP_SECONDS = 1e-3
_LOOK_SECONDS = 0.05  # how often a waiting rank checks that its peers are alive


def shared_waits_supported() -> bool:
    """Say whether ranks can wait for one another in shared memory: processes can be watched, and
    this machine keeps the order of writes (x86), on which a number that is written after its
    payload relies.
    """
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "pidfd_open")


def close_all(*descriptors: int) -> None:
    """Close what is still open."""
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)


class PeerProcesses:
    """The other ranks of an axis as processes: axis index -> process id.

    ``crossed`` says whether a wait that is under way can never end: its ranks wait for each other.
    ``go_on`` is called again and again while this rank waits: it goes on with other collectives.
    """

    def __init__(
        self,
        processes: Mapping[int, int],
        crossed: Callable[[], bool] = lambda: False,
        go_on: Callable[[], None] = lambda: None,
    ) -> None:
        self._watches = {index: os.pidfd_open(process) for index, process in processes.items()}
        self._crossed = crossed
        self._go_on = go_on
        weakref.finalize(self, close_all, *self._watches.values())

    def wait_for(self, index: int, numbers: memoryview, at: int, least: int, timeout: float) -> None:
        """Return when axis index ``index`` has written ``least`` or more at ``numbers[at]``
        (int64).

        Raises RuntimeError when its process has ended (``closed``), where the ranks wait for each
        other, or after ``timeout`` seconds (``timed out``). Spins for a moment, then naps: a rank
        that waits long leaves its core to the one that it waits for.
        """
        if numbers[at] >= least:
            return
        begun = time.monotonic()
        nap, look, deadline = 0.0, begun + _LOOK_SECONDS, begun + timeout
        while numbers[at] < least:
            now = time.monotonic()
            if now - begun < _SPIN_SECONDS:
                os.sched_yield()
                continue
            self._go_on()
            if now >= look:
                look = now + _LOOK_SECONDS
                if self._has_ended(index) and numbers[at] < least:
                    raise RuntimeError(f"closed: the process of axis index {index} has ended")
                if self._crossed():
                    raise RuntimeError(CROSSED)
            if now >= deadline:
                raise RuntimeError("timed out")
            nap = min(nap + 2e-5, _LONGEST_NAP_SECONDS)
            time.sleep(nap)

    def _has_ended(self, index: int) -> bool:
        """Say whether the process has ended, also if its exit status has not been read yet."""
        poll = select.poll()
        poll.register(self._watches[index], select.POLLIN)
        return bool(poll.poll(0))


# --- control values ---

HALF_BYTES = 4096
_HEADER = struct.Struct("=qqq")  # number, crc of the operation's name, bytes
CONTROL_CAPACITY = HALF_BYTES - _HEADER.size


class SharedControlBlock:
    """This rank's block and its view of the others', by axis index.

    Every rank writes its own block alone, and all others read it:

        | number of my last exchange | half 0: header, payload | half 1: header, payload |

    Exchange k goes into half k mod 2. A rank writes its half, then its number, and waits until
    every other rank's number is k or more. That number shows the others that this rank has read all
    of exchange k - 1, so a half is never overwritten before every rank has read it.

    Price: one write of the payload, one read per peer; about 10 microseconds between two ranks that
    arrive together, where a message takes 100.
    """

    NBYTES = 64 + 2 * HALF_BYTES

    def __init__(self, own: memoryview, others: Mapping[int, memoryview], peers: PeerProcesses) -> None:
        self._own = own
        self._others = dict(others)
        self._own_number = own.cast("q")
        self._numbers = {index: block.cast("q") for index, block in others.items()}
        self._peers = peers
        self._number = 0

    def exchange(self, name: str, payload: bytes, timeout: float) -> dict[int, bytes]:
        """Return every other rank's payload of this exchange.

        All ranks must call it with the same ``name`` and number of bytes.

        Raises RuntimeError where a rank has ended (``closed``), does not come (``timed out``) or is
        at another operation.
        """
        self._number += 1
        start = 64 + self._number % 2 * HALF_BYTES
        kind = zlib.crc32(name.encode())
        self._own[start + _HEADER.size : start + _HEADER.size + len(payload)] = payload
        _HEADER.pack_into(self._own, start, self._number, kind, len(payload))
        self._own_number[0] = self._number
        found = {}
        for index, block in self._others.items():
            numbers = self._numbers[index]
            if numbers[0] < self._number:
                self._peers.wait_for(index, numbers, 0, self._number, timeout)
            number, other_kind, size = _HEADER.unpack_from(block, start)
            if (number, other_kind, size) != (self._number, kind, len(payload)):
                raise RuntimeError(f"another rank of this axis (index {index}) {ELSEWHERE}")
            found[index] = bytes(block[start + _HEADER.size : start + _HEADER.size + size])
        return found
