"""The checkpoints of a run's folder: which exist, where a run starts, how a checkpoint gets its
name, and whether its files are intact.

A finished checkpoint is a folder ``step-000200`` whose description lists its files and their
checksums:

    metadata.json = {..., "files": {"trial_state.json": {"bytes": 812, "sha256": "9f…"},
                                    "model0/rank-00000.safetensors": {"bytes": 4096}},
                     "sha256": of everything before it}

Only the size is recorded here for tensor files, whose checksums are in the manifest next to them,
and for very large files of the trial's own, which would be too slow to read a second time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.trial.runs.events import read_json, read_text
from zero_trial.trial.runs.run_layout import RunFolder
from zero_trial.util.files import METADATA, TRIAL_STATE, sync_folder

_MANIFEST = "manifest.json"

SUMMED_BYTES = 1 << 26
"""For larger files, only the size is recorded: reading them a second time would cost seconds at
every save."""

_MANIFEST_START = b'{"sha256": "'  # how a manifest of the engine begins


def _named_step(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for anything else (including
    temporary folders).

    A folder gets this name when it is complete. If ``metadata.json`` is missing, it was lost later.
    """
    head, _, digits = path.name.partition("-")
    return int(digits) if head == "step" and digits.isdigit() and path.is_dir() else None


def checkpoint_step(path: Path) -> int | None:
    """Return the step of a checkpoint that has a ``metadata.json``; None for anything else."""
    return _named_step(path) if (path / METADATA).is_file() else None


def _is_checkpoint(path: Path) -> bool:
    """Return whether a save wrote this folder, even if files have since gone missing."""
    return path.is_dir() and ((path / METADATA).is_file() or (path / TRIAL_STATE).is_file() or bool(manifests(path)))


def latest_checkpoint(folder: Path, apart_from: Collection[str] = ()) -> Path | None:
    """Find the checkpoint with the highest step, damaged or not, except those in ``apart_from``
    (absolute paths).

    There is no pointer file that could be torn by a crash.
    """
    if not folder.is_dir():
        return None
    paths = [path for path in folder.iterdir() if str(path.resolve()) not in apart_from]
    found = [(step, path) for path in paths if (step := _named_step(path)) is not None]
    return max(found)[1] if found else None


def starting_point(
    run_dir: Path | None, resume: Path | None = None, warm_start: Path | None = None, apart_from: Collection[str] = ()
) -> dict[str, Any]:
    """Find the checkpoint to try first, its step, and the trial's id.

    Args:
        run_dir: the run's folder, if its own latest checkpoint takes precedence.
        resume: a run's folder or a checkpoint whose trial continues here.
        warm_start: the same, for a new trial that takes the weights.
        apart_from: checkpoints (absolute paths) to skip.

    Raises ConfigError if ``resume`` or ``warm_start`` has no checkpoint, CheckpointError if all of
    them are skipped.
    """
    own = latest_checkpoint(RunFolder(run_dir).checkpoints, apart_from) if run_dir is not None else None
    named = resume or warm_start
    path = own if own is not None or named is None else named_checkpoint(named, apart_from)
    fresh = {"checkpoint": None, "step": 0, "trial_id": uuid.uuid4().hex}
    if path is None:
        return fresh
    weights_only = own is None and resume is None
    return {**resumed_from(path), "trial_id": fresh["trial_id"]} if weights_only else resumed_from(path)


def resumed_from(path: Path) -> dict[str, Any]:
    """Return a checkpoint, its step, and the id of its trial.

    If the description is damaged, the step comes from the folder's name; ``find_fault`` reports the
    damage.
    """
    described = read_json(path / METADATA)
    step = described.get("steps_completed")
    return {
        "checkpoint": str(path.resolve()),
        "step": step if isinstance(step, int) else _named_step(path) or 0,
        "trial_id": str(described.get("trial_id", "")),
    }


def named_checkpoint(path: Path, apart_from: Collection[str] = ()) -> Path:
    """Return the checkpoint ``path``, or the latest of a run's folder. Raises ConfigError."""
    itself = _named_step(path) is not None
    found = path if itself else latest_checkpoint(RunFolder(path).checkpoints, apart_from)
    if str(path.resolve()) in apart_from or (apart_from and found is None):
        raise CheckpointError("the checkpoint is damaged", where=str(path), fix="Pass another checkpoint.")
    if found is None:
        raise ConfigError(
            "there is no finished checkpoint", where=str(path), expected="a run's folder or a folder step-NNNNNN"
        )
    return found


def publish(temporary: Path, final: Path) -> None:
    """Rename ``temporary`` to its final name, and replace an older checkpoint of that name, damaged
    or not.

    The parent is flushed, so that the name survives a power failure. Raises CheckpointError if
    another file or folder has the name.
    """
    aside = None
    if final.exists() and not _is_checkpoint(final):
        raise CheckpointError("another file or folder has the checkpoint's name", where=str(final), fix="Move it away.")
    if final.exists():
        aside = final.rename(_other_name(final, "old"))
    temporary.rename(final)
    sync_folder(final.parent)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def delete(path: Path) -> None:
    """Rename a checkpoint, then delete it: a killed process leaves no half of it under its name."""
    shutil.rmtree(path.rename(_other_name(path, "tmp")), ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove the temporary folders that a killed run left in its checkpoint folder.

    A checkpoint that was being replaced gets its name back if the new one did not get it.
    """
    for path in folder.glob("step-*.*-*") if folder.is_dir() else ():
        name, _, kind = path.name.partition(".")
        if kind.startswith("old-") and not (folder / name).exists():
            path.rename(folder / name)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _other_name(path: Path, kind: str) -> Path:
    """Return a temporary name: ``tmp`` for new or deleted folders, ``old`` for replaced ones."""
    return path.with_name(f"{path.name}.{kind}-{uuid.uuid4().hex[:8]}")


def add_checksums(metadata: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return ``metadata`` with sizes and checksums of the files in ``folder``. Raises OSError."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / METADATA)
    files = {path.relative_to(folder).as_posix(): _record(path) for path in paths}
    document = {**metadata, "files": files}
    return {**document, "sha256": _sum(document)}


def find_fault(folder: Path) -> str | None:
    """Describe what is wrong with a finished checkpoint, as far as its checksums show; None if
    nothing is.

    Older versions wrote no checksums, so their checkpoints count as intact.
    """
    path = folder / METADATA
    try:
        document = json.loads(read_text(path))
    except FileNotFoundError:
        return f"{path}: the file is missing"
    except (OSError, ValueError, RecursionError) as error:
        # RecursionError: e.g. a million opening brackets
        return f"{path}: cannot be read ({type(error).__name__}: {error})"
    if not isinstance(document, dict) or "steps_completed" not in document:
        return f"{path}: not a checkpoint's metadata"
    if "sha256" not in document and "files" not in document:
        return None
    checksum = document.pop("sha256", None)
    if checksum != _sum(document) or not isinstance(document.get("files"), dict):
        return f"{path}: the file is damaged"
    for name, noted in document["files"].items():
        try:
            fault = _compare(folder / name, noted)
        except OSError as error:
            fault = f"cannot be read ({error.strerror or error})"
        if fault is not None:
            return f"{folder / name}: {fault}"
    return None


def _record(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    has_manifest = path.suffix == ".safetensors" and _is_manifest(path.with_name(_MANIFEST))
    return {"bytes": size} if size > SUMMED_BYTES or has_manifest else {"bytes": size, "sha256": _digest(path)}


def manifests(folder: Path) -> list[Path]:
    """List the engines' manifests in a checkpoint, without a trial's own files of that name."""
    return sorted(path for path in folder.rglob(_MANIFEST) if _is_manifest(path))


def _is_manifest(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MANIFEST_START)) == _MANIFEST_START


def _compare(path: Path, noted: Mapping[str, Any]) -> str | None:
    if not path.is_file():
        return "the file is missing"
    size = path.stat().st_size
    if size != noted["bytes"]:
        return f"the file has {size} bytes, but had {noted['bytes']} when it was written"
    if "sha256" in noted and noted["sha256"] != _digest(path):
        return "the file is damaged"
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()  # at most SUMMED_BYTES


def _sum(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
