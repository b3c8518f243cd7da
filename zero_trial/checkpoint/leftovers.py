"""The names of folders that a save uses on its way, and which of them nobody will finish any more.

A temporary folder is named after the host and the process that writes it: ``<tag>.tmp-<host>-<pid>-<id>``. Two runs may save under one tag at
once: removing the other's folder while it is written, or while it gets its name, would spoil that one's checkpoint.
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from hashlib import sha256
from pathlib import Path

TEMPORARY = ".tmp-"
REPLACED = ".old-"

FORGOTTEN_SECONDS = 24 * 3600.0
"""A folder of another host, whose processes cannot be asked for, is given up when nothing was written into it for so long."""

_OWNER = re.compile(r"(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{12}")


def temporary_name(tag: str) -> str:
    """A new name for the folder in which this process writes ``tag``."""
    return f"{tag}{TEMPORARY}{_host()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def is_abandoned(folder: Path) -> bool:
    """Whether the save that made the temporary ``folder`` is over: its process is this one (which makes a new one now) or is no more."""
    found = _OWNER.fullmatch(folder.name.partition(TEMPORARY)[2])
    if found is None:
        return True  # no running version of ours names folders like this
    if found["host"] == _host():
        return int(found["pid"]) == os.getpid() or not _lives(int(found["pid"]))
    try:
        newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return False  # it is going just now
    return time.time() - newest > FORGOTTEN_SECONDS


def _host() -> str:
    return sha256(socket.gethostname().encode()).hexdigest()[:8]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
