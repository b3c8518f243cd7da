"""Starts, watches and ends the shepherds of allocations; whatever it does it can do again after a restart of the master.

Nothing here knows about trials. ``start`` and ``kill`` return at once: one thread does the work in the order in which it was asked, another
looks for ends.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import zero_trial
from zero_trial.errors import ZeroTrialError
from zero_trial.master import logs
from zero_trial.master.agent import lease, processes, scratch, storage
from zero_trial.master.agent.environment import MARK, Ports, StartOrder, environment, free_ports
from zero_trial.master.directory import MasterDirectory

GRACE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL of a trial's processes."""

WATCH_SECONDS = 0.1
_STUCK_SECONDS = 15.0  # after the grace, until a shepherd that does not end is ended itself
KILLED = 128 + signal.SIGKILL


class LeaseState(Enum):
    """What is there of an allocation when a master comes back."""

    NOTHING = "nothing"  # it was never started
    THERE = "there"  # it runs, or has ended: the watch will say


class AgentApi(Protocol):
    """What the core needs of an agent. ``on_started`` and ``on_exited`` are called from any thread, once for each allocation."""

    def start(self, order: StartOrder) -> None:
        """Start an allocation, later; it may have been started by a master before us, then nothing happens."""

    def kill(self, allocation_id: str) -> None:
        """End all processes of an allocation, later."""

    def adopt(self, allocation_id: str) -> LeaseState:
        """Watch an allocation that a master before us may have started."""

    def close(self) -> None:
        """Stop watching; what runs goes on."""


@dataclass
class _Watched:
    """An allocation whose end we wait for."""

    child: subprocess.Popen[bytes] | None = None  # if we are its parent
    kill_after: float | None = None  # when its shepherd itself is ended, monotonic
    ports: Ports | None = None


class Agent:
    """The one agent of this machine."""

    def __init__(
        self,
        home: MasterDirectory,
        *,
        on_started: Callable[[str], None],
        on_exited: Callable[[str, lease.Exit], None],
        on_error: Callable[[str], None] = lambda message: None,
        python: str = sys.executable,
        grace: float = GRACE_SECONDS,
        host_env: Mapping[str, str],
    ) -> None:
        self._home = home
        self._on_started = on_started
        self._on_exited = on_exited
        self._on_error = on_error
        self._python = python
        self._grace = grace
        self._host_env = host_env
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._watched: dict[str, _Watched] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._do_work, name="agent-work", daemon=True),
            threading.Thread(target=self._watch, name="agent-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def start(self, order: StartOrder) -> None:
        """See Workers."""
        with self._lock:
            self._watched.setdefault(order.allocation.id, _Watched())
        self._work.put(lambda: self._start(order))

    def kill(self, allocation_id: str) -> None:
        """See Workers."""
        self._work.put(lambda: self._kill(allocation_id))

    def adopt(self, allocation_id: str) -> LeaseState:
        """See Workers."""
        if not lease.claimed(self._home.allocation(allocation_id)):
            return LeaseState.NOTHING
        with self._lock:
            self._watched.setdefault(allocation_id, _Watched())
        return LeaseState.THERE

    def close(self) -> None:
        """Stop watching; what runs goes on."""
        self._closed.set()
        self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _do_work(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # one allocation's trouble (a full disk) must not end the work for all others
                self._on_error(f"an order could not be carried out: {type(error).__name__}: {error}")

    def _start(self, order: StartOrder) -> None:
        name = order.allocation.id
        folder = self._home.allocation(name)
        if lease.claimed(folder):  # killed before it began, or begun by a master before us
            return
        try:
            self._spawn(order, folder)
        except (OSError, ValueError, ZeroTrialError) as error:  # ValueError: a path with a NUL in it
            log = logs.path_of(self._home.trial_logs(order.allocation.trial_id), order.allocation.run_id)
            logs.append(log, [logs.entry(f"cannot start the trial: {error}", time.time(), "stderr", l="ERROR")])
            if lease.claim(folder, None):
                lease.record_exit(folder, lease.Exit(127, time.time(), why=f"it could not be started: {error}"))

    def _spawn(self, order: StartOrder, folder: Path) -> None:
        run_root, work = folder / "root", folder / "work"
        for path in (work, run_root / "run/determined/info", run_root / "run/determined/train/logs"):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        storage.link(order.config, run_root)
        with self._lock:
            avoid = {port for other in self._watched.values() if other.ports for port in other.ports.taken()}
        ports = free_ports(avoid)
        host = {**self._host_env, "TMPDIR": str(scratch.make(folder, self._host_env))}
        env = environment(order, ports, run_root, host, self._python)
        log = logs.path_of(self._home.trial_logs(order.allocation.trial_id), order.allocation.run_id)
        told = {"command": steps(order.has_hook), "cwd": str(work), "env": env, "log": str(log), "grace": self._grace}
        with (folder / "shepherd.log").open("ab") as errors:
            child = subprocess.Popen(
                [self._python, "-m", "zero_trial.master.shepherd", str(folder)],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                cwd=str(folder),
                env=with_package(self._host_env),
                start_new_session=True,
            )
        with self._lock:
            watched = self._watched.setdefault(order.allocation.id, _Watched())
            watched.child, watched.ports = child, ports
        _tell(child, told)

    def _kill(self, allocation_id: str) -> None:
        folder = self._home.allocation(allocation_id)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if lease.claim(folder, None):  # its shepherd has not begun, and now never will
            lease.record_exit(folder, lease.Exit(KILLED, time.time(), killed=True, why="it was ended before it began"))
            return
        identity = lease.owner(folder)
        if identity is not None:
            identity.send(signal.SIGTERM)
        with self._lock:
            watched = self._watched.get(allocation_id)
            if watched is not None and watched.kill_after is None:
                watched.kill_after = time.monotonic() + self._grace + _STUCK_SECONDS

    def _watch(self) -> None:
        started: set[str] = set()
        told: set[str] = set()  # troubles, each once: they come again with every look
        while not self._closed.wait(WATCH_SECONDS):
            with self._lock:
                watched = dict(self._watched)
            for name, entry in watched.items():
                try:
                    self._look(name, entry, started)
                except Exception as error:  # one allocation's trouble must not end the watch over the others
                    trouble = f"allocation {name}: {type(error).__name__}: {error}"
                    if trouble not in told:
                        told.add(trouble)
                        self._on_error(trouble)

    def _look(self, name: str, entry: _Watched, started: set[str]) -> None:
        folder = self._home.allocation(name)
        if entry.child is not None:
            entry.child.poll()  # collects it
        identity = lease.owner(folder)
        if identity is not None and name not in started:
            started.add(name)
            self._on_started(name)
        if identity is not None and entry.kill_after is not None and time.monotonic() > entry.kill_after:
            identity.send(signal.SIGKILL)
        ended = self._ended(folder, identity, entry)
        if ended is None:
            return
        processes.sweep(MARK, name)
        self._on_exited(name, ended)  # if this fails we come again: nobody else would tell
        with self._lock:
            self._watched.pop(name, None)
        started.discard(name)
        self._tidy(folder)

    def _ended(self, folder: Path, identity: processes.Identity | None, entry: _Watched) -> lease.Exit | None:
        alive = (
            identity is not None and identity.alive
        )  # before the exit is read: it is written before the shepherd ends
        ended = lease.exit_of(folder)
        if ended is not None:
            return None if alive else ended
        if alive:
            return None
        if identity is not None and identity.before_boot:
            return lease.Exit(KILLED, time.time(), killed=True, why="the machine was started anew")
        if identity is not None:
            return lease.Exit(KILLED, time.time(), why="its shepherd is gone")
        if lease.claimed(folder):  # made void by a master that was killed before it could say so
            return lease.Exit(KILLED, time.time(), killed=True, why="it was ended before it began")
        if entry.child is not None and entry.child.returncode is not None and lease.claim(folder, None):
            return lease.Exit(127, time.time(), why=f"its shepherd could not begin, see {folder / 'shepherd.log'}")
        return None

    def _tidy(self, folder: Path) -> None:
        """Remove copies of the context and what a shepherd that was killed could not remove."""
        for path in (folder / "work", folder / "root"):
            shutil.rmtree(path, ignore_errors=True)
        scratch.remove(folder)


def steps(has_hook: bool) -> list[str]:
    """What a container of Determined does, as one shell: get the context, run the user's hook, meet the other ranks, launch.

    Without a hook the two preparations are one process, which saves a second.
    """
    prepare = "python3 -m determined.exec.prep_container"
    first = f"{prepare} --download_context_directory --resources --proxy"
    if has_hook:
        script = f"set -e; {first}; . ./startup-hook.sh; {prepare} --rendezvous; exec python3 -m determined.exec.launch"
    else:
        script = f"set -e; {first} --rendezvous; exec python3 -m determined.exec.launch"
    return [shutil.which("bash") or "sh", "-c", script]


def with_package(env: Mapping[str, str]) -> dict[str, str]:
    """An environment in which this very package is imported, from whatever working directory."""
    root = str(Path(zero_trial.__file__).parents[1])
    return {**env, "PYTHONPATH": os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])}


def end_all(home: MasterDirectory, *, seconds: float = 60.0) -> list[str]:
    """End every allocation below a root without a master: shepherds first, then whoever is left; returns those that were there."""
    owners = {path.name: lease.owner(path) for path in home.allocations.glob("*") if lease.exit_of(path) is None}
    alive = {name: identity for name, identity in owners.items() if identity is not None and identity.alive}
    for identity in alive.values():
        identity.send(signal.SIGTERM)
    until = time.monotonic() + seconds
    while any(identity.alive for identity in alive.values()) and time.monotonic() < until:
        time.sleep(0.05)
    for identity in alive.values():
        identity.send(signal.SIGKILL)
    for name in owners:
        processes.sweep(MARK, name)
    return list(alive)


def _tell(child: subprocess.Popen[bytes], order: Mapping[str, Any]) -> None:
    """Hand the order to a shepherd; through a pipe, because it holds a token."""
    if child.stdin is None:
        raise OSError("a shepherd without a stdin")
    try:
        child.stdin.write(json.dumps(order).encode())
        child.stdin.close()
    except BrokenPipeError:
        return  # it ended at once; the watch will see
