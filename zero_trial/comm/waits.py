"""Waits for collectives: where each rank is, what is in flight, for how long, and the error that
names the missing rank.

    CallOrder   the collectives of one axis, as this rank has called them
    Heartbeat   publishes this rank's last collective in the process group's store, and warns about
                slow waits
    Watchdog    bounds the waits of one axis and turns their failures into MeshErrors
    Pending     a collective in flight, which owns its buffers until it has been waited for
    Message     a tensor in flight between two ranks
    explain     builds the error of a failed wait from the last published positions

Cost: the hot path assigns one attribute per collective. A daemon thread writes to the store, at
most :data:`WRITES_PER_SECOND` times per second over all ranks, so that positions do not overload a
store that serves thousands of ranks.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch

from zero_trial.comm.diagnosis import (
    Call,
    RankPosition,
    behind,
    crossed,
    diagnose,
    listing,
    names,
    with_way_out,
)
from zero_trial.comm.shared_memory import CROSSED
from zero_trial.errors import MeshError
from zero_trial.util.failures import known_fault, line_being_run

log = logging.getLogger("zero_trial.waits")

PERIOD_SECONDS = 0.25  # how often the thread checks, which is local
WRITES_PER_SECOND = 100  # of all ranks together, to the store
# a rank that has not moved for this long publishes that at once, in a world of any size
STILL_SECONDS = 10.0
# a wait that takes longer is reported while it lasts, again at 20, 40, 80 ... seconds
SLOW_SECONDS = 10.0
# a rank that has not moved for this long reports its line and, if it waits, checks whether others
# wait for it
STUCK_SECONDS = 2.0
_LOOKED_AT = 8  # so many ranks, the first of the axis: of two halves that wait for each other, one is theirs

_KEY = "zero_trial/heartbeat/"

KEPT_CALLS = 1024  # of an axis, by name
# Collectives' tags end here; the rest of 31 bits is for messages between pipeline stages.
FIRST_MESSAGE_TAG = 0xFFFF0 << 11


class CallOrder:
    """The collectives of one axis in the order in which this rank has called them: a digest of all,
    and the names of the last ones.

    Ranks that have called the same collectives have the same digest. It is the tag of their
    messages, so that a rank never receives a message of another collective, nor any message after
    the first mismatch: a wrong match has a probability of 2^-31.

    Args:
        number: of the mesh, in the order in which this process has built them, so that two engines
            with equal module names do not receive each other's tensors.
        axis: its name and ranks, the same on each of them.
    """

    def __init__(self, number: int = 0, axis: str = "") -> None:
        self.number = number
        self.axis = f"{axis} {number}" if axis else ""
        self.count = 0
        self.digest = zlib.crc32(b"%d" % number)
        self._recent: deque[tuple[int, str]] = deque(maxlen=KEPT_CALLS)
        self.call: Call | None = None  # the last; none if the axis has one rank

    def note(self, name: str) -> int:
        """Note a call; return the tag of its messages."""
        self.count += 1
        self.digest = digest = zlib.crc32(name.encode(), self.digest)
        self._recent.append((digest, name))
        if self.axis:
            self.call = (self.axis, self.count, digest)
        return digest % FIRST_MESSAGE_TAG

    def recent(self) -> list[list[int | str]]:
        """Return the digest and the name of each of the last calls, as JSON."""
        return [[digest, name] for digest, name in self._recent]


class Heartbeat:
    """This rank's position, and every rank's as last published.

    A thread publishes instead of the main thread, so that the position of a rank that hangs in user
    code is also known. Only changes are published.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self._keys = ""  # of this process group: the store may have those of an earlier one
        if store is not None and world_size > 1:
            self._keys = f"{_KEY}{store.add(f'{_KEY}groups/{rank}', 1)}/"
        self.step = 0  # number of the optimizer step that collectives from now on belong to
        self.sequence = 0
        self._meshes = 0
        self.waited = 0.0  # seconds that the host spent in collectives
        self._now = RankPosition(since=time.time())
        self._among: tuple[int, ...] = ()  # the ranks of the operation in ``_now``
        self._interval = max(PERIOD_SECONDS, world_size / WRITES_PER_SECOND)
        self._published: RankPosition | None = None
        self._published_at = -math.inf  # monotonic, which may begin with the machine
        self._slow: RankPosition | None = None  # the wait that was reported last
        self._report_after = SLOW_SECONDS
        self._orders: list[weakref.ref[CallOrder]] = []
        self._main = threading.main_thread().ident
        self._detailed: RankPosition | None = None  # the wait that was published with its line
        self._crossed: RankPosition | None = None  # the wait that can never end
        self._told: RankPosition | None = None  # and of which that was logged
        self._look_at = 0.0  # seconds of waiting after which to look again
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if store is not None and world_size > 1:
            self._thread = threading.Thread(target=self._run, name="zero_trial-heartbeat", daemon=True)
            self._thread.start()
            # a script may destroy torch's process group itself, and a thread that is in the store
            # while the interpreter ends aborts the process
            atexit.register(self.close)

    def watch_calls(self, order: CallOrder) -> None:
        """Include the calls on one axis in the position published during a long wait."""
        self._orders = [each for each in self._orders if each() is not None] + [weakref.ref(order)]

    def begin(self, operation: str, among: tuple[int, ...]) -> None:
        """Note that the main thread starts its next collective with the ranks ``among``."""
        self.sequence += 1
        self._among = among
        self._now = RankPosition(self.step, self.sequence, operation, time.time())

    def enter(
        self, operation: str, among: tuple[int, ...] = (), call: Call | None = None, *, again: bool = False
    ) -> None:
        """Note that the main thread enters its next collective, with the ranks ``among``;
        ``again``: to wait for one that it began earlier. ``call``: see :attr:`CallOrder.call`."""
        self.sequence += not again
        self._among = among
        self._now = RankPosition(self.step, self.sequence, operation, time.time(), True, False, call)

    def leave(self) -> None:
        """Note that the main thread no longer waits."""
        now = self._now
        if now.inside and not now.gave_up:
            self.waited += max(time.time() - now.since, 0.0)
            self._now = RankPosition(*now[:4])

    def is_crossed(self) -> bool:
        """Return whether the main thread waits forever: a rank that it waits for is in another
        collective, and waits for this rank."""
        return self._crossed is self._now

    def give_up(self) -> None:
        """Note that this rank's collective failed, so that a late rank does not wait for it."""
        self._now = self._now._replace(gave_up=True)

    def count_mesh(self) -> int:
        """Return the number of the process group's next mesh, from 1, the same on every rank."""
        self._meshes += 1
        return self._meshes

    def report_error(self, error: str) -> None:
        """Publish immediately why this rank raises outside of a collective, so that ranks that wait
        for it can name the reason.

        Writes to the store, because the rank may end before the thread publishes; for errors only.
        """
        self._now = RankPosition(self.step, self.sequence, f"the error {error!r}", time.time())
        if self._thread is not None:
            # the store is gone, and with it the ranks that would read it
            with suppress(RuntimeError):
                self._store.set(f"{self._keys}{self.rank}", json.dumps(self._now._asdict()))

    def positions(self, ranks: Iterable[int] | None = None) -> dict[int, RankPosition | None]:
        """Return the last published position of ``ranks`` (default: all); None for a rank that
        never published.

        If the store is unavailable, only this rank's own position is known.
        """
        chosen = range(self.world_size) if ranks is None else ranks
        return {rank: self._detail(self._now) if rank == self.rank else self._read(rank) for rank in chosen}

    def close(self) -> None:
        """Stop the thread. Call before the process group, and thus the store, is destroyed."""
        atexit.unregister(self.close)
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
            self._thread = None

    def _detail(self, now: RankPosition) -> RankPosition:
        """Return a stalled rank's position, its calls on each axis, and its line."""
        orders = [order for each in self._orders if (order := each()) is not None]
        line = line_being_run(sys._current_frames().get(self._main or 0))
        return now._replace(calls={order.axis: order.count for order in orders}, line=line)

    def _read(self, rank: int) -> RankPosition | None:
        key = f"{self._keys}{rank}"
        try:
            if self._store is None or not self._store.check([key]):
                return None
            found = RankPosition(**json.loads(self._store.get(key)))
            if found.call is None:
                return found
            axis, number, digest = found.call  # a list, because it comes from JSON
            return found._replace(call=(axis, number, digest))
        except (RuntimeError, ValueError, TypeError):
            # the store's process is gone, or the entry is damaged
            return None

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(PERIOD_SECONDS):
            clock = time.monotonic()
            # neither a wait nor Python code keeps this thread from running so long
            if clock - last > SLOW_SECONDS:
                log.warning(
                    "rank %d did not run for %.0f s: the process was stopped, or the machine gave it no CPU time",
                    self.rank,
                    clock - last,
                )
            last, now = clock, self._now
            try:
                self._publish(now, clock)
                self._look_for_crossing(now)
                self._report_slow_wait(now)
            except RuntimeError:  # the store is gone, and with it the run
                return

    def _publish(self, now: RankPosition, clock: float) -> None:
        """Publish a change on this rank's turn: soon if it has stopped or failed."""
        seconds = time.time() - now.since
        stuck = seconds >= self._stuck_after and now is not self._detailed
        due = seconds >= STILL_SECONDS or now.gave_up or clock - self._published_at >= self._interval
        if not stuck and (now is self._published or not due):
            return
        known = self._detail(now) if stuck or now.gave_up else now
        if stuck:
            self._detailed, self._look_at = now, seconds + 2 * PERIOD_SECONDS  # the others publish, too
        self._store.set(f"{self._keys}{self.rank}", json.dumps(known._asdict()))
        self._published, self._published_at = now, clock

    @property
    def _stuck_after(self) -> float:
        return max(STUCK_SECONDS, self._interval)

    def _look_for_crossing(self, now: RankPosition) -> None:
        """Check after a long wait whether a rank that this rank waits for is in another collective
        and waits for this rank. Then waits in shared memory raise an error; for others this is only
        logged, because nothing can end them before their timeout."""
        if now.call is None or not now.inside or now.gave_up:
            return
        if now is self._crossed:
            if now is not self._told:
                self._told = now
                here = f"rank {self.rank}, step {now.step}, {now.operation}"
                ranks = self._near()
                log.error("%s", diagnose(self.positions(ranks), self.rank, here, RuntimeError(CROSSED), 0.0))
            return
        waited = time.time() - now.since
        if now is self._detailed and waited >= self._look_at:
            self._look_at = max(waited * 1.25, waited + self._stuck_after)
            if crossed(self.positions(self._near()), self.rank):
                self._crossed = now

    def _near(self) -> list[int]:
        return [*{*(self._among or range(self.world_size))[:_LOOKED_AT], self.rank}]

    def _report_slow_wait(self, now: RankPosition) -> None:
        """Warn about a long wait, naming the ranks that are behind; only one rank warns."""
        if self._slow is not None and now != self._slow:
            text = "rank %d continues: %s took %.0f s"
            log.warning(text, self.rank, self._slow.operation, time.time() - self._slow.since)
            self._slow, self._report_after = None, SLOW_SECONDS
        waited = time.time() - now.since
        if not now.inside or now.gave_up or waited < self._report_after:
            return
        number = round(self._report_after / SLOW_SECONDS)
        self._report_after *= 2
        if int(self._store.add(f"{self._keys}slow/{now.sequence}/{number}/{now.operation}", 1)) != 1:
            return  # another rank reports it
        self._slow = now
        positions = self.positions(self._among or None)
        late = behind(positions, self.rank)
        missing = f"for {names(late)}" if late else "although every rank has arrived here"
        log.warning(
            "rank %d, step %d, %s: has waited %.0f s %s. %s",
            self.rank,
            now.step,
            now.operation,
            waited,
            missing,
            with_way_out(listing(positions, self.rank, late or None), positions),
        )


Works = list[Any]  # of torch.distributed, or with the same interface


class Watchdog:
    """Bounds the waits of one axis, among ``ranks``: each takes at most ``timeout`` seconds."""

    def __init__(self, heartbeat: Heartbeat, ranks: tuple[int, ...], timeout: float) -> None:
        self.heartbeat = heartbeat
        self.ranks = ranks
        self.timeout = timeout

    def fail(self, name: str, error: Exception, among: tuple[int, ...] | None = None) -> NoReturn:
        """Raise the MeshError for ``error`` in operation ``name``. Raises WorkerLost or DoesNotFit
        if the error text shows one of these, which are not faults of the operation."""
        known = known_fault(error, f"rank {self.heartbeat.rank}, step {self.heartbeat.step}")
        if known is not None:
            self.heartbeat.report_error(str(known))
            raise known from error
        raise explain(self.heartbeat, among or self.ranks, name, error, self.timeout) from error


# --- collectives in flight ------------------------------------------------------------------------


class Pending:
    """A collective in flight.

    It owns its tensors until :meth:`wait` returns: then the result is complete, and no rank reads
    the input. Until then neither input nor output may be accessed.

    Args:
        watch: bounds the waits.
        label: the operation, in errors.
        steps: the works to wait for, and the code that follows them
            (:data:`zero_trial.comm.backends.Steps`). The constructor starts the first works.
        on_host: the tensors are in host memory, and the result is complete after the wait.
            Otherwise later device work of this rank runs after the result, without a host sync.
        call: see :attr:`CallOrder.call`.
        among: the ranks that take part, by default all of ``watch``.
    """

    def __init__(
        self,
        watch: Watchdog,
        label: str,
        steps: Iterator[Works],
        on_host: bool = True,
        call: Call | None = None,
        among: tuple[int, ...] | None = None,
    ) -> None:
        self._watch = watch
        self._label = label
        self._steps = steps
        self._on_host = on_host
        self._call = call
        self._among = among or watch.ranks
        self._failed = False
        self._busy = False  # whether wait() or go_on() is running
        self._works: Works | None = next(steps, None)  # None: the collective is over

    def wait(self) -> Any:
        """Wait until the collective is over on all ranks. Repeatable. Raises MeshError."""
        if self._failed:
            raise MeshError("this collective failed earlier", where=self._label, fix="Look for its first error above.")
        if self._works is not None:
            heartbeat = self._watch.heartbeat
            heartbeat.enter(self._label, self._among, self._call, again=True)
            try:
                self.go_on(wait=True)
            finally:
                heartbeat.leave()

    def go_on(self, *, wait: bool = False) -> bool:
        """Advance as far as possible without waiting, or to the end (``wait``); return whether the
        collective is over, or has failed.

        Code after a wait runs only once. If it raises, the result may be half written, and a second
        try would add it again, so the collective has failed permanently. The other ranks detect
        this from this rank's position (``gave_up``), or from its exit.
        """
        while self._works is not None and not (self._busy or self._failed):
            for work in () if wait else self._works:
                if not work.is_completed():
                    return False
            self._busy = True
            try:
                try:
                    for work in self._works if wait else ():
                        # with a time limit NCCL would block the host; its own watchdog bounds it
                        work.wait(*[timedelta(seconds=self._watch.timeout)] * self._on_host)
                except (RuntimeError, OSError) as error:
                    self._watch.fail(self._label, error, self._among)
                self._works = next(self._steps, None)
            except BaseException:
                self._failed = True
                self._steps = iter(())  # which closes a generator
                raise
            finally:
                self._busy = False
        return self._works is None or self._failed


# A collective of one rank: the result is complete.
DONE = Pending(Watchdog(Heartbeat(None, 0, 1), (0,), 0.0), "", iter(()))


class UnderWay:
    """The unfinished collectives of this process, in the order in which they were started. They are
    advanced whenever this rank waits or starts another collective."""

    def __init__(self) -> None:
        self._pendings: list[Pending] = []

    def add(self, pending: Pending) -> None:
        self._pendings.append(pending)
        self.go_on()

    def go_on(self) -> None:
        """Advance all collectives as far as possible without waiting."""
        for pending in tuple(self._pendings):
            if pending.go_on() and pending in self._pendings:
                self._pendings.remove(pending)

    def wait_for_oldest(self) -> None:
        """Wait for the oldest collective."""
        if not self._pendings:
            raise RuntimeError("an earlier collective failed")
        self._pendings[0].wait()
        self.go_on()


class Message(Pending):
    """A tensor between two ranks, ``among``: ``values`` is sent, or received into."""

    def __init__(self, watch: Watchdog, work: Any, label: str, values: torch.Tensor, among: tuple[int, ...]) -> None:
        super().__init__(watch, label, iter([[work]]), values.is_cpu, among=among)
        self.values = values

    @property
    def done(self) -> bool:
        """Return whether the tensor has been received, or sent. Does not wait."""
        return not self._works or bool(self._works[0].is_completed())

    def wait(self) -> torch.Tensor:
        """Return the tensor after it has been received or sent. Repeatable. Raises MeshError, which
        names the other rank, if the transfer fails."""
        super().wait()
        return self.values


# --- from a failure to an error that names the rank -----------------------------------------------


def explain(
    heartbeat: Heartbeat, ranks: tuple[int, ...], operation: str, error: Exception, timeout: float
) -> MeshError:
    """Return the MeshError for ``operation`` on this rank, from the last positions of ``ranks``."""
    heartbeat.give_up()
    time.sleep(2 * PERIOD_SECONDS)  # lets the other ranks publish their current positions
    here = f"rank {heartbeat.rank}, step {heartbeat.step}, {operation}"
    return diagnose(heartbeat.positions(ranks), heartbeat.rank, here, error, timeout)
