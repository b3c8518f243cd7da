"""Read files of ``torch.save`` with ``torch.load(weights_only=True)``, which imports and calls
nothing that a file names. Objects of other classes become :class:`UnknownObject`; tensors are views
of a memory map (docs/decisions/foreign-checkpoints-run-no-code.md)."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from math import prod
from pathlib import Path
from typing import IO, Any

import torch

from zero_trial.errors import CheckpointError

MOST_DIMENSIONS = 64


class UnknownObject:
    """A placeholder for an object of another class: the class's name, arguments, and state.

    Attributes:
        path: module and name of the class.
    """

    path = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> UnknownObject:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: pickle calls this with the same arguments as ``__new__``."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def __repr__(self) -> str:
        return f"<{self.path[:100]}>"


def unknown(path: str) -> type[UnknownObject]:
    """Return a class for objects of the class ``path`` ("module.Name")."""
    return type(path.rpartition(".")[2], (UnknownObject,), {"path": path})


def _empty_dict(*_: Any) -> dict[Any, Any]:
    return {}


def read_torch_file(path: Path) -> Any:
    """Return the content of a ``torch.save`` file, after checking the CRC-32 of its bytes.

    Raises CheckpointError for any other file.
    """
    if not path.is_file():
        raise CheckpointError("this file cannot be read", where=str(path), got="no such file")
    with path.open("rb") as file:
        _check(file, path)
        return _load(str(path), file, path, mmap=True)


def read_part(path: Path, part: memoryview) -> Any:
    """Return the content of ``part``, a memory map of a part of ``path`` written by ``torch.save``,
    with tensors as views. Raises like :func:`read_torch_file`."""
    file = io.BytesIO(part)
    entries = _check(file, path)
    found = _load(file, file, path, map_location="meta")
    if not isinstance(found, torch.Tensor):
        return _load(file, file, path)
    stored = next((entry for entry in entries if entry.filename.endswith("/data/0")), None)
    if stored is None or found.numel() == 0:
        return torch.empty(found.shape, dtype=found.dtype)
    name, extra = struct.unpack("<HH", part[stored.header_offset + 26 : stored.header_offset + 30])
    flat = torch.frombuffer(
        part,
        dtype=found.dtype,
        count=stored.file_size // found.dtype.itemsize,
        offset=stored.header_offset + 30 + name + extra,
    )
    return flat.as_strided(found.shape, found.stride(), found.storage_offset())


def read_metadata(path: Path) -> Any:
    """Return a pickle's content without tensors (DCP's ``.metadata``). Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            return _Inert(file).load()
    except Exception as fault:  # a damaged pickle raises errors of many kinds
        raise CheckpointError(
            "this file cannot be read", where=str(path), got=f"{type(fault).__name__}: {fault}"[:200]
        ) from fault


class _Inert(pickle.Unpickler):
    """An unpickler that imports nothing but dtypes and sizes of torch."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        return found if isinstance(found, torch.dtype) or found is torch.Size else unknown(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("a tensor")


def _check(file: IO[bytes], path: Path) -> list[zipfile.ZipInfo]:
    """Return the entries of the archive. Raises CheckpointError if a CRC-32 does not match."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged, entries = archive.testzip(), archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, RuntimeError, NotImplementedError, EOFError) as fault:
        raise CheckpointError(
            "this is not a complete file of torch.save",
            where=str(path),
            got=str(fault),
            fix="Copy it again. Convert a file of torch before 1.6 with python -c \"import torch; torch.save(torch.load('OLD', "
            "weights_only=True), 'NEW')\".",
        ) from fault
    if damaged is not None:
        raise CheckpointError(
            "this file is damaged",
            where=str(path),
            got=f"a different CRC-32 of {damaged} than when it was written",
            fix="Copy it again from its source.",
        )
    return entries


def _load(source: str | IO[bytes], file: IO[bytes], path: Path, **options: Any) -> Any:
    """Call torch.load with an unknown class for each name that torch does not allow."""
    try:
        file.seek(0)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        file.seek(0)
        allowed: list[Any] = [
            (_empty_dict if name == "collections.defaultdict" else unknown(name), name) for name in names
        ]
        with torch.serialization.safe_globals(allowed):
            return torch.load(source, weights_only=True, **{"map_location": "cpu", **options})
    except Exception as fault:  # torch raises many kinds of errors for unknown files
        raise CheckpointError(
            "torch.load(weights_only=True) does not read this file",
            where=str(path),
            got=f"{type(fault).__name__}: {fault}".partition("\n")[0][:200],
            fix="No code from the file was run. If you trust its source, load it with the program that wrote it, and torch.save only tensors, "
            "lists, dicts and numbers, with pickle's protocol 2.",
        ) from fault


def same_elements(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two names of the same tensor."""
    place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return (*place, tensor.dtype, tuple(tensor.shape), tensor.stride())


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
    """Return ``value``, a list of integers in [0, 2^63). Raises CheckpointError."""
    if not isinstance(value, (list, tuple)) or not all(type(item) is int and 0 <= item < 2**63 for item in value):
        raise unexpected(value, where, "integers")
    return list(value)


def as_shape(value: Any, where: str) -> tuple[int, ...]:
    """Return ``value``, which must be a tensor's shape. Raises CheckpointError."""
    if not isinstance(value, tuple) or len(value) > MOST_DIMENSIONS or prod(as_integers(value, where)) >= 2**63:
        raise unexpected(value, where, "a shape")
    return tuple(value)


def as_tensor(value: Any, where: str) -> torch.Tensor:
    """Return ``value``, which must be a tensor. Raises CheckpointError."""
    if not isinstance(value, torch.Tensor):
        raise unexpected(value, where, "a tensor")
    return value.detach()


def unexpected(value: Any, where: str, expected: str) -> CheckpointError:
    """Return the error for unexpected content in a checkpoint."""
    got = value.path if isinstance(value, UnknownObject) else type(value).__name__
    return CheckpointError(
        "unexpected content",
        where=where,
        got=f"{got} {value!r}"[:60] if isinstance(value, (str, int, float)) else got[:60],
        expected=expected,
        fix="Copy the file again from its source.",
    )
