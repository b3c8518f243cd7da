"""The optimizer step on CPU: ours, torch's and DeepSpeed's AdamW, and these with 16-bit gradients
and parameters, compared with a plain update stream.

    python benchmarks/ops/cpu.py --numel 25000000 --threads 1 2 --rounds 7
    python benchmarks/ops/cpu.py --numel 100000 --threads 1 --rounds 1     # quick

Every round runs each contender once, in turn, so that a slow moment of the machine hits all alike;
the table shows medians over rounds, each number of threads in a process of its own. `stream` is a
loop that reads four fp32 arrays and writes three, 28 bytes per parameter, compiled by the same
compiler: what the memory gives to an update of this shape. Contenders `... 16-bit` read a bf16
gradient and leave a bf16 copy of the parameters; with `bf16 states` the moments take 2
bytes each instead of 4: 20 bytes per step instead of 28. Errors are
norm-relative, of parameters and moments after ten steps, against the same in float64 on the same
gradients. Cold build, load and call are of our library: built from nothing, loaded from its cache
in a new process, one op on 16 elements.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import record
from zero_trial.ops import backend, cpu_library, reference
from zero_trial.ops.dispatch import OPS
from zero_trial.ops.spec import ADAM

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
STEPS, ERROR_NUMEL = 10, 1_000_003
NARROW = "ours 16-bit, bf16 states"
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
LOAD = """
import os, time
from zero_trial.ops import cpu_library
t = time.perf_counter()
cpu_library.open_native(os.environ)
print(time.perf_counter() - t)
"""
COLUMNS: list[record.Column] = [
    ("threads", lambda row: str(row["threads"])),
    ("contender", lambda row: row["name"]),
    ("ns/parameter", record.number("ns", 3)),
    ("best round", record.number("best_ns", 3)),
    ("% of stream", record.number("percent", 0)),
    ("time / ours", record.number("ratio", 2)),
    *((f"error of {x}", lambda row, x=x: f"{row[x]:.1e}" if x in row else "") for x in "pmv"),
]

Run = Callable[[], Any]


@dataclass
class Arrays:
    """The tensors of all contenders: weights, moments and gradient; 16-bit gradient and copy; the
    number of the step."""

    p: Tensor
    m: Tensor
    v: Tensor
    g: Tensor
    low_gradient: Tensor
    low: Tensor
    narrow: list[Tensor]  # moments in bf16
    step: int = 0

    @classmethod
    def of(cls, n: int) -> Arrays:
        p, m, v, g = torch.full((n,), 0.5), torch.zeros(n), torch.zeros(n), torch.full((n,), 0.01)
        narrow = [torch.zeros(n, dtype=torch.bfloat16) for _ in ADAM.states]
        return cls(p, m, v, g, g.bfloat16(), torch.zeros(n, dtype=torch.bfloat16), narrow)

    def moments(self, contender: str) -> list[Tensor]:
        """Return the moments that a contender has updated, as values."""
        return [x.float() for x in self.narrow] if contender == NARROW else [self.m, self.v]


def main() -> None:
    """Measure with each number of threads, each in a process of its own, and write
    ``results/<name>.*``."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--numel", type=int, default=100_000_000)
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--name", default="ops_cpu", help="of the files in benchmarks/results")
    options.add_argument("--worker", help=argparse.SUPPRESS)
    given = options.parse_args()
    if backend().native is None:
        raise SystemExit(f"no native kernels: {backend().why}")
    if given.worker:
        Path(given.worker).write_text(json.dumps(work(given.numel, given.threads[0], given.rounds)))
        return
    rows = [row for threads in given.threads for row in in_own_process(given.numel, threads, given.rounds)]
    for name, found in errors(peers()).items():
        for row in rows:
            row |= found if row["name"] == name else {}
    settings = {"parameters": given.numel, "rounds": given.rounds, "kernels": backend().describe().split(",")[0] + ")"}
    record.save(given.name, settings | around(), rows, COLUMNS, (__doc__ or "").strip())


def in_own_process(numel: int, threads: int, rounds: int) -> list[dict[str, Any]]:
    """Measure in a process: peers with their own OpenMP runtime read the number of threads from the
    environment."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "rows")
        own = ["--numel", str(numel), "--threads", str(threads), "--rounds", str(rounds), "--worker", str(result)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu"}
        subprocess.run([sys.executable, __file__, *own], check=True, timeout=900, env=environment)
        rows: list[dict[str, Any]] = json.loads(result.read_text())
    return rows


def work(numel: int, threads: int, rounds: int) -> list[dict[str, Any]]:
    """Return the rows of one number of threads."""
    torch.set_num_threads(threads)
    arrays = Arrays.of(numel)
    with tempfile.TemporaryDirectory() as folder:
        stream = build_stream(Path(folder))
        runs = {
            "stream": lambda: stream(numel, threads, *map(Tensor.data_ptr, (arrays.p, arrays.g, arrays.m, arrays.v)))
        }
        return measure(runs | contenders(arrays, peers()), arrays, threads, rounds)


def build_stream(folder: Path) -> Callable[..., None]:
    """Build the plain loop, with vectors of this processor's width."""
    source, library = folder / "stream.cpp", folder / "stream.so"
    source.write_text(STREAM)
    command = ["c++", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=120)
    function = ctypes.CDLL(str(library)).stream
    function.argtypes = [ctypes.c_long, ctypes.c_int, *[ctypes.c_void_p] * 4]
    function.restype = None
    return function


def peers() -> dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]]:
    """Return the peers' optimizers that are installed. DeepSpeed compiles its own at first use, in
    about two minutes."""
    settings: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    found: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
        "torch fused": lambda params: torch.optim.AdamW(params, fused=True, **settings),
        "torch foreach": lambda params: torch.optim.AdamW(params, foreach=True, **settings),
    }
    if importlib.util.find_spec("deepspeed") is None:
        print("skipped  DeepSpeed: not installed (pip install 'zero_trial[bench]')", flush=True)
        return found
    os.environ["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    )  # for its ninja
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return found | {"DeepSpeed CPUAdam": lambda params: DeepSpeedCPUAdam(params, adamw_mode=True, **settings)}


def contenders(arrays: Arrays, others: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]]) -> dict[str, Run]:
    """Return one step of each contender on ``arrays``."""
    a, rest = arrays, (LR, *BETAS, EPS, DECAY)

    def ours(g: Tensor, states: Sequence[Tensor], out: list[Tensor], *noise: list[int]) -> Run:
        lists, columns = [[x] for x in (a.p, g, *states)], [[x] for x in rest]
        return lambda: OPS.adam_(*lists, out, *(noise or ([], [])), *columns, [float(a.step)], 1.0, True)

    runs: dict[str, Run] = {
        "ours fp32": ours(a.g, (a.m, a.v), []),
        "ours 16-bit": ours(a.low_gradient, (a.m, a.v), [a.low]),
        NARROW: ours(a.low_gradient, a.narrow, [a.low], [1], [0]),
    }
    for name, make in others.items():
        weight = torch.nn.Parameter(a.p)
        weight.grad = a.g
        optimizer = make([weight])
        number: Any = 0 if name.startswith("DeepSpeed") else torch.zeros(())
        optimizer.state[weight] = {"step": number, "exp_avg": a.m, "exp_avg_sq": a.v}
        runs[f"{name} fp32"] = optimizer.step
        if name != "torch foreach":
            runs[f"{name} 16-bit, with casts"] = with_casts(a, optimizer)
    return runs


def with_casts(arrays: Arrays, optimizer: torch.optim.Optimizer) -> Run:
    """Return a step with 16-bit gradient and copy by an optimizer that supports only fp32."""

    def run() -> None:
        arrays.g.copy_(arrays.low_gradient)
        optimizer.step()
        arrays.low.copy_(arrays.p)

    return run


def measure(runs: dict[str, Run], arrays: Arrays, threads: int, rounds: int) -> list[dict[str, Any]]:
    """Return medians over interleaved rounds, after one warmup round."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for turn in range(rounds + 1):
            for name, run in runs.items():
                arrays.step += 1
                start = time.perf_counter()
                run()
                if turn:
                    taken[name].append((time.perf_counter() - start) / arrays.p.numel() * 1e9)
    middle = {name: statistics.median(times) for name, times in taken.items()}
    return [
        {
            "threads": threads,
            "name": name,
            "ns": ns,
            "best_ns": min(taken[name]),
            "percent": 100 * middle["stream"] / ns,
            "ratio": ns / middle["ours 16-bit" if "16-bit" in name else "ours fp32"],
        }
        for name, ns in middle.items()
    ]


def errors(others: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]]) -> dict[str, dict[str, float]]:
    """Return the norm-relative distance of p, m and v from float64 AdamW after ten steps."""
    found = {}
    for name in contenders(Arrays.of(1), others):
        arrays, generator = Arrays.of(ERROR_NUMEL), torch.Generator().manual_seed(0)
        arrays.p.normal_(generator=generator)
        run = contenders(arrays, others)[name]
        exact = (arrays.p.double(), arrays.m.double(), arrays.v.double())
        for arrays.step in range(1, STEPS + 1):
            arrays.low_gradient.copy_(torch.randn(ERROR_NUMEL, generator=generator))
            arrays.g.copy_(arrays.low_gradient)
            with torch.no_grad():
                run()
            exact = reference.adamw(
                exact[0], arrays.g.double(), *exact[1:], arrays.step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
            )
        got = (arrays.p, *arrays.moments(name))
        found[name] = {
            key: float((x.double() - y).norm() / y.norm()) for key, x, y in zip("pmv", got, exact, strict=True)
        }
    return found


def around() -> dict[str, Any]:
    """Return the costs besides the loop: building, loading, calling."""
    start = time.perf_counter()
    cpu_library.build(cpu_library.find_compiler(os.environ))
    build = time.perf_counter() - start
    loads = [
        float(
            subprocess.run(
                [sys.executable, "-c", LOAD], check=True, capture_output=True, text=True, cwd=record.FOLDER.parents[1]
            ).stdout
        )
        for _ in range(3)
    ]
    tensors = [[torch.zeros(16)] for _ in range(4)]
    columns = [[x] for x in (LR, *BETAS, EPS, DECAY, 1.0)]
    calls = []
    for _ in range(20_000):
        start = time.perf_counter()
        OPS.adam_(*tensors, [], [], [], *columns, 1.0, True)
        calls.append(time.perf_counter() - start)
    return {
        "cold build s": round(build, 2),
        "cached load ms": round(min(loads) * 1e3, 2),
        "op call us": round(statistics.median(calls) * 1e6, 2),
    }


if __name__ == "__main__":
    main()
