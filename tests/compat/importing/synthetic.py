"""Tensors that lie in no file, for tests of what is made of a file's content."""

from __future__ import annotations

from typing import Any

import torch

from zero_trial.compat.importing.torch_file import FileStorage, FileTensor


def stored(tensor: torch.Tensor, key: str | None = None) -> FileTensor:
    """``tensor`` as a file would hold it; two with one ``key`` are one."""
    storage = FileStorage(key or str(id(tensor)), tensor.dtype, tensor.numel())
    return FileTensor(
        "test.pt", storage, tensor.dtype, 0, tuple(tensor.shape), tuple(tensor.stride()), lambda _: tensor
    )


def model_content(tensors: dict[str, torch.Tensor], buffers: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """What a file of model states holds."""
    module = {name: stored(tensor) for name, tensor in tensors.items()}
    return {"module": module, "buffer_names": list(buffers), "global_steps": 3, "ds_version": "0.0"} | more
