"""Ring buffers in shared memory between ranks of one host: small values of all ranks, and messages between two.

SharedControlBlock   all ranks exchange a few bytes at once: sums, gathers and barriers without a socket or a thread
RingChannels         messages between two ranks, in the order of sending, with a doorbell that wakes the reader
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import time
import weakref
import zlib
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch

from zero_trial.comm.shm.segments import ELSEWHERE, PeerProcesses, SegmentHandle, SharedMemory

HALF_BYTES = 4096
_HEADER = struct.Struct("=qqq")  # number, crc of the operation's name, bytes
CAPACITY = HALF_BYTES - _HEADER.size
BLOCK_BYTES = 64 + 2 * HALF_BYTES


class SharedControlBlock:
    """This rank's block and its view of the others', by axis index. Every rank writes its own block alone, and all others read it:

        | number of my last exchange | half 0: header, payload | half 1: header, payload |

    Exchange k goes into half k mod 2. A rank writes its half, then its number, and waits until every
    other rank's number is k or more. That number shows the others that this rank has read all of exchange
    k - 1, so a half is never overwritten before every rank has read it.

    Price: one write of the payload, one read per peer; about 10 microseconds between two ranks that
    arrive together, where a message takes 100.
    """

    def __init__(self, own: mmap.mmap, others: Mapping[int, mmap.mmap], peers: PeerProcesses) -> None:
        self._own = own
        self._others = dict(others)
        self._own_number = memoryview(own).cast("q")
        self._numbers = {index: memoryview(block).cast("q") for index, block in others.items()}
        self._peers = peers
        self._number = 0

    def exchange(self, name: str, payload: bytes, timeout: float) -> dict[int, bytes]:
        """Return every other rank's payload of this exchange. All ranks must call it with the same ``name`` and number of bytes.

        Raises RuntimeError where a rank has ended (``closed``), does not come (``timed out``) or is at another operation.
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
            self._peers.wait_until(index, lambda numbers=numbers: numbers[0] >= self._number, timeout)  # type: ignore[misc]
            number, other_kind, size = _HEADER.unpack_from(block, start)
            if (number, other_kind, size) != (self._number, kind, len(payload)):
                raise RuntimeError(f"another rank of this axis (index {index}) {ELSEWHERE}")
            found[index] = bytes(block[start + _HEADER.size : start + _HEADER.size + size])
        return found


SLOTS = 2048
INLINE = 192  # bytes of payload that fit into a slot
_FACTS = struct.Struct("=qqqqqqq")  # number, tag, bytes, process, descriptor, generation, offset
_SLOT_BYTES = 64 + INLINE
_FIRST = 64
RING_BYTES = _FIRST + SLOTS * _SLOT_BYTES


class Doorbell:
    """A pipe into which other processes write a byte after they have sent a message."""

    def __init__(self) -> None:
        self._read, self.descriptor = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        weakref.finalize(self, _close, self._read, self.descriptor)

    def wait(self, process: int, seconds: float) -> bool:
        """Wait until it rings, the process of the pid descriptor ``process`` ends, or time is up. Return whether that process has ended."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        poll.register(process, select.POLLIN)
        events = dict(poll.poll(max(seconds, 0.0) * 1e3))
        if self._read in events:
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, 4096)
        return process in events


class RingBuffer:
    """One direction between two ranks, seen from either end: one rank writes, the other reads.

        | number up to which the reader has read | slot 0: number, tag, bytes, handle, small payload | slot 1 ... | slot SLOTS - 1 |

    A payload above INLINE bytes is in a shared segment, to which the handle points.
    """

    def __init__(self, block: mmap.mmap) -> None:
        self._block = block
        self._numbers = memoryview(block).cast("q")
        self._bytes = torch.frombuffer(block, dtype=torch.uint8)

    def full(self, number: int) -> bool:
        """Say whether there is no room for message ``number`` yet."""
        return self._numbers[0] < number - SLOTS

    def write(self, number: int, tag: int, raw: torch.Tensor, handle: SegmentHandle | None) -> None:
        """Write message ``number``, whose bytes are behind ``handle``, or go into the slot."""
        start = self._start(number)
        place = (0, 0, 0, 0)
        if handle is not None:
            place = (handle.process, handle.descriptor, handle.generation, handle.offset)
        elif raw.numel():
            self._bytes[start + 64 : start + 64 + raw.numel()] = raw
        _FACTS.pack_into(self._block, start, -1, tag, raw.numel(), *place)
        self._numbers[start // 8] = number  # last: a reader that sees the number sees the rest

    def has(self, number: int) -> bool:
        """Say whether message ``number`` is there."""
        return self._numbers[self._start(number) // 8] == number

    def facts(self, number: int) -> tuple[int, int, SegmentHandle]:
        """Return the tag of a message that is there, its size in bytes, and where they are if they are many."""
        _, tag, size, *place = _FACTS.unpack_from(self._block, self._start(number))
        return tag, size, SegmentHandle(*place)

    def small(self, number: int, size: int) -> torch.Tensor:
        """Return the bytes in the slot, valid until :meth:`done`."""
        start = self._start(number) + 64
        return self._bytes[start : start + size]

    def done(self, number: int) -> None:
        """Note that the reader has read everything up to ``number``."""
        self._numbers[0] = number

    def _start(self, number: int) -> int:
        return _FIRST + number % SLOTS * _SLOT_BYTES


class RingChannels:
    """This rank's rings to and from the others of an axis. ``bells`` are the others' doorbells, ``processes`` their pid descriptors.

    A sender writes a message's number last, then rings the reader's bell: a byte in a pipe, which wakes it
    within microseconds, where a process that naps may sleep a millisecond too long. The kernel wakes a
    rank that waits for one that has ended. Price: one copy out and one copy in. A send does not wait,
    unless the reader is SLOTS messages behind.
    """

    def __init__(
        self,
        index: int,
        memory: SharedMemory,
        bell: Doorbell,
        out: Mapping[int, RingBuffer],
        into: Mapping[int, RingBuffer],
        bells: Mapping[int, int],
        processes: Mapping[int, int],
        timeout: float,
    ) -> None:
        self._index = index
        self._memory = memory
        self._bell = bell
        self._out, self._in = out, into
        self._bells, self._processes = bells, processes
        self._timeout = timeout
        self._sent = dict.fromkeys(out, 0)
        self._asked = dict.fromkeys(into, 0)
        weakref.finalize(self, _close, *bells.values(), *processes.values())

    def send(self, values: torch.Tensor, to: int, tag: int) -> RingSend:
        """Copy ``values`` into the ring; they may change afterwards. Raises RuntimeError where the reader is gone or far behind."""
        ring, raw = self._out[to], values.reshape(-1).view(torch.uint8)
        self._sent[to] += 1
        number = self._sent[to]
        if ring.full(number):
            self.wait_until(lambda: not ring.full(number), to, self._timeout)
        handle = None
        if raw.numel() > INLINE:
            segment = self._memory.acquire(raw.numel(), [to])
            segment.payload(torch.uint8, raw.numel()).copy_(raw)
            handle = SegmentHandle(os.getpid(), segment.descriptor, segment.generation, 0)
        ring.write(number, tag, raw, handle)
        # The bell rings already, or its reader has ended.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._bells[to], b"\0")
        return RingSend()

    def receive(self, values: torch.Tensor, source: int, tag: int) -> RingReceive:
        """Return the next message of ``source``, to be copied into ``values`` when it is waited for."""
        self._asked[source] += 1
        return RingReceive(self, self._in[source], self._asked[source], values, source, tag)

    def take(self, receipt: RingReceive) -> None:
        """Copy a message that is there. Raises RuntimeError where it is not the one that was asked for."""
        ring, number = receipt.ring, receipt.number
        tag, size, handle = ring.facts(number)
        raw = receipt.values.view(-1).view(torch.uint8)
        if tag != receipt.tag or size != raw.numel():
            raise RuntimeError(f"axis index {receipt.source} {ELSEWHERE}: it has sent another message ({size} bytes)")
        if size > INLINE:
            raw.copy_(self._memory.read(handle, torch.uint8, size))
            self._memory.acknowledge(handle, self._index)
        elif size:
            raw.copy_(ring.small(number, size))
        ring.done(number)

    def wait_until(self, ready: Callable[[], bool], index: int, seconds: float) -> None:
        """Return when ``ready()``. Raises RuntimeError when axis index ``index`` has ended (``closed``) or time is up (``timed out``)."""
        deadline = time.monotonic() + seconds
        while not ready():
            ended = self._bell.wait(self._processes[index], deadline - time.monotonic())
            if ready():
                return
            if ended:
                raise RuntimeError(f"closed: the process of axis index {index} has ended")
            if time.monotonic() >= deadline:
                raise RuntimeError("timed out")


class RingSend:
    """A message that was sent: nothing to wait for."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta) -> None:
        return None


class RingReceive:
    """A message that was asked for; waited for like a work of torch.distributed, in the order of asking."""

    def __init__(
        self, channels: RingChannels, ring: RingBuffer, number: int, values: torch.Tensor, source: int, tag: int
    ) -> None:
        self._channels = channels
        self.ring = ring
        self.number = number
        self.values = values
        self.source = source
        self.tag = tag

    def is_completed(self) -> bool:
        return self.ring.has(self.number)

    def wait(self, timeout: timedelta) -> None:
        self._channels.wait_until(lambda: self.ring.has(self.number), self.source, timeout.total_seconds())
        self._channels.take(self)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
