"""Tests for zero_trial/sharding/param_group.py."""

from __future__ import annotations

import pytest
import torch

from zero_trial.sharding.param_group import absent, is_absent

CPU = torch.device("cpu")


def test_a_tensor_that_is_elsewhere_has_its_shape_and_no_memory() -> None:
    weight = absent((1000, 1000), torch.float32, CPU)
    assert weight.shape == (1000, 1000)
    assert weight.untyped_storage().nbytes() == 4
    assert (weight @ torch.ones(1000)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64])
def test_numbers_are_nan(dtype: torch.dtype) -> None:
    value = absent((2,), dtype, CPU)
    assert value.dtype == dtype
    assert value.to(torch.complex64).isnan().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_integers_are_as_large_as_can_be(dtype: torch.dtype) -> None:
    assert absent((2,), dtype, CPU).tolist() == [torch.iinfo(dtype).max] * 2


def test_scalars_empty_tensors_and_truth_values() -> None:
    assert absent((), torch.float32, CPU).shape == ()
    assert absent((0, 3), torch.float32, CPU).shape == (0, 3)
    assert absent((3,), torch.bool, CPU).dtype == torch.bool


def test_what_is_absent_is_known() -> None:
    assert is_absent(absent((2, 3), torch.float32, torch.device("cpu")))
    assert not is_absent(torch.zeros(2, 3)) and not is_absent(torch.zeros(1)) and not is_absent(torch.zeros(0))
    assert not is_absent(torch.zeros(6)[::2])
