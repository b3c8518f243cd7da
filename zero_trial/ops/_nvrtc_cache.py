"""Compiled kernels kept between processes: one file each, checked when it is read, replaced in one step when it is written."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from zero_trial.ops._library_cache import open_to_others

_MARK = b"zero_trial kernel 1\n"
_DIGEST = hashlib.sha256().digest_size


def sealed(image: bytes) -> bytes:
    """What a file holds: a mark, a checksum and the image."""
    return _MARK + hashlib.sha256(image).digest() + image


def unsealed(content: bytes) -> bytes | None:
    """The image of a file's content, or None where it is not whole."""
    digest, image = content[len(_MARK) : len(_MARK) + _DIGEST], content[len(_MARK) + _DIGEST :]
    whole = content.startswith(_MARK) and hashlib.sha256(image).digest() == digest
    return image if whole else None


class KernelCache:
    """``folder`` may be unwritable, writable by other users, or None: then images live as long as the process."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.trouble = ""  # why nothing is written, for the report
        self._kept: dict[str, bytes] = {}

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        """The image of that key: from memory, from the folder, or made. A broken file counts as missing and is replaced."""
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
