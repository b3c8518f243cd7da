"""Which dtype each tensor lives in, and what is said of it."""

from __future__ import annotations

import pytest
import torch

from zero_trial.sharding.layout import describe_dtypes, has_own_master, living_dtype, wide_dtype

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("own", "asked", "lives"),
    [
        (F64, F32, F64),
        (F32, F32, F32),
        (BF16, F32, BF16),
        (F64, BF16, BF16),
        (F32, F16, F16),
        (torch.int64, BF16, torch.int64),
    ],
)
def test_what_was_given_stays_unless_sixteen_bits_are_asked_for(
    own: torch.dtype, asked: torch.dtype, lives: torch.dtype
):
    assert living_dtype(own, asked) == lives


def test_complex_numbers_are_nobody_s_precision():
    assert living_dtype(torch.complex64, BF16) == torch.complex64


def test_what_is_as_wide_as_a_float64_parameter():
    assert wide_dtype(F64, F32) == wide_dtype(F64, BF16) == F64
    assert wide_dtype(F32, BF16) == BF16 and wide_dtype(BF16, F32) == F32
    assert has_own_master(F64) and has_own_master(F32) and not has_own_master(BF16)


@pytest.mark.parametrize(
    ("dtypes", "asked", "lines"),
    [
        ([F32, F32], F32, []),
        ([F32], BF16, []),
        ([BF16], BF16, []),
        ([], F32, []),
        ([F64], F32, ["parameters keep their dtypes (1 float64)"]),
        ([F64], BF16, ["1 float64 are cast to bfloat16"]),
        ([F32, BF16], BF16, ["1 bfloat16, 1 float32 are cast to bfloat16, with fp32 masters; leave the section out"]),
        ([F16, F32], F32, ["(1 float16, 1 float32)", "no loss scale"]),
    ],
)
def test_one_line_where_a_model_is_not_plainly_what_was_asked_for(
    dtypes: list[torch.dtype], asked: torch.dtype, lines: list[str]
):
    said = describe_dtypes([(f"p{index}", dtype) for index, dtype in enumerate(dtypes)], asked)
    assert len(said) == len(lines)
    assert all(part in line for part, line in zip(lines, said, strict=True)), said
