"""The folder that keeps compiled kernels between processes.

A kernel is code that runs with all of its user's rights, so it is loaded only from a folder where
no other user could have put it. Loading half a file can kill the process instead of failing, so
each file ends with a checksum of its content.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

log = logging.getLogger("zero_trial")

_DIGEST = hashlib.sha256().digest_size


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return ``$XDG_CACHE_HOME/zero_trial`` or ``~/.cache/zero_trial``, for a user without a home
    one among temporary files."""
    base, home = environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    # a relative one would depend on where a process was started
    if os.path.isabs(base):
        return Path(base, "zero_trial")
    return (
        Path(home, ".cache", "zero_trial") if home != "~" else Path(tempfile.gettempdir(), f"zero_trial-{os.getuid()}")
    )


def open_to_others(folder: Path) -> str:
    """Say which other users could have written into an existing folder; empty if none."""
    found = os.stat(folder)
    if found.st_uid not in (os.geteuid(), 0):
        return f"{folder} belongs to another user ({found.st_uid})"
    writers = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return f"{folder} can be written by other users (mode {stat.S_IMODE(found.st_mode):o})" if writers else ""


class KernelCache:
    """Compiled kernels, a file each: checked when it is read, replaced in one step when it is
    written.

    A ``folder`` that cannot be written, or that other users can write, keeps nothing: each process
    compiles for itself then, and logs that.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trouble = ""  # why nothing is kept

    def get(self, name: str, make: Callable[[], bytes]) -> bytes:
        """Return the image of that name, from the folder or made. A broken file counts as missing
        and is replaced. Of processes that start together one makes it, and the others wait."""
        found = self._read(name)
        if found is None:
            with self._turn():
                found = self._read(name)  # another process may have been faster
                if found is None:
                    found = make()
                    self._write(name, found)
        return found

    def _read(self, name: str) -> bytes | None:
        try:
            if open_to_others(self.folder):  # the checksum is not a signature
                return None
            content = (self.folder / name).read_bytes()
        except OSError:
            return None
        image, digest = content[:-_DIGEST], content[-_DIGEST:]
        return image if image and hashlib.sha256(image).digest() == digest else None

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock of the folder, which is released when the process ends."""
        with ExitStack() as held:
            with suppress(OSError):  # where nothing can be kept, nothing is waited for
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                lock = held.enter_context(open(self.folder / "kernels.lock", "w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, name: str, image: bytes) -> None:
        try:
            if fault := open_to_others(self.folder):
                raise OSError(fault)
            handle, scratch = tempfile.mkstemp(dir=self.folder, suffix=".part")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(image + hashlib.sha256(image).digest())
                os.replace(scratch, self.folder / name)
            except OSError:
                os.unlink(scratch)
                raise
        except OSError as trouble:
            if not self.trouble:
                log.warning("kernels are compiled again in every process, because they cannot be kept: %s", trouble)
            self.trouble = str(trouble)
