"""When the stand-in device's work runs, and what memory it may use then.

Work is queued on streams. It runs when the host waits for something, as late as it may, or in
another order that the events allow. Each launch is checked as it is queued: every access to memory
is compared with the accesses before by vector clocks, so that a missing event is an error in every
run and not only where two streams happen to meet.

    Stream.seen   how far this stream is ordered after each other stream
    Event.clock   the same for what was queued before the event
    host clock    the same for what the host has waited for; it orders all that is launched later
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

HOST_DEVICE = ("to the host", "to the device")
ALLOCATED, FREED, EVENT_GONE = range(3)
INSIDE = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/", contextlib.__file__)
ORDERS = ("late", "early", "random")
ENDED_SECONDS = 0.05  # between two looks at what is under way, which says itself when it has ended


class DeviceFault(RuntimeError):
    """A launch, a free or a wait that a GPU would have answered with wrong values, or never."""


class UnderWay(Protocol):
    """Work that goes on by itself once it was started, such as a collective."""

    def is_completed(self) -> bool: ...

    def finish(self) -> None: ...


class Use(NamedTuple):
    """Bytes [low, high) of the allocation at ``base`` that a launch reads or writes."""

    base: int
    low: int
    high: int
    writes: bool


def overlap(one: Use, other: Use) -> bool:
    return one.low < other.high and other.low < one.high


class Access(NamedTuple):
    """A use by launch number ``count`` of a stream."""

    use: Use
    stream: int
    count: int
    name: str
    site: str

    def __str__(self) -> str:
        return f"{self.name} ({'writes' if self.use.writes else 'reads'}, stream {self.stream}, {self.site})"


@dataclass(slots=True)
class Allocation:
    """Memory of the stream that was current when it was allocated."""

    base: int
    nbytes: int
    stream: int
    site: str
    accesses: list[Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)  # by record_stream


@dataclass(slots=True)
class Event:
    """A moment of a stream: after all that was queued there before."""

    stream: int
    clock: dict[int, int]
    done: bool = False


@dataclass(slots=True)
class Work:
    """What a launch queued: a function to run, or an event to wait for or to mark; before it, new
    memory is filled."""

    name: str
    site: str
    run: Callable[[], UnderWay | None] | None = None
    waits_for: Event | None = None
    marks: Event | None = None
    fills: Sequence[tuple[int, int]] = ()


@dataclass(slots=True)
class Launched:
    """One launch in the history: what it was ordered after, how often the host had waited for the
    whole device before, and for copies between host and device the direction and bytes."""

    kind: str
    seen: dict[int, int]
    epoch: int
    nbytes: int = 0


@dataclass(slots=True)
class Stream:
    """A queue. ``count``: launches and allocations so far; ``ran``: how many of them have run.
    ``fills``: new memory, as (address, bytes), that what is queued next fills before."""

    number: int
    seen: dict[int, int] = field(default_factory=dict)  # replaced, never changed
    count: int = 0
    ran: int = 0
    queue: deque[Work] = field(default_factory=deque)
    fills: list[tuple[int, int]] = field(default_factory=list)
    under_way: UnderWay | None = None
    history: list[tuple[int, Launched]] = field(default_factory=list)

    def after(self, clock: dict[int, int]) -> None:
        if any(self.seen.get(stream, 0) < count for stream, count in clock.items() if stream != self.number):
            self.seen = {key: max(self.seen.get(key, 0), clock.get(key, 0)) for key in {*self.seen, *clock}}

    def append(self, work: Work) -> None:
        if self.fills:
            work.fills, self.fills = self.fills, []
        self.queue.append(work)

    def fill(self) -> None:
        """Queue what is left to fill: others may use the memory once this stream was waited for."""
        if self.fills:
            self.append(Work("allocation", ""))

    @property
    def clock(self) -> dict[int, int]:
        return {**self.seen, self.number: self.count}


class Scheduler:
    """All streams of the device, and the memory that their work uses.

    Args:
        unlock, lock: let work touch the device's memory, and forbid it again.
        changes: what was allocated and freed since the last call, as (change, address or event,
            bytes, stream).
        release: gives the pages of a freed allocation back.
        poison: fills memory with NaN.
        share: lets every stream have what was released.
    """

    def __init__(
        self,
        unlock: Callable[[], None],
        lock: Callable[[], None],
        changes: Callable[[], Iterable[tuple[int, int, int, int]]],
        release: Callable[[Allocation], None],
        poison: Callable[[int, int], None],
        share: Callable[[], None],
    ) -> None:
        self._unlock, self._lock, self._changes = unlock, lock, changes
        self._release, self._poison, self._share = release, poison, share
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, Event] = {}
        self._memory: dict[int, Allocation] = {}
        self._leaving: list[Allocation] = []
        self._host: dict[int, int] = {}
        self._turn = threading.RLock()
        self._epoch = 0
        self._random = random.Random(0)
        self._moved = time.monotonic()
        self._fault: DeviceFault | None = None
        self.ended = threading.Event()  # set by what is under way when it is completed
        self.order = "late"
        self.waits: list[str] = []  # of the host, by what and where

    def stream(self, number: int) -> Stream:
        if number not in self._streams:
            self._streams[number] = Stream(number)
        return self._streams[number]

    # --- what is queued ---------------------------------------------------------------------------

    def launch(
        self,
        name: str,
        stream: int,
        uses: Iterable[Use],
        run: Callable[[], UnderWay | None],
        *,
        kind: str = "compute",
        nbytes: int = 0,
    ) -> None:
        """Queue ``run``. Raises DeviceFault where another stream may use the memory at the same
        time."""
        with self._turn:
            self._catch_up()
            self._queue(name, self.stream(stream), uses, run, kind, nbytes)

    def _queue(
        self,
        name: str,
        stream: Stream,
        uses: Iterable[Use],
        run: Callable[[], UnderWay | None],
        kind: str,
        nbytes: int,
    ) -> None:
        site = caller()
        stream.after(self._host)
        stream.count += 1
        for use in uses:
            memory = self._memory.get(use.base)
            if memory is None:
                raise DeviceFault(f"standin: {name} at {site} uses memory that is not allocated")
            access = Access(use, stream.number, stream.count, name, site)
            memory.accesses = [*self._still_relevant(memory, access, stream), access]
        stream.history.append((stream.count, Launched(kind, stream.seen, self._epoch, nbytes)))
        stream.append(Work(name, site, run))

    def _still_relevant(self, memory: Allocation, now: Access, stream: Stream) -> Iterable[Access]:
        for old in memory.accesses:
            if not overlap(old.use, now.use):
                yield old
                continue
            ordered = old.stream == stream.number or stream.seen.get(old.stream, 0) >= old.count
            if not ordered and (old.use.writes or now.use.writes):
                raise DeviceFault(
                    f"standin: {now} and {old} use the same memory on different streams, and no event orders them"
                )
            inside = now.use.low <= old.use.low and old.use.high <= now.use.high
            # what is ordered after a write inside it, or after a read of the same stream, needs no
            # comparison with what came before that
            if not (inside and ordered and (now.use.writes or (not old.use.writes and old.stream == now.stream))):
                yield old

    def record(self, event: int, stream: int) -> None:
        with self._turn:
            self._catch_up()
            at = self.stream(stream)
            at.after(self._host)
            made = self._events[event] = Event(stream, at.clock)
            at.append(Work("event", "", marks=made))

    def block(self, event: int, stream: int) -> None:
        """What is launched on the stream from now on runs after the event."""
        with self._turn:
            self._catch_up()
            if (waited := self._events.get(event)) is not None:
                at = self.stream(stream)
                at.after(waited.clock)
                at.queue.append(Work("wait", "", waits_for=waited))

    def use_on_stream(self, address: int, stream: int) -> None:
        """The memory may be freed before the stream has used it, but not used again."""
        with self._turn:
            self._catch_up()
            if address in self._memory:
                self._memory[address].recorded.add(stream)

    # --- memory -----------------------------------------------------------------------------------

    def paused(self) -> AbstractContextManager[Any]:
        """Inside, no work runs on another thread."""
        return self._turn

    def add_pinned(self, base: int, nbytes: int) -> None:
        """Compare accesses to pinned memory of the host from now on, as those to the device's. Its
        addresses are not used again."""
        with self._turn:
            self._memory.setdefault(base, Allocation(base, nbytes, 0, caller()))

    def _catch_up(self) -> None:
        """Look at what was allocated and freed since the last call: no clock has moved since."""
        fault, self._fault = self._fault, None
        for change, address, nbytes, stream in self._changes():
            if change == EVENT_GONE:
                self._events.pop(address, None)
            elif change == FREED:
                fault = self._free(self._memory.pop(address)) or fault
            else:
                site, owner = caller(), self.stream(stream)
                owner.after(self._host)
                owner.count += 1
                owner.fills.append((address, nbytes))
                use = Use(address, address, address + nbytes, writes=True)
                first = Access(use, stream, owner.count, "allocation", site)
                self._memory[address] = Allocation(address, nbytes, stream, site, [first])
        for memory in self._leaving.copy():
            if all(self.stream(each.stream).ran >= each.count for each in memory.accesses):
                self._leaving.remove(memory)
                self._release(memory)
        if fault is not None:
            raise fault

    def _free(self, memory: Allocation) -> DeviceFault | None:
        owner = self.stream(memory.stream)
        owner.after(self._host)
        if memory.recorded:
            self._leaving.append(memory)
        else:
            self._release(memory)  # its stream uses it in order
        for access in memory.accesses:
            ordered = access.stream == owner.number or owner.seen.get(access.stream, 0) >= access.count
            if not ordered and access.stream not in memory.recorded:
                return DeviceFault(
                    f"standin: memory of stream {memory.stream} ({memory.nbytes} bytes, allocated at {memory.site}) was "
                    f"freed before {caller()} while {access} may still use it: no event, wait or record_stream orders them"
                )
        return None

    # --- what runs --------------------------------------------------------------------------------

    def note_wait(self, what: str) -> None:
        """Count a wait of the host, also one for something else than the device."""
        self.waits.append(f"{what} at {caller()}")

    def wait_event(self, event: int) -> None:
        """Block the host until the event."""
        with self._turn:
            self._catch_up()
            waited = self._events.get(event)
            if waited is not None:
                self._wait("event", waited.clock, lambda: waited.done, [self.stream(waited.stream)])

    def wait_stream(self, number: int, what: str = "stream") -> None:
        """Block the host until all that was queued there has run; -1: on all streams."""
        with self._turn:
            self._catch_up()
            found = [self.stream(number)] if number >= 0 else list(self._streams.values())
            for stream in found:
                stream.fill()
            clock: dict[int, int] = {}
            for stream in found:
                clock = {key: max(clock.get(key, 0), stream.clock.get(key, 0)) for key in {*clock, *stream.clock}}
            self._wait(what, clock, lambda: not any(stream.queue for stream in found), found)
            if number < 0:
                self._forget()

    def _forget(self) -> None:
        """The host is after everything: what is launched from now on needs no comparison with what
        was before, which would cost more with every stream that there was."""
        self._epoch += 1
        self._host = {}
        self._share()
        for event in self._events.values():
            event.clock = {}
        for memory in (*self._memory.values(), *self._leaving):
            memory.accesses.clear()
        self._streams = {number: stream for number, stream in self._streams.items() if stream.history}
        for stream in self._streams.values():
            stream.seen = {}

    def _wait(self, what: str, clock: dict[int, int], done: Callable[[], bool], targets: list[Stream]) -> None:
        self.note_wait(what)
        self.run_until(done, targets)
        self._host_is_after(clock)

    def _host_is_after(self, clock: dict[int, int]) -> None:
        self._host = {key: max(self._host.get(key, 0), clock.get(key, 0)) for key in {*self._host, *clock}}

    def is_done(self, event: int) -> bool:
        """What an event query answers. The device goes on a little with each, as time would."""
        with self._turn:
            found = self._events.get(event)
            if found is not None and not found.done:
                self._step([self.stream(found.stream)])
            if found is not None and found.done:
                self._host_is_after(found.clock)
            return found is None or found.done

    def run_until(self, done: Callable[[], bool], targets: list[Stream]) -> None:
        """Run work until ``done()``; ``targets`` are the streams that matter for it."""
        with self._turn:
            if done():
                return
            self._unlock()
            try:
                while not done():
                    if self._step(targets):
                        continue
                    self.ended.clear()
                    if self._step(targets):  # what has ended just before
                        continue
                    if not any(stream.under_way for stream in self._streams.values()):
                        raise DeviceFault("standin: the host waits for what no stream will do")
                    self.ended.wait(ENDED_SECONDS)
            finally:
                self._lock()

    def go_on(self, idle: float) -> None:
        """Run what can run if the host has let the device wait for ``idle`` seconds: it may be
        blocked by a rank that needs this one."""
        with self._turn:
            if time.monotonic() - self._moved < idle or not any(each.queue for each in self._streams.values()):
                return
            self._unlock()
            try:
                while self._step(list(self._streams.values())):
                    pass
            except DeviceFault as fault:  # the host's next wait raises it
                self._fault = fault
            finally:
                self._lock()

    def _step(self, targets: list[Stream]) -> bool:
        """Run one piece of work; False where nothing can run now."""
        needed = next((stream for target in targets if (stream := self._needed(target)) is not None), None)
        if needed is not None and self.order == "late":
            chosen = needed
        else:
            ready = [stream for stream in self._streams.values() if self._can_run(stream)]
            if not ready:
                return False
            if self.order == "random":
                chosen = self._random.choice(ready)
            elif self.order == "early":
                chosen = next((stream for stream in ready if stream is not needed), ready[0])
            else:
                chosen = ready[-1]
        self._moved = time.monotonic()
        self._unlock()
        try:
            self._run_one(chosen)
        finally:
            self._lock()
        return True

    def _can_run(self, stream: Stream) -> bool:
        if stream.under_way is not None:
            return stream.under_way.is_completed()
        head = stream.queue[0] if stream.queue else None
        return head is not None and (head.waits_for is None or head.waits_for.done)

    def _needed(self, stream: Stream) -> Stream | None:
        """Return the stream whose next work this one waits for, itself where it can go on."""
        passed: set[int] = set()
        while stream.number not in passed and (stream.queue or stream.under_way):
            if self._can_run(stream):
                return stream
            passed.add(stream.number)
            if stream.under_way is not None or (waited := stream.queue[0].waits_for) is None:
                return None
            stream = self.stream(waited.stream)
        return None

    def _run_one(self, stream: Stream) -> None:
        work = stream.queue[0]
        for address, nbytes in work.fills:
            self._poison(address, nbytes)
        stream.ran += len(work.fills)
        work.fills = ()
        if stream.under_way is not None:
            under_way, stream.under_way = stream.under_way, None
            under_way.finish()
        elif work.marks is not None:
            work.marks.done = True
        elif work.run is not None:
            try:
                stream.under_way = work.run()
            except Exception as error:
                stream.queue.popleft()
                raise DeviceFault(f"standin: {work.name}, launched at {work.site}: {error}") from error
            if stream.under_way is not None:
                return
        stream.queue.popleft()
        stream.ran += work.run is not None

    # --- counters ---------------------------------------------------------------------------------

    def copies(self) -> list[tuple[str, int, bool]]:
        """Return (direction, bytes, overlapped) of each copy between host and device: overlapped
        is a copy that some computation on another stream may run beside."""
        with self._turn:
            return [
                (copy.kind, copy.nbytes, self._overlapped(stream, count, copy))
                for stream in self._streams.values()
                for count, copy in stream.history
                if copy.kind in HOST_DEVICE
            ]

    def _overlapped(self, stream: Stream, count: int, copy: Launched) -> bool:
        return any(
            number > copy.seen.get(other.number, 0) and each.seen.get(stream.number, 0) < count
            for other in self._streams.values()
            if other is not stream
            for number, each in other.history
            if each.kind == "compute" and each.epoch == copy.epoch
        )

    def reset(self) -> None:
        """Forget waits and copies so far."""
        with self._turn:
            self.waits.clear()
            for stream in self._streams.values():
                stream.history.clear()


def caller() -> str:
    """Return file:line of the nearest caller outside of torch and this folder."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = _name_outside(frame.f_code.co_filename)
        if name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch's own thread"


@cache
def _name_outside(path: str) -> str:
    """Return the name of a file; nothing where it is torch's or of this folder."""
    return "" if path.startswith(INSIDE) else path.rpartition("/")[2]
