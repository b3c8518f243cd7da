"""Messages between two ranks of one host: ring buffers in memory that they share, with a doorbell
that wakes the reader."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch

from zero_trial.comm.shm.peers import ELSEWHERE, close_all
from zero_trial.comm.shm.segments import SegmentHandle, SharedMemory

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
        weakref.finalize(self, close_all, self._read, self.descriptor)

    def wait(self, process: int, seconds: float) -> bool:
        """Wait until it rings, the process of the pid descriptor ``process`` ends, or time is up.

        Return whether that process has ended.
        """
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

        | number up to which the reader has read | slot 0 | slot 1 | ... | slot SLOTS - 1 |
        a slot: number, tag, bytes, handle, small payload

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
        """Return the tag of a message that is there, its size in bytes, and where they are if they
        are many.
        """
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
    """This rank's rings to and from the others of an axis.

    ``bells`` are the others' doorbells, ``processes`` their pid descriptors.

    A sender writes a message's number last, then rings the reader's bell: a byte in a pipe, which
    wakes it within microseconds, where a process that naps may sleep a millisecond too long. The
    kernel wakes a rank that waits for one that has ended. Price: one copy out and one copy in. A
    send does not wait, unless the reader is SLOTS messages behind.
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
        weakref.finalize(self, close_all, *bells.values(), *processes.values())

    def send(self, values: torch.Tensor, to: int, tag: int) -> RingSend:
        """Copy ``values`` into the ring; they may change afterwards.

        Raises RuntimeError where the reader is gone or far behind.
        """
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
        """Return the next message of ``source``, to be copied into ``values`` when it is waited
        for.
        """
        self._asked[source] += 1
        return RingReceive(self, self._in[source], self._asked[source], values, source, tag)

    def take(self, receipt: RingReceive) -> None:
        """Copy a message that is there.

        Raises RuntimeError where it is not the one that was asked for.
        """
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
        """Return when ``ready()``.

        Raises RuntimeError when axis index ``index`` has ended (``closed``) or time is up (``timed
        out``).
        """
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
    """A message that was asked for; waited for like a work of torch.distributed, in the order of
    asking.
    """

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
