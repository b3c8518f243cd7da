"""Contents of files that were never written, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

import torch

from zero_trial.compat.importing.torch_file import UnknownObject, unknown


def foreign(path: str, args: tuple[Any, ...] = (), state: Any = None) -> UnknownObject:
    """An object of a class that is not built here."""
    made = unknown(path)(*args)
    made.state = state
    return made


def model_content(tensors: dict[str, torch.Tensor], buffers: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """What a file of model states holds."""
    return {"module": tensors, "buffer_names": list(buffers), "global_steps": 3, "ds_version": "0.0"} | more
