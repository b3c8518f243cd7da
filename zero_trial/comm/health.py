"""Where every rank stands: the last collective that it entered, published so that a rank that waits in vain can say for whom.

A daemon thread writes this rank's position into the process group's key-value store a few times per second, and only when it changed:
the hot path pays one attribute assignment per collective. The thread, not the stuck main thread, publishes, so a rank that hangs in
user code is seen too.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch

from zero_trial.comm.shm.segments import ELSEWHERE, MappingRefused
from zero_trial.errors import MeshError

PERIOD_SECONDS = 0.25


class RankPosition(NamedTuple):
    """One rank's place in the sequence of collectives. A tuple: the hot path makes four of them per collective."""

    step: int = 0
    sequence: int = 0
    operation: str = "start"
    since: float = 0.0  # time.time() of entering it
    inside: bool = False  # still waiting in it
    gave_up: bool = False  # it raised a MeshError there and waits no more

    def describe(self) -> str:
        verb = "gave up in" if self.gave_up else "in" if self.inside else "after"
        return f"at step {self.step}, {verb} {self.operation} (collective {self.sequence}, {max(time.time() - self.since, 0):.0f} s ago)"


class Heartbeat:
    """This rank's position, and everyone's as last published."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self.step = 0
        self.sequence = 0
        self.waited = 0.0  # seconds spent in collectives, by the host
        self._now = RankPosition(since=time.time())
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if store is not None and world_size > 1:
            self._thread = threading.Thread(target=self._publish_loop, name="zero_trial-heartbeat", daemon=True)
            self._thread.start()

    def enter(self, operation: str) -> None:
        self.sequence += 1
        self._now = RankPosition(self.step, self.sequence, operation, time.time(), True)

    def leave(self) -> None:
        now = self._now
        if now.inside:
            self.waited += max(time.time() - now.since, 0.0)
            self._now = RankPosition(*now[:4])

    def waiting(self, operation: str) -> None:
        """The main thread now waits for an operation that it entered earlier."""
        now = self._now
        self._now = RankPosition(now.step, now.sequence, operation, time.time(), True)

    def give_up(self) -> None:
        """This rank's collective failed; whoever comes later need not wait for it."""
        self._now = self._now._replace(gave_up=True)

    def positions(self) -> dict[int, RankPosition | None]:
        """Every rank's last published position; None for a rank that never published or whose store is gone."""
        found: dict[int, RankPosition | None] = {}
        for rank in range(self.world_size):
            found[rank] = self._now if rank == self.rank else self._read(rank)
        return found

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
            self._thread = None

    def _read(self, rank: int) -> RankPosition | None:
        key = f"zero_trial/position/{rank}"
        try:
            if self._store is None or not self._store.check([key]):
                return None
            return RankPosition(**json.loads(self._store.get(key)))
        except (RuntimeError, ValueError):  # the store's host is gone: then nobody's position can be had
            return None

    def _publish_loop(self) -> None:
        published: RankPosition | None = None
        while not self._stop.wait(PERIOD_SECONDS):
            now = self._now
            if now is published:
                continue
            try:
                self._store.set(f"zero_trial/position/{self.rank}", json.dumps(now._asdict()))
            except RuntimeError:
                return
            published = now


# Turning a collective that failed or never ended into one error that names the rank, the operation, the step, and who is missing.


Positions = Mapping[int, RankPosition | None]


_SLOW = "if it is only slow, raise comm_timeout_seconds in ds_config"


_GONE_WORDS = ("closed", "reset by peer", "connection refused", "broken pipe", "socket error")


def explain(
    heartbeat: Heartbeat, ranks: tuple[int, ...], operation: str, error: Exception, timeout: float
) -> MeshError:
    """The MeshError for ``operation`` on this rank, from what every rank last published."""
    heartbeat.give_up()
    time.sleep(2 * PERIOD_SECONDS)  # lets the other ranks' boards publish where they are now
    positions = {rank: position for rank, position in heartbeat.positions().items() if rank in ranks}
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    here = f"rank {heartbeat.rank}, step {heartbeat.step}, {operation}"
    if isinstance(error, MappingRefused):
        return too_many_mapped(error, here)
    lost = any(word in text.lower() for word in _GONE_WORDS)
    known = (
        lost_peer(positions, heartbeat.rank, text) if lost else absent_peer(positions, heartbeat.rank, text, timeout)
    )
    if known is not None:
        return MeshError(known[0], where=here, fix=known[1])
    return MeshError(
        "a collective failed",
        where=here,
        got=text[:200],
        fix=f"Ranks: {listing(positions, heartbeat.rank)}. Look for an earlier error in another rank's log.",
    )


def lost_peer(positions: Positions, own: int, text: str) -> tuple[str, str]:
    """What a broken connection means, and what to do: the peer ended, or had given up before this rank came."""
    gone = [rank for rank in positions if rank != own and not gave_up(positions, rank, own)]
    if gone:
        return (
            "another rank ended while this one waited for it",
            f"Look for that rank's own error: {listing(positions, own, gone)}. If it ended without one, it never made this call, which "
            f"every rank must make. ({text[:160]})",
        )
    return (
        f"{names(rank for rank in positions if rank != own)} gave up before this rank came",
        f"{listing(positions, own)}. Find out why this rank was late or called another collective; {_SLOW}. ({text[:160]})",
    )


def absent_peer(positions: Positions, own: int, text: str, timeout: float) -> tuple[str, str] | None:
    """What silence, or another call than this one, means, and what to do; None for an error of another kind."""
    others = listing(positions, own)
    order = f"The ranks disagree about what comes next: {others}. Every rank must make the same collective calls in the same order."
    if ELSEWHERE in text:
        return "another rank makes another collective call at this point", order
    if late := behind(positions, own):
        return (
            f"waited {timeout:g} s for {names(late)}, which never reached this collective",
            f"{listing(positions, own, late)}. Every rank must run the same number of batches and collective calls; {_SLOW}.",
        )
    if "timed out" not in text.lower():
        return None
    if differing(positions, own):
        return f"waited {timeout:g} s although every rank has come this far", order
    return f"waited {timeout:g} s for a rank that came too late", f"{others}. Find out what held it up; {_SLOW}."


def too_many_mapped(error: MappingRefused, here: str) -> MeshError:
    """The MeshError for a segment that may not be mapped any more."""
    return MeshError(
        "the ranks of this host share too many pieces of memory",
        where=here,
        got=f"{error.count} mapped segments",
        expected=f"fewer than three quarters of vm.max_map_count, which is {error.limit}",
        fix=f"Raise it on the host (sysctl -w vm.max_map_count={4 * error.limit}), or set comm_transport to gloo in ds_config.",
    )


def gave_up(positions: Positions, rank: int, own: int) -> bool:
    """Whether ``rank`` has raised an error of its own at a collective that ``own`` had not entered before."""
    at, mine = positions[rank], positions[own]
    return at is not None and at.gave_up and (mine is None or at.sequence >= mine.sequence)


def differing(positions: Positions, own: int) -> list[int]:
    """The ranks whose last collective has the same number as ``own``'s and another name. One that is further on has passed this one."""
    mine = positions[own]
    if mine is None:
        return []
    return [
        rank
        for rank, at in positions.items()
        if at is not None and at.sequence == mine.sequence and at.operation != mine.operation
    ]


def behind(positions: Positions, own: int) -> list[int]:
    """The ranks that have entered fewer collectives than ``own``, or have said nothing at all."""
    mine = positions[own]
    reached = mine.sequence if mine is not None else 0
    return [rank for rank, at in positions.items() if rank != own and (at is None or at.sequence < reached)]


def names(ranks: Iterable[int]) -> str:
    """``rank 1, rank 2``."""
    return ", ".join(f"rank {rank}" for rank in ranks)


def listing(positions: Positions, own: int, only: list[int] | None = None) -> str:
    """``rank 1 at step 17, after all_gather(block.3) ...; rank 2 ...`` for the other ranks."""
    chosen = only if only is not None else [rank for rank in positions if rank != own]
    texts = []
    for rank in chosen:
        at = positions[rank]
        texts.append(f"rank {rank} {at.describe() if at is not None else 'has reported nothing'}")
    return "; ".join(texts) or "no other rank"


# How a rank waits on one axis: where it stands is on the heartbeat, time is bounded, and silence becomes an error that names who is missing.


class Watchdog:
    """Waits for works among ``ranks`` for at most ``timeout`` seconds."""

    def __init__(self, heartbeat: Heartbeat, ranks: tuple[int, ...], timeout: float) -> None:
        self.heartbeat = heartbeat
        self.ranks = ranks
        self.timeout = timeout

    @staticmethod
    def on_host(values: torch.Tensor) -> bool:
        """Whether ``values`` are in the host's memory. A collective of any others runs on their device, in the order of its streams."""
        return values.device.type == "cpu"

    def wait(self, work: Any, name: str, among: tuple[int, ...] | None = None, *, on_host: bool = True) -> None:
        """Waits for ``work`` (of torch.distributed, or waited for like one). Raises MeshError, about ``among`` or all ranks.

        ``on_host``: what :meth:`on_host` says of its tensors. Then the work is done when this returns; otherwise what this rank
        launches next comes after it on the device, and the host goes on.
        """
        self.heartbeat.waiting(name)
        try:
            if on_host:
                work.wait(timedelta(seconds=self.timeout))
            else:
                work.wait()  # with a time limit NCCL would block the host; its own watchdog bounds the work
        except (RuntimeError, OSError) as error:
            self.fail(name, error, among)
        self.heartbeat.leave()

    def fail(self, name: str, error: Exception, among: tuple[int, ...] | None = None) -> NoReturn:
        """Raises the MeshError that ``error`` in operation ``name`` means."""
        raise explain(self.heartbeat, among or self.ranks, name, error, self.timeout) from error
