"""What a reader of a foreign format has found: slices of tensors by file, the state beside them, and what was left out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_trial.checkpoint.slice import Slice


@dataclass(frozen=True)
class Wishes:
    """What the person asked for. ``names``: the parameters of each optimizer group; ``buffers``: patterns of names that are buffers."""

    with_optimizer: bool = True
    strip: str = ""
    names: Sequence[Sequence[str]] | None = None
    buffers: tuple[str, ...] = ()

    def own(self, name: str) -> str:
        """A name of the source as the model has it."""
        return name.removeprefix(self.strip) if self.strip else name


@dataclass(frozen=True)
class Findings:
    """``shards``: one row of slices per file to write; ``state``: an engine's, with tensors; ``left_out``: a line for each thing that is lost."""

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
        """The logical tensors whose names are wanted, each once."""
        return sorted({part.name for shard in self.shards for part in shard if wanted(part.name)})


def folder_name(folder: Path) -> str:
    """A folder's own name, also of one that is given as ``.`` or ``..``."""
    return Path(os.path.abspath(folder)).name


def fresh_state() -> dict[str, Any]:
    """An engine's state before its first step: what weights alone come with."""
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
