"""Every CUDA kernel compiles, keeps to its budget of registers, spills nothing and reads 16 bytes
at a time. No GPU is needed.

All kernels on sm_90; on sm_80 and sm_100 each arithmetic with the storage types that differ in
code. ``benchmarks/ops/cubins.py`` does all on all. Registers and stack are read from every cubin;
loads and stores are counted in the disassembly of some, which takes a third of a second each.
"""

from __future__ import annotations

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.ops import cubins
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cpu_library, cuda_runtime
from zero_trial.ops.cuda_runtime import Kernel
from zero_trial.ops.spec import BF16, FP16, FP32, NONE

# compiling them all takes half a minute
pytestmark = pytest.mark.slow

BUDGETS = json.loads(cubins.BUDGETS.read_text())
HINT = "pip install 'zero_trial[cuda-check]'"

STATES = {("ZT_STATE", BF16)}
CORE = [
    *(
        cuda_runtime.update(op, *kind, FP32)
        for op in (op.struct for op in cuda_runtime.OPTIMIZERS)
        for kind in ((FP32, NONE), (BF16, BF16), (FP16, FP16))
    ),
    *(cuda_runtime.update(op.struct, BF16, BF16, BF16) for op in cuda_runtime.OPTIMIZERS),
    *(cuda_runtime.square_sum(stored) for stored in cuda_runtime.STORED),
    cuda_runtime.sums(),
]
DISASSEMBLED = [
    (cuda_runtime.update("ZtAdam", BF16, BF16, FP32), 80),
    (cuda_runtime.update("ZtAdam", BF16, BF16, FP32), 90),
    (cuda_runtime.update("ZtAdam", FP32, NONE, FP32), 100),
    (cuda_runtime.update("ZtLion", FP16, FP16, FP32), 80),
    (cuda_runtime.update("ZtAdagrad", FP32, NONE, FP32), 90),
    (cuda_runtime.update("ZtSgd", BF16, BF16, FP32), 100),
    (cuda_runtime.update("ZtAdam", BF16, BF16, BF16), 90),
    (cuda_runtime.update("ZtLion", BF16, BF16, BF16), 80),
    (cuda_runtime.square_sum(BF16), 90),
]
WANTED = [(kernel, arch) for arch in (80, 100) for kernel in CORE] + [
    # With states in bf16, only those of CORE: gradients and copies are read and written as
    # with fp32 states.
    (kernel, 90)
    for kernel in cuda_runtime.every_kernel()
    if kernel in CORE or not set(kernel.definitions) & STATES
]


@pytest.fixture(scope="module")
def images() -> dict[tuple[Kernel, int], bytes]:
    try:
        nvrtc = cuda_runtime.open_nvrtc()
    except KernelUnavailable as trouble:
        pytest.skip(f"{trouble.what}. {HINT}")

    def compile_(job: tuple[Kernel, int]) -> bytes:
        kernel, arch = job
        source, headers = cuda_runtime.source_of(kernel), cuda_runtime.headers()
        return nvrtc.compile(kernel.source, source, headers, kernel.options, nvrtc.target(arch))

    # 12.8 is the first that knows sm_100
    wanted = [(kernel, arch) for kernel, arch in WANTED if arch in nvrtc.archs]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(wanted, pool.map(compile_, wanted), strict=True))


@pytest.fixture(scope="module")
def cuobjdump() -> str:
    found = cubins.find_cuobjdump()
    if found is None:
        pytest.skip(f"no cuobjdump. {HINT}")
    return found


def test_all_compile_to_machine_code(images: dict[tuple[Kernel, int], bytes]) -> None:
    assert {arch for _, arch in images} >= {80, 90}
    assert all(image.startswith(b"\x7fELF") and kernel.entry.encode() in image for (kernel, _), image in images.items())


def test_no_stack_no_spills_and_registers_within_the_budget(
    images: dict[tuple[Kernel, int], bytes], cuobjdump: str, tmp_path: Path
) -> None:
    wrong = []
    for (kernel, arch), image in images.items():
        file = tmp_path / "kernel.cubin"
        file.write_bytes(image)
        output = subprocess.run(
            [cuobjdump, "-res-usage", str(file)], capture_output=True, text=True, timeout=60, check=True
        )
        found = re.search(rf"Function {kernel.entry}:\s*REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", output.stdout, re.DOTALL)
        assert found is not None, output.stdout
        registers, stack, local = map(int, found.groups())
        most = cubins.budget_of(kernel, BUDGETS)["registers"]
        if registers > most or stack or local:
            wrong.append(f"{kernel.name} sm_{arch}: {registers} of {most} registers, stack {stack}, local {local}")
    assert wrong == []


def test_sixteen_bytes_at_a_time(images: dict[tuple[Kernel, int], bytes], cuobjdump: str) -> None:
    def check(job: tuple[Kernel, int]) -> str:
        kernel, arch = job
        usage = cubins.inspect(cuobjdump, images[job], kernel.entry)
        over = cubins.over_budget(kernel, usage, cubins.budget_of(kernel, BUDGETS))
        return f"{kernel.name} sm_{arch}: {'; '.join(over)}" if over else ""

    with ThreadPoolExecutor(2) as pool:
        assert [output for output in pool.map(check, [job for job in DISASSEMBLED if job in images]) if output] == []


def test_names_keys_and_rows() -> None:
    kernels = cuda_runtime.every_kernel()
    assert len({kernel.name for kernel in kernels}) == len(kernels)
    assert all(cubins.budget_of(kernel, BUDGETS) for kernel in kernels) and set(CORE) <= set(kernels)
    keys = {cuda_runtime.kernel_key(kernel, "NVRTC 13", option) for kernel in kernels for option in ("sm_80", "sm_90")}
    assert len(keys) == 2 * (len(kernels) - 1)  # the two levels of sums are one cubin


def test_every_source_and_header_is_used() -> None:
    assert {kernel.source for kernel in cuda_runtime.every_kernel()} == {
        path.name for path in (cpu_library.SOURCES / "cuda").iterdir()
    }
    text = "".join(cuda_runtime.source_of(kernel) for kernel in CORE) + "".join(cuda_runtime.headers().values())
    assert all(f'#include "{name}"' in text for name in cuda_runtime.headers())
