"""Read a folder of torch.distributed.checkpoint (FSDP2, torchtitan), without running pickles, as
slices of tensors and an engine's state.

    .metadata     a pickle: every entry's shape and chunks, and where each chunk's bytes are
    *.distcp      a file of torch.save for each chunk and each value that is no tensor, end to end

Names are those of ``get_state_dict`` and torchtitan; model names may have a prefix:

    model.<name>                               or without ``model.``
    optimizer.state.<name>.<kind>
    optimizer.param_groups.<number>.<setting>  or, flattened, .param_groups.<name>.<setting>
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from zero_trial.checkpoint.format import Slice
from zero_trial.compat.importing.imported import (
    ImportedState,
    ImportOptions,
    common_step,
    folder_name,
    fresh_state,
    is_buffer,
    note_optimizer,
    one_number,
)
from zero_trial.compat.importing.torch_file import UnknownObject, as_dict, as_integers, read_metadata, read_part
from zero_trial.errors import CheckpointError

METADATA = ".metadata"

_OTHERS = ("train_state", "lr_scheduler", "dataloader", "rng", "rng_state", "trainer", "step", "epoch")
"""Entries that training programs save next to a model: never names of parameters."""


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor, and the location of its torch.save data."""

    file: str
    start: int
    length: int
    offsets: tuple[int, ...]


class DcpFolder:
    """The entries of a folder. Raises CheckpointError for unknown content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / METADATA
        state = _state(read_metadata(path), "Metadata", str(path))
        entries = as_dict(state.get("state_dict_metadata"), f"{path}, state_dict_metadata")
        self.shapes: dict[str, tuple[int, ...] | None] = {
            str(name): self._shape(entry, str(path)) for name, entry in entries.items()
        }
        self._chunks: dict[str, list[_Chunk]] = {}
        places = as_dict(state.get("storage_data"), f"{path}, storage_data")
        for index, info in places.items():
            key, place = _state(index, "MetadataIndex", str(path)), _state(info, "_StorageInfo", str(path))
            if place.get("transform_descriptors"):
                raise CheckpointError("compressed entries are not supported", where=str(path), got=str(key.get("fqn")))
            start, length = as_integers([place.get("offset"), place.get("length")], f"{path}, {key.get('fqn')}")
            offsets = tuple(as_integers(key.get("offset") or (), f"{path}, {key.get('fqn')}"))
            name = str(place.get("relative_path"))
            if Path(name).name != name:
                raise CheckpointError("a file is outside of the folder", where=str(path), got=name)
            self._chunks.setdefault(str(key.get("fqn")), []).append(_Chunk(name, start, length, offsets))
        self._maps: dict[str, memoryview] = {}

    def value(self, name: str) -> Any:
        """Return the value of an entry that is not a tensor."""
        return self._read(self._chunks[name][0])

    def slices(self, name: str, stored: str) -> list[tuple[str, Slice]]:
        """Return the tensor ``name`` as slices of ``stored``, each with its file.

        If a chunk is not a range of rows, assembles the whole tensor in memory.
        """
        shape = self.shapes[name]
        full = shape or ()
        parts = [(chunk, self._tensor(chunk, name)) for chunk in self._chunks.get(name, ())]
        if not parts:
            raise CheckpointError("a tensor has no values", where=str(self.folder), got=name)
        row = prod(full[1:])
        plain = all(not any(chunk.offsets[1:]) and part.shape[1:] == full[1:] for chunk, part in parts)
        if plain:
            found = []
            for chunk, part in parts:
                start = (chunk.offsets[0] if chunk.offsets else 0) * row
                flat = part.reshape(-1)
                found.append((chunk.file, Slice(stored, full, start, start + flat.numel(), flat)))
            return found
        whole, filled = torch.empty(full, dtype=parts[0][1].dtype), 0
        for chunk, part in parts:
            box = tuple(slice(a, a + size) for a, size in zip(chunk.offsets, part.shape, strict=True))
            if whole[box].shape != part.shape:
                raise CheckpointError("a chunk is outside of its tensor", where=str(self.folder), got=name)
            whole[box] = part
            filled += part.numel()
        if filled != whole.numel():
            raise CheckpointError(
                "elements are missing", where=f"{self.folder}, {name}", got=filled, expected=whole.numel()
            )
        return [(parts[0][0].file, Slice.whole(stored, whole))]

    def _shape(self, entry: Any, where: str) -> tuple[int, ...] | None:
        if isinstance(entry, UnknownObject) and entry.name == "BytesStorageMetadata":
            return None
        return tuple(as_integers(_state(entry, "TensorStorageMetadata", where).get("size"), where))

    def _tensor(self, chunk: _Chunk, name: str) -> torch.Tensor:
        content = self._read(chunk)
        if not isinstance(content, torch.Tensor):
            raise CheckpointError(
                "not a tensor", where=f"{self.folder / chunk.file}, {name}", got=type(content).__name__
            )
        return content

    def _read(self, chunk: _Chunk) -> Any:
        path = self.folder / chunk.file
        if chunk.file not in self._maps:
            try:
                with path.open("rb") as file:
                    # copy on write, because torch requires writable memory
                    self._maps[chunk.file] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
            except (OSError, ValueError) as fault:
                raise CheckpointError("this file cannot be read", where=str(path), got=str(fault)) from fault
        part = self._maps[chunk.file][chunk.start : chunk.start + chunk.length]
        if len(part) != chunk.length:
            raise CheckpointError(
                "this file is truncated",
                where=str(path),
                got=f"{len(self._maps[chunk.file])} bytes",
                expected=f"{chunk.start + chunk.length}",
            )
        return read_part(path, part)


def _state(value: Any, kind: str, where: str) -> Mapping[Any, Any]:
    """Return the fields of an object of DCP's class ``kind``."""
    if not isinstance(value, UnknownObject) or value.name != kind or not isinstance(value.state, dict):
        got = value.path if isinstance(value, UnknownObject) else type(value).__name__
        raise CheckpointError("unexpected content", where=where, got=got, expected=kind)
    return value.state


def read_dcp(source: Path, options: ImportOptions) -> ImportedState:
    """Read a folder of torch.distributed.checkpoint. Tensors remain in their files until written,
    except tensors that are sharded along a dimension other than the first."""
    folder = DcpFolder(source)
    root = _optimizer_root(folder)
    kinds, steps = _optimizer_entries(folder, root)
    prefix = _model_prefix(folder, root, {name for name, _ in kinds} | set(steps))
    left_out: list[str] = []
    rows: dict[str, list[Slice]] = {}
    aliases: dict[str, str] = {}
    trained = {name for name, _ in kinds}

    def add(key: str, stored: str) -> None:
        for file, part in folder.slices(key, stored):
            rows.setdefault(file, []).append(part)

    for key, shape in folder.shapes.items():
        name = key.removeprefix(prefix)
        if root is not None and key.startswith((f"{root}state.", f"{root}param_groups")):
            continue
        if shape is None or not key.startswith(prefix) or (name not in trained and name.split(".")[0] in _OTHERS):
            left_out.append(f"{key}: {'not a tensor' if shape is None else 'not part of the model'}")
            continue
        own = options.own(name)
        if (tied := _tied(folder, prefix, name, trained)) is not None:
            aliases[own] = options.own(tied)
            continue
        first = folder.slices(key, own)[0][1].tensor
        add(key, f"{'buffer' if name not in trained and is_buffer(own, first, options.buffers) else 'param'}/{own}")
    state = fresh_state() | {"aliases": aliases}
    if root is not None and options.with_optimizer:
        for (name, kind), key in kinds.items():
            add(key, f"state/{kind}/{options.own(name)}")
        _note_optimizer(folder, root, steps, {kind for _, kind in kinds}, state, left_out)
    elif root is not None:
        left_out.append("the optimizer's state, because of --no-optimizer")
    form = f"torch.distributed.checkpoint, {len(rows)} files"
    return ImportedState(form, folder_name(source), list(rows.values()), state, left_out)


def _tied(folder: DcpFolder, prefix: str, name: str, trained: set[str]) -> str | None:
    """Return the trained matrix that ``name`` (not in the optimizer) is tied to: the one with the
    same values. A folder contains both. A constant matrix, such as initial values, is not treated
    as tied."""
    shape = folder.shapes[prefix + name]
    if name in trained or shape is None or len(shape) < 2:
        return None
    alike = [other for other in sorted(trained) if folder.shapes.get(prefix + other) == shape]
    own = _ranges(folder, prefix + name) if alike else []
    if all(bool((part.flat == own[0].flat[0]).all()) for part in own):
        return None
    return next((other for other in alike if _same_values(own, _ranges(folder, prefix + other))), None)


def _ranges(folder: DcpFolder, key: str) -> list[Slice]:
    """Return the nonempty slices of a tensor."""
    return [part for _, part in folder.slices(key, key) if part.start < part.stop]


def _same_values(one: Sequence[Slice], two: Sequence[Slice]) -> bool:
    """Compare two tensors of the same shape whose slices may have different boundaries."""
    if sum(part.stop - part.start for part in one) != sum(part.stop - part.start for part in two):
        return False
    return all(
        a.dtype == b.dtype
        and torch.equal(a.flat[low - a.start : high - a.start], b.flat[low - b.start : high - b.start])
        for a in one
        for b in two
        if (low := max(a.start, b.start)) < (high := min(a.stop, b.stop))
    )


def _optimizer_root(folder: DcpFolder) -> str | None:
    """Return the prefix of the optimizer's entries; None without an optimizer."""
    roots = {name.partition("param_groups")[0] for name in folder.shapes if "param_groups" in name.split(".")}
    if len(roots) > 1:
        raise CheckpointError(
            "several optimizers are not supported",
            where=str(folder.folder),
            got=", ".join(sorted(roots)),
            expected="one",
        )
    return next(iter(roots), None)


def _optimizer_entries(folder: DcpFolder, root: str | None) -> tuple[dict[tuple[str, str], str], dict[str, float]]:
    """Return (name, kind) -> key of state with a value per element, and name -> step."""
    kinds: dict[tuple[str, str], str] = {}
    steps: dict[str, float] = {}
    for key, shape in folder.shapes.items():
        if root is None or not key.startswith(f"{root}state."):
            continue
        name, _, kind = key.removeprefix(f"{root}state.").rpartition(".")
        if kind == "step":
            value = folder.value(key) if shape is None else folder.slices(key, key)[0][1].tensor.item()
            steps[name] = one_number("step", value)["step"]
        elif shape is None:
            raise CheckpointError("optimizer state that is not a tensor", where=str(folder.folder), got=key)
        else:
            kinds[name, kind] = key
    return kinds, steps


def _model_prefix(folder: DcpFolder, root: str | None, trained: set[str]) -> str:
    """Return the prefix of the model's names, which all names in the optimizer share."""
    keys = [key for key in folder.shapes if root is None or not key.startswith(root) or not root]
    if not trained:
        return "model." if any(key.startswith("model.") for key in keys) else ""
    first = min(trained)
    for prefix in sorted((key.removesuffix(first) for key in keys if key.endswith(first)), key=len):
        if all(prefix + name in folder.shapes for name in trained):
            return prefix
    raise CheckpointError(
        "the optimizer's names do not match the model's",
        where=str(folder.folder),
        got=first,
        expected="names of parameters",
    )


def _note_optimizer(
    folder: DcpFolder,
    root: str,
    steps: Mapping[str, float],
    kinds: set[str],
    state: dict[str, Any],
    left_out: list[str],
) -> None:
    """Record groups, their settings and steps, and the kinds of state."""
    place = f"{root}param_groups"
    members: list[list[str]] = []
    settings: list[dict[str, Any]] = []
    if place in folder.shapes:
        for group in folder.value(place):
            settings.append({str(key): value for key, value in as_dict(group, place).items()})
    else:
        numbered = f"{place}.0.params" in folder.shapes
        rows: dict[str, dict[str, Any]] = {}
        for key, shape in folder.shapes.items():
            if key.startswith(f"{place}."):
                owner, _, setting = key.removeprefix(f"{place}.").rpartition(".")
                value = folder.value(key) if shape is None else folder.slices(key, key)[0][1].tensor
                rows.setdefault(owner, {})[setting] = value.item() if torch.is_tensor(value) else value
        if numbered:
            settings = [rows[owner] for owner in sorted(rows, key=int)]
        else:  # one row per parameter: equal rows form a group
            for owner, row in rows.items():
                same = next((number for number, known in enumerate(settings) if known == row), None)
                if same is None:
                    settings.append(row)
                    members.append([])
                members[-1 if same is None else same].append(owner)
    members = members or [[str(name) for name in group.get("params", ())] for group in settings]
    scalars: dict[str, dict[str, float]] = {}
    for number, names in enumerate(members):
        found = {steps[name] for name in names if name in steps}
        scalars[str(number)] = common_step(found, f"{folder.folder}, group {number}")
    plain = [{key: value for key, value in row.items() if key != "params"} for row in settings]
    note_optimizer(state, plain, scalars, kinds, left_out)
    step = int(max(steps.values(), default=0))
    state["counters"] = state["counters"] | {"global_steps": step, "micro_steps": step}
