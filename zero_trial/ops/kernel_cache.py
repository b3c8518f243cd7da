"""The folder that keeps compiled kernels between processes: what may be loaded from there, and
which process builds.

A library is code that runs with all of its user's rights, so it is loaded only from a place where
no other user could have put it. Mapping half a file can kill the process instead of failing, so
each file holds a checksum of its content.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pwd
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


class BuildLockTimeout(OSError):
    """Another process has held the build lock for too long."""


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return ``$XDG_CACHE_HOME/zero_trial`` or ``~/.cache/zero_trial``. Raises RuntimeError for a
    user without a home."""
    for base, below in ((environ.get("XDG_CACHE_HOME"), ""), (environ.get("HOME"), ".cache")):
        # a relative one would depend on where a process was started
        if base and os.path.isabs(base):
            return Path(base, below, "zero_trial")
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir, ".cache", "zero_trial")
    except KeyError:
        raise RuntimeError(f"user {os.getuid()} has no home folder, and $XDG_CACHE_HOME is not set") from None


def open_to_others(folder: Path) -> str:
    """Say which other users could have written into an existing folder; empty if none."""
    fault = _open_to_others(os.stat(folder))
    return f"{folder} {fault}" if fault else ""


def _open_to_others(found: os.stat_result) -> str:
    """Say which other users could have written this."""
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user ({found.st_uid})"
    writers = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return f"can be written by other users (mode {stat.S_IMODE(found.st_mode):o})" if writers else ""


def why_not(folder: Path) -> str:
    """Say why libraries must not be kept in an existing folder; empty if they may."""
    if fault := open_to_others(folder):
        return fault
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return f"{folder} is on a file system that does not run programs (noexec)"
    return ""


def is_sound(path: Path) -> bool:
    """Return whether the file exists, is complete, and could only be written by this user or
    root."""
    try:
        with open(path, "rb") as file:
            ours, content = not _open_to_others(os.fstat(file.fileno())), file.read()
    except OSError:
        return False
    return ours and unsealed(content) is not None


def seal(path: Path) -> None:
    """Append the file's checksum, and make it writable only for its owner."""
    path.write_bytes(sealed(path.read_bytes()))
    path.chmod(0o755)


@contextmanager
def turn(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock next to ``path``, which is released when the process ends. Raises
    BuildLockTimeout after ``seconds``."""
    with open(path.with_suffix(".lock"), "w") as lock:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise BuildLockTimeout(f"another process has held {lock.name} for {seconds:g} s") from None
                time.sleep(0.02)
        yield


def sealed(image: bytes) -> bytes:
    """Return the content of a file: the image, then its checksum, which a loader does not look
    at."""
    return image + hashlib.sha256(image).digest()


def unsealed(content: bytes) -> bytes | None:
    """Return the image of a file's content, or None if it is incomplete."""
    image, digest = content[:-_DIGEST], content[-_DIGEST:]
    return image if image and hashlib.sha256(image).digest() == digest else None


class KernelCache:
    """Compiled CUDA kernels, a file each: checked when it is read, replaced in one step when it is
    written.

    ``folder`` may be unwritable, writable by other users, or None: then images live as long as the
    process.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.trouble = ""  # why nothing is written, for the report
        self._kept: dict[str, bytes] = {}

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        """Return the image of that key: from memory, from the folder, or made. A broken file counts
        as missing and is replaced."""
        if key not in self._kept:
            found = self._read(key)
            if found is None:
                found = make()
                self._write(key, found)
            self._kept[key] = found
        return self._kept[key]

    def _path(self, key: str) -> Path | None:
        return None if self.folder is None else self.folder / f"cuda-{key}.bin"

    def _read(self, key: str) -> bytes | None:
        path = self._path(key)
        try:
            if path is None or open_to_others(path.parent):  # the checksum is not a signature
                return None
            return unsealed(path.read_bytes())
        except OSError:
            return None

    def _write(self, key: str, image: bytes) -> None:
        path = self._path(key)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if fault := open_to_others(path.parent):
                raise OSError(fault)
            handle, scratch = tempfile.mkstemp(dir=path.parent, prefix="cuda-", suffix=".part")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(sealed(image))
                os.replace(scratch, path)
            except OSError:
                os.unlink(scratch)
                raise
        except OSError as trouble:
            self.trouble = str(trouble)
