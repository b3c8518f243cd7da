"""Dtypes from ds_config's values: the rule for the gradient buffer and for communication, as tables."""

from __future__ import annotations

import pytest
import torch

from zero_trial.errors import ConfigError
from zero_trial.precision import DynamicScale, StaticScale, dtype_from_name, dtype_policy

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def test_plain_fp32() -> None:
    policy = dtype_policy()
    assert (policy.param, policy.grad, policy.comm, policy.master) == (FP32, FP32, FP32, FP32)
    assert policy.loss_scale == StaticScale(1.0)
    assert not policy.has_separate_master


@pytest.mark.parametrize(
    ("precision", "accumulation", "grad_accum", "comm", "expected"),
    [
        ("bf16", 1, None, None, (BF16, BF16, BF16)),
        ("bf16", 4, None, None, (BF16, FP32, FP32)),
        ("fp16", 4, None, None, (FP16, FP32, FP32)),
        ("fp32", 4, None, None, (FP32, FP32, FP32)),
        ("bf16", 4, "bf16", None, (BF16, BF16, BF16)),
        ("bf16", 1, "fp32", None, (BF16, FP32, FP32)),
        ("bf16", 4, None, "bf16", (BF16, FP32, BF16)),
        ("bf16", 1, None, "fp32", (BF16, BF16, FP32)),
    ],
)
def test_rule(
    precision: str, accumulation: int, grad_accum: str | None, comm: str | None, expected: tuple[torch.dtype, ...]
) -> None:
    policy = dtype_policy(
        precision, accumulation_steps=accumulation, grad_accum_dtype=grad_accum, communication_data_type=comm
    )
    assert (policy.param, policy.grad, policy.comm) == expected
    assert policy.master == FP32
    assert policy.has_separate_master == (policy.param != FP32)


def test_sixteen_bit_masters_on_request() -> None:
    assert not dtype_policy("bf16", master_dtype="bf16").has_separate_master


def test_loss_scale_belongs_to_fp16() -> None:
    scale = DynamicScale()
    assert dtype_policy("fp16", loss_scale=scale).loss_scale == scale
    with pytest.raises(ConfigError, match="fp16"):
        dtype_policy("bf16", loss_scale=scale)


@pytest.mark.parametrize("name", ["BF16", "bfloat16", "BFloat16"])
def test_names_in_any_case(name: str) -> None:
    assert dtype_from_name(name, "x") == BF16


def test_unknown_dtype_names_its_key() -> None:
    with pytest.raises(ConfigError) as raised:
        dtype_policy("bf16", grad_accum_dtype="fp8")
    assert raised.value.where == "data_types.grad_accum_dtype"
