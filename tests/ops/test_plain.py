"""The ops in plain torch are the reference's formulas, in place. tests/ops/test_library.py runs them next to the native kernels."""

from __future__ import annotations

import pytest
import torch

from zero_trial.ops import plain, reference
from zero_trial.ops.spec import LION


@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_lion_in_place(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(plain, "CHUNK", chunk)
    p, g, m = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    out = torch.empty(10, dtype=torch.bfloat16)
    want = reference.lion(p.clone(), g * 0.5, m.clone(), lr=0.1, weight_decay=0.2)
    plain.step_of(LION)(p, g, m, out, None, 0.1, 0.9, 0.99, 0.2, 0.5)
    assert torch.equal(p, want.p) and torch.equal(m, want.m) and torch.equal(out, p.bfloat16())


def test_the_flag() -> None:
    assert not plain.skips(None)
    assert not plain.skips(torch.zeros(()))
    assert plain.skips(torch.ones(1))
