"""Read ranges of a checkpoint's tensors straight into memory, whatever ranks wrote them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zero_trial.checkpoint.format import MANIFEST_NAME, FileRecord, Manifest, Slice, TensorEntry, dtype_of
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

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every stored tensor."""
        return {name: entry.shape for name, entry in self.manifest.tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a stored tensor."""
        return dtype_of(self.manifest.tensors[name].dtype)

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
        (see :func:`require_match`)."""
        stored = {name.removeprefix(prefix): shape for name, shape in self.shapes.items() if name.startswith(prefix)}
        plain = {name.removeprefix(prefix): shape for name, shape in wanted.items()}
        require_match(stored, plain, where=str(self.folder), **allow)

    def read_into(self, slices: Sequence[Slice]) -> None:
        """Fill each slice's memory, converting to its dtype where that differs. Not collective:
        each rank reads its own.

        Only the files and ranges that are wanted are touched. Raises CheckpointError for another
        shape or an unknown name.
        """
        self._check_shapes(slices)
        wants = [ReadRequest(part.name, part.start, part.stop, target) for target, part in enumerate(slices)]
        copies = plan_copies(self.manifest.tensors, wants)
        for file, of_file in groupby(copies, key=lambda copy: copy.file):
            with closing(WeightsReader(self.folder / file)) as entries:
                for copy in of_file:
                    end = copy.offset + copy.source_stop - copy.source_start
                    target = slices[copy.target].flat[copy.offset : end]
                    entries.read_into(copy.key, copy.source_start, copy.source_stop, target)

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Read a whole tensor, new."""
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError("not in the checkpoint", where=str(self.folder), got=name)
        import torch

        out = torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device=device)
        self.read_into([Slice.whole(name, out)])
        return out

    def _check_shapes(self, slices: Iterable[Slice]) -> None:
        stored = self.shapes
        wanted = {part.name: part.shape for part in slices}
        require_match({n: s for n, s in stored.items() if n in wanted}, wanted, where=str(self.folder))


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
    if path.is_symlink() and not path.resolve().is_relative_to(path.parent.resolve()):
        raise CheckpointError(
            "a file of the checkpoint is a symbolic link to another folder",
            where=str(path),
            got=str(path.resolve()),
            expected="a file of the checkpoint's own: it would be lost where the folder is copied or its target removed",
            fix="Replace the link with a copy of its target.",
        )
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


# Which elements to copy from where to where: wanted ranges cut with the pieces of a manifest.


class ReadRequest(NamedTuple):
    """Elements [start, stop) of the stored tensor ``name``, to be read; ``target`` is the caller's
    number for where they go."""

    name: str
    start: int
    stop: int
    target: int


class ReadCopy(NamedTuple):
    """Elements [source_start, source_stop) of entry ``key`` in ``file`` go to ``target``, from
    element ``offset`` on."""

    file: str
    key: str
    source_start: int
    source_stop: int
    target: int
    offset: int


def plan_copies(tensors: Mapping[str, TensorEntry], wants: Iterable[ReadRequest]) -> list[ReadCopy]:
    """Plan copies that fill every want, in the order of files and of elements in them, so that
    disks are read forwards.

    ``tensors`` covers each element once (``Manifest.check``). A want looks at all pieces of its
    tensor. Raises CheckpointError for a want that is not in the checkpoint.
    """
    ordered = {name: sorted(entry.pieces, key=lambda piece: piece.start) for name, entry in tensors.items()}
    copies: list[ReadCopy] = []
    for want in wants:
        if want.name not in ordered or not 0 <= want.start <= want.stop <= tensors[want.name].numel:
            size = tensors[want.name].numel if want.name in ordered else None
            raise CheckpointError(
                "not in the checkpoint",
                where=want.name,
                got=f"elements {want.start} to {want.stop} wanted",
                expected="no such tensor" if size is None else f"0 to {size}",
            )
        for piece in ordered[want.name]:
            low, high = max(want.start, piece.start), min(want.stop, piece.stop)
            if low < high:
                first = low - piece.start
                copies.append(ReadCopy(piece.file, piece.key, first, first + high - low, want.target, low - want.start))
    return sorted(copies)


# A checkpoint's names and shapes compared with a model's.


Shapes = Mapping[str, tuple[int, ...]]

_SHOWN = 8


@dataclass(frozen=True)
class TensorMismatch:
    """The differences between the tensors of a checkpoint and those of a model.

    Attributes:
        stored, wanted: how many tensors there are on either side.
        missing: names that are wanted and not stored.
        extra: names that are stored and not wanted.
        shapes: name -> (stored shape, wanted shape), where they differ.
    """

    stored: int
    wanted: int
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

    def describe(self) -> str:
        """Describe the difference: ``checkpoint has 48 tensors, model has 50. Missing: head.bias.
        Shape differs: wte (50257, 768) vs (50304, 768)``
        """
        text = [f"checkpoint has {self.stored} tensors, model has {self.wanted}"]
        text += [f"Missing: {listed(self.missing, _SHOWN)}"] if self.missing else []
        text += [f"Not in the model: {listed(self.extra, _SHOWN)}"] if self.extra else []
        differing = [f"{name} {stored} vs {wanted}" for name, (stored, wanted) in sorted(self.shapes.items())]
        text += [f"Shape differs: {listed(differing, _SHOWN)}"] if differing else []
        return ". ".join(text)


def compare_tensors(stored: Shapes, wanted: Shapes) -> TensorMismatch:
    """List all differences between the tensors of a checkpoint and those of a model."""
    return TensorMismatch(
        len(stored),
        len(wanted),
        missing=tuple(sorted(wanted.keys() - stored.keys())),
        extra=tuple(sorted(stored.keys() - wanted.keys())),
        shapes={
            name: (tuple(stored[name]), tuple(shape))
            for name, shape in wanted.items()
            if name in stored and tuple(stored[name]) != tuple(shape)
        },
    )


def require_match(
    stored: Shapes, wanted: Shapes, *, where: str, allow_missing: bool = False, allow_extra: bool = False
) -> None:
    """Raise CheckpointError with every difference that is not allowed; another shape is never
    allowed."""
    difference = compare_tensors(stored, wanted)
    if difference.shapes or (difference.missing and not allow_missing) or (difference.extra and not allow_extra):
        raise CheckpointError(
            difference.describe(), where=where, fix="Build the model as it was when the checkpoint was saved."
        )
