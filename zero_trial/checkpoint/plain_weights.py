"""Read element ranges of plain weights, one safetensors file or several with an index, straight
into tensors.

A file is read with positioned reads, not mapped: mapped pages would count as this process's memory.
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from safetensors import SafetensorError, safe_open

from zero_trial.checkpoint.format import dtype_of, item_bytes, name_in_safetensors, tensor_bytes
from zero_trial.errors import CheckpointError

if TYPE_CHECKING:
    import torch

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_CHUNK_BYTES = 1 << 22  # read at once where values are cast or go to another device
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # how the text begins that git keeps of a large file
_ALIAS = "alias:"  # metadata of our own files: another name of a tied tensor


class StoredEntry(NamedTuple):
    """Where a tensor is. ``place``: of its first byte in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    place: int


class WeightsReader:
    """The tensors of a safetensors file, or of a folder with one or with several and an index.

    Opening reads the headers; a file is open while it is read. Raises CheckpointError for files
    that are missing, damaged or of another format.

    Attributes:
        tensors: by name; also by the other names of tied ones, as ``engine.save_16bit_model`` notes
            them in a file.
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

        Raises CheckpointError for a tensor that is not there, or shorter.
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
            out[low : low + len(part)].copy_(values.to(out.dtype))

    def _read_header(self, path: Path, wanted: set[str] | None) -> None:
        """Take over what the library finds in a header, which it checks: tensors lie end to end, to
        the end of the file."""
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
            raise CheckpointError("a tensor that the index names is not in its file", where=str(path), got=lost[0])
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
                    raise _damaged(path, f"it ends at byte {place + done}")
                done += count
    except OSError as fault:
        raise CheckpointError("this file cannot be read", where=str(path), got=str(fault)) from fault


def _refuse_lfs_pointer(path: Path) -> None:
    """Raise CheckpointError for the text that git keeps of a large file."""
    text = path.read_bytes() if path.is_file() and path.stat().st_size < 1024 else b""
    if text.startswith(_LFS_POINTER):
        raise CheckpointError(
            "this is a git-lfs pointer, not the file that it stands for",
            where=str(path),
            got=f"{len(text)} bytes of text",
            expected="the weights themselves",
            fix=f"Type `git lfs pull` in {path.parent}, with git-lfs installed.",
        )


def _damaged(path: Path, got: str) -> CheckpointError:
    return CheckpointError("not a whole safetensors file", where=str(path), got=got)


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
            raise CheckpointError("a file that the index names is missing", where=str(index), got=file)
        wanted = found.setdefault(index.parent / file, set())
        if wanted is not None:
            wanted.add(name)
    return dict(sorted(found.items()))
