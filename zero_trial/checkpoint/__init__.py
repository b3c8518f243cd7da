"""Checkpoints: safetensors files of slices of logical tensors, and one JSON manifest that is
written last.

A folder is a checkpoint when its manifest verifies; nothing in it depends on how many ranks wrote
it. No pickle.
"""

from zero_trial.checkpoint.background import BackgroundSaver
from zero_trial.checkpoint.folder import latest_checkpoint, list_checkpoints
from zero_trial.checkpoint.format import Manifest, Slice
from zero_trial.checkpoint.reader import CheckpointReader
from zero_trial.checkpoint.writer import Ranks, SingleRank, save_checkpoint

__all__ = [
    "BackgroundSaver",
    "CheckpointReader",
    "Manifest",
    "Ranks",
    "SingleRank",
    "Slice",
    "latest_checkpoint",
    "list_checkpoints",
    "save_checkpoint",
]
