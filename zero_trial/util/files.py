"""Atomic file writes, and file names that several packages share."""

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
    """Yield a new, empty file next to ``path`` that replaces it when the block ends.

    If the block raises, removes the new file and leaves ``path`` unchanged.

    Args:
        path: the file to replace or create; its folder must exist.
        durable: sync content and name to disk, to survive a power failure. Unnecessary for files
            that only running processes read.
        private: only this user can read the file, from its creation.
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
    """Write a file atomically: readers see either the old or the new content."""
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
    """Remove ``folder`` and its content, if it exists (best effort). Renames the folder first, so
    that concurrent writers find it missing and do not leave new files."""
    gone = folder.with_name(f"{folder.name}.{secrets.token_hex(6)}")
    with suppress(OSError):  # missing, or cannot be renamed
        os.rename(folder, gone)
    for path in (gone, folder):
        shutil.rmtree(path, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder, or the content of a file, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# types of file systems that keep files in memory
IN_MEMORY = frozenset({"tmpfs", "ramfs"})


def file_system_of(folder: Path) -> str:
    """Return the type of the file system of ``folder``; "" if unknown."""
    try:
        kinds = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    except OSError:  # a sandbox hides them
        return ""
    here = folder.resolve()
    return next((kinds[str(place)] for place in (here, *here.parents) if str(place) in kinds), "")
