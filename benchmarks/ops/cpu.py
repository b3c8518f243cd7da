"""The optimizer step on CPU: ours, torch's fused AdamW, and both with 16-bit gradients and parameters, beside a plain update stream.

    python benchmarks/ops/cpu.py --numel 25000000 --threads 1 2 --rounds 7

Every round runs each contender once, in turn, so that a slow moment of the machine hits all alike; the table shows the minimum over
rounds. `stream` is a loop that reads four fp32 arrays and writes three, 28 bytes per parameter, compiled by the same compiler: what
the memory gives to an update of this shape. Contenders `... 16-bit` read a bf16 gradient and leave a bf16 copy of the parameters.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import record
from zero_trial.ops import backend
from zero_trial.ops.library import OPS

STREAM = """
extern "C" void stream(long n, int threads, float* p, const float* g, float* m, float* v) {
#pragma omp parallel for num_threads(threads)
  for (long i = 0; i < n; ++i) {
    m[i] = 0.9f * m[i] + g[i];
    v[i] = 0.9f * v[i] + g[i];
    p[i] = p[i] - m[i] * v[i];
  }
}
"""


def main() -> None:
    """Measures with each number of threads and writes ``results/ops-cpu.*``."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--numel", type=int, default=100_000_000)
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options.add_argument("--rounds", type=int, default=7)
    given = options.parse_args()
    if backend().native is None:
        raise SystemExit(f"no native kernels: {backend().why}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        runs = contenders(given.numel, build_stream(Path(folder)))
        for threads in given.threads:
            torch.set_num_threads(threads)
            rows += measure(runs, threads, given.numel, given.rounds)
    columns = [
        ("threads", lambda row: str(row["threads"])),
        ("contender", lambda row: row["name"]),
        ("ns/parameter", record.number("ns", 3)),
        ("% of stream", record.number("percent", 0)),
        ("time / ours", record.number("ratio", 2)),
    ]
    settings = {"parameters": given.numel, "rounds": given.rounds, "kernels": backend().describe().split(",")[0] + ")"}
    record.save("ops-cpu", settings, rows, columns, (__doc__ or "").strip())


def build_stream(folder: Path) -> Callable[..., None]:
    """The plain loop, with vectors of this processor's width."""
    source, library = folder / "stream.cpp", folder / "stream.so"
    source.write_text(STREAM)
    command = ["c++", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=120)
    function = ctypes.CDLL(str(library)).stream
    function.argtypes = [ctypes.c_long, ctypes.c_int, *[ctypes.c_void_p] * 4]
    function.restype = None
    return function


def contenders(n: int, stream: Callable[..., None]) -> dict[str, Callable[[], None]]:
    """What is measured, on one set of arrays."""
    p, m, v, g = (torch.full((n,), 0.01) for _ in range(4))
    low_gradient, low = g.bfloat16(), torch.zeros(n, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(p)
    weight.grad = g
    fused = torch.optim.AdamW([weight], fused=True)
    fused.state[weight] = {"step": torch.ones(()), "exp_avg": m, "exp_avg_sq": v}
    rest = (1e-3, 0.9, 0.999, 1e-8, 0.01, 2.0, 1.0, True)

    def torch_with_casts() -> None:
        g.copy_(low_gradient)
        fused.step()
        low.copy_(p)

    return {
        "stream": lambda: stream(n, torch.get_num_threads(), p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr()),
        "ours fp32": lambda: OPS.adam_(p, g, m, v, None, None, *rest),
        "torch fused fp32": lambda: fused.step() and None,
        "ours 16-bit": lambda: OPS.adam_(p, low_gradient, m, v, low, None, *rest),
        "torch fused 16-bit, with casts": torch_with_casts,
    }


def measure(runs: dict[str, Callable[[], None]], threads: int, n: int, rounds: int) -> list[dict[str, Any]]:
    """Minimum time of each contender over interleaved rounds; one round before them warms up."""
    best = dict.fromkeys(runs, float("inf"))
    with torch.no_grad():
        for turn in range(rounds + 1):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                taken = time.perf_counter() - start
                best[name] = min(best[name], taken) if turn else best[name]
    rows = []
    for name, taken in best.items():
        peer = "ours 16-bit" if "16-bit" in name else "ours fp32"
        row = {"threads": threads, "name": name, "ns": taken / n * 1e9, "percent": 100 * best["stream"] / taken}
        rows.append(row | {"ratio": taken / best[peer]})
    return rows


if __name__ == "__main__":
    main()
