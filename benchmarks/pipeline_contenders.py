"""The pipelines that are compared: each turns the waiting layers into one function that does a whole optimizer step.

``ours-SCHEDULE``; ``torch-SCHEDULE`` with torch.distributed.pipelining; ``deepspeed`` with DeepSpeed's PipelineModule, whose schedule is 1F1B.
All use SGD with the same rate.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline_work import Times, layers, loss_of

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
Step = Callable[[Batches], Tensor]  # the micro-batches of one step -> mean loss, where it is known


def missing(name: str) -> str | None:
    """Why this contender cannot run here, or None."""
    if name == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed (pip install 'zero_trial[bench]')"
    return None


def join(name: str) -> None:
    """The process group of this rank."""
    if name == "deepspeed":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    elif name.startswith("ours"):
        import zero_trial

        zero_trial.init_distributed(dist_backend="gloo")
    else:
        dist.init_process_group("gloo")


def prepare(name: str, times: Times, micro_batches: int, rows: int) -> Step:
    """The step function of contender ``name`` on this rank; as many stages as ranks. Collective."""
    kind, _, schedule = name.partition("-")
    built = layers(dist.get_world_size(), PER_STAGE, times)
    if kind == "ours":
        return ours(built, schedule, micro_batches, rows)
    return torch_schedule(built, schedule, micro_batches) if kind == "torch" else deepspeed(built, micro_batches, rows)


def ours(built: list[nn.Module], schedule: str, micro_batches: int, rows: int) -> Step:
    """zero_trial's engine."""
    import zero_trial

    config = _config(micro_batches, rows) | {
        "mesh": {"pipe": dist.get_world_size()},
        "pipeline": {"schedule": schedule, "partition_method": "uniform"},
        "log_level": "error",
    }
    model = zero_trial.PipelineModule(built, loss_fn=loss_of)
    engine = zero_trial.initialize(model=model, config=config)[0]
    return lambda batches: engine.train_batch(iter(batches))


def deepspeed(built: list[nn.Module], micro_batches: int, rows: int) -> Step:
    """DeepSpeed's engine."""
    import deepspeed as library
    from deepspeed.pipe import PipelineModule

    model = PipelineModule(built, num_stages=dist.get_world_size(), loss_fn=loss_of, partition_method="uniform")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = library.initialize(model=model, model_parameters=parameters, config=_config(micro_batches, rows))
    return lambda batches: engine.train_batch(data_iter=iter(batches))


def torch_schedule(built: list[nn.Module], schedule: str, micro_batches: int) -> Step:
    """torch.distributed.pipelining; it takes a whole batch and cuts it itself."""
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
    runner = kind(stages[0] if chunks == 1 else stages, micro_batches, loss_fn=loss_of)
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
