"""The folder that keeps compiled kernels between processes: what may be loaded from there, and
which process builds.

A library is code that runs with all of its user's rights, so it is loaded only from a place where
no other user could have put it. Mapping half a file can kill the process instead of failing, so
each file holds a checksum of its content.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import pwd
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

DEAD_AFTER = 1800.0  # seconds; no build takes as long: the process that made the folder was killed

_MARK = b"zero_trial kernel 1\n"  # begins a file of a CUDA kernel
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
    return ours and len(content) > _DIGEST and hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def seal(path: Path) -> None:
    """Append the file's checksum, which a loader does not look at, and make it writable only for
    its owner."""
    with open(path, "r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(digest)
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


def scratch_prefix(path: Path) -> str:
    """Return how the names of the folders begin in which this library is built."""
    return f"build-{path.stem}-"


def sweep(path: Path) -> None:
    """Remove what killed builds left; call it only while holding :func:`turn`. Young folders of
    other versions stay: they may be building."""
    for left in path.parent.glob("build-*"):
        try:
            own = left.name.startswith(scratch_prefix(path))
            if own or time.time() - left.stat().st_mtime > DEAD_AFTER:
                shutil.rmtree(left, ignore_errors=True)
        except OSError:  # another process was faster
            pass


def is_full(complaint: str) -> bool:
    """Return whether a compiler's output says that the disk is full."""
    return any(os.strerror(number) in complaint for number in (errno.ENOSPC, errno.EDQUOT))


def sealed(image: bytes) -> bytes:
    """Return the content of a kernel's file: a mark, a checksum and the image."""
    return _MARK + hashlib.sha256(image).digest() + image


def unsealed(content: bytes) -> bytes | None:
    """Return the image of a file's content, or None if it is incomplete."""
    digest, image = content[len(_MARK) : len(_MARK) + _DIGEST], content[len(_MARK) + _DIGEST :]
    whole = content.startswith(_MARK) and hashlib.sha256(image).digest() == digest
    return image if whole else None


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
