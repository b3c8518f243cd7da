"""The temporary directory of one allocation, and what the harness leaves in /tmp under the allocation's name.

Whoever ends an allocation removes it: its shepherd as a rule, the agent where the shepherd was killed. So it is known by a link in the
allocation's folder, ``FOLDER/tmp``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

PREFIX = "zt-"
LONGEST = 40
"""Characters of the directory that it lies in. Sockets are made below it, and the path of one may have 107."""

_LINK = "tmp"
_SHARED = Path("/tmp")


def make(folder: Path, host: Mapping[str, str]) -> Path:
    """A directory for the allocation in ``folder``, in the host's TMPDIR unless that is too long: the one that it has already, or a
    new one. OSError if it cannot be made.
    """
    link = folder / _LINK
    if link.is_dir():
        return Path(os.readlink(link))
    base = host.get("TMPDIR") or str(_SHARED)
    made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base if len(base) <= LONGEST else _SHARED))
    link.unlink(missing_ok=True)
    link.symlink_to(made)
    return made


def remove(folder: Path) -> None:
    """Remove the allocation's directory and files in /tmp; nothing happens where they are gone already."""
    link = folder / _LINK
    if link.is_symlink():
        shutil.rmtree(os.readlink(link), ignore_errors=True)
        link.unlink(missing_ok=True)
    for path in _SHARED.glob(f"tensorboard-{folder.name}-*"):
        shutil.rmtree(path, ignore_errors=True)
    (_SHARED / f"pid_server-{folder.name}").unlink(missing_ok=True)
