"""The agent starts, watches and ends the supervisors of allocations; every step can be repeated
after a restart of the master.

It does not depend on trials. ``start`` and ``kill`` return at once.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import zero_trial
from zero_trial.errors import ZeroTrialError
from zero_trial.master import logs
from zero_trial.master.agent import resources, storage
from zero_trial.master.agent.environment import MARK, HeldPorts, SlotDevices, StartOrder, environment
from zero_trial.master.agent.resources import (
    KILLED_CODE,
    POOL,
    Exit,
    Identity,
    Node,
    OrderQueue,
    Reports,
    is_passing,
    never_begun,
)
from zero_trial.master.directory import MasterDirectory
from zero_trial.util import process_tree

THIS_MACHINE = "this-machine"  # the name of the only node
SUBMITTED = "submitted.json"  # in the folder of an allocation whose processes are a cluster's
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL of a trial's processes
WATCH_SECONDS = 0.1
_STUCK_SECONDS = 15.0  # after the grace, until a supervisor that does not end is killed itself


@dataclass
class _Watched:
    """An allocation whose end the agent waits for."""

    child: subprocess.Popen[bytes] | None = None  # if this process is its parent
    started: bool = False  # as was reported
    kill_after: float | None = None  # when its supervisor itself is killed, monotonic
    matches_read: int = 0  # bytes
    ports: HeldPorts | None = None


class Agent:
    """Starts and ends allocations as processes of this machine, watches them and calls back."""

    def __init__(
        self,
        directory: MasterDirectory,
        devices: SlotDevices,
        *,
        grace: float = GRACE_SECONDS,
        host_env: Mapping[str, str],
    ) -> None:
        self._directory = directory
        self._devices = devices
        self._python = sys.executable
        self._grace = grace
        self._host_env = host_env
        self._orders = OrderQueue("agent")
        self._watched: dict[str, _Watched] = {}
        self._lock = threading.Lock()

    def nodes(self) -> tuple[Node, ...]:
        return (Node(THIS_MACHINE, self._devices.count, kind=self._devices.kind, gpus=self._devices.gpus),)

    def pools(self) -> tuple[str, ...]:
        return (POOL,)

    def check(self, config: Mapping[str, Any]) -> None:
        """Refuse nothing."""

    def begin(self, reports: Reports) -> None:
        self._orders.begin(lambda: self._look_at_all(reports), WATCH_SECONDS, reports.on_waiting)

    def start(self, order: StartOrder) -> None:
        with self._lock:
            self._watched.setdefault(order.allocation.id, _Watched())
        self._orders.put(order.allocation.id, lambda: self._start(order), begins=True)

    def kill(self, allocation_id: str) -> None:
        self._orders.put(allocation_id, lambda: self._kill(allocation_id))

    def adopt(self, allocation_id: str) -> bool:
        if not resources.lease_exists(self._directory.allocation(allocation_id)):
            return False
        with self._lock:
            self._watched.setdefault(allocation_id, _Watched())
        return True

    def close(self) -> None:
        self._orders.close()
        with self._lock:
            held = [entry.ports for entry in self._watched.values() if entry.ports is not None]
        for ports in held:
            ports.close()

    def _start(self, order: StartOrder) -> None:
        name = order.allocation.id
        folder = self._directory.allocation(name)
        if resources.lease_exists(folder):  # killed before it began, or begun by an earlier master
            return
        try:
            self._spawn(order, folder)
        except Exception as error:  # any: it would hold its slots until it is killed
            if is_passing(error):
                raise
            refuse(self._directory, order, error)

    def _spawn(self, order: StartOrder, folder: Path) -> None:
        run_root, work = folder / "root", folder / "work"
        for path in (work, run_root / "run/determined/info", run_root / "run/determined/train/logs"):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        storage.link(order.config, run_root)
        with self._lock:
            watched = self._watched.setdefault(order.allocation.id, _Watched())
            held = watched.ports = watched.ports or HeldPorts()
        host = {**self._host_env, "TMPDIR": str(storage.make_scratch(folder, self._host_env))}
        here = replace(
            order,
            agent_id=THIS_MACHINE,
            visible_devices=self._devices.visible(order.allocation.slots),
            threads=self._devices.threads,
        )
        env = environment(here, held.variables, run_root, host, self._python)
        output = logs.path_of(self._directory.trial_logs(order.allocation.trial_id), order.allocation.run_id)
        policies = [asdict(policy) for policy in logs.policies_of(order.config)]
        run = {
            "command": steps(order.has_hook),
            "cwd": str(work),
            "env": env,
            "log": str(output),
            "grace": self._grace,
            "policies": policies,
        }
        with (folder / "supervisor.log").open("ab") as errors:
            child = subprocess.Popen(
                [self._python, "-m", "zero_trial.master.shepherd", str(folder)],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                cwd=str(folder),
                env=with_package(self._host_env),
                start_new_session=True,
            )
        watched.child = child
        _send(child, run)

    def _kill(self, allocation_id: str) -> None:
        folder = self._directory.allocation(allocation_id)
        # its supervisor has not begun, and now never will
        if resources.forbid(folder, never_begun()):
            return
        identity = resources.lease_owner(folder)
        if identity is not None:
            identity.send(signal.SIGTERM)
        with self._lock:
            watched = self._watched.get(allocation_id)
            if watched is not None and watched.kill_after is None:
                watched.kill_after = time.monotonic() + self._grace + _STUCK_SECONDS

    def _look_at_all(self, reports: Reports) -> None:
        with self._lock:
            watched = dict(self._watched)
        for name, entry in watched.items():
            self._orders.guarded(f"allocation {name}", self._look, name, entry, reports)

    def _look(self, name: str, entry: _Watched, reports: Reports) -> None:
        folder = self._directory.allocation(name)
        if entry.child is not None:
            entry.child.poll()  # collects it
        identity = resources.lease_owner(folder)
        if identity is not None and not entry.started:
            reports.on_started(name)  # if this fails the next look repeats it
            entry.started = True
        if identity is not None and entry.kill_after is not None and time.monotonic() > entry.kill_after:
            identity.send(signal.SIGKILL)
        ended = self._ended(folder, identity, entry)
        matches, end = logs.read_matches(folder, entry.matches_read)
        for match in matches:
            reports.on_matched(name, match)
        entry.matches_read = end
        begun_since = identity is None and resources.lease_owner(folder) is not None
        if ended is None or begun_since:  # the next look reports the start before the end
            return
        process_tree.sweep(MARK, name)
        if entry.ports is not None:
            entry.ports.close()
        reports.on_exited(name, ended)  # if this fails the next look repeats it
        with self._lock:
            self._watched.pop(name, None)
        for path in (folder / "work", folder / "root"):  # copies of the context
            shutil.rmtree(path, ignore_errors=True)
        storage.remove_scratch(folder)  # a killed supervisor could not

    def _ended(self, folder: Path, identity: Identity | None, entry: _Watched) -> Exit | None:
        # before the exit is read: it is written before the supervisor ends
        alive = identity is not None and identity.alive
        ended = resources.exit_of(folder)
        if ended is not None:
            return None if alive else ended
        if alive:
            return None
        if identity is not None and identity.before_boot:
            return Exit(KILLED_CODE, time.time(), killed=True, why="the machine was restarted")
        if identity is not None:
            return Exit(KILLED_CODE, time.time(), why="its supervisor is gone")
        if resources.lease_exists(folder):  # it was voided since, or a power cut has emptied the file
            return resources.exit_of(folder) or never_begun()
        if entry.child is not None and entry.child.returncode is not None:
            why = f"its supervisor could not begin, see {folder / 'supervisor.log'}"
            never_began = Exit(127, time.time(), why=why)
            try:
                if resources.forbid(folder, never_began):
                    return never_began
            except OSError as error:  # disk full: report the exit anyway, nothing else can start this allocation
                return replace(never_began, why=f"{why}; this could not be recorded: {error}")
        return resources.exit_of(folder)


def steps(has_hook: bool, *, rendezvous: bool = True) -> list[str]:
    """Return the command of a trial: what a container of Determined does, as one shell.

    It gets the context directory, runs the user's hook, waits for the other containers and
    launches. Without a hook the two preparations are one process, which saves a second. Without
    ``rendezvous`` the containers have met before.
    """
    prepare = "python3 -m zero_trial.trial.runtime.determined prepare"
    first = f"{prepare} --download_context_directory --resources --proxy"
    if not rendezvous:
        hook = ". ./startup-hook.sh; " if has_hook else ""
        script = f"set -e; {first}; {hook}exec python3 -m determined.exec.launch"
    elif has_hook:
        script = f"set -e; {first}; . ./startup-hook.sh; {prepare} --rendezvous; exec python3 -m determined.exec.launch"
    else:
        script = f"set -e; {first} --rendezvous; exec python3 -m determined.exec.launch"
    return [shutil.which("bash") or "sh", "-c", script]


def with_package(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` with this very package importable from any working directory."""
    root = str(Path(zero_trial.__file__).parents[1])
    return {**env, "PYTHONPATH": os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])}


def refuse(directory: MasterDirectory, order: StartOrder, error: Exception) -> None:
    """Record that an allocation cannot be started, in the log of its trial and as its end."""
    run = order.allocation
    path = logs.path_of(directory.trial_logs(run.trial_id), run.run_id)
    foreseen = isinstance(error, (ZeroTrialError, OSError, ValueError))
    said = str(error) if foreseen else f"{type(error).__name__}: {error}"
    logs.append(path, [logs.entry(f"cannot start the trial: {said}", time.time(), "stderr", l="ERROR")])
    ended = Exit(127, time.time(), why=f"it could not be started: {said}")
    resources.forbid(directory.allocation(run.id), ended)


def running(directory: MasterDirectory) -> list[str]:
    """List the allocations whose supervisors run on this machine, with or without a master."""
    return sorted(name for name, owner in _owners(directory).items() if owner is not None and owner.alive)


def end_all(directory: MasterDirectory, *, seconds: float = 60.0) -> list[str]:
    """End every allocation below a root without a master: supervisors first, then what is left of
    them. Returns those that ran.
    """
    owners = _owners(directory)
    alive = {name: identity for name, identity in owners.items() if identity is not None and identity.alive}
    for identity in alive.values():
        identity.send(signal.SIGTERM)
    until = time.monotonic() + seconds
    while any(identity.alive for identity in alive.values()) and time.monotonic() < until:
        time.sleep(0.05)
    for identity in alive.values():
        identity.send(signal.SIGKILL)
    for name in owners:
        process_tree.sweep(MARK, name)
    return list(alive)


def _owners(directory: MasterDirectory) -> dict[str, Identity | None]:
    """Return the local supervisors of allocations without an exit record, not of cluster jobs."""
    return {
        path.name: resources.lease_owner(path)
        for path in directory.allocations.glob("*")
        if resources.exit_of(path) is None and not (path / SUBMITTED).exists()
    }


def _send(child: subprocess.Popen[bytes], order: Mapping[str, Any]) -> None:
    """Send the order to a supervisor; through a pipe, because it holds a token."""
    if child.stdin is None:
        raise OSError("a supervisor without a stdin")
    try:
        child.stdin.write(json.dumps(order).encode())
        child.stdin.close()
    except BrokenPipeError:
        return  # it ended at once; the watch will see
