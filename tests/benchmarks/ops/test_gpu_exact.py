"""The comparison of CUDA with CPU, rehearsed as CPU with CPU; and that it sees one wrong bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.ops import gpu_exact
from zero_trial.ops import cuda, many

CPU = torch.device("cpu")


def test_equal_things_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_exact, "SIZES", (1, 33))
    rows = gpu_exact.run(CPU, tiny=True)
    lines = gpu_exact.summary(rows)
    assert not any(line["different"] for line in lines)
    assert {line["op"] for line in lines} >= {*gpu_exact.STEPS, "square_sum", "step_control_", "LAMB and float64"}


def test_one_bit_is_seen() -> None:
    x = torch.tensor([1.0, float("nan"), 0.0])
    y = x.clone()
    assert gpu_exact.same(x, y)
    y.view(torch.int32)[0] += 1
    assert not gpu_exact.same(x, y)
    assert not gpu_exact.same(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_the_summary_names_the_first_difference() -> None:
    rows = [gpu_exact.row("a", "n=1", True), gpu_exact.row("a", "n=2", False), gpu_exact.row("a", "n=3", False)]
    rows += [gpu_exact.row("b", "x", True, errors=[1e-8]), gpu_exact.row("b", "y", True, errors=[3e-8])]
    first, second = gpu_exact.summary(rows)
    assert (first["cases"], first["different"], first["first"]) == (3, 2, "n=2")
    assert second["errors"] == [3e-8]


def test_every_op_of_many_tensors_is_compared() -> None:
    """A new op must come into the comparison: its name stands in the script."""
    text = Path(gpu_exact.__file__).read_text(encoding="utf-8")
    compared = [name for name in many.SCHEMAS if f"OPS.{name}(" in text]
    assert set(many.SCHEMAS) - set(compared) == {
        "lion_many_",
        "adagrad_many_",
        "sgd_many_",
    }  # adam_many_'s kernel and table
    assert all(hasattr(cuda, name) for name in many.SCHEMAS)
