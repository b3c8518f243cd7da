"""One rank of one measurement: build a contender, warm it up, time its steps, write the results as
JSON."""

from __future__ import annotations

import gc
import resource
import sys
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.contenders import Workload, prepare
from benchmarks.rounds import answer


def join(name: str) -> None:
    """Join the ranks as the contender does."""
    if name.startswith("deepspeed"):
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    elif name.startswith("ours"):
        import zero_trial

        zero_trial.init_distributed(dist_backend="gloo")
    else:
        dist.init_process_group("gloo")


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Return a step's median wall time and mean CPU time, memory, and the
    losses."""
    workload, parts = Workload(**job["workload"]), job["accumulation"]
    before = _rss()
    model = workload.build()
    tensors = sum(1 for _ in model.parameters())
    numel = sum(weights(parameter) for parameter in model.parameters())
    step, alive = prepare(job["name"], model, job["dtype"], workload.micro_batch, parts)
    rank, walls, losses = dist.get_rank(), [], []
    for index in range(job["warmup"] + job["steps"]):
        batches = [workload.batch(rank, index * parts + part) for part in range(parts)]
        if index == job["warmup"]:
            dist.barrier()
            process, thread = time.process_time(), time.thread_time()
        start = time.perf_counter()
        loss = step(batches)
        walls.append(time.perf_counter() - start)
        losses.append(float(loss))
    process, thread = time.process_time() - process, time.thread_time() - thread
    growth, shared = _peak_rss() - before, _of_peers()
    del batches, loss
    return {
        "wall_ms": 1e3 * median(walls[job["warmup"] :]),
        "cpu_ms": 1e3 * process / job["steps"],
        "main_thread_ms": 1e3 * thread / job["steps"],
        "peak_rss_growth_mib": growth / 2**20,
        "peak_own_growth_mib": (growth - shared) / 2**20,
        "tensor_bytes_per_parameter": persistent_bytes(alive) / numel,
        "parameters": numel,
        "parameter_tensors": tensors,
        "losses": losses,
    }


def weights(parameter: torch.Tensor) -> int:
    """Return how many weights a parameter has; in 4 bits, it has fewer elements."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def persistent_bytes(alive: list[Any]) -> int:
    """Return the bytes of all distinct storages that Python can reach between two steps, gradients
    included."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if not isinstance(thing, torch.Tensor):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [thing, thing.grad if thing.is_leaf else None]
        for tensor in found:
            if tensor is not None:
                storage = _local(tensor).untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    if not alive:
        raise RuntimeError("the contender was freed before it was weighed")
    return sum(storages.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _rss() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _of_peers() -> int:
    """Return the resident bytes of shared memory that count as the peers' share."""
    lines = "".join(Path("/proc/self", name).read_text() for name in ("smaps_rollup", "status")).splitlines()
    kib = {line.partition(":")[0]: int(line.split()[1]) for line in lines if "Shmem:" in line}
    return 1024 * (kib["RssShmem"] - kib["Pss_Shmem"])


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    answer(join, measure)
