"""The checkpoints that lie in a folder, as a person looks for them: whole, broken, or left over by a save that was killed.

A folder may be a run's (``checkpoints/`` in it), a folder of a trial's or of an engine's checkpoints, or one checkpoint itself:

    step-000200/                        of a trial: metadata.json, trial_state.json
        model0/manifest.json            its engines
    global_step40/manifest.json         of an engine alone
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_trial.checkpoint.leftovers import REPLACED, TEMPORARY
from zero_trial.checkpoint.manifest import MANIFEST_NAME, Manifest
from zero_trial.checkpoint.reader import check_sizes, read_manifest
from zero_trial.errors import CheckpointError, ConfigError

METADATA = "metadata.json"
TRIAL_STATE = "trial_state.json"


@dataclass(frozen=True)
class EngineFolder:
    """One engine's checkpoint; ``manifest`` is None where it cannot be read, and then ``fault`` says why."""

    folder: Path
    manifest: Manifest | None
    fault: str | None = None


@dataclass(frozen=True)
class Saved:
    """One checkpoint. ``fault``: the first thing that is wrong with it, as far as manifests and sizes tell; no byte of a tensor is read.

    ``leftover``: a save that did not finish, or what a newer one has replaced: no loader looks at it. ``saved``: seconds since the epoch.
    ``trial``: whose it is ("" where it does not say); None for an engine's own.
    """

    folder: Path
    step: int | None
    engines: tuple[EngineFolder, ...]
    saved: float
    bytes: int
    files: int
    fault: str | None = None
    leftover: bool = False
    trial: str | None = None

    @property
    def whole(self) -> bool:
        return self.fault is None and not self.leftover

    def facts(self, key: str) -> tuple[Any, ...]:
        """What the manifests say of the ranks that wrote them (``ranks``, ``zero_stage``, ``mesh``): each answer once, in the engines' order."""
        said = [engine.manifest.world.get(key) for engine in self.engines if engine.manifest is not None]
        return tuple(value for index, value in enumerate(said) if value is not None and value not in said[:index])


@dataclass(frozen=True)
class Shelf:
    """All of a folder's, lowest step first. ``single``: the folder is a checkpoint itself."""

    folder: Path
    saved: tuple[Saved, ...]
    single: bool = False

    @property
    def trials(self) -> tuple[str, ...]:
        """Whose checkpoints these are: a cluster's storage has those of many."""
        return tuple(dict.fromkeys(one.trial for one in self.saved if one.trial))

    def latest(self, trial: str | None = None) -> Saved | None:
        """The highest step that looks whole, of one trial or of all."""
        return next((one for one in reversed(self.saved) if one.whole and trial in (None, one.trial)), None)

    def is_latest(self, saved: Saved) -> bool:
        """Of its own trial, where there are several."""
        return saved is self.latest(saved.trial if len(self.trials) > 1 else None)


def look_into(folder: Path) -> Shelf:
    """Raises ConfigError if there is nothing in ``folder`` that could be a checkpoint, CheckpointError if it cannot be read."""
    try:
        return _look_into(folder)
    except OSError as fault:
        raise CheckpointError("cannot be read", where=str(fault.filename or folder), got=fault.strerror) from fault


def _look_into(folder: Path) -> Shelf:
    if not folder.is_dir():
        raise ConfigError(
            "there is no such folder" if not folder.exists() else "this is a file",
            where=str(folder),
            expected="a run's folder, a folder of checkpoints, or a checkpoint",
        )
    if _is_engine(folder):
        return Shelf(folder, (_of_engine(folder),), single=True)
    if _is_trial(folder):
        return Shelf(folder, (_of_trial(folder),), single=True)
    inner = folder / "checkpoints"
    place = inner if inner.is_dir() else folder
    children = sorted(place.iterdir())
    beside = {child.name for child in children}
    saved = [_look_at(child, beside) for child in children]
    found = [one for one in saved if one is not None]
    if not found:
        raise ConfigError(
            "there are no checkpoints here",
            where=str(place),
            expected="a run's folder, a folder of checkpoints, or a checkpoint",
            fix="A checkpoint is a folder with a manifest.json, or a trial's folder of these.",
        )
    return Shelf(place, tuple(sorted(found, key=lambda one: (one.step is not None, one.step or 0, one.folder.name))))


def _look_at(folder: Path, beside: Collection[str]) -> Saved | None:
    if not folder.is_dir():
        return None
    if _is_engine(folder):
        saved = _of_engine(folder)
    elif _is_trial(folder) or _engines_in(folder):
        saved = _of_trial(folder)
    elif any(folder.glob("*.safetensors")) or TEMPORARY in folder.name:
        saved = _saved(folder, (), None, "there is no manifest")
    else:
        return None
    # a checkpoint that stepped aside counts for as long as the new one of its name is missing
    leftover = TEMPORARY in folder.name or (REPLACED in folder.name and folder.name.split(REPLACED)[0] in beside)
    return Saved(**{**vars(saved), "leftover": leftover})


def _is_engine(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).is_file()


def _is_trial(folder: Path) -> bool:
    return (folder / METADATA).is_file() or (folder / TRIAL_STATE).is_file()


def _engines_in(folder: Path) -> list[Path]:
    names = [path.parent for path in folder.glob(f"*/{MANIFEST_NAME}")]
    return sorted(path for path in names if TEMPORARY not in path.name and REPLACED not in path.name)


def _of_engine(folder: Path) -> Saved:
    engine = _read_engine(folder)
    step = engine.manifest.step if engine.manifest is not None else None
    return _saved(folder, (engine,), step, engine.fault)


def _of_trial(folder: Path) -> Saved:
    engines = tuple(_read_engine(path) for path in _engines_in(folder))
    faults = [engine.fault for engine in engines if engine.fault is not None]
    lost = [path for path in sorted(folder.iterdir()) if any(path.glob("*.safetensors")) and not _is_engine(path)]
    faults += [f"{path}: there is no manifest" for path in lost]
    metadata: Mapping[str, Any] = {}
    try:
        _document(folder / TRIAL_STATE)
        metadata = _document(folder / METADATA)
    except CheckpointError as fault:
        faults.append(str(fault))
    step = metadata.get("steps_completed")
    if not isinstance(step, int):
        step = next((engine.manifest.step for engine in engines if engine.manifest is not None), None)
    return _saved(folder, engines, step, faults[0] if faults else None, str(metadata.get("trial_id", "")))


def _document(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        word = "it is missing" if isinstance(fault, FileNotFoundError) else str(fault)
        raise CheckpointError("a part of the checkpoint cannot be read", where=str(path), got=word) from fault
    if not isinstance(found, dict):
        raise CheckpointError("not what a trial writes", where=str(path), got=type(found).__name__)
    return found


def _read_engine(folder: Path) -> EngineFolder:
    manifest = None
    try:
        manifest = read_manifest(folder)
        check_sizes(folder, manifest)
    except CheckpointError as fault:
        return EngineFolder(folder, manifest, str(fault))
    return EngineFolder(folder, manifest)


def _saved(
    folder: Path, engines: tuple[EngineFolder, ...], step: int | None, fault: str | None, trial: str | None = None
) -> Saved:
    sizes, newest = [], 0.0
    for path in folder.rglob("*"):
        try:
            found = path.stat()
        except OSError:  # a run that goes on replaces what it has
            continue
        if path.is_file():
            sizes.append(found.st_size)
            newest = max(newest, found.st_mtime)
    return Saved(folder, step, engines, newest, sum(sizes), len(sizes), fault, trial=trial)
