"""One rank of one pipeline measurement: build a contender, warm it up, time its steps, write
its results as JSON.

A pipeline is measured with layers that take a given time, so that the schedule is measured and not
the processors. Each layer waits (``time.sleep``) in its forward, for its input's gradient and for
its weight's gradient: many ranks can wait at once on few cores, as many devices would compute at
once. The arithmetic around the waits is negligible.

A contender turns these layers into one function that does a whole optimizer step:
``ours-SCHEDULE``; ``torch-SCHEDULE`` with torch.distributed.pipelining; ``deepspeed`` with
DeepSpeed's PipelineModule, whose schedule is 1F1B. All use SGD with the same rate.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.rounds import answer

WIDTH, ROWS = 64, 4


@dataclass(frozen=True)
class Times:
    """Seconds of one layer for one micro-batch."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def total(self) -> float:
        return self.forward + self.input_gradient + self.weight_gradient


class _OnTheWay(torch.autograd.Function):
    """Return the input, with a wait in either direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        if forward:
            time.sleep(forward)
        ctx.backward_seconds = backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return grad, None, None


class Layer(nn.Module):
    """One layer that waits; its initial weights are equal on all ranks."""

    def __init__(self, times: Times) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.9, 1.1, WIDTH))
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        # Two nodes, so that a backward in two halves can have one without the other; the product
        # between them is torch's own.
        arrived = _OnTheWay.apply(x, self.times.forward, self.times.input_gradient)
        return arrived * _OnTheWay.apply(self.weight, 0.0, self.times.weight_gradient)


def layers(stages: int, per_stage: int, times: Times) -> list[Layer]:
    """Return ``stages * per_stage`` layers; those of one stage take ``times`` together."""
    each = Times(*(value / per_stage for value in (times.forward, times.input_gradient, times.weight_gradient)))
    return [Layer(each) for _ in range(stages * per_stage)]


def batches(micro_batches: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """Return the micro-batches of a step, equal on all ranks."""
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(ROWS, WIDTH, generator=generator), torch.zeros(ROWS, WIDTH)) for _ in range(micro_batches)]


LR = 1e-3
PER_STAGE = 2  # layers, so that a stage can be two chunks
CHUNKS = {"interleaved": 2, "looped_bfs": 2, "zb_v": 2}
TORCH = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb_v": "ScheduleZBVZeroBubble",
}

Batches = list[tuple[Tensor, Tensor]]
Step = Callable[[Batches], Tensor]  # the micro-batches of one step -> mean loss, if it is known


def missing(name: str) -> str | None:
    """Return why this contender cannot run here, or None."""
    if name == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed (pip install 'zero_trial[bench]')"
    return None


def join(name: str) -> None:
    """Join this rank's process group."""
    if name == "deepspeed":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    elif name.startswith("ours"):
        import zero_trial

        zero_trial.init_distributed(dist_backend="gloo")
    else:
        dist.init_process_group("gloo")


def prepare(name: str, times: Times, micro_batches: int, rows: int) -> Step:
    """Return the step function of contender ``name``; as many stages as ranks. Collective."""
    kind, _, schedule = name.partition("-")
    built = layers(dist.get_world_size(), PER_STAGE, times)
    if kind == "ours":
        return ours(built, schedule, micro_batches, rows)
    return torch_schedule(built, schedule, micro_batches) if kind == "torch" else deepspeed(built, micro_batches, rows)


def ours(built: list[nn.Module], schedule: str, micro_batches: int, rows: int) -> Step:
    """Return a step of zero_trial's engine."""
    import zero_trial

    config = _config(micro_batches, rows) | {
        "mesh": {"pipe": dist.get_world_size()},
        "pipeline": {"schedule": schedule, "partition_method": "uniform"},
        "log_level": "error",
    }
    model = zero_trial.PipelineModule(built, loss_fn=mse_loss)
    engine = zero_trial.initialize(model=model, config=config)[0]
    return lambda batches: engine.train_batch(iter(batches))


def deepspeed(built: list[nn.Module], micro_batches: int, rows: int) -> Step:
    """Return a step of DeepSpeed's engine."""
    import deepspeed as library
    from deepspeed.pipe import PipelineModule

    model = PipelineModule(built, num_stages=dist.get_world_size(), loss_fn=mse_loss, partition_method="uniform")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = library.initialize(model=model, model_parameters=parameters, config=_config(micro_batches, rows))
    return lambda batches: engine.train_batch(data_iter=iter(batches))


def torch_schedule(built: list[nn.Module], schedule: str, micro_batches: int) -> Step:
    """Return a step of torch.distributed.pipelining, which splits a whole batch itself."""
    from torch.distributed import pipelining

    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = CHUNKS.get(schedule, 1)
    each = len(built) // (size * chunks)
    mine = [rank] if chunks == 1 else [rank, 2 * size - 1 - rank] if schedule == "zb_v" else [rank, rank + size]
    parts = [nn.Sequential(*built[number * each : (number + 1) * each]) for number in mine]
    stages = [
        pipelining.PipelineStage(part, number, size * chunks, torch.device("cpu"))
        for part, number in zip(parts, mine, strict=True)
    ]
    kind: Any = getattr(pipelining, TORCH[schedule], None) or getattr(pipelining.schedules, TORCH[schedule])
    runner = kind(stages[0] if chunks == 1 else stages, micro_batches, loss_fn=mse_loss)
    optimizer = torch.optim.SGD([parameter for part in parts for parameter in part.parameters()], lr=LR)
    first, last = 0 in mine, size * chunks - 1 in mine

    def step(batches: Batches) -> Tensor:
        inputs, targets = (torch.cat(part) for part in zip(*batches, strict=True))
        losses: list[Tensor] = []
        runner.step(*([inputs] if first else []), **({"target": targets, "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if last else torch.zeros(())

    return step


def _config(micro_batches: int, rows: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
    }


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Return wall times of steps in milliseconds, each from a barrier until the last rank is done,
    and the losses if they are known."""
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
    """Give all threads of this process real-time priority; this needs the
    permission."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setscheduler(int(thread.name), os.SCHED_FIFO, os.sched_param(10))


if __name__ == "__main__":
    answer(join, measure)
