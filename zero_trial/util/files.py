"""Files that appear whole or not at all, and the names of those that several rooms read."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

METADATA = "metadata.json"
"""In a trial's checkpoint: its description, written last."""

TRIAL_STATE = "trial_state.json"
"""In a trial's checkpoint: the counters of the trial."""


@contextmanager
def replacing(path: Path, *, durable: bool = True, private: bool = False) -> Iterator[Path]:
    """Yield a new, empty file beside ``path`` that takes its place when the block ends.

    If the block raises, the new file is removed and ``path`` stays as it was.

    Args:
        path: the file to replace or to create; its folder exists.
        durable: content and name are on the disk afterwards, also if the machine loses power. A
            file that only running processes read does not need that.
        private: only this user can read the file, from its first moment on.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    os.close(os.open(draft, flags, 0o600 if private else 0o666))
    try:
        yield draft
        if durable:
            sync_folder(draft)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True, private: bool = False) -> None:
    """Write a file atomically: a reader finds the old content or the new one."""
    with replacing(path, durable=durable, private=private) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def signature(path: Path) -> tuple[int, int] | None:
    """Return a value that changes with the file or its mode; None if it cannot be read."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ctime_ns, stat.st_size


def remove_folder(folder: Path) -> None:
    """Remove ``folder`` with all that is in it, if it exists, as far as it can be removed. It loses
    its name first, so that a process or thread that still writes into it finds that it is gone, and
    leaves nothing there."""
    gone = folder.with_name(f"{folder.name}.{secrets.token_hex(6)}")
    with suppress(OSError):  # it is not there, or cannot be renamed
        os.rename(folder, gone)
    for path in (gone, folder):
        shutil.rmtree(path, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Return when the names in a folder, or the content of a file, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# types of file systems that keep files in memory
IN_MEMORY = frozenset({"tmpfs", "ramfs"})


def file_system_of(folder: Path) -> str:
    """Return the type of the file system of ``folder``; empty if the system does not say."""
    try:
        kinds = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    except OSError:  # a sandbox hides them
        return ""
    here = folder.resolve()
    return next((kinds[str(place)] for place in (here, *here.parents) if str(place) in kinds), "")
