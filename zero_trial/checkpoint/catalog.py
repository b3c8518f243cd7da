"""Which checkpoints a folder holds, and which is the latest that is whole: no pointer file, so none that can be
torn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from zero_trial.checkpoint.leftovers import REPLACED, TEMPORARY
from zero_trial.checkpoint.manifest import MANIFEST_NAME
from zero_trial.checkpoint.reader import CheckpointReader
from zero_trial.checkpoint.writer import check_tag
from zero_trial.errors import CheckpointError


class Found(NamedTuple):
    """A readable manifest: its step, its tag, its folder."""

    step: int
    tag: str
    folder: Path


def list_checkpoints(directory: str | Path, told: Callable[[str], None] | None = None) -> list[Found]:
    """All whose manifest and file sizes are right, lowest step first; ``told`` gets a line for each that is not."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found = []
    for tag, folder in _candidates(directory):
        try:
            found.append(Found(CheckpointReader(folder).manifest.step, tag, folder))
        except CheckpointError as fault:
            if told is not None:
                told(str(fault))
    return sorted(found)


def latest_checkpoint(directory: str | Path, told: Callable[[str], None] | None = None) -> Found | None:
    """The one with the highest step whose every file has its SHA-256; None if there is none. ``told`` as above.

    Reads all bytes of the newest (and of older ones only where newer ones are damaged): one rank does it, and tells.
    """
    for found in reversed(list_checkpoints(directory, told)):
        try:
            CheckpointReader(found.folder).verify()
        except CheckpointError as fault:
            if told is not None:
                told(str(fault))
            continue
        return found
    return None


def checkpoint_folder(directory: str | Path, tag: str) -> Path:
    """Where ``tag`` is: its folder, or the one that a replacement put aside and did not finish. Raises
    CheckpointError."""
    directory = Path(directory)
    folder = directory / check_tag(tag)
    if folder.is_dir():
        return folder
    known = dict(_candidates(directory)) if directory.is_dir() else {}
    if tag in known:
        return known[tag]
    tags = ", ".join(sorted(known)) or "none"
    raise CheckpointError("no such checkpoint", where=str(directory), got=repr(tag), expected=f"one of: {tags}")


def _candidates(directory: Path) -> list[tuple[str, Path]]:
    folders = [folder for folder in sorted(directory.iterdir()) if (folder / MANIFEST_NAME).is_file()]
    named = {folder.name: folder for folder in folders if TEMPORARY not in folder.name and REPLACED not in folder.name}
    for folder in folders:
        if REPLACED in folder.name:
            named.setdefault(folder.name.split(REPLACED)[0], folder)
    return sorted(named.items())
