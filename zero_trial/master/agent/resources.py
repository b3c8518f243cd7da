"""Building blocks of a resource manager: machines with slots and how trials fit on them, the queue
of orders to carry out, and each allocation's lease and exit record, through which a supervisor,
this master and the next master coordinate."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from zero_trial.errors import MasterError
from zero_trial.master.logs import LogMatch
from zero_trial.util import process_tree
from zero_trial.util.files import write_atomic

log = logging.getLogger(__name__)

POOL = "default"
"""The resource pool of a master that has only one."""


@dataclass(frozen=True)
class Node:
    """A machine. Slots are numbered from ``first`` on, across all machines of a master.

    ``up`` is False for a known machine that is currently unusable. ``gpus`` contains the values for
    CUDA_VISIBLE_DEVICES, if the master assigns GPUs itself. ``cpus`` is the number of CPUs per
    slot: the slot's own, or the GPU's share of the machine; 0: unknown.
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
    """Receives the reports of a resource manager. Methods are called from any thread."""

    def on_nodes_changed(self) -> None:
        """Assign slots again, because `ClusterManager.nodes` has changed."""

    def on_waiting(self, allocation_id: str, why: str) -> None:
        """Record why the engine has not started an allocation yet."""

    def on_started(self, allocation_id: str, nodes: Sequence[str] = ()) -> None:
        """Record that the processes of an allocation are running, and on which nodes if the manager
        chose them. Called once for each allocation."""

    def on_matched(self, allocation_id: str, match: LogMatch) -> None:
        """Record that a log policy has matched. Called again for the same match after a restart."""

    def on_exited(self, allocation_id: str, ended: Exit) -> None:
        """Record that the processes of an allocation have ended. Called once, and last."""


def shape(slots: int, sizes: Sequence[int]) -> tuple[int, int] | None:
    """Return the number of machines and the slots per machine for a trial; None if it cannot run.

    Uses the fewest machines that can provide equal parts.

    Args:
        slots: number of slots of the trial.
        sizes: the slots of each usable machine, free or not.
    """
    for nodes in range(1, len(sizes) + 1):
        each = slots // nodes
        if each * nodes == slots and sum(size >= each for size in sizes) >= nodes:
            return nodes, each
    return None


def fit(nodes: int, each: int, free: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return slots for a trial that needs ``each`` slots on ``nodes`` machines; None if too few are
    free. Prefers machines with the fewest free slots, so that large trials find empty machines.

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
    """Return the new slots of an allocation that the engine started on ``nodes``, and of the
    allocations that it swaps slots with; by allocation.

    Args:
        slots: the slots assigned before the engine chose the nodes; equally many per node.
        holders: the allocation that holds each slot.
    """
    each = len(slots) // max(1, len(nodes))
    rank = {allocation_id: 0, "": 1}  # prefer its own slots, then free slots, then slots of other allocations
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
    """Return the found nodes with their previous slot numbers; new and enlarged nodes get new
    numbers. Nodes that disappeared are kept, marked as not up and in no pool, so that their numbers
    are not reused."""
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


# -- orders of a resource manager: start or end an allocation

_RETRY_SECONDS = (5.0, 10.0, 20.0, 40.0, 60.0)  # delay until the next attempt, by number of earlier attempts
_PASSING = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EROFS, errno.EAGAIN))
"""Disk errors that are not specific to one allocation."""


class EngineBusy(MasterError):
    """The engine does not answer, or accepts no job now, for a reason unrelated to the job."""


def is_passing(error: Exception) -> bool:
    """Return whether the error that prevented an order may be temporary."""
    return isinstance(error, EngineBusy) or (isinstance(error, OSError) and error.errno in _PASSING)


@dataclass(eq=False)
class _Order:
    """An order for one allocation. ``begins``: whether the order starts the allocation."""

    allocation_id: str
    work: Callable[[], None]
    begins: bool
    attempts: int = 0
    due: float = 0.0  # monotonic
    reported: str = ""  # the reported reason why the order waits


class OrderQueue:
    """Carries out orders in one thread, which also polls the running jobs. An error in one
    allocation does not stop the work on other allocations.

    An order that fails for a temporary reason (a full disk, an unresponsive engine) is retried
    after 5 to 60 seconds, until it succeeds or another order for the same allocation replaces it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._newest: dict[str, _Order] = {}  # by allocation, until carried out
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._faults: dict[str, str] = {}  # last logged error by kind of poll, so that repeats are not logged

    def begin(self, look: Callable[[], None], seconds: float, on_waiting: Callable[[str, str], None]) -> None:
        """Start the thread.

        Args:
            look: called every ``seconds`` seconds.
            on_waiting: called with an allocation that cannot start yet, and the reason.
        """
        self._thread = threading.Thread(
            target=self._run, args=(look, seconds, on_waiting), name=self._name, daemon=True
        )
        self._thread.start()

    def put(self, allocation_id: str, work: Callable[[], None], *, begins: bool = False) -> None:
        """Queue an order. It replaces an earlier order for this allocation, but a start order never
        replaces an order that ends the allocation."""
        with self._lock:
            before = self._newest.get(allocation_id)
            if before is None or before.begins or not begins:
                self._newest[allocation_id] = _Order(allocation_id, work, begins)
        self._wake.set()

    def guarded(self, what: str, look: Callable[..., None], *arguments: object) -> None:
        """Call ``look``; log an exception instead of raising it."""
        try:
            look(*arguments)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            if self._faults.get(what) != fault:
                self._faults[what] = fault
                log.error("%s: %s", what, fault)
        else:
            self._faults.pop(what, None)

    def close(self) -> None:
        """End the thread; drop the orders that wait."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, look: Callable[[], None], seconds: float, on_waiting: Callable[[str, str], None]) -> None:
        look_at = time.monotonic() + seconds
        while True:
            self._wake.wait(max(0.0, look_at - time.monotonic()))
            self._wake.clear()
            with self._lock:
                orders = [order for order in self._newest.values() if time.monotonic() >= order.due]
            for order in orders:
                if self._closed:
                    break
                self._carry_out(order, on_waiting)
            if self._closed:
                return
            if time.monotonic() >= look_at:
                self.guarded(self._name, look)
                look_at = time.monotonic() + seconds

    def _carry_out(self, order: _Order, on_waiting: Callable[[str, str], None]) -> None:
        if not self._is_newest(order):
            return
        try:
            order.work()
        except Exception as error:
            # an OSError arrives here if the exit of the allocation could not be recorded either
            if isinstance(error, (OSError, EngineBusy)):
                order.due = time.monotonic() + _RETRY_SECONDS[min(order.attempts, len(_RETRY_SECONDS) - 1)]
                order.attempts += 1
                if self._is_newest(order):
                    self.guarded(f"allocation {order.allocation_id}", self._report, order, str(error), on_waiting)
                return
            log.error("an order failed: %s: %s", type(error).__name__, error)
        with self._lock:
            if self._newest.get(order.allocation_id) is order:
                del self._newest[order.allocation_id]

    def _is_newest(self, order: _Order) -> bool:
        with self._lock:
            return self._newest.get(order.allocation_id) is order

    def _report(self, order: _Order, why: str, on_waiting: Callable[[str, str], None]) -> None:
        if why != order.reported:
            if order.begins:
                on_waiting(order.allocation_id, why)
            else:
                log.warning("an order is postponed: %s", why)
            order.reported = why


# -- the lease and the exit record of an allocation

_LEASE_FILE = "claim.json"  # the names of both files are part of the on-disk format
_EXIT_FILE = "exit.json"


@dataclass(frozen=True)
class Identity:
    """A process, identified uniquely even if its pid is reused.

    ``start`` is the boot id and clock tick at which it started, as ``boot:tick``; empty on systems
    without /proc.
    """

    pid: int
    start: str

    @property
    def alive(self) -> bool:
        """Return whether this exact process is still running (a zombie is not)."""
        # for kill(2), pid 0 means a process group that includes this process
        return self.pid > 0 and process_tree.is_running(self.pid) and self.start in ("", identify(self.pid).start)

    @property
    def before_boot(self) -> bool:
        """Return whether the process started before the last boot, so that it is gone."""
        return bool(self.start) and self.start.partition(":")[0] != _boot()

    def send(self, number: signal.Signals) -> None:
        """Signal this process, but never another process that reuses its pid."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def identify(pid: int) -> Identity:
    """Return the identity of a running process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Identity(pid, "")
    # the fields of proc(5) follow the name in parentheses, which may contain parentheses and blanks
    return Identity(pid, f"{_boot()}:{text.rpartition(')')[2].split()[19]}")


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@dataclass(frozen=True)
class Exit:
    """The end of an allocation. ``killed``: whether its supervisor was asked to end it."""

    code: int
    time: float
    killed: bool = False
    why: str = ""


KILLED_CODE = 128 + signal.SIGKILL


def never_begun() -> Exit:
    """Return the exit of an allocation that was stopped before it started."""
    return Exit(KILLED_CODE, time.time(), killed=True, why="it was stopped before it started")


def acquire_lease(folder: Path, identity: Identity | Exit | None) -> bool:
    """Acquire the lease, or void it permanently (recording an Exit with it, if given). Return False
    if the lease was taken before; this works even if the disk is full.

    The lease is a file that can be created only once. Therefore an allocation runs at most once,
    and the next master finds its supervisor.
    """
    if lease_exists(folder):
        return False
    if isinstance(identity, Identity):
        content: dict[str, Any] = {"pid": identity.pid, "start": identity.start}
    else:
        content = {"void": True, "exit": None if identity is None else asdict(identity)}
    draft = folder / f"{_LEASE_FILE}.{os.getpid()}-{threading.get_ident()}"
    try:
        draft.write_text(json.dumps(content), encoding="utf-8")
        os.link(draft, folder / _LEASE_FILE)  # fails if the file exists; file and content appear atomically
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def forbid(folder: Path, ended: Exit) -> bool:
    """Void an allocation's lease and record ``ended``. Return False if it has started."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return acquire_lease(folder, ended)


def never_begins(folder: Path) -> bool:
    """Void the lease if it is free. Return True if the work can no longer start."""
    return acquire_lease(folder, None) or "void" in (_read(folder / _LEASE_FILE) or {})


def lease_exists(folder: Path) -> bool:
    """Return whether the lease was taken or voided."""
    return (folder / _LEASE_FILE).exists()


def lease_owner(folder: Path) -> Identity | None:
    """Return the process that holds the lease; None if the lease is free or void."""
    content = _read(folder / _LEASE_FILE)
    return Identity(content["pid"], content["start"]) if content and "pid" in content else None


def record_exit(folder: Path, ended: Exit) -> None:
    """Record how the allocation ended; the file is written atomically."""
    write_atomic(folder / _EXIT_FILE, json.dumps(asdict(ended)), durable=False)


def exit_of(folder: Path) -> Exit | None:
    """Return how the allocation ended; None if it runs, or its exit was not recorded."""
    content = _read(folder / _EXIT_FILE) or (_read(folder / _LEASE_FILE) or {}).get("exit")
    return Exit(content["code"], content["time"], content["killed"], content["why"]) if content else None


def _read(path: Path) -> dict[str, Any] | None:
    """Read a JSON file; None if the file is missing, or was damaged by a power failure."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None
