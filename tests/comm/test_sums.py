"""Tests for zero_trial/comm/backends.py: one order, one rounding, over any part, and little memory."""

from __future__ import annotations

import pytest
import torch

from zero_trial.comm import backends
from zero_trial.comm.backends import sum_in_order

SIXTEEN = [torch.float16, torch.bfloat16]


def test_parts_are_added_from_left_to_right() -> None:
    """In fp32 (1 + 1e8) - 1e8 is 0 and (1e8 - 1e8) + 1 is 1: the order shows."""
    out = torch.empty(2)
    sum_in_order([torch.tensor([1.0, 1e8]), torch.tensor([1e8, -1e8]), torch.tensor([-1e8, 1.0])], out)
    assert out.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_sixteen_bit_parts_are_rounded_once(dtype: torch.dtype) -> None:
    """Each small part alone is lost against the large one; all of them together are not."""
    large, small = torch.ones(3, dtype=dtype), torch.full((3,), torch.finfo(dtype).eps / 2, dtype=dtype)
    out = torch.empty(3, dtype=dtype)
    sum_in_order([large, small, small, small], out)
    assert out.tolist() == (large.float() + 3 * small.float()).to(dtype).tolist()
    assert out[0] > 1
    assert (large + small)[0] == 1


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN])
def test_the_result_may_be_written_over_any_part(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    parts = [torch.randn(37, generator=generator).to(dtype) for _ in range(count)]
    expected = torch.empty(37, dtype=dtype)
    sum_in_order(parts, expected)
    for target in range(count):
        copies = [part.clone() for part in parts]
        sum_in_order(copies, copies[target])
        assert torch.equal(copies[target], expected)
        assert all(torch.equal(copies[i], parts[i]) for i in range(count) if i != target)


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN, torch.int64])
def test_chunks_do_not_show(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [(1000 * torch.randn(257, generator=generator)).to(dtype) for _ in range(4)]
    whole, cut = torch.empty(257, dtype=dtype), parts[2].clone()
    sum_in_order(parts, whole)
    monkeypatch.setattr(backends, "CHUNK", 16)
    sum_in_order([*parts[:2], cut, parts[3]], cut)
    assert torch.equal(cut, whole)
    assert whole.isfinite().all() and whole.count_nonzero() > 200
