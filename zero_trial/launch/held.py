"""A run's folder, held by one process at a time: two that train in it would destroy each other's checkpoints."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero_trial.errors import ConfigError

NAME = "held"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds ``folder`` until the block ends or this process does, however it does. Raises ConfigError if another one holds it.

    The lock is the operating system's (flock); on file systems without any, nothing is held.
    """
    if not folder.is_dir():
        yield
        return
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 100).decode(errors="replace").strip()
            raise ConfigError(
                "another process is running in this folder",
                where="--run-dir",
                got=str(folder),
                fix=f"Wait for process {holder or 'that holds it'}, or give another folder.",
            ) from None
        except OSError:
            pass  # a file system without locks
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
