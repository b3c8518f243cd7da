"""Files as a context directory, as ``det`` sends it."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping


def tgz(files: Mapping[str, str | bytes]) -> bytes:
    """Return the files in a .tar.gz, by name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            raw = content.encode() if isinstance(content, str) else content
            entry = tarfile.TarInfo(name)
            entry.size = len(raw)
            archive.addfile(entry, io.BytesIO(raw))
    return buffer.getvalue()
