"""The seal of a finished checkpoint folder: what lies in it, and the sum by which a changed byte is found.

    metadata.json = {..., "files": {"trial_state.json": {"bytes": 812, "sha256": "9f…"}, "model0/rank-00000.safetensors": {"bytes": 4096}},
                     "sha256": of all that stands before}

Tensor files have a sum in the manifest that lies beside them, and very large files of the trial's own are not read a second time: of both
only the size is noted here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METADATA = "metadata.json"
MANIFEST = "manifest.json"
TRIAL_STATE = "trial_state.json"
_SEALED = b'{"sha256": "'  # how a manifest of ours begins
SUMMED_BYTES = 1 << 26
"""Larger files are known by their size alone: a second reading of them would cost seconds at every save."""


def sealed(metadata: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """``metadata`` with the seal of ``folder`` as it is now. Raises OSError."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / METADATA)
    files = {path.relative_to(folder).as_posix(): _record(path) for path in paths}
    document = {**metadata, "files": files}
    return {**document, "sha256": _sum(document)}


def find_fault(folder: Path) -> str | None:
    """What is wrong with a finished checkpoint, as far as its seal tells; None if nothing, or if it was made without one."""
    path = folder / METADATA
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{path}: the file is missing"
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: a million opening brackets
        return f"{path}: cannot be read ({type(error).__name__}: {error})"
    if not isinstance(document, dict) or "steps_completed" not in document:
        return f"{path}: no description of a checkpoint"
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
    return {"bytes": size, "sha256": _digest(path)} if _is_summed(path, size) else {"bytes": size}


def _is_summed(path: Path, size: int) -> bool:
    return size <= SUMMED_BYTES and not (path.suffix == ".safetensors" and _is_manifest(path.with_name(MANIFEST)))


def manifests(folder: Path) -> list[Path]:
    """The manifests of the engines in a checkpoint. A trial may have a file of that name, too."""
    return sorted(path for path in folder.rglob(MANIFEST) if _is_manifest(path))


def _is_manifest(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_SEALED)) == _SEALED


def _compare(path: Path, noted: Mapping[str, Any]) -> str | None:
    if not path.is_file():
        return "the file is missing"
    size = path.stat().st_size
    if size != noted["bytes"]:
        return f"the file has {size} bytes, and had {noted['bytes']}"
    if "sha256" in noted and noted["sha256"] != _digest(path):
        return "the file is damaged"
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()  # at most SUMMED_BYTES


def _sum(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
