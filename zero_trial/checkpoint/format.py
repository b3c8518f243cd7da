"""The elements of a checkpoint: dtypes, names of tensors, slices, tags, and the manifest."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from zero_trial.errors import CheckpointError

if TYPE_CHECKING:
    import torch  # only for types: importing it would add a second to reading a manifest

# Dtypes: torch's names and those of safetensors.

_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}

_ITEM_BYTES = {"bool": 1, **{name: int(re.findall(r"[0-9]+", name)[0]) // 8 for name in _SAFETENSORS if name != "bool"}}


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the manifest's name of a dtype: ``float32``, ``bfloat16`` ..."""
    return str(dtype).removeprefix("torch.")


def item_bytes(name: str) -> int:
    """Return the bytes of an element of a manifest's dtype. Raises CheckpointError."""
    return _ITEM_BYTES[check_dtype(name)]


def is_floating(name: str) -> bool:
    """Return whether a manifest's dtype is a floating-point one."""
    return name.startswith(("float", "bfloat"))


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a manifest's name. Raises CheckpointError for an unknown one."""
    import torch

    found: torch.dtype = getattr(torch, check_dtype(name))
    return found


def check_dtype(name: str) -> str:
    """Return the name of a dtype. Raises CheckpointError for one that checkpoints cannot hold."""
    if name not in _SAFETENSORS:
        raise CheckpointError("unknown dtype", got=repr(name), expected=", ".join(sorted(_SAFETENSORS)))
    return name


def safetensors_name(dtype: torch.dtype | str) -> str:
    """Return the name in the header of a safetensors file: ``F32``, ``BF16`` ..."""
    name = dtype_name(dtype)
    if name not in _SAFETENSORS:
        raise CheckpointError("this dtype cannot be stored", got=name, expected=", ".join(sorted(_SAFETENSORS)))
    return _SAFETENSORS[name]


def name_in_safetensors(name: str) -> str:
    """Return a dtype's manifest name from a safetensors header. Raises ValueError."""
    found = next((own for own, stored in _SAFETENSORS.items() if stored == name), None)
    if found is None:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(_SAFETENSORS.values())}")
    return found


def safetensors_header(
    tensors: Iterable[tuple[str, torch.dtype | str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the beginning of a safetensors file: the header's length, and name, dtype, shape and
    position of each tensor.

    Args:
        tensors: (name, dtype or its name, shape), in the order of their bytes.
        metadata: free text entries.
    """
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + prod(shape) * item_bytes(dtype_name(dtype))
        entries[name] = {"dtype": safetensors_name(dtype), "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor. The view keeps the tensor alive."""
    memory = (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


# Names: a stored tensor is a parameter, optimizer state, a buffer, or belongs to the run.

_PART = re.compile(r"part(\d+)of(\d+)/(.*)", re.DOTALL)


class TensorKind(Enum):
    """The four kinds of tensors in an engine's checkpoint."""

    PARAM = "param"
    STATE = "state"
    BUFFER = "buffer"
    RUN = "run"  # random generators, the client's tensors, buffers of single ranks


class StoredName(NamedTuple):
    """The model's ``name``; ``state`` such as ``exp_avg``; ``part`` of ``parts``."""

    kind: TensorKind
    name: str
    state: str = ""
    part: int = 0
    parts: int = 1


def parse_stored_name(stored: str) -> StoredName:
    """Parse ``part0of2/state/exp_avg/head.weight``. Names of unknown form belong to the run."""
    part, parts, rest = 0, 1, stored
    found = _PART.fullmatch(stored)
    if found is not None:
        part, parts, rest = int(found[1]), int(found[2]), found[3]
    word, _, name = rest.partition("/")
    if word in (TensorKind.PARAM.value, TensorKind.BUFFER.value) and name:
        return StoredName(TensorKind(word), name, "", part, parts)
    if word == TensorKind.STATE.value:
        state, _, name = name.partition("/")
        if state and name:
            return StoredName(TensorKind.STATE, name, state, part, parts)
    return StoredName(TensorKind.RUN, stored)


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Return a key to sort names by, so that ``blocks.2`` comes before ``blocks.10``."""
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"(\d+)", name)]


# Slices: a range of elements of a named tensor, and the memory of this rank that holds it or
# receives it.


@dataclass(frozen=True)
class Slice:
    """Elements [start, stop) of ``name``, flattened in row-major order; ``tensor`` holds exactly
    these, contiguously.

    ``shape`` is the whole logical tensor's. Padding of a shard belongs to no slice. Only one rank
    saves a replicated slice.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        numel = prod(self.shape)
        if not 0 <= self.start <= self.stop <= numel:
            raise CheckpointError(
                "a slice is outside its tensor",
                where=self.name,
                got=f"elements {self.start} to {self.stop}",
                expected=f"0 to {numel}, for shape {self.shape}",
            )
        if self.tensor.numel() != self.stop - self.start or not self.tensor.is_contiguous():
            raise CheckpointError(
                "a slice's memory does not fit its range",
                where=self.name,
                got=f"{self.tensor.numel()} elements{'' if self.tensor.is_contiguous() else ', not contiguous'}",
                expected=f"{self.stop - self.start} contiguous elements",
            )

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def flat(self) -> torch.Tensor:
        """Return the memory with one dimension, without a copy."""
        return self.tensor.detach().view(-1)

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Slice:
        """Make the slice of a whole tensor; a non-contiguous one is copied, for saving only."""
        detached = tensor.detach()
        return cls(name, tuple(tensor.shape), 0, tensor.numel(), detached.contiguous())


# Tags: the names of a checkpoint's folder and of the temporary folders during a save.

TEMPORARY = ".tmp-"
REPLACED = ".old-"
LONGEST_TAG = 200  # bytes: a file system's limit, minus the suffix of a temporary folder


def check_tag(tag: str) -> str:
    """Require a plain folder name, not a temporary folder's. Raises CheckpointError."""
    plain = (
        tag not in ("", ".", "..")
        and tag.isprintable()
        and not any(part in tag for part in ("/", "\\", TEMPORARY, REPLACED))
    )
    if not plain:
        raise CheckpointError("not a tag", where="tag", got=repr(tag), expected="a plain folder name")
    if len(tag.encode()) > LONGEST_TAG:
        raise CheckpointError(
            "the tag is too long",
            where="tag",
            got=f"{tag[:20]!r}... of {len(tag.encode())} bytes",
            expected=f"at most {LONGEST_TAG}",
        )
    return tag


# The manifest: which file holds which elements of which tensor, and everything that is JSON.
#
# It depends on the writing ranks only in ``world``, which is for information: a tensor is stored as
# its dtype, its shape and its pieces.

FORMAT = 1
MANIFEST_NAME = "manifest.json"

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors")


class StoredPiece(NamedTuple):
    """Elements [start, stop) of a flattened tensor: the safetensors entry ``key`` of ``file``."""

    file: str
    key: str
    start: int
    stop: int


@dataclass(frozen=True)
class TensorEntry:
    """A logical tensor: its dtype (torch's name), its whole shape, and the pieces that hold it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...] = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)


def shape_text(shape: Sequence[int]) -> str:
    """Format as ``2x3x4`` or ``scalar``."""
    return "x".join(map(str, shape)) or "scalar"


@dataclass(frozen=True)
class FileRecord:
    """A safetensors file of the checkpoint: its size in bytes and the SHA-256 of its content."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a checkpoint.

    Attributes:
        state: JSON of the run.
        rank_state: JSON of each rank that wrote it, by rank.
        world: the ranks that wrote it, for information.
    """

    step: int
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileRecord]
    state: Any = None
    rank_state: tuple[Any, ...] = ()
    world: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Check that every element of every tensor is in exactly one piece, of a listed file.

        Raises CheckpointError naming the first tensor and range that violates this.
        """
        for name, entry in self.tensors.items():
            check_dtype(entry.dtype)
            check_coverage(name, entry)
            for piece in entry.pieces:
                if piece.file not in self.files:
                    raise CheckpointError("a piece is in a file that is not listed", where=name, got=piece.file)

    def to_json(self) -> str:
        """Write the text of manifest.json, sealed: equal manifests give equal text."""
        document = {
            "format": FORMAT,
            "step": self.step,
            "world": dict(self.world),
            "files": {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in sorted(self.files.items())},
            "tensors": {
                name: {"dtype": t.dtype, "shape": list(t.shape), "pieces": [list(piece) for piece in t.pieces]}
                for name, t in sorted(self.tensors.items())
            },
            "state": self.state,
            "rank_state": list(self.rank_state),
        }
        return seal(json.dumps(document, indent=1, allow_nan=False))

    @classmethod
    def from_json(cls, text: str, where: str = MANIFEST_NAME) -> Manifest:
        """Read and check the manifest in ``text``. Raises CheckpointError."""
        document = _parse(_unseal(text, where), where)
        found = document.get("format")
        if found != FORMAT:
            raise CheckpointError("this version cannot read that format", where=where, got=found, expected=FORMAT)
        try:
            manifest = cls(
                step=int(document["step"]),
                tensors={name: _tensor(**entry) for name, entry in document["tensors"].items()},
                files={_file_name(name): FileRecord(**record) for name, record in document["files"].items()},
                state=document["state"],
                rank_state=tuple(document["rank_state"]),
                world=dict(document["world"]),
            )
            manifest.check()
        except (KeyError, TypeError, ValueError, AttributeError) as fault:
            raise CheckpointError("not a manifest", where=where, got=f"{type(fault).__name__}: {fault}") from fault
        return manifest


_SEAL = re.compile(r'\{"sha256": "([0-9a-f]{64})",\n')


def seal(body: str) -> str:
    """Add the SHA-256 of ``body``, a JSON object, as its first entry."""
    return f'{{"sha256": "{sha256(body.encode()).hexdigest()}",\n{body[1:]}\n'


def _unseal(text: str, where: str) -> str:
    """Return the text that was passed to ``seal``. Raises CheckpointError if it has changed."""
    found = _SEAL.match(text)
    if found is None:
        raise CheckpointError("not a manifest", where=where, expected="its SHA-256 on the first line")
    body = "{" + text[found.end() :].removesuffix("\n")
    if sha256(body.encode()).hexdigest() != found[1] or not text.endswith("\n"):
        raise CheckpointError("the manifest is damaged", where=where, got="content with a different SHA-256")
    return body


def check_coverage(name: str, entry: TensorEntry) -> None:
    """Require ``entry``'s pieces to cover [0, numel) exactly once. Raises CheckpointError."""
    end = 0
    for piece in sorted(entry.pieces, key=lambda piece: (piece.start, piece.stop)):
        if piece.start >= piece.stop or piece.stop > entry.numel:
            raise CheckpointError(
                "a piece is outside its tensor",
                where=name,
                got=f"elements {piece.start} to {piece.stop} in {piece.file}",
                expected=f"a range within 0 to {entry.numel}, shape {shape_text(entry.shape)}",
            )
        if piece.start > end:
            raise _hole(name, end, piece.start, entry)
        if piece.start < end:
            raise CheckpointError(
                "elements are stored twice",
                where=name,
                got=f"elements {piece.start} to {min(end, piece.stop)} again in {piece.file}",
                expected="each element once",
            )
        end = piece.stop
    if end < entry.numel:
        raise _hole(name, end, entry.numel, entry)


def _hole(name: str, start: int, stop: int, entry: TensorEntry) -> CheckpointError:
    return CheckpointError(
        "elements are missing", where=name, got=f"no piece for {start} to {stop}", expected=f"all of 0 to {entry.numel}"
    )


def same_tensor(name: str, entries: Iterable[TensorEntry]) -> TensorEntry:
    """Merge several ranks' entries. Raises CheckpointError if dtypes or shapes differ."""
    listed = list(entries)
    kinds = {(entry.dtype, entry.shape) for entry in listed}
    if len(kinds) > 1:
        raise CheckpointError(
            "ranks disagree about a tensor",
            where=name,
            got=" and ".join(f"{dtype} {shape_text(shape)}" for dtype, shape in sorted(kinds)),
        )
    pieces = sorted((piece for entry in listed for piece in entry.pieces), key=lambda piece: piece.start)
    return TensorEntry(listed[0].dtype, listed[0].shape, tuple(pieces))


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise CheckpointError("not a manifest", where=where, got=f"{type(fault).__name__}: {fault}") from fault
    if not isinstance(document, dict):
        raise CheckpointError("not a manifest", where=where, got=type(document).__name__, expected="a JSON object")
    return document


def _tensor(dtype: str, shape: Sequence[int], pieces: Sequence[Sequence[Any]]) -> TensorEntry:
    return TensorEntry(dtype, tuple(shape), tuple(StoredPiece(_file_name(file), *rest) for file, *rest in pieces))


def _file_name(value: Any) -> str:
    """Require the plain name of a safetensors file: no path out of the folder, no pickle."""
    if not isinstance(value, str) or not _FILE_NAME.fullmatch(value):
        raise ValueError(f"{value!r} is not a plain name that ends in .safetensors")
    return value
