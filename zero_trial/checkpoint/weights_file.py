"""A model's weights as one safetensors file of its own, that is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from zero_trial.checkpoint.disk import Disk


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Writes ``tensors`` beside ``path`` and gives the file its name when it is on the disk: until then the old file, if any, stays.

    Raises OSError or SafetensorError, and leaves nothing behind then.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(dict(tensors), str(part), metadata=dict(metadata))
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    Disk().sync_folder(path.parent)
