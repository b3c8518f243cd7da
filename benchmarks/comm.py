"""Collectives between CPU ranks of one host: through shared memory, by gloo's messages, by gloo's
own collectives, and the copy they must make.

    python benchmarks/comm.py --rounds 5
    python benchmarks/comm.py --ops reduce_scatter --bytes 16777216 --ranks 4
    python benchmarks/comm.py --ops reduce_scatter --bytes 65536 --rounds 1     # quick

Sizes are those of the whole fp32 tensor on a rank. `copy` is the least that every rank has
to move, as a plain copy that all ranks make at the same time: n (N-1)/N elements for reduce-scatter
and all-gather, twice that for all-reduce, n for a broadcast. `mapped` is what the engine uses:
tensors in memory that peers read in place; `staged` the same on ordinary tensors, which are copied
out first; `plain` is `mapped` with sums in plain torch instead of the native one (the same
for two ranks and small sizes, and where nothing is added); `direct` the same collectives by
messages of gloo; `gloo` torch.distributed's own. Times are medians over interleaved rounds of the
slower rank, in microseconds per call; CPU is a rank's mean processor time per call, with all its
threads. Each call ends when its tensors may be overwritten.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import record
from benchmarks.processes import free_port
from zero_trial.comm import AxisComm, MeshShape, build_mesh, destroy_distributed, init_distributed, sum_in_order
from zero_trial.comm.backends import NativeTransport, Steps
from zero_trial.ops.cpu import native_sum

SIZES = (16, 1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)
OPS = ("reduce_scatter", "all_gather", "all_reduce", "broadcast", "small_sum", "barrier")
SIZELESS = ("small_sum", "barrier")
WAYS = ("copy", "mapped", "staged", "plain", "direct", "gloo")
ABOUT_BYTES = 1 << 22  # bytes that a measurement moves at least; small sizes are repeated
MOST_REPEATS = 200
COLUMNS: list[record.Column] = [
    ("collective", lambda row: row["op"]),
    ("bytes", lambda row: f"{row['bytes']:,}" if row["bytes"] else ""),
    *((f"{way} us", record.number(way, 1)) for way in WAYS),
    ("mapped / copy", record.number("mapped_by_copy", 2)),
    ("staged / copy", record.number("staged_by_copy", 2)),
    ("gloo / mapped", record.number("gloo_by_mapped", 1)),
    *((f"{way} CPU us", record.number(f"{way}_cpu", 1)) for way in WAYS),
]

Call = Callable[[], Any]


def main() -> None:
    """Start the ranks, then print and save their measurements."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS)
    options.add_argument("--bytes", type=int, nargs="+", default=list(SIZES))
    options.add_argument("--name", default="comm", help="of the files in benchmarks/results")
    options.add_argument("--worker", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        rows = work(given.ops, given.bytes, given.rounds)
        if os.environ["RANK"] == "0":
            Path(given.worker).write_text(json.dumps(rows))
        return
    rows = in_ranks(sys.argv[1:], given.ranks)
    settings = {"ranks": given.ranks, "rounds": given.rounds, "threads per rank": 1}
    record.save(given.name, settings, rows, COLUMNS, (__doc__ or "").strip())


def in_ranks(arguments: list[str], ranks: int) -> list[dict[str, Any]]:
    """Return the measurements of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "rows")
        common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        command = [sys.executable, __file__, *arguments, "--worker", str(result)]
        started = [
            subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait(timeout=900) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")
        rows: list[dict[str, Any]] = json.loads(result.read_text())
    return rows


def work(ops: list[str], sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Measure all cases on one rank. Collective over the world."""
    torch.set_num_threads(1)
    world = init_distributed().world_size
    shape, add = MeshShape(shard=world), native_sum(sum_in_order)
    shared, direct = (build_mesh(shape, shared_memory=choice, add=add).shard for choice in (True, False))
    plain = build_mesh(shape, add=sum_in_order).shard
    if shared.transport_name != "shared memory":
        raise SystemExit("these ranks cannot share memory")
    rows = []
    for op in ops:
        for nbytes in [0] if op in SIZELESS else sizes:
            rows.append(
                {"op": op, "bytes": nbytes, **measure(calls(op, nbytes, shared, direct, plain), nbytes, rounds, direct)}
            )
            if shared.index == 0:
                print(f"measured {op} {nbytes}", file=sys.stderr, flush=True)
    destroy_distributed()
    return rows


def calls(op: str, nbytes: int, shared: AxisComm, direct: AxisComm, plain: AxisComm) -> dict[str, Call]:
    """Return the collective in each mode, each on tensors of its own, and the copy."""
    if op == "barrier":
        return {"mapped": lambda: shared.barrier("b"), "direct": lambda: direct.barrier("b"), "gloo": dist.barrier}
    if op == "small_sum":
        few = torch.zeros(4, dtype=torch.float64)
        found: dict[str, Call] = {
            "mapped": lambda: shared.all_reduce_small(few, "s"),
            "direct": lambda: direct.all_reduce_small(few, "s"),
        }
        return found | {"gloo": lambda: dist.all_reduce(few)}
    numel = max(nbytes // 4, shared.size)
    full, mapped = torch.zeros(numel), shared.buffer(numel, torch.float32, torch.device("cpu"))
    out = torch.zeros(numel // shared.size)
    native = NativeTransport(dist.group.WORLD)
    source, target = (torch.zeros(moved(op, numel, shared.size)) for _ in range(2))
    return {
        "copy": lambda: target.copy_(source),
        "mapped": by(shared, op, mapped, out),
        "staged": by(shared, op, full, out),
        "plain": by(plain, op, mapped, out),
        "direct": by(direct, op, full, out),
        "gloo": by_gloo(native, op, full, out),
    }


def by(comm: AxisComm, op: str, full: Tensor, out: Tensor) -> Call:
    """Return one of our collectives."""
    own = full.view(comm.size, -1)[comm.index]
    found: dict[str, Call] = {
        "reduce_scatter": lambda: comm.reduce_scatter(full, out, "r").wait(),
        "all_gather": lambda: comm.all_gather(full, own, "g").wait(),
        "all_reduce": lambda: comm.all_reduce(full, "a").wait(),
        "broadcast": lambda: comm.broadcast(full, "b"),
    }
    return found[op]


def by_gloo(native: NativeTransport, op: str, full: Tensor, out: Tensor) -> Call:
    """Return torch.distributed's collective."""
    own = full.view(dist.get_world_size(), -1)[dist.get_rank()]
    found: dict[str, Call] = {
        "reduce_scatter": lambda: finish(native.reduce_scatter(full, out, 0)),
        "all_gather": lambda: finish(native.all_gather(full, own, 0)),
        "all_reduce": lambda: dist.all_reduce(full),
        "broadcast": lambda: dist.broadcast(full, 0),
    }
    return found[op]


def moved(op: str, numel: int, ranks: int) -> int:
    """Return the least number of elements that a rank has to move."""
    part = numel * (ranks - 1) // ranks
    return {"reduce_scatter": part, "all_gather": part, "all_reduce": 2 * part, "broadcast": numel}[op]


def finish(steps: Steps) -> None:
    """Perform a collective of torch.distributed."""
    for works in steps:
        for each in works:
            each.wait()


def measure(runs: dict[str, Call], nbytes: int, rounds: int, meet: AxisComm) -> dict[str, float]:
    """Return microseconds per call of each mode. Collective over ``meet``; a first round warms up
    and allocates the pages."""
    repeats = max(1, min(MOST_REPEATS, ABOUT_BYTES // max(nbytes, 1)))
    taken: dict[str, list[float]] = {name: [] for name in runs}
    used: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            meet.barrier("next")
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(repeats):
                run()
            wall, processor = time.perf_counter() - start, time.process_time() - cpu
            both = torch.tensor([wall, processor], dtype=torch.float64) / repeats * 1e6
            slowest, total = slowest_and_total(both, meet)
            if turn:
                taken[name].append(slowest)
                used[name].append(total / meet.size)
    row = {name: statistics.median(times) for name, times in taken.items()}
    row |= {f"{name}_cpu": statistics.median(times) for name, times in used.items()}
    if "copy" in row:
        row |= {f"{way}_by_copy": row[way] / row["copy"] for way in ("mapped", "staged")}
    return row | {"gloo_by_mapped": row["gloo"] / row["mapped"]}


def slowest_and_total(both: Tensor, meet: AxisComm) -> tuple[float, float]:
    """Return the largest wall time and the sum of the processor times over ranks."""
    wall, processor = both[:1].clone(), both[1:].clone()
    meet.all_reduce_small(wall, "slowest", "max")
    meet.all_reduce_small(processor, "total")
    return float(wall), float(processor)


if __name__ == "__main__":
    main()
