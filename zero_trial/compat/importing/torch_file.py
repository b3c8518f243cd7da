"""Read a file of ``torch.save`` without pickle: its structure as values, its tensors as views of a
memory map.

Both of torch's formats are read. The newer one is an uncompressed zip archive; the older one is a
row of pickles followed by the storages' bytes. docs/decisions/0031 says why torch's own
``weights_only`` reader does not do.
"""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_trial.checkpoint.format import dtype_of
from zero_trial.compat.importing.pickle_program import PersistentId, PickledCall, PickledName, read_program, require_key
from zero_trial.errors import CheckpointError


class FileStorage(NamedTuple):
    """One block of elements of a torch file: ``numel`` elements of ``dtype`` under ``key``."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class FileTensor:
    """A tensor that is still in its file: elements of ``storage`` from ``offset`` on, with these
    strides. Two that are equal are one."""

    file: str
    storage: FileStorage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    read: Callable[[FileTensor], torch.Tensor] = field(repr=False, compare=False)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def tensor(self) -> torch.Tensor:
        """Return the values: a view of the file's memory map, which costs memory only while it is
        read."""
        return self.read(self)

    def check(self) -> None:
        """Check that all elements are inside the storage, and each is its own. Raises
        CheckpointError."""
        room = self.storage.numel * self.storage.dtype.itemsize // self.dtype.itemsize
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        fine = min((self.offset, *self.shape, *self.strides)) >= 0 and len(self.shape) == len(self.strides)
        if not fine or (self.numel > 0 and (last >= room or self.numel > room)):
            raise CheckpointError(
                "a tensor does not fit the storage that it names",
                where=self.file,
                got=f"shape {self.shape}, strides {self.strides}, from {self.offset} on",
                expected=f"within {room} elements",
            )


@dataclass(frozen=True, eq=False, repr=False)
class UnknownObject:
    """An object of a class that is not built here: its name, and what it was made of. Its repr is
    short whatever that is."""

    path: str
    args: tuple[Any, ...] = ()
    state: Any = None
    pairs: tuple[tuple[Any, Any], ...] = ()

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def __repr__(self) -> str:
        return f"<{self.path[:100]}>"


def as_dict(value: Any, where: str) -> dict[Any, Any]:
    """Return ``value``, which must be a dict. Raises CheckpointError."""
    if not isinstance(value, dict):
        raise unexpected(value, where, "a dict")
    return value


def as_list(value: Any, where: str) -> list[Any]:
    """Return ``value``, which must be a list. Raises CheckpointError."""
    if not isinstance(value, list):
        raise unexpected(value, where, "a list")
    return value


def as_integers(value: Any, where: str) -> list[int]:
    """Return ``value``, which must be a list or tuple of integers that are not negative and fit 64
    bits. Raises CheckpointError."""
    if not isinstance(value, (list, tuple)) or not all(type(item) is int and 0 <= item < 2**63 for item in value):
        raise unexpected(value, where, "integers")
    return list(value)


def as_shape(value: Any, where: str) -> tuple[int, ...]:
    """Return ``value``, which must be a tensor's shape. Raises CheckpointError."""
    if not isinstance(value, tuple) or len(value) > MOST_DIMENSIONS or prod(as_integers(value, where)) >= 2**63:
        raise unexpected(value, where, "a shape")
    return value


def as_tensor(value: Any, where: str) -> FileTensor:
    """Return ``value``, which must be a tensor. Raises CheckpointError."""
    if not isinstance(value, FileTensor):
        raise unexpected(value, where, "a tensor")
    return value


def unexpected(value: Any, where: str, expected: str) -> CheckpointError:
    """Make the error for content of another kind than a checkpoint has at this place."""
    got = value.path if isinstance(value, UnknownObject) else type(value).__name__
    return CheckpointError(
        "unexpected content",
        where=where,
        got=f"{got} {value!r}"[:60] if isinstance(value, (str, int, float)) else got[:60],
        expected=expected,
        fix="Copy the file again from where it was written.",
    )


MOST_COPIED = 1 << 30
"""Bytes of what a file names at many places and has only once, and which is made again at each: far
more than any checkpoint has."""

ENTRY = 100  # bytes of a dict or a set

MOST_DIMENSIONS = 64


class Resolver:
    """Turns one file's records into values; ``read`` gives the values of a stored tensor."""

    def __init__(self, file: str, read: Callable[[FileTensor], torch.Tensor]) -> None:
        self._file = file
        self._read = read
        self._done: dict[int, tuple[Any, Any]] = {}
        self._copied = 0
        self.storages: dict[str, FileStorage] = {}

    def resolve(self, value: Any) -> Any:
        """Return ``value`` without records. What the program used twice is one object in the
        result, too. Raises CheckpointError."""
        try:
            return self._resolve(value)
        except (RecursionError, TypeError, ValueError, IndexError, KeyError, AttributeError, MemoryError) as fault:
            raise CheckpointError(
                "this is not a structure that torch.save writes",
                where=self._file,
                got=f"{type(fault).__name__}: {fault}"[:200],
            ) from fault

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, (str, bytes, int, float, type(None))):
            return value
        known = self._done.get(id(value))
        if known is not None:
            return known[1]
        if type(value) is dict:
            found: Any = {}
            # before its content: a structure may contain itself
            self._done[id(value)] = (value, found)
            found.update({self._key(key): self._resolve(item) for key, item in value.items()})
            return found
        found = self._made(value)
        self._done[id(value)] = (value, found)
        return found

    def _made(self, value: Any) -> Any:
        if isinstance(value, PickledName):
            return _dtype(value) or UnknownObject(value.path)
        if isinstance(value, PersistentId):
            return self._storage(value.key)
        if isinstance(value, PickledCall):
            return self._called(value)
        if isinstance(value, tuple):
            return tuple(self._resolve(item) for item in value)
        if isinstance(value, (set, frozenset)):
            return type(value)(self._key(item) for item in value)
        return type(value)(self._resolve(item) for item in value)

    def _key(self, value: Any) -> Any:
        return require_key(self._resolve(value))

    def _copy(self, size: int) -> None:
        """Count about ``size`` bytes made of what the file may hold once and name many times: a
        small file could ask for any amount."""
        self._copied += size
        if self._copied > MOST_COPIED:
            raise ValueError(f"more than {MOST_COPIED} bytes, repeated")

    def _called(self, call: PickledCall) -> Any:
        rule = _RULES.get(call.path)
        if rule is not None:
            try:
                return rule(self, call)
            except _OtherDtype as fault:
                return UnknownObject(str(fault))
        args = self._resolve(call.args)
        pairs = tuple((self._resolve(key), self._resolve(item)) for key, item in call.pairs)
        return UnknownObject(call.path, args, self._resolve(call.state), pairs)

    def _storage(self, key: Any) -> FileStorage:
        if not isinstance(key, tuple) or len(key) < 5 or key[0] != "storage" or any(key[5:]):
            raise ValueError("an unknown kind of storage")
        _, kind, name, _, numel = key[:5]
        storage = FileStorage(str(_plain(name)), _storage_dtype(kind), _whole(numel))
        if storage.numel < 0 or self.storages.setdefault(storage.key, storage) != storage:
            raise ValueError(f"storage {storage.key} has two sizes")
        return storage

    def _dict(self, call: PickledCall) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for item in call.args:
            # OrderedDict([[key, value], ...]), as Python 2 wrote it
            if type(item) in (list, tuple):
                self._copy(ENTRY * len(item))
                found.update({self._key(key): self._resolve(value) for key, value in item})
        found.update({self._key(key): self._resolve(value) for key, value in call.pairs})
        return found

    def _tensor(self, call: PickledCall, dtype: torch.dtype | None = None) -> FileTensor:
        storage, offset, shape, strides = (self._resolve_storage(call.args[0]), *call.args[1:4])
        stored = FileTensor(
            self._file,
            storage,
            dtype or storage.dtype,
            _whole(offset),
            _sizes(self._resolve(shape)),
            _sizes(self._resolve(strides)),
            self._read,
        )
        stored.check()
        return stored

    def _tensor_of_dtype(self, call: PickledCall) -> FileTensor:
        dtype = _dtype(call.args[6])
        if dtype is None:
            raise _OtherDtype(f"a tensor of {getattr(call.args[6], 'path', 'no dtype')}")
        return self._tensor(call, dtype)

    def _resolve_storage(self, value: Any) -> FileStorage:
        if not isinstance(value, PersistentId):
            raise ValueError("a tensor without a storage")
        return self._storage(value.key)

    def _of_type(self, call: PickledCall) -> Any:
        """Return the plain tensor of one that has attributes of its own, or is a subclass of
        Tensor."""
        target, _, args = call.args[:3]
        if not isinstance(args, tuple):
            raise ValueError("arguments that are no tuple")
        return self._called(PickledCall(target, args))


class _OtherDtype(Exception):
    """A tensor of a dtype that a checkpoint does not hold: quantized, complex128 ... It is kept as
    it is, unread."""


def _whole(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError(f"{type(value).__name__} where a whole number belongs")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if len(value) > MOST_DIMENSIONS:
        raise ValueError(f"{len(value)} dimensions")
    return tuple(_whole(size) for size in value)


def _plain(value: Any) -> str | int:
    if not isinstance(value, (str, int)):
        raise ValueError(f"{type(value).__name__} where a name or a number belongs")
    return value


def _dtype(name: Any) -> torch.dtype | None:
    if not isinstance(name, PickledName) or name.module != "torch":
        return None
    try:
        return dtype_of(name.name)
    except CheckpointError:
        return None


_STORAGES: Mapping[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "UntypedStorage": torch.uint8,
}


def _storage_dtype(kind: Any) -> torch.dtype:
    found = _STORAGES.get(kind.name) if isinstance(kind, PickledName) and kind.module.split(".")[0] == "torch" else None
    if found is None:
        raise _OtherDtype(f"a tensor of {getattr(kind, 'path', 'no dtype')}")
    return found


def _a_set(resolver: Resolver, call: PickledCall) -> set[Any]:
    given = call.args[0] if call.args else ()
    resolver._copy(ENTRY * len(given))
    return {resolver._key(item) for item in (*given, *call.items)}


def _size(resolver: Resolver, call: PickledCall) -> tuple[Any, ...]:
    found = resolver._resolve(call.args[0]) if call.args else ()
    resolver._copy(8 * len(found))
    return tuple(found)


def _encoded(resolver: Resolver, call: PickledCall) -> bytes:
    """Decode bytes as protocol 2 writes them."""
    if not isinstance(call.args[0], str):
        raise ValueError(f"bytes of a {type(call.args[0]).__name__}")
    resolver._copy(len(call.args[0]))
    return call.args[0].encode("latin-1")


_RULES: Mapping[str, Callable[[Resolver, PickledCall], Any]] = {
    "collections.OrderedDict": Resolver._dict,
    "collections.defaultdict": Resolver._dict,
    "torch.Size": _size,
    "torch.device": lambda resolver, call: ":".join(str(_plain(part)) for part in call.args[:2]),
    "torch._utils._rebuild_tensor": Resolver._tensor,
    "torch._utils._rebuild_tensor_v2": Resolver._tensor,
    "torch._utils._rebuild_tensor_v3": Resolver._tensor_of_dtype,
    "torch._utils._rebuild_parameter": lambda resolver, call: resolver._resolve(call.args[0]),
    "torch._utils._rebuild_parameter_with_state": lambda resolver, call: resolver._resolve(call.args[0]),
    "torch._tensor._rebuild_from_type_v2": Resolver._of_type,
    "_codecs.encode": _encoded,
    "builtins.bytes": lambda resolver, call: b"",
    "__builtin__.bytes": lambda resolver, call: b"",
    "builtins.set": _a_set,
    "__builtin__.set": _a_set,
}

LARGEST_PROGRAM = 1 << 30

OLD_MAGIC = 0x1950A86A20F9469CFC6C


class _StorageBytes(NamedTuple):
    """Where a storage's bytes are in the file, and the CRC-32 that they should have (None: the
    format has none)."""

    start: int
    size: int
    crc: int | None


class _Window(io.RawIOBase):
    """Bytes in memory as a file, without a copy."""

    def __init__(self, content: memoryview) -> None:
        super().__init__()
        self._content = content
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._content)}[whence]
        if start + offset < 0:
            raise OSError("a position before the start")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, target: Any) -> int:
        part = self._content[self._position : self._position + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)


class TorchFile:
    """A file of ``torch.save``. ``content`` is what ``torch.load`` would have returned, with
    :class:`FileTensor` for tensors.

    Opening reads the structure only. A storage's bytes are compared with their CRC-32 when its
    first tensor is read. Raises CheckpointError for everything that is not such a file.

    Args:
        part: the bytes of the newer format inside ``path``, memory that may be written to; default:
            all of the file.
    """

    def __init__(self, path: Path, part: memoryview | None = None) -> None:
        self.path = path
        self._places: dict[str, _StorageBytes] = {}
        self._checked: set[str] = set()
        self._resolver = Resolver(str(path), self._read)
        if part is not None:
            self._map: memoryview = part
            self.content = self._from_zip()
            return
        try:
            with path.open("rb") as file:
                # copy on write: torch wants memory that may be written to; nothing writes to it
                whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as fault:
            raise CheckpointError("this file cannot be read", where=str(path), got=str(fault)) from fault
        self._map = memoryview(whole)
        self.content = self._from_zip() if whole[:4] == b"PK\3\4" else self._from_old(whole)

    def _from_zip(self) -> Any:
        try:
            with zipfile.ZipFile(_Window(self._map)) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, struct.error) as fault:
            raise self._damaged(str(fault)) from fault
        places = {entry.filename.partition("/")[2]: self._place(entry) for entry in entries}
        program = places.pop("data.pkl", None)
        if program is None:
            raise CheckpointError(
                "this is not a file of torch.save", where=str(self.path), got="a zip archive without data.pkl"
            )
        if program.size > LARGEST_PROGRAM:
            raise self._damaged(f"a structure of {program.size} bytes")
        self._check_order(places.get("byteorder"))
        self._places = {name.removeprefix("data/"): place for name, place in places.items() if name.startswith("data/")}
        return self._resolver.resolve(read_program(io.BytesIO(self._bytes(program, "data.pkl")), str(self.path)))

    def _place(self, entry: zipfile.ZipInfo) -> _StorageBytes:
        """Return where an entry's bytes begin: the local header says it, not the archive's list."""
        header = bytes(self._map[entry.header_offset : entry.header_offset + 30])
        if (
            entry.compress_type != zipfile.ZIP_STORED
            or entry.flag_bits & 1
            or header[:4] != b"PK\3\4"
            or len(header) < 30
        ):
            raise self._damaged(f"entry {entry.filename} is compressed, encrypted or torn")
        name, extra = struct.unpack("<HH", header[26:30])
        place = _StorageBytes(entry.header_offset + 30 + name + extra, entry.file_size, entry.CRC)
        if place.start + place.size > len(self._map):
            raise self._damaged(f"entry {entry.filename} ends behind the end of the file")
        return place

    def _check_order(self, place: _StorageBytes | None) -> None:
        order = bytes(self._map[place.start : place.start + place.size]) if place is not None else b"little"
        if order != b"little":
            raise CheckpointError(
                "the numbers are in another byte order", where=str(self.path), got=order, expected="little"
            )

    def _from_old(self, stream: mmap.mmap) -> Any:
        stream.seek(0)
        if stream[:1] != b"\x80":
            raise CheckpointError(
                "this is not a file of torch.save", where=str(self.path), got=f"it begins with {stream[:4]!r}"
            )
        magic, version, _, program, keys = (read_program(stream, str(self.path)) for _ in range(5))  # type: ignore[arg-type]
        if magic != OLD_MAGIC or version != 1001 or not isinstance(keys, list):
            raise CheckpointError("this is not a file of torch.save", where=str(self.path), got="another pickle")
        content = self._resolver.resolve(program)
        for key in keys:
            storage = self._resolver.storages.get(str(key)) if isinstance(key, (str, int)) else None
            if storage is None:
                raise self._damaged("a storage belongs to nothing")
            place = _StorageBytes(stream.tell() + 8, storage.numel * storage.dtype.itemsize, None)
            if int.from_bytes(stream.read(8), "little") != storage.numel or place.start + place.size > len(stream):
                raise self._damaged(f"storage {storage.key} is cut short")
            self._places[storage.key] = place
            stream.seek(place.start + place.size)
        return content

    def _read(self, stored: FileTensor) -> torch.Tensor:
        if stored.numel == 0:
            return torch.empty(stored.shape, dtype=stored.dtype)
        place = self._place_of(stored.storage)
        count = place.size // stored.dtype.itemsize
        flat = torch.frombuffer(self._map, dtype=stored.dtype, count=count, offset=place.start)
        return flat.as_strided(stored.shape, stored.strides, stored.offset)

    def _place_of(self, storage: FileStorage) -> _StorageBytes:
        place = self._places.get(storage.key)
        size = storage.numel * storage.dtype.itemsize
        if place is None or place.size != size:
            got = "nothing" if place is None else f"{place.size} bytes"
            raise self._damaged(f"{got} for storage {storage.key} of {size} bytes")
        if storage.key not in self._checked:
            self._bytes(place, f"storage {storage.key}", copy=False)
            self._checked.add(storage.key)
        return place

    def _bytes(self, place: _StorageBytes, what: str, copy: bool = True) -> bytes:
        with self._map[place.start : place.start + place.size] as view:
            if place.crc is not None and zlib.crc32(view) != place.crc:
                raise self._damaged(f"{what} has another CRC-32 than when it was written")
            return bytes(view) if copy else b""

    def _damaged(self, got: str) -> CheckpointError:
        return CheckpointError(
            "this file is damaged", where=str(self.path), got=got, fix="Copy it again from where it was written."
        )
