"""The identity of a process beyond its pid, and the lease of an allocation.

The lease is a file that can be created only once. So an allocation runs at most once, and the next
master finds its supervisor.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zero_trial.util.files import write_atomic

_PROC = Path("/proc")
_STATE, _START = 0, 19  # fields of /proc/PID/stat after the name, see proc(5)
_LEASE_FILE = "claim.json"  # the names of both files are part of the state on disk
_EXIT_FILE = "exit.json"


@dataclass(frozen=True)
class Identity:
    """A process, identified beyond the reuse of pids.

    ``start`` is the boot and the clock tick at which it started, as ``boot:tick``; empty where
    there is no /proc.
    """

    pid: int
    start: str

    @property
    def alive(self) -> bool:
        """Return whether this very process still runs (a zombie does not)."""
        if self.pid <= 0:  # to kill(2) that is a group of processes, ours among them
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return not self.start
        fields = _stat(self.pid)
        if fields is None:
            return not _PROC.joinpath("self", "stat").exists()
        return fields[_STATE] not in ("Z", "X") and (not self.start or _start_of(fields) == self.start)

    @property
    def before_boot(self) -> bool:
        """Return whether it started before the machine did, so that it ended with the machine."""
        return bool(self.start) and self.start.partition(":")[0] != _boot()

    def send(self, number: signal.Signals) -> None:
        """Signal this process, but not another that was given its pid later."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def identify(pid: int) -> Identity:
    """Return the identity of a running process."""
    fields = _stat(pid)
    return Identity(pid, _start_of(fields) if fields else "")


def _start_of(fields: list[str]) -> str:
    return f"{_boot()}:{fields[_START]}"


def _boot() -> str:
    """Return the id of this boot; "" where there is no /proc."""
    try:
        return _PROC.joinpath("sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    try:
        text = _PROC.joinpath(str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The state follows the command name, which is in brackets and may itself hold brackets and
    # blanks.
    return text.rpartition(")")[2].split()


@dataclass(frozen=True)
class Exit:
    """The end of an allocation. ``killed``: its supervisor was asked to end it."""

    code: int
    time: float
    killed: bool = False
    why: str = ""


def acquire_lease(folder: Path, identity: Identity | Exit | None) -> bool:
    """Take the lease, or make it void for good: with an end, which is recorded with it, or with
    None. Return False if it was taken before, which can be seen on a full disk, too."""
    if lease_exists(folder):
        return False
    if isinstance(identity, Identity):
        content: dict[str, Any] = {"pid": identity.pid, "start": identity.start}
    else:
        content = {"void": True, "exit": None if identity is None else asdict(identity)}
    draft = folder / f"{_LEASE_FILE}.{os.getpid()}-{threading.get_ident()}"
    try:
        draft.write_text(json.dumps(content), encoding="utf-8")
        os.link(draft, folder / _LEASE_FILE)  # fails if it exists: file and content appear at once
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def forbid(folder: Path, ended: Exit) -> bool:
    """Let an allocation that has not begun never begin, and record this end; one that has stays.
    Return whether it had not begun."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return acquire_lease(folder, ended)


def never_begins(folder: Path) -> bool:
    """Make the lease void unless it was taken; tell whether it is void, so that what belongs to it
    has not begun and never will."""
    return acquire_lease(folder, None) or "void" in (_read(folder / _LEASE_FILE) or {})


def lease_exists(folder: Path) -> bool:
    """Tell whether the lease was taken or made void."""
    return (folder / _LEASE_FILE).exists()


def lease_owner(folder: Path) -> Identity | None:
    """Return the process that holds the lease; None if there is none or it is void."""
    content = _read(folder / _LEASE_FILE)
    return Identity(content["pid"], content["start"]) if content and "pid" in content else None


def record_exit(folder: Path, ended: Exit) -> None:
    """Record how the allocation ended; the file appears whole or not at all."""
    write_atomic(folder / _EXIT_FILE, json.dumps(asdict(ended)), durable=False)


def exit_of(folder: Path) -> Exit | None:
    """Return how the allocation ended; None if it has not, or could not record it."""
    content = _read(folder / _EXIT_FILE) or (_read(folder / _LEASE_FILE) or {}).get("exit")
    return Exit(content["code"], content["time"], content["killed"], content["why"]) if content else None


def _read(path: Path) -> dict[str, Any] | None:
    """Read a JSON file; None if it is missing, or was lost in a power cut."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None
