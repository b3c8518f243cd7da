"""What was read from another program's files, and how it is written as a checkpoint of ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from zero_trial.checkpoint.format import MANIFEST_NAME, Slice, check_tag
from zero_trial.checkpoint.state_tree import encode_state
from zero_trial.checkpoint.writer import DurableFiles, begin, commit, write_rank
from zero_trial.errors import CheckpointError


@dataclass(frozen=True)
class ImportOptions:
    """What the user asked for.

    Attributes:
        strip: a prefix to remove from all names.
        names: the parameters of each optimizer group.
        buffers: patterns of names that are buffers.
    """

    with_optimizer: bool = True
    strip: str = ""
    names: Sequence[Sequence[str]] | None = None
    buffers: tuple[str, ...] = ()

    def own(self, name: str) -> str:
        """Return a name of the source as the model has it."""
        return name.removeprefix(self.strip) if self.strip else name


@dataclass(frozen=True)
class ImportedState:
    """A foreign checkpoint in the form of an engine's.

    Attributes:
        shards: a row of slices for each file to write.
        state: an engine's, with tensors.
        left_out: a line for each thing that is lost.
    """

    kind: str
    tag: str
    shards: Sequence[Sequence[Slice]]
    state: Mapping[str, Any]
    left_out: Sequence[str] = ()
    notes: Sequence[str] = ()
    world: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return int(self.state["counters"]["global_steps"])

    def names(self, wanted: Callable[[str], bool]) -> list[str]:
        """List the logical tensors whose names are wanted, each once."""
        return sorted({part.name for shard in self.shards for part in shard if wanted(part.name)})


def folder_name(folder: Path) -> str:
    """Return a folder's own name, also of one that is given as ``.`` or ``..``."""
    return Path(os.path.abspath(folder)).name


BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked")
"""Names of buffers in floating point; whole numbers and truth values are buffers whatever their
name."""


def is_buffer(name: str, tensor: torch.Tensor, patterns: Iterable[str]) -> bool:
    """Return whether a tensor cannot be trained, or is named like a buffer."""
    return not tensor.dtype.is_floating_point or any(fnmatchcase(name, pattern) for pattern in (*BUFFERS, *patterns))


def fresh_state() -> dict[str, Any]:
    """Return an engine's state before its first step, for weights that come alone."""
    return {
        "counters": {"global_steps": 0, "global_samples": 0, "micro_steps": 0, "skipped_steps": 0},
        "loss_scaler": {"kind": "static", "scale": 1.0},
        "scheduler": None,
        "optimizer": None,
        "groups": [],
        "scalars": {},
        "kinds": [],
        "reduction_order": None,
        "aliases": {},
        "ds_config": {},
        "client": {},
    }


def write_imported(
    imported: ImportedState, directory: Path, tag: str | None = None, disk: DurableFiles | None = None
) -> Path:
    """Write ``<directory>/<tag>``: one file per shard, each tensor read from the source's memory
    map as it is written.

    There is no state of single ranks in it: their random generators are another program's. Raises
    CheckpointError, and leaves nothing behind; also where a checkpoint has that name: a run may
    have gone on from an earlier import of it.
    """
    disk = disk or DurableFiles()
    final = directory / check_tag(tag or imported.tag)
    if (final / MANIFEST_NAME).exists():
        raise CheckpointError(
            "there is a checkpoint of that name already",
            where=str(final),
            fix="Give the new one another with --as TAG, or move that one away: it is not overwritten.",
        )
    state, tensors = encode_state(dict(imported.state), "engine")
    folder = begin(final, disk)
    try:
        reports = []
        for index, shard in enumerate(imported.shards):
            extra = [Slice.whole(name, tensor) for name, tensor in tensors.items()] if index == 0 else []
            reports.append(write_rank(folder, index, [*shard, *extra], disk))
        commit(folder, final, reports, imported.step, state, {"model_parts": 1, **imported.world}, disk)
    except BaseException:
        disk.remove_folder(folder)
        raise
    return final
