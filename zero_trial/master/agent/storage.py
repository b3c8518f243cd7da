"""Files of trials on this machine's disk: checkpoint storage, and the temporary directory of an
allocation.

The allocation's supervisor usually removes the temporary directory; the agent removes it if the
supervisor was killed. On a cluster the directory is on the node, and stays there in that case. A
link in the allocation's folder, ``FOLDER/tmp``, records its location.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.master.agent.resources import is_passing

SHARED_FS = "determined_shared_fs"
"""The harness's name for the container path of ``host_path``."""

_NAME_FILE = ".zero_trial_storage"
_SCRATCH_PREFIX = "zt-"
LONGEST_SCRATCH = 40
"""Characters of the path of the directory around it. Sockets are made below it, and the path of a
socket may have 107.
"""

_SCRATCH_LINK = "tmp"
_SHARED_TMP = Path("/tmp")


def base_of(config: Mapping[str, Any]) -> Path | None:
    """Return the folder that contains all checkpoints; None if it is not on this machine's disk."""
    section = config.get("checkpoint_storage") or {}
    if section.get("type") == "shared_fs":
        path = section.get("storage_path") or section.get("tensorboard_path") or section.get("checkpoint_path")
        host = Path(section["host_path"])
        # an absolute storage_path below host_path replaces host_path
        return host / path if path else host
    if section.get("type") == "directory":
        return Path(section["container_path"])
    return None


def link(config: Mapping[str, Any], run_root: Path) -> None:
    """Link ``host_path`` to the (relocated) container path for a trial; create a missing folder.

    Raises ConfigError if the folder cannot be created, and OSError if the reason may be temporary
    (a full disk).
    """
    section = config.get("checkpoint_storage") or {}
    if section.get("type") == "directory":
        Path(section["container_path"]).mkdir(parents=True, exist_ok=True)
    if section.get("type") != "shared_fs":
        return
    host = Path(section["host_path"])
    try:
        host.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if is_passing(error):
            raise
        raise ConfigError(
            "the folder for checkpoints cannot be created",
            where="checkpoint_storage.host_path",
            got=f"{host} ({error})",
        ) from error
    place = run_root / SHARED_FS
    place.unlink(missing_ok=True)
    place.symlink_to(host, target_is_directory=True)


def kept_in(config: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the folder of ``checkpoint_storage`` and the name written in it, by which another
    machine verifies that it sees the same storage. Return None if the storage is not on a disk, or
    cannot be read or written here."""
    section = config.get("checkpoint_storage") or {}
    key = {"shared_fs": "host_path", "directory": "container_path"}.get(str(section.get("type")))
    if key is None:
        return None
    folder = Path(section[key])
    try:
        name = name_of(folder) or _give_name(folder)
    except OSError:
        return None
    return {"path": str(folder), "name": name} if name else None


def name_of(folder: Path) -> str:
    """Return the name that `kept_in` wrote into a folder; "" if there is none."""
    try:
        return (folder / _NAME_FILE).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _give_name(folder: Path) -> str:
    """Write a name into a folder, readable by all users, unless another master was first. Never
    replace a name: orders that wait in an engine's queue contain it."""
    draft = folder / f"{_NAME_FILE}.{uuid.uuid4().hex}"
    try:
        draft.write_text(uuid.uuid4().hex, encoding="ascii")
        draft.chmod(0o644)
        with contextlib.suppress(FileExistsError):
            os.link(draft, folder / _NAME_FILE)
    finally:
        draft.unlink(missing_ok=True)
    return name_of(folder)


def refresh_listing(folder: Path) -> None:
    """Make files that other machines wrote into a folder visible on this machine.

    An NFS client caches that a name does not exist until the folder's cached attributes expire.
    Changing the folder from this machine makes the client ask the server again.
    """
    probe = folder / f".look-{os.getpid()}"
    with contextlib.suppress(OSError):  # the storage is full: the files become visible later
        probe.touch()
        probe.unlink()


def folder_of(base: Path, name: str) -> Path | None:
    """Return the folder of a checkpoint; None if the folder is missing, a link, or not named by a
    UUID. Raises OSError if the storage cannot be read."""
    if not is_uuid(name):
        return None
    folder = base / name
    try:
        return folder if stat.S_ISDIR(folder.lstat().st_mode) else None
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_uuid(name: str) -> bool:
    """Return whether ``name`` is a UUID as the harness writes it (row key and folder name)."""
    try:
        return str(uuid.UUID(name)) == name.lower()
    except ValueError:
        return False


def delete(base: Path, name: str) -> bool:
    """Delete a checkpoint's folder without following links. Return True if the folder existed."""
    folder = folder_of(base, name)
    if folder is None:
        return False
    shutil.rmtree(folder)
    return True


def matching(base: Path, name: str, globs: Sequence[str]) -> list[Path]:
    """List the paths that ``det checkpoint rm --glob`` deletes from a checkpoint, files first.

    Globs work as in Determined's SharedFSStorageManager: ``*`` and ``?`` stop at a slash and skip
    hidden names, ``**`` spans folders, a matching folder includes its contents, and ``**/*``
    matches the whole checkpoint. Unlike there, links that leave the checkpoint are not followed.
    """
    folder = folder_of(base, name)
    if folder is None:
        return []
    if "**/*" in globs:
        return [folder]
    inside, root = glob.escape(str(folder)), folder.resolve()
    found = {Path(path) for each in globs for path in glob.glob(f"{inside}/{each}", recursive=True)}
    there = sorted(path for path in found if path == folder or path.parent.resolve().is_relative_to(root))
    files = [path for path in there if path.is_symlink() or path.is_file()]
    return files + [path for path in there if path.is_dir() and not path.is_symlink()]


def delete_matching(base: Path, name: str, globs: Sequence[str]) -> None:
    """Delete the paths that `matching` lists, and the checkpoint's folder if it is then empty."""
    for path in matching(base, name, globs):
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
        elif path.is_dir():  # unless deleted with a parent folder
            shutil.rmtree(path)
    folder = folder_of(base, name)
    if folder is not None and not contents(folder):
        folder.rmdir()


def remaining(base: Path, name: str) -> dict[str, int]:
    """List the existing files of a checkpoint, as `contents` does; empty if its folder is missing.
    Raises OSError if the storage is missing or cannot be read."""
    base.stat()
    folder = folder_of(base, name)
    return {} if folder is None else contents(folder)


def delete_tensorboard(base: Path, cluster_id: str, experiment_id: int) -> None:
    """Delete the TensorBoard files of an experiment."""
    shutil.rmtree(base / cluster_id / "tensorboard" / "experiment" / str(experiment_id), ignore_errors=True)


def contents(folder: Path) -> dict[str, int]:
    """Return the files below a folder with their sizes in bytes, and folders (with a slash) with
    size 0, as Determined's harness does. Raises OSError if one cannot be read."""

    def refuse(error: OSError) -> None:
        raise error

    found = {}
    for here, folders, files in os.walk(folder, onerror=refuse):
        inner = Path(here).relative_to(folder)
        found.update({f"{inner / name}/": 0 for name in folders})
        for name in files:
            path = Path(here) / name
            found[str(inner / name)] = (path.stat() if path.exists() else path.lstat()).st_size
    return found


def make_scratch(folder: Path, host: Mapping[str, str]) -> Path:
    """Return the temporary directory of the allocation in ``folder``; create it if missing.

    The directory is created in the host's TMPDIR, or in /tmp if that path is too long. Raises
    OSError if it cannot be created.
    """
    link = folder / _SCRATCH_LINK
    if link.is_dir():
        return Path(os.readlink(link))
    base = host.get("TMPDIR") or str(_SHARED_TMP)
    made = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=base if len(base) <= LONGEST_SCRATCH else _SHARED_TMP))
    link.unlink(missing_ok=True)
    link.symlink_to(made)
    return made


def remove_scratch(folder: Path, allocation_id: str | None = None) -> None:
    """Remove the allocation's directory and files in /tmp; no effect if they do not exist.

    Args:
        allocation_id: required if ``folder`` is the folder of one node; default: the folder's name.
    """
    name = allocation_id or folder.name
    link = folder / _SCRATCH_LINK
    if link.is_symlink():
        shutil.rmtree(os.readlink(link), ignore_errors=True)
        link.unlink(missing_ok=True)
    for path in _SHARED_TMP.glob(f"tensorboard-{name}-*"):
        shutil.rmtree(path, ignore_errors=True)
    (_SHARED_TMP / f"pid_server-{name}").unlink(missing_ok=True)
