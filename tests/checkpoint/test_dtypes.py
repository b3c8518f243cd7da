"""Names of dtypes, both ways."""

from __future__ import annotations

import pytest
import torch

from zero_trial.checkpoint.format import dtype_name, dtype_of, safetensors_name
from zero_trial.errors import CheckpointError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_there_and_back(dtype: torch.dtype) -> None:
    assert dtype_of(dtype_name(dtype)) == dtype


def test_names() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
    assert safetensors_name(torch.bfloat16) == "BF16"


def test_unknown() -> None:
    with pytest.raises(CheckpointError, match="'float31'"):
        dtype_of("float31")
    with pytest.raises(CheckpointError, match="complex128"):
        safetensors_name(torch.complex128)
