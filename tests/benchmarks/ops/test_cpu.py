"""The benchmark of the optimizer step on CPU, with a few elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import record
from benchmarks.ops import cpu


@pytest.fixture
def torch_alone() -> dict[str, Any]:
    """Peers that need no compiler."""
    settings: dict[str, Any] = {"lr": cpu.LR, "betas": cpu.BETAS, "eps": cpu.EPS, "weight_decay": cpu.DECAY}
    return {"torch foreach": lambda params: torch.optim.AdamW(params, foreach=True, **settings)}


def test_contenders_do_the_same_job(torch_alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "ERROR_NUMEL", 500)
    found = cpu.errors(torch_alone)
    assert found.keys() == {"ours fp32", "ours 16-bit", "torch foreach fp32", cpu.NARROW}
    # of p, m, v: a bf16 state is rounded at 2^-8
    limits = {cpu.NARROW: (0.02, 0.02, 0.02)}
    for name, errors in found.items():
        for error, limit in zip(errors.values(), limits.get(name, (1e-6,) * 3), strict=True):
            assert error < limit, (name, errors)


def test_every_contender_is_measured(torch_alone: dict[str, Any]) -> None:
    arrays = cpu.Arrays.of(100)
    runs = {"stream": lambda: None} | cpu.contenders(arrays, torch_alone)
    rows = cpu.measure(runs, arrays, 1, 3)
    assert [row["name"] for row in rows] == list(runs)
    assert rows[0]["percent"] == 100.0 and arrays.step == 4 * len(runs)
    assert {row["name"]: row["ratio"] for row in rows}["ours 16-bit"] == 1.0
    assert len(record.markdown(rows, cpu.COLUMNS).splitlines()) == len(rows) + 2


def test_casts_go_both_ways() -> None:
    arrays = cpu.Arrays.of(3)
    arrays.low_gradient.fill_(2.0)
    weight = torch.nn.Parameter(arrays.p)
    weight.grad = arrays.g
    with torch.no_grad():
        cpu.with_casts(arrays, torch.optim.SGD([weight], lr=0.125))()
    assert arrays.low.tolist() == [0.25] * 3
