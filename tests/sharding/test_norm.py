"""Tests for zero_trial/sharding/layout.py: the norm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from zero_trial.sharding import layout
from zero_trial.sharding.layout import ALIGN, clip_factor, square_sum, square_sum_of_rows


@pytest.fixture(autouse=True, params=["native where it can be had", "rows"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "rows":
        monkeypatch.setattr(layout, "native_on", lambda device: False)


def test_the_sum_of_squares_of_a_shard() -> None:
    shard = torch.zeros(ALIGN)
    shard[:2] = torch.tensor([3.0, 4.0])
    assert square_sum(shard).item() == pytest.approx(
        25.0, rel=1e-6
    )  # a row's norm is rounded to fp32 before it is squared
    assert square_sum(shard).dtype == torch.float64


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 6])
def test_the_norm_has_the_same_bits_however_the_buffer_is_cut(shards: int) -> None:
    values = torch.randn(ALIGN * 12 * 50, generator=torch.Generator().manual_seed(3))
    whole = math.sqrt(square_sum(values).item())
    parts = torch.stack([square_sum(part) for part in values.view(shards, -1)]).sum()
    # both rounded to fp32
    assert torch.tensor(math.sqrt(parts.item())).item() == torch.tensor(whole).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_double_precision(dtype: torch.dtype) -> None:
    values = (torch.randn(ALIGN * 300, generator=torch.Generator().manual_seed(4)) * 100).to(dtype)
    exact = values.double().square().sum().item()
    assert square_sum(values).item() == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", [0, 31, 32, 95])
def test_one_bad_element_shows(bad: float, position: int) -> None:
    values = torch.ones(96)
    values[position] = bad
    assert not math.isfinite(square_sum(values).item())


def test_an_element_too_large_for_a_row_counts_as_not_finite() -> None:
    values = torch.zeros(ALIGN)
    values[0] = 1e18
    assert math.isfinite(square_sum_of_rows(values).item())
    values[0] = 2e19
    assert not math.isfinite(square_sum_of_rows(values).item())


@pytest.mark.parametrize(("norm", "limit"), [(2.0, 1.0), (0.5, 1.0), (1.0, 1.0), (7.0, 0.1), (0.0, 1.0)])
def test_clipping_is_that_of_torch(norm: float, limit: float) -> None:
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    param.grad = torch.tensor([norm], dtype=torch.float64)
    nn.utils.clip_grad_norm_([param], limit)
    assert norm * clip_factor(norm, limit) == pytest.approx(param.grad.item(), abs=1e-15)


def test_no_limit_clips_nothing() -> None:
    assert clip_factor(1e9, 0.0) == 1.0
