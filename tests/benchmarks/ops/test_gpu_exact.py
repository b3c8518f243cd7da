"""The comparison of CUDA with CPU, rehearsed as CPU with CPU; and that it sees one wrong bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.ops import gpu_exact
from tests.support.pretended_gpus import Gpus
from zero_trial.ops import cuda_runtime, dispatch
from zero_trial.ops.spec import SCHEMAS, OptimizerOp

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", gpu_exact.SECTIONS)
def test_a_gpu_is_compared(gpus: Gpus, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All of the script's CUDA side: side streams, and what would be copied from and to a
    GPU."""
    monkeypatch.setattr(gpu_exact, "SIZES", (1, 2099))
    monkeypatch.setattr(gpu_exact, "FLOATS", (torch.bfloat16,))
    monkeypatch.setattr(gpu_exact, "cuda_backend", cuda_runtime.cuda_backend)
    before = gpus.emulator.library.launch_count()
    line, usable = gpu_exact.run(torch.device("cuda", 0), name, tiny=True)
    assert usable and line["cases"] and line["different"] == 0, line
    assert gpus.emulator.library.launch_count() > before
    assert not gpu_exact.not_native(torch.device("cuda", 0))["different"]


def test_a_wrong_kernel_is_found(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_exact, "SIZES", (33,))
    monkeypatch.setattr(gpu_exact, "FLOATS", (torch.bfloat16,))
    pack = OptimizerOp.pack
    monkeypatch.setattr(OptimizerOp, "pack", lambda op, lr, *rest: pack(op, lr * 1.01, *rest))
    line, _ = gpu_exact.run(torch.device("cuda", 0), "Lion", tiny=True)
    assert line["different"] == line["cases"]
    assert not gpu_exact.same(torch.tensor([0.0]), torch.tensor([-0.0])), "one bit"


def test_every_op_of_many_tensors_is_compared() -> None:
    """A new op must come into the comparison: its name stands in the script."""
    text = Path(gpu_exact.__file__).read_text(encoding="utf-8")
    steps = {op for op, *_ in gpu_exact.STEPS.values()}
    assert set(SCHEMAS) - steps == {name for name in SCHEMAS if f"OPS.{name}(" in text} - steps
    assert dispatch.CUDA.keys() == dispatch.CPU.keys() == SCHEMAS.keys()
