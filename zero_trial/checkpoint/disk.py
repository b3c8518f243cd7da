"""The few changes that a checkpoint makes to a disk, each made durable before the next one relies on it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

from zero_trial.checkpoint.manifest import FileRecord


class Disk:
    """The local or shared file system. Tests put a disk in its place that breaks at a chosen step."""

    def make_folder(self, folder: Path) -> None:
        """Create ``folder`` (new) and its parents."""
        folder.mkdir(parents=True)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
        """A new file with the chunks, on the disk when this returns; its size and SHA-256, computed on the way."""
        digest, size = sha256(), 0
        with path.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += chunk.nbytes if isinstance(chunk, memoryview) else len(chunk)
            file.flush()
            os.fsync(file.fileno())
        return FileRecord(size, digest.hexdigest())

    def sync_folder(self, folder: Path) -> None:
        """The folder's list of names is on the disk when this returns."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, destination: Path) -> None:
        """Atomic; ``destination`` must not exist."""
        if destination.exists():
            raise FileExistsError(f"{destination} exists")
        os.rename(source, destination)

    def remove_folder(self, folder: Path) -> None:
        """With all that is in it; nothing happens if it does not exist."""
        shutil.rmtree(folder, ignore_errors=True)


def read_digest(path: Path, block: int = 1 << 22, told: Callable[[int], object] | None = None) -> FileRecord:
    """Size and SHA-256 of an existing file, read in blocks of ``block`` bytes; ``told`` gets the size of each."""
    digest, size = sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(block):
            digest.update(chunk)
            size += len(chunk)
            if told is not None:
                told(len(chunk))
    return FileRecord(size, digest.hexdigest())
