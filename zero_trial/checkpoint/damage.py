"""What is wrong with a checkpoint: every file that is not what was written, and the tensors that lie in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zero_trial.checkpoint.disk import read_digest
from zero_trial.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest
from zero_trial.checkpoint.reader import leads_outside
from zero_trial.checkpoint.shelf import Saved

Told = Callable[[int], object]
"""Gets the number of bytes that were read since it was last called."""


@dataclass(frozen=True)
class Damage:
    """``tensors``: those with elements in ``file``, with the range where a part of one lies there."""

    file: Path
    what: str
    tensors: tuple[str, ...] = ()


def bytes_to_read(saved: Saved) -> int:
    """What ``find_damage`` reads of a checkpoint that is whole."""
    manifests = [engine.manifest for engine in saved.engines if engine.manifest is not None]
    return sum(record.bytes for manifest in manifests for record in manifest.files.values())


def find_damage(saved: Saved, told: Told | None = None) -> list[Damage]:
    """All that is wrong; nothing if every byte is as it was written. Reads each file of each engine once, in blocks of 4 MiB."""
    found: list[Damage] = []
    for engine in saved.engines:
        if engine.manifest is None:
            found.append(Damage(engine.folder / MANIFEST_NAME, engine.fault or "it cannot be read"))
        else:
            found += damaged_files(engine.folder, engine.manifest, told)
    if saved.fault is not None and not found:  # in what a trial has written beside its engines
        found.append(Damage(saved.folder, saved.fault))
    return found


def in_file(manifest: Manifest, file: str) -> tuple[str, ...]:
    """``param/head.weight`` for a tensor that lies in ``file`` alone, ``param/wte.weight[0:4096]`` for a part of one."""
    return tuple(
        name if (piece.start, piece.stop) == (0, entry.numel) else f"{name}[{piece.start}:{piece.stop}]"
        for name, entry in manifest.tensors.items()
        for piece in entry.pieces
        if piece.file == file
    )


def damaged_files(folder: Path, manifest: Manifest, told: Told | None = None) -> Iterator[Damage]:
    """One engine's files that are not as they were written, found one after the other."""
    for name, expected in sorted(manifest.files.items()):
        what = _fault(folder / name, expected, told)
        if what is not None:
            yield Damage(folder / name, what, in_file(manifest, name))


def _fault(path: Path, expected: FileRecord, told: Told | None) -> str | None:
    if leads_outside(path):
        return f"it is a symbolic link to another folder: {path.resolve()}"
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"{size} bytes, {expected.bytes} were written"
        found = read_digest(path, told=told)
    except FileNotFoundError:
        return "it is missing"
    except OSError as fault:
        return f"it cannot be read: {fault.strerror or fault}"
    if found != expected:
        return f"its content has changed: SHA-256 {found.sha256[:16]}…, {expected.sha256[:16]}… was written"
    return None
