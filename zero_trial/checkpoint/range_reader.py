"""Read ranges of a checkpoint's tensors straight into memory, whatever ranks wrote them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_trial.checkpoint.format import MANIFEST_NAME, FileRecord, Manifest, Slice, dtype_of
from zero_trial.checkpoint.plain_weights import WeightsReader
from zero_trial.errors import CheckpointError
from zero_trial.util.text import listed

if TYPE_CHECKING:
    import torch

Progress = Callable[[int], object]
"""Is called with the number of bytes that were read or written since its last call."""


class CheckpointReader:
    """One checkpoint folder. Opening reads and checks the manifest and the files' sizes; ``verify``
    reads all their bytes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        check_sizes(self.folder, self.manifest)
        self._files: dict[str, WeightsReader] = {}  # those of which something was read

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every stored tensor."""
        return {name: entry.shape for name, entry in self.manifest.tensors.items()}

    def verify(self, index: int = 0, count: int = 1, *, load_follows: bool = False) -> None:
        """Read every ``count``-th file from the ``index``-th on and compare its SHA-256: ranks can
        share the work.

        Args:
            load_follows: this process is about to load the checkpoint. The next ``verify`` passes
                over the files that this one has read and that have not been written since, so that
                a start reads them once for their sums, not twice.

        Raises CheckpointError naming the first file whose content changed.
        """
        for name in sorted(self.manifest.files)[index::count]:
            path, expected = self.folder / name, self.manifest.files[name]
            known = _VERIFIED.pop(str(path.resolve()), None)
            require_file(path, expected)
            identity = _identity(path)  # before reading: a write meanwhile changes it
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
        """Fill each slice's memory, converting to its dtype where that differs. Not collective:
        each rank reads its own.

        Only the files and ranges that are wanted are touched. Raises CheckpointError for another
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
        # in the order of files, and of elements in them: disks are read forwards
        for file, key, start, stop, target in sorted(copies, key=lambda copy: copy[:4]):
            if file not in self._files:
                self._files[file] = WeightsReader(self.folder / file)
            self._files[file].read_into(key, start, stop, target)

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Read a whole tensor, new."""
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError("not in the checkpoint", where=str(self.folder), got=name)
        import torch

        out = torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device=device)
        self.read_into([Slice.whole(name, out)])
        return out


# Files that this process has verified for the load that follows, by path: as which file, and with
# what sum.
_VERIFIED: dict[str, tuple[tuple[int, ...], FileRecord]] = {}


def _identity(path: Path) -> tuple[int, ...]:
    """Return numbers that change when the file is replaced or written."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest in ``folder``, also where files that it lists are missing. Raises
    CheckpointError."""
    path = folder / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise CheckpointError("there is no readable manifest", where=str(path), got=str(fault)) from fault
    return Manifest.from_json(text, str(path))


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Check that every listed file is in the folder, with its size. Raises CheckpointError for the
    first that is not."""
    for name, record in manifest.files.items():
        require_file(folder / name, record)


_NO_TRUST = "Load another checkpoint; this one cannot be trusted."


def require_file(path: Path, expected: FileRecord, *, read: bool = False, progress: Progress | None = None) -> None:
    """Require that a file of a checkpoint is there with its size, and if ``read``, that all of its
    bytes are as they were written. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError("a file is missing", where=str(path), expected=f"{expected.bytes} bytes", fix=_NO_TRUST)
    try:
        size = path.stat().st_size
        found = read_digest(path, progress=progress) if read and size == expected.bytes else expected
    except OSError as fault:
        raise CheckpointError("a file cannot be read", where=str(path), got=str(fault)) from fault
    if size != expected.bytes:
        facts: dict[str, Any] = {"got": f"{size} bytes", "expected": f"{expected.bytes} bytes", "fix": _NO_TRUST}
        raise CheckpointError("a file is cut short or grown", where=str(path), **facts)
    if found != expected:
        facts = {"got": f"sha256 {found.sha256[:16]}…", "expected": f"{expected.sha256[:16]}…", "fix": _NO_TRUST}
        raise CheckpointError("a file is damaged", where=str(path), **facts)


def read_digest(path: Path, block: int = 1 << 22, progress: Progress | None = None) -> FileRecord:
    """Return size and SHA-256 of an existing file, read in blocks of ``block`` bytes; ``progress``
    gets the size of each."""
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
    """Describe all differences between the tensors of a checkpoint (or ``what`` has them) and those
    of a model: ``checkpoint has 48 tensors, model has 50. Missing: head.bias. Shape differs: wte
    (50257, 768) vs (50304, 768)``. None if there is none, or none that is not allowed; another
    shape never is."""
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
