"""The lease of an allocation: a file that can be created only once.

So the allocation runs at most once, and the next master finds its supervisor.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_trial.master.agent.processes import Identity
from zero_trial.util.files import write_atomic

CLAIM = "claim.json"
EXIT = "exit.json"


@dataclass(frozen=True)
class Exit:
    """How an allocation ended. ``killed``: because it was asked to end."""

    code: int
    time: float
    killed: bool = False
    why: str = ""


def acquire(folder: Path, identity: Identity | None) -> bool:
    """Take the lease; False if it was taken before. ``None`` makes it void: the allocation will never run."""
    content = {"void": True} if identity is None else {"pid": identity.pid, "start": identity.start}
    draft = _write(folder / f"{CLAIM}.{_draft()}", content)
    try:
        os.link(draft, folder / CLAIM)  # fails if it exists: file and content appear at once
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def exists(folder: Path) -> bool:
    """Tell whether the lease was taken or made void."""
    return (folder / CLAIM).exists()


def owner(folder: Path) -> Identity | None:
    """Return the process that holds the lease; None if there is none or it is void."""
    content = _read(folder / CLAIM)
    return Identity(content["pid"], content["start"]) if content and "pid" in content else None


def record_exit(folder: Path, ended: Exit) -> None:
    """Record how the allocation ended; the file appears whole or not at all."""
    content = {"code": ended.code, "time": ended.time, "killed": ended.killed, "why": ended.why}
    write_atomic(folder / EXIT, json.dumps(content), durable=False)


def exit_of(folder: Path) -> Exit | None:
    """Return how the allocation ended; None if it has not, or could not record it."""
    content = _read(folder / EXIT)
    return Exit(content["code"], content["time"], content["killed"], content["why"]) if content else None


def _draft() -> str:
    """A name that nobody else writes at the same time."""
    return f"{os.getpid()}-{threading.get_ident()}"


def _write(path: Path, content: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def _read(path: Path) -> dict[str, Any] | None:
    """What a file says. None if there is none, or if the machine lost its power before the content was on the disk."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None
