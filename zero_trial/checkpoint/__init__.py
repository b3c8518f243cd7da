"""Checkpoints: safetensors files of slices of logical tensors, and one JSON manifest that is written last.

A folder is a checkpoint when its manifest verifies; nothing in it depends on how many ranks wrote it. No pickle.
"""

from zero_trial.checkpoint.catalog import latest_checkpoint, list_checkpoints
from zero_trial.checkpoint.manifest import Manifest
from zero_trial.checkpoint.ranks import Alone, Ranks
from zero_trial.checkpoint.reader import CheckpointReader
from zero_trial.checkpoint.slice import Slice
from zero_trial.checkpoint.writer import save_checkpoint

__all__ = [
    "Alone",
    "CheckpointReader",
    "Manifest",
    "Ranks",
    "Slice",
    "latest_checkpoint",
    "list_checkpoints",
    "save_checkpoint",
]
