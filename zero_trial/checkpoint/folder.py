"""The checkpoints in a folder: which exist, which is the latest, what one contains, and what is
damaged.

There is no pointer file that a crash could damage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from zero_trial.checkpoint.format import (
    MANIFEST_NAME,
    REPLACED,
    TEMPORARY,
    Manifest,
    TensorEntry,
    TensorKind,
    check_tag,
    is_floating,
    natural_order,
    parse_stored_name,
)
from zero_trial.checkpoint.range_reader import (
    CheckpointReader,
    Progress,
    check_sizes,
    read_manifest,
    require_file,
)
from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.util.files import METADATA, TRIAL_STATE

_TENSORS = "rank-*.safetensors"
OF_TRAINER = re.compile(r"checkpoint-\d+")  # folders of checkpoints of Hugging Face's Trainer


class FoundCheckpoint(NamedTuple):
    """A readable manifest: its step, its tag, its folder."""

    step: int
    tag: str
    folder: Path


def list_checkpoints(directory: str | Path, report: Callable[[str], None] | None = None) -> list[FoundCheckpoint]:
    """List the checkpoints with correct manifest and file sizes, lowest step first; ``report`` gets
    a line for each other one, and for a folder without its manifest."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found = []
    for folder in sorted(directory.iterdir()):
        done = TEMPORARY not in folder.name and REPLACED not in folder.name  # named when its manifest is there
        if done and any(folder.glob(_TENSORS)) and not (folder / MANIFEST_NAME).exists() and report:
            report(f"{folder}: a checkpoint without its {MANIFEST_NAME}")
    for tag, folder in _candidates(directory):
        try:
            found.append(FoundCheckpoint(CheckpointReader(folder).manifest.step, tag, folder))
        except CheckpointError as fault:
            if report is not None:
                report(str(fault))
    return sorted(found)


def checkpoint_folder(directory: str | Path, tag: str) -> Path:
    """Find the folder of ``tag``, or of an unfinished replacement. Raises CheckpointError."""
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


# All checkpoints in a folder, for display: intact, damaged, or left over from a killed save.
#
# The folder may be a run's (with ``checkpoints/`` in it), a folder of a trial's or an engine's
# checkpoints, a folder of such folders, or one checkpoint:
#
#     step-000200/                        of a trial: metadata.json, trial_state.json
#         model0/manifest.json            its engines
#     global_step40/manifest.json         of an engine without a trial
#     checkpoint-40/global_step40/        of an engine saved by Hugging Face's Trainer

_DEPTH = 2  # levels of folders of checkpoints within a folder


@dataclass(frozen=True)
class EngineCheckpoint:
    """One engine's checkpoint; ``manifest`` is None if it cannot be read, and ``fault`` is the
    reason."""

    folder: Path
    manifest: Manifest | None
    fault: str | None = None


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint, as far as manifests and file sizes show; no byte of a tensor is read.

    Attributes:
        saved: time of the save, in seconds since the epoch.
        fault: the first error found.
        leftover: an unfinished save, or one that a newer save replaced; no loader reads it.
        trial: its trial's id ("" if unknown); None for an engine's own checkpoint.
    """

    folder: Path
    step: int | None
    engines: tuple[EngineCheckpoint, ...]
    saved: float
    bytes: int
    files: int
    fault: str | None = None
    leftover: bool = False
    trial: str | None = None

    @property
    def series(self) -> str:
        """Return the checkpoint's trial, or the engine's folder; empty if unknown."""
        if self.trial is not None or not self.engines:
            return self.trial or ""
        parent = self.folder.parent
        return str(parent.parent if OF_TRAINER.fullmatch(parent.name) else parent)

    @property
    def whole(self) -> bool:
        return self.fault is None and not self.leftover

    def facts(self, key: str) -> tuple[Any, ...]:
        """Collect a property of the ranks that wrote the manifests (``ranks``, ``zero_stage``,
        ``mesh``): each value once, in the engines' order."""
        said = [engine.manifest.world.get(key) for engine in self.engines if engine.manifest is not None]
        return tuple(value for index, value in enumerate(said) if value is not None and value not in said[:index])


@dataclass(frozen=True)
class CheckpointFolder:
    """All checkpoints of a folder by step. ``single``: the folder is itself a checkpoint."""

    folder: Path
    saved: tuple[SavedCheckpoint, ...]
    single: bool = False

    @property
    def trials(self) -> tuple[str, ...]:
        """Return the trials of these checkpoints: a cluster's storage has many."""
        return tuple(dict.fromkeys(one.trial for one in self.saved if one.trial))

    @property
    def series(self) -> tuple[str, ...]:
        """Return the trials or folders of these checkpoints; if several, none is the newest."""
        return tuple(dict.fromkeys(one.series for one in self.saved if one.series))

    def latest(self, series: str | None = None) -> SavedCheckpoint | None:
        """Return the intact checkpoint with the highest step, of one series or of all."""
        return next((one for one in reversed(self.saved) if one.whole and series in (None, one.series)), None)

    def is_latest(self, saved: SavedCheckpoint) -> bool:
        """Return whether it is the latest (of its own series, if there are several)."""
        return saved is self.latest(saved.series if len(self.series) > 1 else None)

    def name(self, saved: SavedCheckpoint) -> str:
        """Return its path within the folder."""
        return saved.folder.name if self.single else str(saved.folder.relative_to(self.folder))

    def require_one_series(self, fix: str) -> None:
        """Raise ConfigError if none of the checkpoints is the newest."""
        if len(self.series) > 1:
            noun = "trials" if len(self.trials) == len(self.series) else "folders"
            raise ConfigError(
                f"the folder contains checkpoints of {len(self.series)} {noun}",
                where=str(self.folder),
                expected="one checkpoint",
                fix=fix,
            )


def inspect_folder(folder: Path) -> CheckpointFolder:
    """List the checkpoints in a folder. Raises ConfigError if it has none, CheckpointError if it
    cannot be read."""
    try:
        return _look_into(folder)
    except OSError as fault:
        raise CheckpointError("cannot be read", where=str(fault.filename or folder), got=fault.strerror) from fault


def _look_into(folder: Path) -> CheckpointFolder:
    if not folder.is_dir():
        raise ConfigError(
            "the folder does not exist" if not folder.exists() else "this is a file",
            where=str(folder),
            expected="a run's folder, a folder of checkpoints, or a checkpoint",
        )
    if _is_engine(folder):
        return CheckpointFolder(folder, (_of_engine(folder),), single=True)
    if _is_trial(folder):
        return CheckpointFolder(folder, (_of_trial(folder),), single=True)
    place = _place_in(folder)
    found = _saved_below(place, _DEPTH)
    if not found:
        raise ConfigError(
            "no checkpoints were found here",
            where=str(place),
            expected="a run's folder, a folder of checkpoints, or a checkpoint",
            fix="A checkpoint is a folder with a manifest.json, or a trial's folder of these.",
        )
    return CheckpointFolder(
        place, tuple(sorted(found, key=lambda one: (one.step is not None, one.step or 0, one.folder.name)))
    )


def _place_in(folder: Path) -> Path:
    """Return the folder of a run's checkpoints; any other folder unchanged."""
    inner = folder / "checkpoints"
    return inner if inner.is_dir() else folder


def _saved_below(place: Path, depth: int) -> list[SavedCheckpoint]:
    children = sorted(child for child in place.iterdir() if child.is_dir())
    siblings = {child.name for child in children}
    found = []
    for child in children:
        saved = _look_at(child, siblings)
        if saved is not None:
            found.append(saved)
        elif depth:
            found += _saved_below(_place_in(child), depth - 1)
    return found


def _look_at(folder: Path, siblings: Collection[str]) -> SavedCheckpoint | None:
    if _is_engine(folder):
        saved = _of_engine(folder)
    elif _is_trial(folder):
        saved = _of_trial(folder)
    elif any(folder.glob(_TENSORS)) or TEMPORARY in folder.name:
        saved = _saved(folder, (), None, f"{folder}: the manifest is missing")
    else:
        return None
    # a renamed old checkpoint counts as long as the new one of its name is missing
    leftover = TEMPORARY in folder.name or (REPLACED in folder.name and folder.name.split(REPLACED)[0] in siblings)
    return replace(saved, leftover=leftover)


def _is_engine(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).is_file()


def _is_trial(folder: Path) -> bool:
    return (folder / METADATA).is_file() or (folder / TRIAL_STATE).is_file()


def _of_engine(folder: Path) -> SavedCheckpoint:
    engine = _read_engine(folder)
    step = engine.manifest.step if engine.manifest is not None else None
    return _saved(folder, (engine,), step, engine.fault)


def _of_trial(folder: Path) -> SavedCheckpoint:
    names = sorted(path.parent for path in folder.glob(f"*/{MANIFEST_NAME}"))
    engines = tuple(_read_engine(path) for path in names if TEMPORARY not in path.name and REPLACED not in path.name)
    faults = [engine.fault for engine in engines if engine.fault is not None]
    lost = [path for path in sorted(folder.iterdir()) if any(path.glob(_TENSORS)) and not _is_engine(path)]
    faults += [f"{path}: the manifest is missing" for path in lost]
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
        word = "the file is missing" if isinstance(fault, FileNotFoundError) else str(fault)
        raise CheckpointError("a part of the checkpoint cannot be read", where=str(path), got=word) from fault
    if not isinstance(found, dict):
        raise CheckpointError("not written by a trial", where=str(path), got=type(found).__name__)
    return found


def _read_engine(folder: Path) -> EngineCheckpoint:
    manifest = None
    try:
        manifest = read_manifest(folder)
        check_sizes(folder, manifest)
    except CheckpointError as fault:
        return EngineCheckpoint(folder, manifest, str(fault))
    return EngineCheckpoint(folder, manifest)


def _saved(
    folder: Path, engines: tuple[EngineCheckpoint, ...], step: int | None, fault: str | None, trial: str | None = None
) -> SavedCheckpoint:
    sizes, newest = [], 0.0
    for path in folder.rglob("*"):
        try:
            found = path.stat()
        except OSError:  # a running job replaces its checkpoints
            continue
        if path.is_file():
            sizes.append(found.st_size)
            newest = max(newest, found.st_mtime)
    return SavedCheckpoint(folder, step, engines, newest, sum(sizes), len(sizes), fault, trial=trial)


# Damage: every file that differs from what was written, and the tensors in it.


@dataclass(frozen=True)
class Damage:
    """A damaged file. ``tensors``: the tensors in it, with the range if only a part is in it."""

    file: Path
    what: str
    tensors: tuple[str, ...] = ()


def bytes_to_read(saved: SavedCheckpoint) -> int:
    """Return how many bytes ``find_damage`` reads of an intact checkpoint."""
    manifests = [engine.manifest for engine in saved.engines if engine.manifest is not None]
    return sum(record.bytes for manifest in manifests for record in manifest.files.values())


def find_damage(saved: SavedCheckpoint, progress: Progress | None = None) -> list[Damage]:
    """List all damage. Reads each file of each engine once, in blocks of 4 MiB."""
    found: list[Damage] = []
    for engine in saved.engines:
        if engine.manifest is None:
            found.append(Damage(engine.folder / MANIFEST_NAME, engine.fault or "the file cannot be read"))
        else:
            found += damaged_files(engine.folder, engine.manifest, progress)
    if saved.fault is not None and not found:  # in a trial's own files
        found.append(Damage(saved.folder, saved.fault))
    return found


def _in_file(manifest: Manifest, file: str) -> tuple[str, ...]:
    """Name the tensors in ``file``: ``param/head.weight`` for a whole tensor,
    ``param/wte.weight[0:4096]`` for a part of one."""
    return tuple(
        name if (piece.start, piece.stop) == (0, entry.numel) else f"{name}[{piece.start}:{piece.stop}]"
        for name, entry in manifest.tensors.items()
        for piece in entry.pieces
        if piece.file == file
    )


def damaged_files(folder: Path, manifest: Manifest, progress: Progress | None = None) -> Iterator[Damage]:
    """Yield one engine's files that differ from what was written."""
    for name, expected in sorted(manifest.files.items()):
        try:
            require_file(folder / name, expected, read=True, progress=progress)
        except CheckpointError as fault:
            what = CheckpointError(fault.what, got=fault.got, expected=fault.expected)
            yield Damage(folder / name, str(what), _in_file(manifest, name))


def choose_checkpoint(folder: Path) -> SavedCheckpoint:
    """Return the folder's only checkpoint, or the latest intact one. Raises CheckpointError."""
    listing = inspect_folder(folder)
    listing.require_one_series(f"List them with zero-trial ckpt ls {listing.folder}, and pass one of them.")
    saved = listing.saved[-1] if listing.single else listing.latest()
    if saved is None:
        raise CheckpointError(
            "no checkpoint here is intact",
            where=str(listing.folder),
            got=next((one.fault for one in reversed(listing.saved) if one.fault), "unfinished saves"),
        )
    if saved.fault is not None:
        raise CheckpointError(saved.fault)
    return saved


def only_engine(saved: SavedCheckpoint) -> EngineCheckpoint:
    """Return the engine of a checkpoint. Raises ConfigError if there are several."""
    if not saved.engines:
        raise ConfigError(
            "no engine has saved anything in this checkpoint",
            where=str(saved.folder),
            fix="If the trial saves its model itself, only its own code can read it.",
        )
    if len(saved.engines) > 1:
        names = ", ".join(engine.folder.name for engine in saved.engines)
        raise ConfigError(
            f"the trial has {len(saved.engines)} models",
            where=str(saved.folder),
            got=names,
            fix=f"Name one: {saved.engines[0].folder}.",
        )
    return saved.engines[0]


# The contents of one engine's checkpoint, by name: parameters with their optimizer state, buffers
# and tied names. Reads only the manifest, without torch.


@dataclass(frozen=True)
class StoredTensor:
    """A stored parameter or buffer.

    Attributes:
        name: its name in the model.
        stored: its name in the manifest.
        lives: the dtype in which the model computes with it; None if the checkpoint does not say.
        states: its optimizer state: name -> dtype.
    """

    name: str
    stored: str
    entry: TensorEntry
    lives: str | None
    part: int = 0
    states: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_master(self) -> bool:
        """Return whether the stored values are not the ones that the model computes with."""
        return self.lives is not None and self.lives != self.entry.dtype


@dataclass(frozen=True)
class Inventory:
    """The contents of a checkpoint, by name.

    Attributes:
        aliases: tied name -> stored name.
        parts: more than 1 if the model itself is parallel; then names repeat.
    """

    params: tuple[StoredTensor, ...]
    buffers: tuple[StoredTensor, ...]
    aliases: Mapping[str, str]
    parts: int
    state: Mapping[str, Any]

    @property
    def elements(self) -> int:
        return sum(param.entry.numel for param in self.params)

    @property
    def without_frozen(self) -> bool:
        """Return whether the save left out frozen parameters (``exclude_frozen_parameters``), so
        that the checkpoint does not have the whole model."""
        return self.state.get("without_frozen") is True

    def in_part(self, part: int) -> tuple[StoredTensor, ...]:
        """List parameters, then buffers."""
        return tuple(held for held in (*self.params, *self.buffers) if held.part == part)


def take_inventory(manifest: Manifest) -> Inventory:
    """List the contents of the manifest by name, in natural order. Reads nothing else."""
    state = manifest.state if isinstance(manifest.state, dict) else {}
    aliases = state.get("aliases")
    states: dict[tuple[int, str], dict[str, str]] = {}
    found: dict[TensorKind, list[StoredTensor]] = {TensorKind.PARAM: [], TensorKind.BUFFER: []}
    named = sorted(
        ((parse_stored_name(name), name) for name in manifest.tensors),
        key=lambda pair: (pair[0].part, natural_order(pair[0].name)),
    )
    for meaning, stored in named:
        if meaning.kind is TensorKind.STATE:
            states.setdefault((meaning.part, meaning.name), {})[meaning.state] = manifest.tensors[stored].dtype
    for meaning, stored in named:
        if meaning.kind in found:
            entry = manifest.tensors[stored]
            lives = _lives(state, meaning.name, entry) if meaning.kind is TensorKind.PARAM else entry.dtype
            own = states.get((meaning.part, meaning.name), {}) if meaning.kind is TensorKind.PARAM else {}
            own = dict(sorted(own.items()))
            found[meaning.kind].append(StoredTensor(meaning.name, stored, entry, lives, meaning.part, own))
    return Inventory(
        tuple(found[TensorKind.PARAM]),
        tuple(found[TensorKind.BUFFER]),
        dict(aliases) if isinstance(aliases, dict) else {},
        max((meaning.parts for meaning, _ in named), default=1),
        state,
    )


def _lives(state: Mapping[str, Any], name: str, entry: TensorEntry) -> str | None:
    """Return the recorded dtype. Checkpoints of other programs have none."""
    noted = state.get("dtypes")
    if not is_floating(entry.dtype):
        return entry.dtype
    return str(noted.get(name, "float32")) if isinstance(noted, dict) else None
