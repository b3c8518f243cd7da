"""Read ranges of a checkpoint's tensors straight into memory, whatever ranks wrote them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from zero_trial.checkpoint.format import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    Slice,
    dtype_of,
    item_bytes,
    name_in_safetensors,
    tensor_bytes,
)
from zero_trial.errors import CheckpointError
from zero_trial.util.text import listed

if TYPE_CHECKING:
    import torch


Progress = Callable[[int], object]
"""Called with the number of bytes that were read or written since its last call."""


class CheckpointReader:
    """One checkpoint folder. Opening checks manifest and sizes; ``verify`` reads all bytes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        check_sizes(self.folder, self.manifest)
        self._files: dict[str, WeightsReader] = {}  # files that have been read from

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every stored tensor."""
        return {name: entry.shape for name, entry in self.manifest.tensors.items()}

    def verify(self, index: int = 0, count: int = 1, *, load_follows: bool = False) -> None:
        """Read every ``count``-th file from the ``index``-th on and compare its SHA-256: ranks can
        share the work.

        Args:
            load_follows: this process is about to load the checkpoint. The next ``verify`` skips
                the files that this one has read and that have not been written since, so that a
                start reads them once for their sums, not twice.

        Raises CheckpointError naming the first file whose content changed.
        """
        for name in sorted(self.manifest.files)[index::count]:
            path, expected = self.folder / name, self.manifest.files[name]
            known = _VERIFIED.pop(str(path.resolve()), None)
            require_file(path, expected)
            identity = _identity(path)  # before reading: a write during the read changes it
            if known == (identity, expected):
                continue
            require_file(path, expected, read=True)
            if load_follows:
                _VERIFIED[str(path.resolve())] = identity, expected

    def require(self, wanted: Mapping[str, tuple[int, ...]], prefix: str = "", **allow: bool) -> None:
        """Require that the stored tensors whose names start with ``prefix`` are those of ``wanted``
        (see :func:`mismatch`). Raises CheckpointError."""
        stored = {name.removeprefix(prefix): shape for name, shape in self.shapes.items() if name.startswith(prefix)}
        plain = {name.removeprefix(prefix): shape for name, shape in wanted.items()}
        self._require(stored, plain, **allow)

    def _require(self, stored: Shapes, wanted: Shapes, **allow: bool) -> None:
        if (text := mismatch(stored, wanted, "checkpoint", **allow)) is not None:
            fix = "Build the model as it was when the checkpoint was saved."
            raise CheckpointError(text, where=str(self.folder), fix=fix)

    def read_into(self, slices: Sequence[Slice]) -> None:
        """Fill each slice's memory, converting to its dtype if that differs. Not collective: each
        rank reads its own slices.

        Reads only the files and ranges that are needed. Raises CheckpointError for a different
        shape or an unknown name.
        """
        tensors, copies = self.manifest.tensors, []
        wanted = {part.name: part.shape for part in slices}
        self._require({name: tensors[name].shape for name in wanted if name in tensors}, wanted)
        for part in slices:
            for piece in tensors[part.name].pieces:
                low, high = max(part.start, piece.start), min(part.stop, piece.stop)
                if low < high:
                    first = low - piece.start
                    target = part.flat[low - part.start : high - part.start]
                    copies.append((piece.file, piece.key, first, first + high - low, target))
        # in the order of files, and of elements in each, so that disks are read forward
        for file, key, start, stop, target in sorted(copies, key=lambda copy: copy[:4]):
            if file not in self._files:
                self._files[file] = WeightsReader(self.folder / file)
            self._files[file].read_into(key, start, stop, target)

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Read a whole tensor into new memory."""
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError("not in the checkpoint", where=str(self.folder), got=name)
        import torch

        out = torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device=device)
        self.read_into([Slice.whole(name, out)])
        return out


# Files that this process has verified for the following load, by path: the file's identity and
# sum.
_VERIFIED: dict[str, tuple[tuple[int, ...], FileRecord]] = {}


def _identity(path: Path) -> tuple[int, ...]:
    """Return numbers that change when the file is replaced or written."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def read_manifest(folder: Path) -> Manifest:
    """Read ``folder``'s manifest, even if listed files are missing. Raises CheckpointError."""
    path = folder / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise CheckpointError("no readable manifest was found", where=str(path), got=str(fault)) from fault
    return Manifest.from_json(text, str(path))


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Require every listed file in the folder, with its size. Raises CheckpointError."""
    for name, record in manifest.files.items():
        require_file(folder / name, record)


_NO_TRUST = "Load another checkpoint; this one is damaged."


def require_file(path: Path, expected: FileRecord, *, read: bool = False, progress: Progress | None = None) -> None:
    """Require that a file of a checkpoint exists with its size, and if ``read``, that its bytes
    have not changed since they were written. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError("a file is missing", where=str(path), expected=f"{expected.bytes} bytes", fix=_NO_TRUST)
    try:
        size = path.stat().st_size
        found = read_digest(path, progress=progress) if read and size == expected.bytes else expected
    except OSError as fault:
        raise CheckpointError("a file cannot be read", where=str(path), got=str(fault)) from fault
    if size != expected.bytes:
        facts: dict[str, Any] = {"got": f"{size} bytes", "expected": f"{expected.bytes} bytes", "fix": _NO_TRUST}
        raise CheckpointError("the file has the wrong size", where=str(path), **facts)
    if found != expected:
        facts = {"got": f"sha256 {found.sha256[:16]}…", "expected": f"{expected.sha256[:16]}…", "fix": _NO_TRUST}
        raise CheckpointError("a file is damaged", where=str(path), **facts)


def read_digest(path: Path, block: int = 1 << 22, progress: Progress | None = None) -> FileRecord:
    """Return size and SHA-256 of a file, read in blocks; ``progress`` gets their sizes."""
    digest, size = sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(block):
            digest.update(chunk)
            size += len(chunk)
            if progress is not None:
                progress(len(chunk))
    return FileRecord(size, digest.hexdigest())


Shapes = Mapping[str, tuple[int, ...]]

_SHOWN = 8


def mismatch(
    stored: Shapes, wanted: Shapes, what: str, *, allow_missing: bool = False, allow_extra: bool = False
) -> str | None:
    """Describe all differences between the tensors of a checkpoint (or of ``what``) and those
    of a model: ``checkpoint has 48 tensors, model has 50. Missing: head.bias. Shape differs: wte
    (50257, 768) vs (50304, 768)``. None if all differences are allowed; a different shape never
    is."""
    missing, extra = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    pairs = {name: (tuple(stored[name]), tuple(wanted[name])) for name in sorted(stored.keys() & wanted.keys())}
    differing = [f"{name} {one} vs {other}" for name, (one, other) in pairs.items() if one != other]
    if not (differing or (missing and not allow_missing) or (extra and not allow_extra)):
        return None
    text = [f"{what} has {len(stored)} tensors, model has {len(wanted)}"]
    text += [f"Missing: {listed(missing, _SHOWN)}"] if missing else []
    text += [f"Not in the model: {listed(extra, _SHOWN)}"] if extra else []
    text += [f"Shape differs: {listed(differing, _SHOWN)}"] if differing else []
    return ". ".join(text)


# --- plain weights: ranges of safetensors files, one or several with an index ---------------------


FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_CHUNK_BYTES = 1 << 22  # read at once if values are cast or copied to another device
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # first bytes of a Git LFS pointer
_ALIAS = "alias:"  # metadata of our own files: another name of a tied tensor


class StoredEntry(NamedTuple):
    """Where a tensor is. ``place``: the offset of its first byte in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    place: int


class WeightsReader:
    """The tensors of a safetensors file, or of a folder with one or with several and an index.

    Opening reads the headers; files are open only while they are read. Raises CheckpointError for
    files that are missing, damaged or of another format.

    Attributes:
        tensors: by name; tied ones also by their other names, which ``engine.save_16bit_model``
            writes into the file's metadata.
    """

    def __init__(self, source: str | Path) -> None:
        self.source = Path(source)
        self.tensors: dict[str, StoredEntry] = {}
        for path, wanted in _files_at(self.source).items():
            self._read_header(path, wanted)

    def read_into(
        self, name: str, start: int, stop: int, out: torch.Tensor, through: torch.dtype | None = None
    ) -> None:
        """Fill ``out`` with elements [start, stop) of the flattened tensor ``name``.

        Args:
            out: (stop - start,) on any device; values are cast on the host.
            through: a dtype to which values are rounded first.

        Raises CheckpointError if the tensor does not exist or is too short.
        """
        import torch

        stored = self.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"no entry {name}", where=str(self.source))
        if stop > prod(stored.shape):
            raise CheckpointError(
                f"entry {name} is too short", where=str(self.source), got=stored.shape, expected=(stop,)
            )
        width, dtype = item_bytes(stored.dtype), dtype_of(stored.dtype)
        place = stored.place + start * width
        direct = out.is_cpu and out.is_contiguous() and out.dtype == dtype and through in (None, out.dtype)
        if direct:
            _read(stored.path, place, tensor_bytes(out))
            return
        step = _CHUNK_BYTES // width
        chunk = torch.empty(min(step, stop - start), dtype=dtype)
        for low in range(0, stop - start, step):
            part = chunk[: min(step, stop - start - low)]
            _read(stored.path, place + low * width, tensor_bytes(part))
            values = part.to(through) if through is not None else part
            out[low : low + len(part)].copy_(values)

    def _read_header(self, path: Path, wanted: set[str] | None) -> None:
        """Use the library's validated header: tensors fill the file from end to end."""
        try:
            with safe_open(path, framework="numpy") as file:
                entries = [(name, file.get_slice(name)) for name in file.offset_keys()]
                found = [(name, name_in_safetensors(e.get_dtype()), tuple(e.get_shape())) for name, e in entries]
                metadata = file.metadata() or {}
        except OSError as fault:
            raise CheckpointError("this file cannot be read", where=str(path), got=str(fault)) from fault
        except (SafetensorError, ValueError) as fault:
            _refuse_lfs_pointer(path)
            raise _damaged(path, str(fault)) from fault
        place = path.stat().st_size
        for name, dtype, shape in reversed(found):
            place -= prod(shape) * item_bytes(dtype)
            if wanted is None or name in wanted:
                self.tensors[name] = StoredEntry(path, dtype, shape, place)
        lost = sorted(wanted - self.tensors.keys()) if wanted is not None else []
        if lost:
            raise CheckpointError("a tensor in the index is missing from its file", where=str(path), got=lost[0])
        for key, name in metadata.items():
            if key.startswith(_ALIAS) and name in self.tensors:
                self.tensors[key.removeprefix(_ALIAS)] = self.tensors[name]


def _read(path: Path, place: int, into: memoryview) -> None:
    """Fill ``into`` with the bytes of a file from ``place`` on. Raises CheckpointError."""
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            while done < into.nbytes:
                count = os.preadv(file.fileno(), [into[done:]], place + done)
                if count == 0:
                    raise _damaged(path, f"the file ends at byte {place + done}")
                done += count
    except OSError as fault:
        raise CheckpointError("this file cannot be read", where=str(path), got=str(fault)) from fault


def _refuse_lfs_pointer(path: Path) -> None:
    """Raise CheckpointError for a Git LFS pointer, which git stores instead of a large file."""
    text = path.read_bytes() if path.is_file() and path.stat().st_size < 1024 else b""
    if text.startswith(_LFS_POINTER):
        raise CheckpointError(
            "this is a git-lfs pointer, not the file itself",
            where=str(path),
            got=f"{len(text)} bytes of text",
            expected="the weights themselves",
            fix=f"Run `git lfs pull` in {path.parent}, with git-lfs installed.",
        )


def _damaged(path: Path, got: str) -> CheckpointError:
    return CheckpointError("not a complete safetensors file", where=str(path), got=got)


def _files_at(source: Path) -> dict[Path, set[str] | None]:
    """Return the files of weights at ``source``, each with the names to read (None: all)."""
    found = source
    if source.is_dir():
        found = next((source / name for name in (FILE, INDEX) if (source / name).is_file()), source)
    if found.is_file() and found.name.endswith(".index.json"):
        return files_of_index(found)
    if found.is_file() and found.suffix == ".safetensors":
        return {found: None}
    here = sorted(path.name for path in source.iterdir())[:6] if source.is_dir() else []
    raise CheckpointError(
        "no safetensors weights were found here",
        where=str(source),
        got=", ".join(here)
        or ("an empty folder" if source.is_dir() else "no such file" if not source.exists() else source.name),
        expected=f"a *.safetensors file, or a folder with {FILE} or {INDEX}",
        fix="To convert others, run `zero-trial ckpt import`, then `zero-trial ckpt export`.",
    )


def files_of_index(index: Path) -> dict[Path, set[str] | None]:
    """Return the files of Hugging Face's index of weights, with the names in each."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise CheckpointError("not an index of weights", where=str(index), got=str(fault)[:200]) from fault
    pairs = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(pairs, dict) or not all(isinstance(file, str) for file in pairs.values()):
        raise CheckpointError(
            "not an index of weights", where=str(index), expected="weight_map: tensor name -> file name"
        )
    found: dict[Path, set[str] | None] = {}
    for name, file in pairs.items():
        if Path(file).name != file or not (index.parent / file).is_file():
            raise CheckpointError("a file in the index is missing", where=str(index), got=file)
        wanted = found.setdefault(index.parent / file, set())
        if wanted is not None:
            wanted.add(name)
    return dict(sorted(found.items()))
