"""Checkpoints: safetensors files of slices of logical tensors, and one JSON manifest that is
written last.

A folder is a checkpoint when its manifest verifies; nothing in it depends on how many ranks wrote
it. No pickle.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_trial.checkpoint.background import BackgroundSaver
    from zero_trial.checkpoint.folder import list_checkpoints
    from zero_trial.checkpoint.format import Manifest, Slice
    from zero_trial.checkpoint.range_reader import CheckpointReader
    from zero_trial.checkpoint.writer import Ranks, SingleRank, save_checkpoint

# Imported when they are asked for: what reads manifests and bytes only needs no torch.
_PLACES = {
    "BackgroundSaver": "background",
    "CheckpointReader": "range_reader",
    "Manifest": "format",
    "Ranks": "writer",
    "SingleRank": "writer",
    "Slice": "format",
    "list_checkpoints": "folder",
    "save_checkpoint": "writer",
}

__all__ = [
    "BackgroundSaver",
    "CheckpointReader",
    "Manifest",
    "Ranks",
    "SingleRank",
    "Slice",
    "list_checkpoints",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
