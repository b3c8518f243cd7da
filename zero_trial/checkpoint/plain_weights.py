"""Read element ranges of plain weights, one safetensors file or several with an index, straight
into tensors, or as they are stored, without torch.

A file is read with positioned reads, not mapped: mapped pages would count as this process's memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zero_trial.checkpoint.format import dtype_of, item_bytes, name_in_safetensors, no_duplicates, tensor_bytes
from zero_trial.errors import CheckpointError

if TYPE_CHECKING:
    import torch

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_LONGEST_HEADER = 100_000_000  # bytes: what the safetensors library takes
_CHUNK_BYTES = 1 << 22  # read at once where values are cast or go to another device
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # how the text begins that git keeps of a large file
_ALIAS = "alias:"  # metadata of our own files: another name of a tied tensor


class _StoredTensor(NamedTuple):
    path: Path
    dtype: str
    shape: tuple[int, ...]
    place: int  # of its first byte in the file


class WeightsReader:
    """The tensors of a safetensors file, or of a folder with one or with several and an index.

    Opening reads the headers; the files stay open until :meth:`close`. Raises CheckpointError for
    files that are missing, damaged or of another format.

    Attributes:
        bytes_read: from the files by this reader, headers included.
        aliases: other names of tied tensors, as ``engine.save_16bit_model`` notes them in a file.
    """

    def __init__(self, source: str | Path) -> None:
        self.source = Path(source)
        self.bytes_read = 0
        self.aliases: dict[str, str] = {}
        self._tensors: dict[str, _StoredTensor] = {}
        self._files: dict[Path, int] = {}
        self._open = ExitStack()
        try:
            for path, wanted in _files_at(self.source).items():
                self._read_header(path, wanted)
        except BaseException:
            self._open.close()
            raise

    def close(self) -> None:
        self._open.close()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every stored tensor, without aliases."""
        return {name: stored.shape for name, stored in self._tensors.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        """Return name -> dtype (the manifest's name of it) of every stored tensor, without
        aliases."""
        return {name: stored.dtype for name, stored in self._tensors.items()}

    def read_into(
        self, name: str, start: int, stop: int, out: torch.Tensor, through: torch.dtype | None = None
    ) -> None:
        """Fill ``out`` with elements [start, stop) of the flattened tensor ``name``.

        Args:
            out: (stop - start,) on any device; values are cast on the host.
            through: a dtype to which values are rounded first.

        Raises CheckpointError for a tensor that is not there, or shorter.
        """
        import torch

        stored = self._entry(name, stop)
        width, dtype = item_bytes(stored.dtype), dtype_of(stored.dtype)
        place = stored.place + start * width
        direct = out.is_cpu and out.is_contiguous() and out.dtype == dtype and through in (None, out.dtype)
        if direct:
            self._read(stored.path, place, tensor_bytes(out))
            return
        step = _CHUNK_BYTES // width
        chunk = torch.empty(min(step, stop - start), dtype=dtype)
        for low in range(0, stop - start, step):
            part = chunk[: min(step, stop - start - low)]
            self._read(stored.path, place + low * width, tensor_bytes(part))
            values = part.to(through) if through is not None else part
            out[low : low + len(part)].copy_(values.to(out.dtype))

    def read_stored(self, name: str, start: int, stop: int, dtype: str) -> bytearray:
        """Read elements [start, stop) of the flattened tensor ``name``, new, as bytes of ``dtype``.
        Raises CheckpointError for a tensor that is not there, shorter, or of another dtype."""
        stored = self._entry(name, stop)
        if stored.dtype != dtype:
            raise CheckpointError(
                f"entry {name} has another dtype than the manifest says",
                where=str(stored.path),
                got=stored.dtype,
                expected=dtype,
            )
        width = item_bytes(dtype)
        data = bytearray((stop - start) * width)
        self._read(stored.path, stored.place + start * width, memoryview(data))
        return data

    def _entry(self, name: str, stop: int) -> _StoredTensor:
        """Return the place of a tensor that has at least ``stop`` elements. Raises
        CheckpointError."""
        stored = self._tensors.get(name)
        if stored is None:
            raise CheckpointError(f"no entry {name}", where=str(self.source))
        if stop > prod(stored.shape):
            raise CheckpointError(
                f"entry {name} is too short", where=str(self.source), got=stored.shape, expected=(stop,)
            )
        return stored

    def _read_header(self, path: Path, wanted: set[str] | None) -> None:
        try:
            file = self._open.enter_context(path.open("rb", buffering=0)).fileno()
        except OSError as fault:
            raise CheckpointError("this file cannot be read", where=str(path), got=str(fault)) from fault
        self._files[path] = file
        size = os.fstat(file).st_size
        start = self._read_bytes(path, 0, min(8, size))
        if _LFS_POINTER.startswith(start) and self._read_bytes(path, 0, min(len(_LFS_POINTER), size)) == _LFS_POINTER:
            raise CheckpointError(
                "this is a git-lfs pointer, not the file that it stands for",
                where=str(path),
                got=f"{size} bytes of text",
                expected="the weights themselves",
                fix=f"Type `git lfs pull` in {path.parent}, with git-lfs installed.",
            )
        length = int.from_bytes(start, "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise _damaged(path, f"{size} bytes, a header of {length}")
        try:
            header: Any = json.loads(self._read_bytes(path, 8, length), object_pairs_hook=no_duplicates)
            metadata = header.pop("__metadata__", None) or {}
            end = 8 + length
            for name, entry in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
                stored = _stored(path, entry, 8 + length)
                if stored.place != end:
                    raise ValueError(f"bytes {end} to {stored.place} belong to no tensor, or to two")
                end += prod(stored.shape) * item_bytes(stored.dtype)
                if wanted is None or name in wanted:
                    self._tensors[name] = stored
            if end != size:
                raise ValueError(f"the tensors end at byte {end} of {size}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as fault:
            raise _damaged(path, f"{type(fault).__name__}: {fault}"[:200]) from fault
        lost = sorted(wanted - self._tensors.keys()) if wanted is not None else []
        if lost:
            raise CheckpointError("a tensor that the index names is not in its file", where=str(path), got=lost[0])
        self.aliases |= {key.removeprefix(_ALIAS): name for key, name in metadata.items() if key.startswith(_ALIAS)}

    def _read_bytes(self, path: Path, place: int, size: int) -> bytes:
        data = bytearray(size)
        self._read(path, place, memoryview(data))
        return bytes(data)

    def _read(self, path: Path, place: int, into: memoryview) -> None:
        done = 0
        while done < into.nbytes:
            try:
                count = os.preadv(self._files[path], [into[done:]], place + done)
            except OSError as fault:
                raise CheckpointError("this file cannot be read", where=str(path), got=str(fault)) from fault
            if count == 0:
                raise _damaged(path, f"it ends at byte {place + done}")
            done += count
        self.bytes_read += done


def _damaged(path: Path, got: str) -> CheckpointError:
    return CheckpointError("not a whole safetensors file", where=str(path), got=got)


def _stored(path: Path, entry: Mapping[str, Any], data: int) -> _StoredTensor:
    """Return the place of an entry of a header whose tensors begin at byte ``data``. Raises
    ValueError, TypeError or KeyError for one that cannot be."""
    dtype, shape = name_in_safetensors(entry["dtype"]), tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (start, stop, *shape)):
        raise ValueError(f"bytes {start} to {stop} for {shape}")
    if stop - start != prod(shape) * item_bytes(dtype):
        raise ValueError(f"bytes {start} to {stop} for {shape} of {dtype}")
    return _StoredTensor(path, dtype, shape, data + start)


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
        "there are no safetensors weights here",
        where=str(source),
        got=", ".join(here)
        or ("an empty folder" if source.is_dir() else "no such file" if not source.exists() else source.name),
        expected=f"a *.safetensors file, or a folder with {FILE} or {INDEX}",
        fix="Convert others: `zero-trial ckpt import`, then `zero-trial ckpt export`.",
    )


def files_of_index(index: Path) -> dict[Path, set[str] | None]:
    """Return the files of an index of weights in Hugging Face's form, each with the names that it
    should hold."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates)
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
            raise CheckpointError("a file that the index names is missing", where=str(index), got=file)
        wanted = found.setdefault(index.parent / file, set())
        if wanted is not None:
            wanted.add(name)
    return dict(sorted(found.items()))
