"""Sums of two dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zero_trial.ops import dispatch as module
from zero_trial.ops.dispatch import WORTH_ELEMENTS, accumulate


def randn(n: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("n", [3, WORTH_ELEMENTS + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bits_are_torchs(n: int, dtype: torch.dtype) -> None:
    into, values = randn(n, 0, torch.float32), randn(n, 1, dtype)
    want = into + values.float()
    accumulate(into, values)
    assert torch.equal(into, want)


def test_any_shape_and_strides() -> None:
    into, values = torch.zeros(1024, 512).t(), torch.ones(512, 1024, dtype=torch.bfloat16)
    accumulate(into, values)
    assert torch.equal(into, torch.ones(512, 1024))


def test_large_sums_of_two_dtypes_need_no_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(module.OPS, "add_many_", lambda into, values: asked.append(into[0].numel()))
    for n in (WORTH_ELEMENTS - 1, WORTH_ELEMENTS):
        for dtype in (torch.float32, torch.bfloat16):
            accumulate(torch.zeros(n), torch.zeros(n, dtype=dtype))
    assert asked == [WORTH_ELEMENTS]
