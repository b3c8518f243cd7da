"""The forward under torch.autocast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_trial.errors import ConfigError
from zero_trial.precision import autocast_dtype, forward_of


def test_off_is_the_module_itself():
    module = nn.Linear(4, 4)
    call = forward_of(module, None, "cpu")
    assert call == module.__call__
    assert call(torch.ones(2, 4)).dtype == torch.float32


def test_on_computes_in_the_dtype_and_keeps_the_parameters():
    module = nn.Linear(4, 4)
    out = forward_of(module, torch.bfloat16, "cpu")(torch.ones(2, 4))
    assert out.dtype == torch.bfloat16
    assert module.weight.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_an_autocast_around_it_gives_way():
    with torch.autocast("cpu", dtype=torch.float16):
        out = forward_of(nn.Linear(4, 4), torch.bfloat16, "cpu")(torch.ones(2, 4))
    assert out.dtype == torch.bfloat16


def test_the_dtype():
    assert autocast_dtype(False, "fp16") is None
    assert autocast_dtype(True, None) is torch.bfloat16
    assert autocast_dtype(True, "fp16") is torch.float16
    with pytest.raises(ConfigError, match=r"torch_autocast\.dtype"):
        autocast_dtype(True, "int8")
