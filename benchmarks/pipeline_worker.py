"""One rank of one pipeline measurement: builds a contender, warms it up, times its steps, writes what it saw as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.pipeline_contenders import join, prepare
from benchmarks.pipeline_work import ROWS, Times, batches


def main() -> None:
    """Reads the job from the command line; ranks and addresses come from the environment."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    job = json.loads(args.job)
    warnings.simplefilter("ignore")
    torch.set_num_threads(job["threads"])
    join(job["name"])
    result = measure(job)
    args.output.with_name(f"{args.output.name}.{dist.get_rank()}").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Wall times of steps in milliseconds, each from a barrier until the last rank is done, and the losses where they are known."""
    step = prepare(job["name"], Times(**job["times"]), job["micro_batches"], ROWS)
    walls, losses = [], []
    for index in range(job["warmup"] + job["steps"]):
        if index == job["warmup"] and job["realtime"]:
            go_first()
        given = batches(job["micro_batches"], index)
        dist.barrier()
        start = time.perf_counter()
        loss = step(given)
        wall = torch.tensor(1e3 * (time.perf_counter() - start))
        dist.all_reduce(wall, dist.ReduceOp.MAX)  # a step is over when the last rank is done
        walls.append(float(wall))
        losses.append(float(loss))
    return {"wall_ms": median(walls[job["warmup"] :]), "losses": losses[job["warmup"] :]}


def go_first() -> None:
    """All threads of this process run before those of ordinary processes from now on; needs the right to do so."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setscheduler(int(thread.name), os.SCHED_FIFO, os.sched_param(10))


if __name__ == "__main__":
    main()
