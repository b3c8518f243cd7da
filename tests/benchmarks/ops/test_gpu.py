"""The benchmarks of the ops on a GPU, rehearsed without one: speed, comparison with the CPU (which
sees one wrong bit), and loading of every kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import record
from benchmarks.ops import gpu, gpu_exact, gpu_load
from tests.support.pretended_gpus import Gpus
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cuda_runtime, dispatch
from zero_trial.ops.spec import SCHEMAS, OptimizerOp

CPU = torch.device("cpu")


def test_every_contender_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "elements", lambda device: 1000)
    rows: list[dict[str, Any]] = []
    assert gpu.run(CPU, 1, [], rows.append) == 0
    assert [row["name"] for row in rows] == [contender.name for contender in gpu.CONTENDERS]
    assert [row for row in rows if "why" in row] == []
    assert gpu.with_percentages(rows)[0]["percent"] == pytest.approx(100.0)
    assert all(row["gb_per_s"] == pytest.approx(row["bytes"] * 1000 / row["ms"] / 1e6) for row in rows)
    assert len(record.markdown(gpu.with_percentages(rows), gpu.COLUMNS).splitlines()) == len(rows) + 2


def test_a_gpu_is_measured(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events, the cover that hides the host, and our contenders; torch's own need a real one."""
    monkeypatch.setattr(gpu, "elements", lambda device: 100)
    monkeypatch.setattr(gpu, "COVER", 10)
    monkeypatch.setattr(gpu, "on_host", lambda run, *_: (run(), 1e-6)[1])
    ours = ["copy", "AdamW bf16: ours", "norm, clip and AdamW bf16, 37 tensors: ours", "square sum bf16: ours"]
    rows: list[dict[str, Any]] = []
    before = gpus.emulator.library.launch_count()
    assert gpu.run(torch.device("cuda", 0), 1, ours, rows.append) == 0
    assert [row for row in rows if "why" in row] == [] and [row["name"] for row in rows] == ours
    assert (
        gpus.emulator.library.launch_count() == before + 4 * (1 + 2 + 1) + 2
    )  # two to warm up, one, the host's on two chunks


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


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        cuda_runtime.open_nvrtc()
    except KernelUnavailable as trouble:
        pytest.skip(trouble.what)


class Loads:
    """A GPU on which one kernel does not load, one has a stack, and one has half the room."""

    def usage(self, image: bytes, entry: str) -> tuple[int, int, int]:
        if entry == "zt_sum":
            raise KernelUnavailable("zt_sum: cuModuleLoadData: out of memory (2)")
        return {"zt_update": (20, 8, 8), "zt_square_sum": (64, 0, 2)}[entry]


@pytest.mark.usefixtures("compiler")
def test_what_a_gpu_says_of_its_kernels() -> None:
    kernels = [cuda_runtime.sums(), cuda_runtime.update("ZtSgd", 0, -1, 0), cuda_runtime.square_sum(0)]
    row = gpu_load.row_of("some", kernels, 90, Loads())  # type: ignore[arg-type]
    assert row["kernels"] == 2 and row["registers"] == 64 and row["target"] == "sm_90"
    assert row["wrong"] == [
        f"{kernels[0].name}: zt_sum: cuModuleLoadData: out of memory (2)",
        f"{kernels[1].name}: 8 bytes of local memory",
    ]
    assert row["fewer_blocks"] == [f"{kernels[2].name}: 2 of 4"]
    assert 0 < row["cached_ms"] < row["cold_ms"]


@pytest.mark.usefixtures("compiler")
def test_kernels_are_loaded_and_asked_about(gpus: Gpus) -> None:
    """By the emulated driver: the calls that a GPU gets, beginning with the image."""
    backend = cuda_runtime.cuda_backend().native
    assert backend is not None
    loads = gpu_load.Loads(backend.driver, 1)
    kernels = [cuda_runtime.sums(), cuda_runtime.update("ZtSgd", 0, -1, 0)]
    row = gpu_load.row_of("some", kernels, 129, loads)
    assert row["wrong"] == [] and row["fewer_blocks"] == [] and row["registers"] == 40 and row["kernels"] == 2
