"""The dtypes that a checkpoint may hold, by torch's name and by safetensors' name."""

from __future__ import annotations

import torch

from zero_trial.errors import CheckpointError

_SAFETENSORS: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _SAFETENSORS}


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``, ``bfloat16`` ...: what the manifest says."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a manifest's name. Raises CheckpointError for a name that no checkpoint holds."""
    found = _NAMES.get(name)
    if found is None:
        raise CheckpointError("unknown dtype", got=repr(name), expected=", ".join(sorted(_NAMES)))
    return found


def safetensors_name(dtype: torch.dtype) -> str:
    """``F32``, ``BF16`` ...: what the header of a safetensors file says."""
    found = _SAFETENSORS.get(dtype)
    if found is None:
        raise CheckpointError("this dtype cannot be stored", got=dtype_name(dtype), expected=", ".join(sorted(_NAMES)))
    return found
