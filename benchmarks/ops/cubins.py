"""The CUDA kernels as machine code: how long NVRTC takes cold and from the cache, and what each
kernel uses. Needs no GPU.

    pip install 'zero_trial[cuda-check]' && python benchmarks/ops/cubins.py
    python benchmarks/ops/cubins.py --only zt_sum --arch 90     # quick

Registers, stack and spills come from cuobjdump, loads and stores are counted in its disassembly.
``tests/ops/test_cuda_kernels.py`` checks some of them against the table in
``tests/ops/sass_budget.json``; this script checks all of them, on every architecture.

``loads16`` are load instructions of 16 bytes per thread, and so on, over all paths of a kernel.
Storage types: -1 none, 0 fp32, 1 bf16, 2 fp16. Times are processor times, so that a busy machine
does not change them; the cached one reads a file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import record
from zero_trial.ops import cuda_runtime
from zero_trial.ops.cpu_library import KernelCache
from zero_trial.ops.cuda_runtime import Kernel

BUDGETS = Path(__file__).parents[2] / "tests" / "ops" / "sass_budget.json"
PLACES = ("nvidia/cu13/bin", "triton/backends/nvidia/bin")
SYSTEM = ("/usr/local/cuda/bin", "/usr/bin")


@dataclass(frozen=True)
class Usage:
    """What one kernel of a cubin uses. ``loads16``: load instructions of 16 bytes per thread, and
    so on."""

    registers: int
    stack: int
    spills: int
    loads16: int
    loads8: int
    stores16: int
    stores8: int


def find_cuobjdump(folders: Sequence[str] | None = None) -> str | None:
    """Return the disassembler, from a pip package or from CUDA; it calls nvdisasm, which must be in
    the same folder or on the path."""
    for place in [*(f"{folder}/{below}" for folder in folders or sys.path for below in PLACES), *SYSTEM]:
        asked = os.access(f"{place}/nvdisasm", os.X_OK) or shutil.which("nvdisasm")
        if asked and os.access(f"{place}/cuobjdump", os.X_OK):
            return f"{place}/cuobjdump"
    return None


def inspect(cuobjdump: str, image: bytes, entry: str) -> Usage:
    """Read one kernel of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        command = [cuobjdump, "-res-usage", "-sass", file.name]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return read(said, entry)


def read(said: str, entry: str) -> Usage:
    """Return the numbers of one kernel from cuobjdump's output."""
    resources = re.search(rf"Function {entry}:\s*REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", said, re.DOTALL)
    code = said.split(f"Function : {entry}\n", 1)
    if resources is None or len(code) < 2:
        raise SystemExit(f"cuobjdump shows no kernel {entry}")
    listing = code[1].split("Function :", 1)[0]

    def count(pattern: str) -> int:
        return len(re.findall(pattern, listing))

    registers, stack, local = map(int, resources.groups())
    return Usage(
        registers,
        stack + local,
        count(r"\b(?:LDL|STL)\b"),
        count(r"\bLDG\.E(?:\.\w+)*\.128\b"),
        count(r"\bLDG\.E(?:\.\w+)*\.64\b"),
        count(r"\bSTG\.E(?:\.\w+)*\.128\b"),
        count(r"\bSTG\.E(?:\.\w+)*\.64\b"),
    )


def budget_of(kernel: Kernel, budgets: Mapping[str, Any]) -> dict[str, int]:
    """Return a kernel's row of the table: the longest key that its name begins with."""
    rows = [name for name in budgets if kernel.name.startswith(name)]
    if not rows:
        raise SystemExit(f"{BUDGETS.name} has no row for {kernel.name}")
    return dict(budgets[max(rows, key=len)])


def over_budget(kernel: Kernel, usage: Usage, budget: Mapping[str, int]) -> list[str]:
    """Return a message about what a kernel uses beyond its row."""
    most = {"registers": budget["registers"], "stack": 0, "spills": 0}
    wrong = [f"{key} {getattr(usage, key)} > {limit}" for key, limit in most.items() if getattr(usage, key) > limit]
    given = dict(kernel.definitions)
    least = {"loads16": 0, "loads8": 0, "stores16": 0, "stores8": 0} | {
        key: value for key, value in budget.items() if key != "registers"
    }
    # A tensor that the variant stores in 16 bits is accessed 8 bytes at a time, in fp32 16 bytes:
    # the table counts accesses.
    for role, kind in (("ZT_GRADIENT", "load"), ("ZT_OUT", "store")):
        if role in given and given[role] != cuda_runtime.NONE and kernel.entry in READS.get(role, ()):
            least[f"{kind}s{16 if given[role] == cuda_runtime.FP32 else 8}"] += 1
    return wrong + [
        f"{key} {getattr(usage, key)} < {count}" for key, count in least.items() if getattr(usage, key) < count
    ]


READS = {
    "ZT_GRADIENT": ("zt_update",),
    "ZT_OUT": ("zt_update",),
}


def measure(nvrtc: cuda_runtime.Nvrtc, cuobjdump: str | None, kernel: Kernel, arch: int) -> dict[str, Any]:
    """Return cold and cached processor time, which a busy machine does not change, and the kernels'
    usage."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.thread_time()
        image = cuda_runtime.compiled(nvrtc, KernelCache(Path(folder)), kernel, arch)
        cold = time.thread_time() - start
        start = time.thread_time()
        cuda_runtime.compiled(nvrtc, KernelCache(Path(folder)), kernel, arch)
        cached = time.thread_time() - start
    row: dict[str, Any] = {"kernel": kernel.name, "arch": arch, "cold": 1e3 * cold, "cached": 1e3 * cached}
    if cuobjdump:
        usage = inspect(cuobjdump, image, kernel.entry)
        row |= asdict(usage)
        row["over"] = "; ".join(over_budget(kernel, usage, budget_of(kernel, json.loads(BUDGETS.read_text()))))
    return row


COUNTS = ("registers", "spills", "loads16", "loads8", "stores16", "stores8")


def by_kernel(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per kernel; each measured value is a list with an entry per
    architecture."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        own = found.setdefault(row["kernel"], {"kernel": row["kernel"]})
        for key, value in row.items():
            if key != "kernel":
                own.setdefault(key, []).append(value)
    return list(found.values())


def each(key: str, digits: int = 0) -> Callable[[dict[str, Any]], str]:
    """Return a cell: the value on every architecture, once if they are all the same."""

    def cell(row: dict[str, Any]) -> str:
        values = [f"{value:.{digits}f}" for value in row.get(key, [])]
        return values[0] if len(set(values)) == 1 else " / ".join(values)

    return cell


def main() -> None:
    """Check all kernels on all architectures; exit with 1 if one is over its budget."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--arch", type=int, nargs="+", default=list(cuda_runtime.ARCHS))
    options.add_argument("--only", default="", help="kernels whose name contains this; nothing is written")
    given = options.parse_args()
    nvrtc, cuobjdump = cuda_runtime.open_nvrtc(), find_cuobjdump()
    kernels = [kernel for kernel in cuda_runtime.every_kernel() if given.only in kernel.name]
    measured = [measure(nvrtc, cuobjdump, kernel, arch) for arch in given.arch for kernel in kernels]
    rows = by_kernel(measured)
    columns: list[record.Column] = [
        (f"kernel on sm_{' / '.join(map(str, given.arch))}", lambda row: f"`{row['kernel']}`"),
        *((name, each(name)) for name in COUNTS),
        ("cold CPU ms", each("cold")),
        ("cached CPU ms", lambda row: f"{max(row['cached']):.1f}"),
        ("over budget", lambda row: "; ".join(filter(None, row.get("over", [])))),
    ]
    settings = {
        "nvrtc": ".".join(map(str, nvrtc.version)),
        "disassembler": "cuobjdump" if cuobjdump else "none",
        "slowest cold ms": round(max(row["cold"] for row in measured)),
        "slowest cached ms": round(max(row["cached"] for row in measured), 1),
        "over budget": sum(bool(row.get("over")) for row in measured),
    }
    if given.only or given.arch != list(cuda_runtime.ARCHS):
        print(record.markdown(rows, columns))
    else:
        record.save("cubins", settings, rows, columns, (__doc__ or "").strip())
    print(", ".join(f"{name} {value}" for name, value in settings.items()))
    if settings["over budget"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
