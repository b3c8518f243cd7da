"""What a master runs trials on: machines with slots, the protocol of what starts trials there, and
which machines have room for one; and the orders that it carries out.

There are two resource managers: `agent.Agent` runs trials as processes of this machine, and
`cluster.ClusterManager` as jobs of an engine that has several machines (Slurm, Ray).
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from zero_trial.errors import MasterError
from zero_trial.master.agent.environment import StartOrder
from zero_trial.master.agent.processes import Exit
from zero_trial.master.logs import LogMatch

POOL = "default"
"""The resource pool of a master that has only one."""


@dataclass(frozen=True)
class Node:
    """A machine. Its slots are numbered from ``first`` on, through all machines of a master.

    ``up`` is False for a machine that is known and cannot be used now. ``gpus`` are the names that
    CUDA_VISIBLE_DEVICES takes, where the master assigns them itself. ``cpus`` are the CPUs of a
    slot, its own or the GPU's share of the machine; 0: unknown.
    """

    name: str
    slots: int
    first: int = 0
    kind: str = "cpu"  # or "cuda"
    pools: tuple[str, ...] = (POOL,)
    up: bool = True
    address: str = "127.0.0.1"
    gpus: tuple[str, ...] = ()
    cpus: int = 1

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.slots)


class Reports(Protocol):
    """Takes what a resource manager reports, from any thread."""

    def on_nodes_changed(self) -> None:
        """Assign slots again: `ResourceManager.nodes` has changed."""

    def on_waiting(self, allocation_id: str, why: str) -> None:
        """Record why the engine does not start an allocation yet."""

    def on_started(self, allocation_id: str, nodes: Sequence[str] = ()) -> None:
        """Record that the processes of an allocation run, and on which nodes if the manager has
        chosen them. Called once for each allocation.
        """

    def on_matched(self, allocation_id: str, match: LogMatch) -> None:
        """Record that a log policy has matched. Called again for the same after a restart."""

    def on_exited(self, allocation_id: str, ended: Exit) -> None:
        """Record that the processes of an allocation have ended. Called once, after the others."""


class ResourceManager(Protocol):
    """Starts, watches and ends allocations on its nodes; tests have one without processes."""

    def nodes(self) -> tuple[Node, ...]:
        """List the machines that are known now."""

    def pools(self) -> tuple[str, ...]:
        """List the resource pools, the default first."""

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise ConfigError for an experiment that asks for what cannot be done here."""

    def begin(self, reports: Reports) -> None:
        """Begin to work."""

    def start(self, order: StartOrder) -> None:
        """Start an allocation, later. Nothing happens if an earlier master has started it."""

    def kill(self, allocation_id: str) -> None:
        """End all processes of an allocation, later."""

    def adopt(self, allocation_id: str) -> bool:
        """Watch an allocation if an earlier master has started it; return whether it has. The
        allocation may have ended while no master ran.
        """

    def close(self) -> None:
        """Stop watching; what runs goes on."""


def shape(slots: int, sizes: Sequence[int]) -> tuple[int, int] | None:
    """Return how many machines a trial takes and how many slots of each; None if it cannot run.

    It takes the fewest machines that give equal parts.

    Args:
        slots: of the trial.
        sizes: the slots of each machine that may be used, free or not.
    """
    for nodes in range(1, len(sizes) + 1):
        each = slots // nodes
        if each * nodes == slots and sum(size >= each for size in sizes) >= nodes:
            return nodes, each
    return None


def fit(nodes: int, each: int, free: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the slots of a trial that takes ``each`` of so many ``nodes``; None if too few are
    free. Machines with the fewest free slots come first, so that large trials find whole ones.

    Args:
        free: the numbers of the free slots of each machine.
    """
    having = sorted((numbers for numbers in free if len(numbers) >= each), key=len)
    if len(having) < nodes:
        return None
    return tuple(sorted(number for numbers in having[:nodes] for number in sorted(numbers)[:each]))


def moved(
    allocation_id: str, slots: Sequence[int], nodes: Sequence[Node], holders: Mapping[int, str]
) -> dict[str, tuple[int, ...]]:
    """Return the slots of an allocation that the engine has started on ``nodes``, and of those that
    change places with it; by allocation.

    Args:
        slots: those that were assigned before the engine had chosen; as many on each node.
        holders: the allocation that holds each slot.
    """
    each = len(slots) // max(1, len(nodes))
    rank = {allocation_id: 0, "": 1}  # first its own, then free ones, then those of others
    new: list[int] = []
    for node in nodes:
        new += sorted(node.numbers, key=lambda number: (rank.get(holders.get(number, ""), 2), number))[:each]
    given_up = sorted(set(slots) - set(new))
    held: dict[str, list[int]] = {allocation_id: new}
    for number in sorted(set(new) - set(slots)):
        other = holders.get(number)
        if other is not None:
            its = held.setdefault(other, [slot for slot, name in holders.items() if name == other])
            its[its.index(number)] = given_up.pop(0)
    return {name: tuple(sorted(numbers)) for name, numbers in held.items()}


def numbered(known: Sequence[Node], found: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes that were found, with the numbers that they had; new and enlarged ones get
    numbers of their own. Nodes that are gone stay, not up and in no pool, so that their numbers do
    not come back.
    """
    before = {node.name: node for node in known}
    last = max((node.first + node.slots for node in known), default=0)
    after = {name: replace(node, up=False, pools=()) for name, node in before.items()}
    for node in found:
        old = before.get(node.name)
        if old is not None and old.slots >= node.slots:
            after[node.name] = replace(node, first=old.first)
        else:
            after[node.name] = replace(node, first=last)
            last += node.slots
    return tuple(after.values())


log = logging.getLogger(__name__)

# The orders of a resource manager (start this run, end that one) and its two threads: one carries
# out orders one after the other, the other looks again and again at what runs.

_RETRY_SECONDS = (5.0, 10.0, 20.0, 40.0, 60.0)  # until the next attempt, by those before
_PASSING = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EROFS, errno.EAGAIN))
"""Faults of a disk that are not about one allocation."""


class EngineBusy(MasterError):
    """The engine does not answer, or takes no job now, for a reason that is not the job's."""


def is_passing(error: Exception) -> bool:
    """Tell whether what has kept an order from being carried out may be over soon."""
    return isinstance(error, EngineBusy) or (isinstance(error, OSError) and error.errno in _PASSING)


@dataclass
class _Order:
    """An order for one allocation. ``begins``: it starts the allocation."""

    allocation_id: str
    work: Callable[[], None]
    begins: bool
    attempts: int = 0
    due: float | None = None  # of the next attempt, monotonic; None: it is being tried
    why: str = ""
    said: str = ""  # why, as was reported


class OrderQueue:
    """Carries out orders and watches, each in a thread of its own. A fault of one allocation does
    not end the work for the others.

    An order that fails for a reason that passes (a full disk, an engine that does not answer) is
    tried again after 5 to 60 seconds, until it succeeds or another order for the same allocation
    comes.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._newest: dict[str, _Order] = {}  # by allocation, until it is carried out
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._faults: dict[str, str] = {}  # what was said of a look that fails, once: it comes again

    def begin(self, look: Callable[[], None], seconds: float, on_waiting: Callable[[str, str], None]) -> None:
        """Start the threads.

        Args:
            look: what the watch does, each so many ``seconds``.
            on_waiting: takes the allocation that cannot begin yet, and why.
        """
        self._threads = [
            threading.Thread(target=self._carry_out, name=f"{self._name}-work", daemon=True),
            threading.Thread(
                target=self._watch, args=(look, seconds, on_waiting), name=f"{self._name}-watch", daemon=True
            ),
        ]
        for thread in self._threads:
            thread.start()

    def put(self, allocation_id: str, work: Callable[[], None], *, begins: bool = False) -> None:
        """Carry out an order, later. An earlier one of this allocation is not tried again, except
        for one that ends it: a start does not undo that."""
        order = _Order(allocation_id, work, begins)
        with self._lock:
            before = self._newest.get(allocation_id)
            if before is None or before.begins or not begins:
                self._newest[allocation_id] = order
            self._orders.put(order)

    def guarded(self, what: str, look: Callable[[], None]) -> None:
        """Look, and log a fault instead of raising it."""
        try:
            look()
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            if self._faults.get(what) != fault:
                self._faults[what] = fault
                log.error("%s: %s", what, fault)
        else:
            self._faults.pop(what, None)

    def close(self) -> None:
        """End the threads; orders that wait are dropped."""
        self._closed.set()
        self._orders.put(None)
        for thread in self._threads:
            thread.join()

    def _carry_out(self) -> None:
        while (order := self._orders.get()) is not None:
            with self._lock:
                outdated = self._newest.get(order.allocation_id, order) is not order
            if outdated:
                continue
            try:
                order.work()
            except Exception as error:
                # an OSError comes here if the end of the allocation could not be recorded either
                if isinstance(error, (OSError, EngineBusy)):
                    self._delay(order, error)
                else:
                    log.error("an order could not be carried out: %s: %s", type(error).__name__, error)
                    self._forget(order)
            else:
                self._forget(order)

    def _delay(self, order: _Order, error: Exception) -> None:
        """Let an order be tried again, unless a newer one came while it was tried."""
        with self._lock:
            if self._newest.get(order.allocation_id) is not order:
                return
            seconds = _RETRY_SECONDS[min(order.attempts, len(_RETRY_SECONDS) - 1)]
            order.attempts, order.due, order.why = order.attempts + 1, time.monotonic() + seconds, str(error)
        if not order.begins and order.why != order.said:
            order.said = order.why
            log.warning("an order will be carried out later: %s", error)

    def _forget(self, order: _Order) -> None:
        with self._lock:
            if self._newest.get(order.allocation_id) is order:
                del self._newest[order.allocation_id]

    def _watch(self, look: Callable[[], None], seconds: float, on_waiting: Callable[[str, str], None]) -> None:
        while not self._closed.wait(seconds):
            self.guarded(self._name, look)
            with self._lock:
                orders = list(self._newest.values())
            for order in orders:
                self.guarded(f"allocation {order.allocation_id}", lambda order=order: self._look_at(order, on_waiting))  # type: ignore[misc]

    def _look_at(self, order: _Order, on_waiting: Callable[[str, str], None]) -> None:
        with self._lock:
            if self._newest.get(order.allocation_id) is not order:
                return
            if order.due is not None and time.monotonic() >= order.due:
                order.due = None
                self._orders.put(order)
        if order.begins and order.why != order.said:
            on_waiting(order.allocation_id, order.why)
            order.said = order.why
