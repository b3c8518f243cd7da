"""The files of a DeepSpeed checkpoint, and the weights and buffers in its model states."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from zero_trial.checkpoint.format import Slice
from zero_trial.compat.importing.imported import ImportOptions
from zero_trial.compat.importing.torch_file import as_shape, same_elements
from zero_trial.errors import CheckpointError

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt")

_OTHER = {
    "a pipeline's layers": re.compile(r"layer_\d+-model_(?:\d+-)?(?:\d+_)*model_states\.pt|layer_\d+-model_states\.pt"),
    "experts (MoE)": re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_.*\.pt"),
}


@dataclass(frozen=True)
class DeepSpeedFolder:
    """The files of a DeepSpeed checkpoint, by data-parallel rank; ``universal``: the folder from
    DeepSpeed's converter."""

    path: Path
    models: tuple[Path, ...]
    optimizers: tuple[Path, ...]
    universal: Path | None = None


def find_deepspeed(source: Path, tag: str | None) -> DeepSpeedFolder | None:
    """Find the checkpoint at ``source``, a folder of tags or the folder of a tag. None if there is
    no DeepSpeed checkpoint.

    Raises CheckpointError if it is incomplete, model-parallel, or the tag is unknown.
    """
    folder = _tag_folder(source, tag)
    if folder is None:
        return None
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    models, optimizers = _by_rank(folder, files, _MODEL), _by_rank(folder, files, _OPTIMIZER)
    for kind, pattern in _OTHER.items():
        found = next((name for name in files if pattern.fullmatch(name)), None)
        if found is not None:
            raise CheckpointError(
                f"a checkpoint with {kind} in separate files cannot be imported",
                where=str(folder),
                got=found,
                fix="Save a complete state dict with the model's own code, and import it.",
            )
    universal = folder / "zero"
    return DeepSpeedFolder(folder, models, optimizers, universal if universal.is_dir() else None) if models else None


def _tag_folder(source: Path, tag: str | None) -> Path | None:
    if not source.is_dir():
        return None
    pointer = next((source / name for name in ("latest", "latest_universal") if (source / name).is_file()), None)
    if tag is None and pointer is not None:
        tag = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if tag is not None:
        folder = source / tag
        if tag in ("", ".", "..") or Path(tag).name != tag or not folder.is_dir():
            known = ", ".join(sorted(path.name for path in source.iterdir() if path.is_dir())) or "none"
            raise CheckpointError("no such tag", where=str(source), got=repr(tag), expected=f"one of: {known}")
        return folder
    if any(_MODEL.fullmatch(path.name) for path in source.iterdir()):
        return source
    inside = [
        path
        for path in sorted(source.iterdir())
        if path.is_dir() and any(_MODEL.fullmatch(file.name) for file in path.iterdir())
    ]
    if len(inside) > 1:
        raise CheckpointError(
            "several checkpoints were found, but no file that names the latest",
            where=str(source),
            got=", ".join(path.name for path in inside),
            fix="Choose one with --tag.",
        )
    return inside[0] if inside else None


def _by_rank(folder: Path, files: list[str], pattern: re.Pattern[str]) -> tuple[Path, ...]:
    found: dict[int, str] = {}
    for name in files:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        if int(match["part"]) != 0:
            raise CheckpointError(
                "a checkpoint of a model in parallel parts cannot be imported",
                where=str(folder),
                got=name,
                expected="only files of mp_rank_00",
                fix="Join the parts with the model's own code, save a state dict, and import it.",
            )
        rank = int(match["rank"] or 0)
        if rank in found:
            raise CheckpointError(
                "two files are of the same rank: one of them is left over from another save",
                where=str(folder),
                got=f"{found[rank]} and {name}",
                fix="Move the older ones away.",
            )
        found[rank] = name
    missing = sorted(set(range(max(found, default=-1) + 1)) - set(found))
    if missing:
        raise CheckpointError(
            "a rank's file is missing",
            where=str(folder),
            got=f"no file of rank {missing[0]}",
            expected=f"ranks 0 to {max(found)}",
        )
    return tuple(folder / found[rank] for rank in sorted(found))


# Model states: weights and buffers under the names of our checkpoints.


State = Mapping[Any, Any]


class ModelStates:
    """The weights and settings in DeepSpeed's files of model states. Names are the model's own,
    without the prefix to strip.

    Args:
        contents: the content of the file; at stage 3, of each rank's file.
    """

    def __init__(self, contents: Sequence[State], options: ImportOptions, where: str) -> None:
        self.where = where
        self.first = contents[0]
        self._contents = contents
        self.options = options
        module = self.first.get("module")
        if not isinstance(module, dict):
            raise CheckpointError(
                "the file of model states contains no weights",
                where=where,
                got=f"module is {type(module).__name__}",
                fix="Save a complete state dict with the model's own code, and import it.",
            )
        self.tensors = {
            options.own(str(name)): value.detach() for name, value in module.items() if isinstance(value, torch.Tensor)
        }
        self.not_tensors = [str(name) for name, value in module.items() if not isinstance(value, torch.Tensor)]
        if len(self.tensors) + len(self.not_tensors) != len(module):
            raise CheckpointError(
                "two tensors have the same name without the prefix", where="--strip", got=options.strip
            )
        buffers = self.first.get("buffer_names")
        self.buffers = {options.own(str(name)) for name in buffers} if isinstance(buffers, list) else set()
        self.aliases = self._aliases()

    @property
    def parameters(self) -> list[str]:
        """Return every parameter by its first name, in model order."""
        return [name for name in self.tensors if name not in self.buffers and name not in self.aliases]

    def frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of parameters that the optimizer lacks, like DeepSpeed (stages 2,
        3)."""
        found = self.first.get("frozen_param_shapes")
        return (
            {
                self.options.own(str(name)): as_shape(shape, f"{self.where}, frozen_param_shapes, {name}")
                for name, shape in found.items()
            }
            if isinstance(found, dict)
            else {}
        )

    def weights(self, but: set[str], sharded: bool) -> list[list[Slice]]:
        """List parameters that are not in ``but``, and buffers: one row per file of model states;
        ``sharded`` means stage 3.

        Raises CheckpointError for a parameter without values.
        """
        rows: list[list[Slice]] = [[] for _ in self._contents]
        frozen = self.frozen_shapes() if sharded else {}
        for name in self.parameters:
            if name in but:
                continue
            if name in frozen:
                self._fragments(name, frozen[name], rows)
            elif sharded and self.tensors[name].numel() == 0:
                raise CheckpointError("a parameter has no values", where=self.where, got=name)
            else:
                rows[0].append(Slice.whole(f"param/{name}", self.tensors[name]))
        rows[0] += [
            Slice.whole(f"buffer/{name}", tensor) for name, tensor in self.tensors.items() if name in self.buffers
        ]
        return rows

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless the optimizer and the module have the same tensors."""
        for name, shape in shapes.items():
            held = self.tensors.get(name)
            if held is None or (held.shape != shape and held.numel() != 0):
                got = "no such parameter" if held is None else f"shape {held.shape}"
                raise CheckpointError(
                    f"{name} differs between the module and the optimizer", where=self.where, got=got, expected=shape
                )

    def _fragments(self, name: str, shape: tuple[int, ...], rows: list[list[Slice]]) -> None:
        """Read a frozen parameter of stage 3 from the fragments in all ranks' files."""
        numel = prod(shape)
        share = -(-numel // len(rows))
        if numel == 0:
            rows[0].append(Slice(f"param/{name}", shape, 0, 0, torch.empty(0)))
        for rank, row in enumerate(rows):
            start, stop = min(rank * share, numel), min((rank + 1) * share, numel)
            if start < stop:
                row.append(Slice(f"param/{name}", shape, start, stop, self._fragment(name, rank, stop - start)))

    def _fragment(self, name: str, rank: int, size: int) -> torch.Tensor:
        fragments = self._contents[rank].get("frozen_param_fragments")
        own = (
            {self.options.own(str(key)): value for key, value in fragments.items()}
            if isinstance(fragments, dict)
            else {}
        )
        fragment = own.get(name)
        if not isinstance(fragment, torch.Tensor) or fragment.numel() < size:
            raise CheckpointError(
                "a part of a frozen parameter is missing", where=self.where, got=f"{name}, rank {rank}"
            )
        return fragment.detach().reshape(-1)[:size].contiguous()

    def _aliases(self) -> dict[str, str]:
        """Find tied names: listed by DeepSpeed, and at stages 0 to 2 also by shared elements."""
        shared = self.first.get("shared_params")
        found = (
            {self.options.own(str(alias)): self.options.own(str(name)) for alias, name in shared.items()}
            if isinstance(shared, dict)
            else {}
        )
        seen: dict[tuple[Any, ...], str] = {}
        for name, tensor in self.tensors.items():
            if tensor.numel() and name not in self.buffers:
                first = seen.setdefault(same_elements(tensor), name)
                if first != name:
                    found.setdefault(name, first)
        return found
