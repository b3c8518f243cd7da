"""Every CUDA kernel compiled for this GPU and loaded by its driver: times, registers, and how many
blocks a multiprocessor holds.

    python benchmarks/ops/gpu_load.py            # needs a CUDA device
    python benchmarks/ops/gpu_load.py --dry-run  # quick: some, for sm_90, not loaded

Prints a row of JSON per source as soon as it is done, with its errors. Launches are as large as
``blocks`` of ops/cuda_kernels.py says a multiprocessor holds at once; if the GPU holds fewer, the
row names the kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.processes import BROKEN
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cuda_runtime
from zero_trial.ops.cpu_library import KernelCache, cache_folder
from zero_trial.ops.cuda_runtime import THREADS, Driver, Kernel, open_driver, open_nvrtc

Row = dict[str, Any]


def sources() -> dict[str, list[Kernel]]:
    """Return the kernels by their source file."""
    found: dict[str, list[Kernel]] = {}
    for kernel in cuda_runtime.every_kernel():
        found.setdefault(kernel.source, []).append(kernel)
    return found


def row_of(name: str, kernels: Sequence[Kernel], arch: int, loads: Loads | None) -> Row:
    """Return the row of all kernels of one source; a failing kernel does not hide the others."""
    nvrtc = open_nvrtc()
    folder = cache_folder(os.environ)
    target, cold, cached, wrong = nvrtc.target(arch), list[float](), list[float](), list[str]()
    most, fewer = 0, list[str]()
    for kernel in kernels:
        try:
            times = []
            for kept in (KernelCache(folder), KernelCache(folder)):
                begin = time.perf_counter()
                image = cuda_runtime.compiled(nvrtc, kept, kernel, arch)
                times.append(1e3 * (time.perf_counter() - begin))
            if loads is not None:
                registers, local, blocks = loads.usage(image, kernel.entry)
                most = max(most, registers)
                wrong += [f"{kernel.name}: {local} bytes of local memory"] if local else []
                fewer += [f"{kernel.name}: {blocks} of {kernel.blocks}"] if blocks < kernel.blocks else []
            cold.append(times[0])
            cached.append(times[1])
        except KernelUnavailable as trouble:
            wrong.append(f"{kernel.name}: {trouble.what}"[:300])
    made = {"nvrtc": ".".join(map(str, nvrtc.version)), "target": target.option.partition("=")[2], "kernels": len(cold)}
    times_of = {"cold_ms": max(cold, default=0.0), "cold_ms_all": sum(cold), "cached_ms": max(cached, default=0.0)}
    return {"name": name, **made, **times_of, "registers": most, "wrong": wrong, "fewer_blocks": fewer}


class Loads:
    """The driver's view of a kernel on the current device."""

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver, self._device = driver, device

    def usage(self, image: bytes, entry: str) -> tuple[int, int, int]:
        """Return registers, bytes of local memory, and blocks per multiprocessor. Raise
        KernelUnavailable if the kernel does not load."""
        function, call = self._driver.function(image, entry, self._device), self._driver.call
        registers, local = (call("cuFuncGetAttribute", attribute, function) for attribute in attributes())
        return registers, local, call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, THREADS, 0)


def attributes() -> tuple[Any, Any]:
    """The driver's names of a kernel's registers and of its local memory."""
    from cuda.bindings.driver import CUfunction_attribute as names

    return names.CU_FUNC_ATTRIBUTE_NUM_REGS, names.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES


def main() -> None:
    """Print a row per source; exit with 1 if a kernel could not be loaded or uses local
    memory."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("sources", nargs="*", help="these files only")
    options.add_argument("--dry-run", action="store_true")
    given = options.parse_args()
    if not given.dry_run and not torch.cuda.is_available():
        raise SystemExit("gpu_load.py: no CUDA device; --dry-run compiles some kernels")
    arch, loads = 90, None
    if not given.dry_run:
        # torch's primary context is current in this thread from here on
        torch.ones(1, device="cuda")
        arch = cuda_runtime.device_of(torch.device("cuda", torch.cuda.current_device())).arch
        loads = Loads(open_driver(), torch.cuda.current_device())
    wrong = 0
    for name in given.sources or sources():
        row = row_of(name, sources()[name][:: 12 if given.dry_run else 1], arch, loads)
        print(json.dumps(row), flush=True)
        wrong += len(row["wrong"])
        if row["wrong"] and not given.dry_run:
            try:
                torch.ones(2, device="cuda").sum().item()
            except RuntimeError:
                raise SystemExit(BROKEN) from None
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
