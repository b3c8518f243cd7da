"""Write a checkpoint so that a kill at any moment leaves the previous one, or the new one, whole.

    1  rank 0     <directory>/<tag>.tmp-<id>/            new folder
    2  each rank  rank-00000.safetensors ...             its slices; fsync; SHA-256
    3  rank 0     manifest.json                          last file; fsync; folder fsync
    4  rank 0     <tag>.tmp-<id>  ->  <tag>              rename; parent fsync

If ``<tag>`` exists already it is renamed to ``<tag>.old-<id>`` first and removed at the end.
Readers take the renamed folder for ``<tag>`` while that is missing.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

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

if TYPE_CHECKING:
    import torch  # who exports a checkpoint does not take the second that its import takes


class Ranks(Protocol):
    """All ranks that save one checkpoint together. ``gather_json`` and ``gather_row`` (a few
    integers) are collective and give every rank all values, in order."""

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather_json(self, value: Any, label: str) -> list[Any]: ...

    def gather_row(self, row: list[int], label: str) -> list[list[int]]: ...


class SingleRank:
    """One process that saves by itself."""

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
    """Save what all ranks give as ``<directory>/<tag>`` and return that path. Collective: every
    rank calls, in three exchanges.

    ``slices`` of all ranks together must cover each of their tensors exactly once; ``state`` (rank
    0's counts) and ``rank_state`` are JSON values. ``directory`` must be the same place for all
    ranks. Raises CheckpointError on every rank if any rank cannot write, and leaves no temporary
    folder.
    """
    ranks, disk = ranks or SingleRank(), disk or DurableFiles()
    final = Path(directory) / check_tag(tag)
    temporary = agree(ranks, "checkpoint folder", lambda: str(begin(final, disk)))
    folder = Path(temporary)
    report = write_rank(folder, ranks.index, slices, rank_state, disk)
    reports = ranks.gather_json(report, "checkpoint files")
    agree(ranks, "checkpoint commit", lambda: commit(folder, final, reports, step, state, world or {}, disk))
    return final


def begin(final: Path, disk: DurableFiles) -> Path:
    """Step 1, rank 0: make a new temporary folder; remove those that killed saves of the same tag
    left.

    Raises CheckpointError if ``final`` is something else than a checkpoint, which replacing it
    would destroy.
    """
    if final.exists() and not (final / MANIFEST_NAME).is_file() and not (final.is_dir() and not any(final.iterdir())):
        raise CheckpointError(
            "something that is not a checkpoint has the name of the new one",
            where=str(final),
            expected="nothing, an empty folder, or a checkpoint to replace",
            fix="Move it away, or save under another tag.",
        )
    if final.parent.is_dir():
        for leftover in final.parent.iterdir():
            if leftover.name.startswith(final.name + TEMPORARY) and is_abandoned(leftover):
                disk.remove_folder(leftover)
    folder = final.with_name(temporary_name(final.name))
    disk.make_folder(folder)
    return folder


def write_rank(folder: Path, rank: int, slices: Sequence[Slice], rank_state: Any, disk: DurableFiles) -> dict[str, Any]:
    """Step 2: write this rank's file, and return the report of it for rank 0, as JSON.

    Any fault goes into the report instead of out of this function: a rank that raised here would
    leave the others waiting.
    """
    name = rank_file(rank)
    try:
        json.dumps(rank_state, allow_nan=False)
        return {**write_file(folder / name, slices, disk), "rank_state": rank_state}
    except Exception as fault:
        return {"fault": f"rank {rank}, {name}: {type(fault).__name__}: {fault}"}


def rank_file(rank: int, part: str = "") -> str:
    """Return the name of a rank's file of tensors; ``part``: of one that is written apart."""
    return f"rank-{rank:05d}{part}.safetensors"


def write_file(
    path: Path, slices: Sequence[Slice], disk: DurableFiles, check: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Write a file with ``slices``, unless all are empty; return its record and what is in it as
    JSON, a part of a rank's report. ``check``: is called before each chunk of ``CHUNK_BYTES``, and
    raises to end the writing there."""
    kept = [part for part in slices if part.start < part.stop]
    files = []
    if kept:
        chunks = shard_chunks(kept)
        record = disk.write(path, chunks if check is None else _checked(chunks, check))
        files.append({"name": path.name, "bytes": record.bytes, "sha256": record.sha256})
    tensors: dict[str, dict[str, Any]] = {}
    for part in slices:
        entry = {"dtype": dtype_name(part.dtype), "shape": list(part.shape), "pieces": []}
        pieces = tensors.setdefault(part.name, entry)["pieces"]
        if part.start < part.stop:
            pieces.append([path.name, piece_key(part), part.start, part.stop])
    return {"files": files, "tensors": tensors}


def merge(reports: Sequence[Mapping[str, Any]], step: int, state: Any, world: Mapping[str, Any]) -> Manifest:
    """Merge the reports of all ranks into a manifest. Raises CheckpointError for a failed rank, or
    elements missing or stored twice."""
    faults = [report["fault"] for report in reports if "fault" in report]
    if faults:
        raise CheckpointError("writing failed", where="checkpoint", got="; ".join(faults))
    files: dict[str, FileRecord] = {}
    entries: dict[str, list[TensorEntry]] = {}
    for report in reports:
        files |= {file["name"]: FileRecord(file["bytes"], file["sha256"]) for file in report["files"]}
        for name, entry in report["tensors"].items():
            pieces = tuple(StoredPiece(*piece) for piece in entry["pieces"])
            entries.setdefault(name, []).append(TensorEntry(entry["dtype"], tuple(entry["shape"]), pieces))
    tensors = {name: same_tensor(name, found) for name, found in entries.items()}
    rank_state = tuple(report["rank_state"] for report in reports)
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
    """Take steps 3 and 4, on rank 0. On any fault the temporary folder is removed and what was
    there before stays."""
    try:
        manifest = merge(reports, step, state, world)
        require_files(folder, manifest)
        write_manifest(folder, manifest, disk)
        publish(folder, final, disk)
    except Exception:
        disk.remove_folder(folder)
        raise
    return str(final)


def require_files(folder: Path, manifest: Manifest) -> None:
    """Require that rank 0 sees every rank's file: otherwise the folder is not on a file system that
    all hosts share."""
    for name, record in manifest.files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != record.bytes:
            raise CheckpointError(
                "rank 0 does not see a file that another rank wrote",
                where=str(folder / name),
                got="no file" if found is None else f"{found} bytes",
                expected=f"{record.bytes} bytes",
                fix="Save to a folder that all hosts share.",
            )


def write_manifest(folder: Path, manifest: Manifest, disk: DurableFiles) -> None:
    """Step 3: write the manifest as the last file, so that a folder without one is not a
    checkpoint."""
    disk.write(folder / MANIFEST_NAME, [manifest.to_json().encode()])
    disk.sync_folder(folder)


def publish(folder: Path, final: Path, disk: DurableFiles) -> None:
    """Step 4: give the folder its name; an older checkpoint of that name is renamed first and
    removed last."""
    replaced = final.with_name(folder.name.replace(TEMPORARY, REPLACED))
    if final.exists():
        disk.rename(final, replaced)
    disk.rename(folder, final)
    disk.sync_folder(final.parent)
    for leftover in final.parent.iterdir():
        if leftover.name.startswith(final.name + REPLACED):
            disk.remove_folder(leftover)


def agree(ranks: Ranks, label: str, act: Callable[[], str]) -> str:
    """Let rank 0 act; every rank gets its result, or raises its error, so that none waits for the
    next exchange."""
    outcome: dict[str, str] | None = None
    if ranks.index == 0:
        try:
            outcome = {"value": act()}
        except Exception as fault:
            outcome = {
                "fault": str(fault) if isinstance(fault, CheckpointError) else f"{type(fault).__name__}: {fault}"
            }
    answer = ranks.gather_json(outcome, label)[0]
    if "fault" in answer:
        raise CheckpointError("the checkpoint was not saved", where=label, got=answer["fault"])
    return str(answer["value"])


# The bytes of one rank's safetensors file, made piece by piece, so that no second copy of a shard
# ever exists.
#
# The format (safetensors 0.4 and later): 8 bytes little-endian length of the header, the header as
# JSON padded with spaces to 8 bytes, then the tensors' bytes end to end in the header's order.

CHUNK_BYTES = 1 << 24  # how much of a tensor on another device is brought to the host at a time


def piece_key(part: Slice) -> str:
    """Return the safetensors name of a slice, unique within a file:
    ``param/wte.weight[0:4096]``."""
    return f"{part.name}[{part.start}:{part.stop}]"


def shard_chunks(slices: Sequence[Slice]) -> Iterator[bytes | memoryview]:
    """Yield the file's bytes in order. ``slices``: not empty ones, names of their keys all
    different."""
    yield _header(slices)
    for part in slices:
        yield from _tensor_chunks(part.flat)


def _checked(chunks: Iterable[bytes | memoryview], check: Callable[[], None]) -> Iterator[memoryview]:
    """Yield the bytes of ``chunks`` in chunks of at most ``CHUNK_BYTES``, after a call of
    ``check``."""
    for chunk in chunks:
        view = memoryview(chunk)
        for start in range(0, view.nbytes, CHUNK_BYTES):
            check()
            yield view[start : start + CHUNK_BYTES]


def _header(slices: Sequence[Slice]) -> bytes:
    return safetensors_header((piece_key(part), part.dtype, (part.tensor.numel(),)) for part in slices)


def _tensor_chunks(flat: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor on the host as one view of its own memory, valid while ``flat``
    is; of one on a device in parts, each in memory of its own."""
    if flat.is_cpu:
        yield tensor_bytes(flat)
        return
    import torch

    per_chunk = max(1, CHUNK_BYTES // flat.element_size())
    for start in range(0, flat.numel(), per_chunk):
        part = flat[start : start + per_chunk]
        held = bytearray(part.numel() * part.element_size())
        torch.frombuffer(held, dtype=part.dtype).copy_(part)
        yield memoryview(held)


# Names of the folders that a save uses on its way, and which of them were abandoned.
#
# A temporary folder is named after the host and the process that writes it:
# ``<tag>.tmp-<host>-<pid>-<id>``. Two runs may save under one tag at once; removing the other's
# folder while it is written would spoil its checkpoint.

FORGOTTEN_SECONDS = 24 * 3600.0
"""A folder of another host, whose processes cannot be asked for, is given up when nothing was
written into it for so long."""

_OWNER = re.compile(r"(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{12}")


def temporary_name(tag: str) -> str:
    """Return a new name for the folder in which this process writes ``tag``."""
    return f"{tag}{TEMPORARY}{_host()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def is_abandoned(folder: Path) -> bool:
    """Return whether the save that made the temporary ``folder`` is over: its process is this one
    (which makes a new one now) or has ended."""
    found = _OWNER.fullmatch(folder.name.partition(TEMPORARY)[2])
    if found is None:
        return True  # no running version of ours names folders like this
    if found["host"] == _host():
        return int(found["pid"]) == os.getpid() or not _lives(int(found["pid"]))
    try:
        newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return False  # it is going just now
    return time.time() - newest > FORGOTTEN_SECONDS


def _host() -> str:
    return sha256(socket.gethostname().encode()).hexdigest()[:8]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


# The changes that a save makes to a disk, each durable before the next one relies on it.


class DurableFiles:
    """The local or shared file system. Tests put a disk in its place that breaks at a chosen
    step."""

    def make_folder(self, folder: Path) -> None:
        """Create ``folder`` (new) and its parents."""
        folder.mkdir(parents=True)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
        """Write a new file with the chunks and flush it; return its size and SHA-256. Another
        thread computes that of large chunks, whose memory must stay as it is until the end."""
        size, written, started = 0, 0, 0
        with path.open("xb", buffering=0) as file, _Digest() as digest:
            for chunk in chunks:
                digest.add(chunk)
                view = memoryview(chunk)
                while view.nbytes:
                    written = file.write(view[:CHUNK_BYTES])
                    view = view[written:]
                    size += written
                    if size - started >= CHUNK_BYTES:  # the disk begins now, not at the end
                        os.posix_fadvise(file.fileno(), started, size - started, os.POSIX_FADV_DONTNEED)
                        started = size
            os.fsync(file.fileno())
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
        """Remove the folder with all that is in it, if it exists. It loses its name first, so that
        a thread or rank that still writes into it makes no new file, and finds that it is gone."""
        remove_folder(folder)


_APART_BYTES = 1 << 20  # a smaller chunk is summed at once: handing it over would cost more
_MOST_HELD = 8  # chunks with memory of their own that wait for their sum


class _Digest:
    """The SHA-256 of chunks, large ones in a thread beside the caller's. Its end is the end of the
    block, where the sum is complete."""

    def __init__(self) -> None:
        self._sum = sha256()
        self._waiting: SimpleQueue[bytes | memoryview | None] = SimpleQueue()
        self._room = threading.Semaphore(_MOST_HELD)
        self._thread: threading.Thread | None = None
        self._broken_off = False

    def __enter__(self) -> _Digest:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._thread is not None:
            self._broken_off = kind is not None  # then no one asks for the sum of what waits
            self._waiting.put(None)
            self._thread.join()

    def add(self, chunk: bytes | memoryview) -> None:
        if self._thread is None:
            if len(chunk) < _APART_BYTES:
                self._sum.update(chunk)
                return
            self._thread = threading.Thread(target=self._run, name="zero_trial-sha256", daemon=True)
            self._thread.start()
        if _is_owned(chunk):
            self._room.acquire()
        self._waiting.put(chunk)

    def hexdigest(self) -> str:
        return self._sum.hexdigest()

    def _run(self) -> None:
        while (chunk := self._waiting.get()) is not None:
            if not self._broken_off:
                self._sum.update(chunk)
            if _is_owned(chunk):
                self._room.release()


def _is_owned(chunk: bytes | memoryview) -> bool:
    """Return whether the chunk is more than a view of a tensor that exists anyway."""
    return isinstance(chunk, bytes) or isinstance(chunk.obj, bytearray)
