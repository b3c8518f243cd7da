"""Write a checkpoint so that a kill at any moment leaves the previous or the new one intact.

    1  rank 0     <directory>/<tag>.tmp-<id>/            new folder
    2  each rank  rank-00000.safetensors ...             its slices; fsync; SHA-256
    3  rank 0     manifest.json                          last file; fsync; folder fsync
    4  rank 0     <tag>.tmp-<id>  ->  <tag>              rename; parent fsync

If ``<tag>`` exists already, it is first renamed to ``<tag>.old-<id>`` and removed at the end.
Readers use the renamed folder as ``<tag>`` while that is missing.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, Protocol

from zero_trial.checkpoint.format import (
    MANIFEST_NAME,
    REPLACED,
    TEMPORARY,
    FileRecord,
    Manifest,
    Slice,
    StoredPiece,
    TensorEntry,
    check_tag,
    dtype_name,
    safetensors_header,
    same_tensor,
    tensor_bytes,
)
from zero_trial.errors import CheckpointError
from zero_trial.util.files import remove_folder, sync_folder


class Ranks(Protocol):
    """All ranks that save one checkpoint together. ``gather_json`` and ``gather_row`` (a few
    integers) are collective and return all values to every rank, in order."""

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather_json(self, value: Any, label: str) -> list[Any]: ...

    def gather_row(self, row: list[int], label: str) -> list[list[int]]: ...


class SingleRank:
    """A single process that saves alone."""

    index = 0
    size = 1

    def gather_json(self, value: Any, label: str) -> list[Any]:
        return [value]

    def gather_row(self, row: list[int], label: str) -> list[list[int]]:
        return [row]


def save_checkpoint(
    directory: str | Path,
    tag: str,
    slices: Sequence[Slice],
    *,
    step: int,
    state: Any = None,
    rank_state: Any = None,
    world: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
    disk: DurableFiles | None = None,
) -> Path:
    """Save the slices of all ranks as ``<directory>/<tag>`` and return that path. Collective: every
    rank must call it; takes three exchanges.

    ``slices`` of all ranks together must cover each of their tensors exactly once; ``state`` (rank
    0's is saved) and ``rank_state`` are JSON values. ``directory`` must be the same place for all
    ranks. Raises CheckpointError on every rank if any rank cannot write, and leaves no temporary
    folder.
    """
    ranks, disk = ranks or SingleRank(), disk or DurableFiles()
    final = Path(directory) / check_tag(tag)
    temporary = agree(ranks, final, "checkpoint folder", lambda: str(begin(final, disk)))
    folder = Path(temporary)
    report = write_rank(folder, ranks.index, slices, disk, rank_state=rank_state)
    reports = ranks.gather_json(report, "checkpoint files")
    agree(ranks, final, "checkpoint commit", lambda: commit(folder, final, reports, step, state, world or {}, disk))
    return final


def begin(final: Path, disk: DurableFiles) -> Path:
    """Step 1, rank 0: create a new temporary folder; remove those left by other saves of the same
    tag.

    Raises CheckpointError if ``final`` is not a checkpoint: replacing it would destroy other files.
    """
    if final.exists() and not (final / MANIFEST_NAME).is_file() and not (final.is_dir() and not any(final.iterdir())):
        raise CheckpointError(
            "another file or folder has the name of the new checkpoint",
            where=str(final),
            expected="nothing, an empty folder, or a checkpoint to replace",
            fix="Move it away, or save under another tag.",
        )
    _remove_leftovers(final, TEMPORARY, disk)
    folder = final.with_name(f"{final.name}{TEMPORARY}{uuid.uuid4().hex[:12]}")
    disk.make_folder(folder)
    return folder


def write_rank(folder: Path, rank: int, slices: Sequence[Slice], disk: DurableFiles, **more: Any) -> dict[str, Any]:
    """Step 2: write this rank's file, and return the report of it for rank 0, as JSON, with
    ``more`` (its ``rank_state``).

    Errors are put into the report instead of being raised: a rank that raised here would leave the
    others waiting.
    """
    name = rank_file(rank)
    try:
        json.dumps(more, allow_nan=False)
        return {**write_file(folder / name, slices, disk), **more}
    except Exception as fault:
        return {"fault": f"rank {rank}, {name}: {type(fault).__name__}: {fault}"}


def rank_file(rank: int, part: str = "") -> str:
    """Return the name of a rank's file of tensors; ``part`` is for a separately written file."""
    return f"rank-{rank:05d}{part}.safetensors"


def write_file(
    path: Path, slices: Sequence[Slice], disk: DurableFiles, check: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Write a file with ``slices``, unless all are empty; return its record and contents as JSON, a
    part of a rank's report. ``check`` is called before each chunk of ``CHUNK_BYTES``, and raises to
    stop the writing there."""
    kept = [part for part in slices if part.start < part.stop]
    files = []
    if kept:
        record = disk.write(path, shard_chunks(kept, check))
        files.append({"name": path.name, "bytes": record.bytes, "sha256": record.sha256})
    tensors: dict[str, dict[str, Any]] = {}
    for part in slices:
        entry = {"dtype": dtype_name(part.dtype), "shape": list(part.shape), "pieces": []}
        pieces = tensors.setdefault(part.name, entry)["pieces"]
        if part.start < part.stop:
            pieces.append([path.name, piece_key(part), part.start, part.stop])
    return {"files": files, "tensors": tensors}


def merge(
    reports: Sequence[Mapping[str, Any]], step: int, state: Any, world: Mapping[str, Any], final: Path | None = None
) -> Manifest:
    """Merge the reports of all ranks into the manifest of ``final``. Raises CheckpointError for a
    failed rank, or for elements that are missing or stored twice."""
    faults = [report["fault"] for report in reports if "fault" in report]
    if faults:
        raise CheckpointError("writing failed", where=str(final or "checkpoint"), got="; ".join(faults), fix=_FIX)
    files: dict[str, FileRecord] = {}
    entries: dict[str, list[TensorEntry]] = {}
    for report in reports:
        files |= {file["name"]: FileRecord(file["bytes"], file["sha256"]) for file in report["files"]}
        for name, entry in report["tensors"].items():
            pieces = tuple(StoredPiece(*piece) for piece in entry["pieces"])
            entries.setdefault(name, []).append(TensorEntry(entry["dtype"], tuple(entry["shape"]), pieces))
    tensors = {name: same_tensor(name, found) for name, found in entries.items()}
    rank_state = tuple(report["rank_state"] for report in reports if "rank_state" in report)
    manifest = Manifest(step, tensors, files, state, rank_state, {"ranks": len(reports), **world})
    manifest.check()
    return manifest


def commit(
    folder: Path,
    final: Path,
    reports: Sequence[Mapping[str, Any]],
    step: int,
    state: Any,
    world: Mapping[str, Any],
    disk: DurableFiles,
) -> str:
    """Do steps 3 and 4, on rank 0. After an error only the temporary folder is removed."""
    try:
        if not folder.is_dir():
            what = "the folder is gone: another run has removed it, or saves under the same tag"
            raise CheckpointError(what, where=str(folder), fix="Give each run its own folder.")
        manifest = merge(reports, step, state, world, final)
        for name, record in manifest.files.items():
            found = (folder / name).stat().st_size if (folder / name).is_file() else None
            if found != record.bytes:
                raise CheckpointError(
                    "rank 0 cannot see a file that another rank wrote",
                    where=str(folder / name),
                    got="no file" if found is None else f"{found} bytes",
                    expected=f"{record.bytes} bytes",
                    fix="Save to a folder that all hosts share.",
                )
        write_manifest(folder, manifest, disk)
        publish(folder, final, disk)
    except Exception:
        disk.remove_folder(folder)
        raise
    return str(final)


def write_manifest(folder: Path, manifest: Manifest, disk: DurableFiles) -> None:
    """Step 3: write the manifest last; a folder without one is not a checkpoint."""
    disk.write(folder / MANIFEST_NAME, [manifest.to_json().encode()])
    disk.sync_folder(folder)


def publish(folder: Path, final: Path, disk: DurableFiles) -> None:
    """Step 4: name the folder; an older checkpoint of that name is removed last."""
    replaced = final.with_name(folder.name.replace(TEMPORARY, REPLACED))
    if final.exists():
        disk.rename(final, replaced)
    disk.rename(folder, final)
    disk.sync_folder(final.parent)
    _remove_leftovers(final, REPLACED, disk)


def _remove_leftovers(final: Path, word: str, disk: DurableFiles) -> None:
    """Remove the temporary folders of saves of ``final``."""
    for leftover in list(final.parent.iterdir()) if final.parent.is_dir() else ():
        if leftover.name.startswith(final.name + word):
            disk.remove_folder(leftover)


def agree(ranks: Ranks, final: Path, label: str, act: Callable[[], str]) -> str:
    """Run an action for ``final`` on rank 0; every rank gets its result, or raises its error."""
    outcome: dict[str, str] | None = None
    if ranks.index == 0:
        try:
            outcome = {"value": act()}
        except CheckpointError as fault:
            outcome = {"fault": str(fault)}
        except Exception as fault:
            text, fix = fault_text(fault, "rank 0"), _FIX if isinstance(fault, OSError) else None
            outcome = {
                "fault": str(CheckpointError("the checkpoint was not saved", where=str(final), got=text, fix=fix))
            }
    answer = ranks.gather_json(outcome, label)[0]
    if "fault" in answer:
        raise CheckpointError(answer["fault"])
    return str(answer["value"])


_FIX = "Save to a writable folder with free space. Earlier checkpoints are unaffected."


def fault_text(fault: Exception, where: str) -> str:
    """Return the text of an error for the other ranks."""
    return str(fault) if isinstance(fault, CheckpointError) else f"{where}: {type(fault).__name__}: {fault}"


# The bytes of one rank's safetensors file, made piece by piece, so that no second copy of a shard
# ever exists.
#
# The format (safetensors 0.4 and later): 8 bytes little-endian length of the header, the header as
# JSON padded with spaces to 8 bytes, then the tensors' bytes end to end in the header's order.

CHUNK_BYTES = 1 << 24


def piece_key(part: Slice) -> str:
    """Return a slice's safetensors name, unique in a file: ``param/wte.weight[0:4096]``."""
    return f"{part.name}[{part.start}:{part.stop}]"


def shard_chunks(slices: Sequence[Slice], check: Callable[[], None] = lambda: None) -> Iterator[bytes | memoryview]:
    """Yield the file's bytes in order: at most ``CHUNK_BYTES`` of a tensor at a time, after a call
    of ``check``, valid until the next. ``slices``: none empty, all with different keys."""
    yield safetensors_header((piece_key(part), part.dtype, (part.tensor.numel(),)) for part in slices)
    for part in slices:
        for held in part.flat.split(max(1, CHUNK_BYTES // part.tensor.element_size())):
            check()
            held = held.cpu()  # a view of the tensor's own memory if it is on the CPU already
            yield tensor_bytes(held)


# The changes that a save makes to a disk, each durable before the next one relies on it.


_APART_BYTES = 1 << 20  # the first chunk this large starts the thread: a small file needs none
_MOST_AHEAD = 8  # most chunks that are written and not yet summed


class DurableFiles:
    """The local or shared file system. Tests use a disk that fails at a chosen step."""

    def make_folder(self, folder: Path) -> None:
        """Create ``folder`` (new) and its parents."""
        folder.mkdir(parents=True)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
        """Write a new file with the chunks and flush it; return its size and SHA-256. Another
        thread computes the hash, which takes longer than the kernel's copy of a chunk; at most
        ``_MOST_AHEAD`` chunks stay in memory for it."""
        size, started, digest = 0, 0, sha256()
        ahead: Queue[memoryview | None] = Queue(_MOST_AHEAD)
        # a plain thread: a pool accepts no work once the interpreter exits, but a save continues
        summing = Thread(target=lambda: [*map(digest.update, iter(ahead.get, None))], name="zero_trial-sha256")
        try:
            with path.open("xb", buffering=0) as file:
                for chunk in chunks:
                    view = memoryview(chunk)
                    if not summing.is_alive() and view.nbytes < _APART_BYTES:
                        digest.update(view)
                    else:
                        if not summing.is_alive():
                            summing.start()
                        ahead.put(view)
                    while view.nbytes:
                        written = file.write(view)
                        view, size = view[written:], size + written
                    if size - started >= CHUNK_BYTES and hasattr(os, "posix_fadvise"):
                        # the disk starts writing now, not at the end
                        os.posix_fadvise(file.fileno(), started, size - started, os.POSIX_FADV_DONTNEED)
                        started = size
                os.fsync(file.fileno())
        finally:
            if summing.is_alive():
                ahead.put(None)
                summing.join()
        return FileRecord(size, digest.hexdigest())

    def remove_file(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def sync_folder(self, folder: Path) -> None:
        """Flush the folder's list of names to the disk."""
        sync_folder(folder)

    def rename(self, source: Path, destination: Path) -> None:
        """Rename atomically; ``destination`` must not exist."""
        if destination.exists():
            raise FileExistsError(f"{destination} exists")
        os.rename(source, destination)

    def remove_folder(self, folder: Path) -> None:
        """Remove the folder with all its contents, if it exists. It is renamed first, so that a
        thread or rank that still writes into it creates no new file and notices the removal."""
        remove_folder(folder)
