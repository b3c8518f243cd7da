"""A case of training, run twice: by plain torch in one process, and by an engine on every rank; how
far the two end apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import zero_trial
from tests.support.models import ADAMW, adamw

TOLERANCE = 2e-6

# Thresholds are tiny, so that small models have several buckets and blocks that are really freed,
# alone or with a neighbour.
STAGES: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0, "reduce_bucket_size": 3000},
    "zero1": {"stage": 1, "reduce_bucket_size": 3000},
    "zero2": {"stage": 2, "reduce_bucket_size": 3000},
    "zero3": {
        "stage": 3,
        "param_persistence_threshold": 20,
        "reduce_bucket_size": 3000,
        "module_granularity_threshold": 1,
    },
    "zero3-free": {
        "stage": 3,
        "param_persistence_threshold": 0,
        "reshard_after": "forward",
        "module_granularity_threshold": 1,
    },
}

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 1024.0}},
}


@dataclass(frozen=True)
class Turn:
    """One micro-batch of one rank."""

    step: int
    turn: int
    rank: int

    def normal(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7919 * self.step + 101 * self.turn + self.rank)
        return torch.randn(*shape, generator=generator)


def tower_loss(model: Any, turn: Turn) -> torch.Tensor:
    """Loss of a model of 5 numbers, such as Tower(), in its own dtype."""
    return (model(turn.normal(4, 5).to(next(model.parameters()).dtype)) - 1).float().square().mean()


Groups = Callable[[nn.Module], list[dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """``loss(model, turn)`` calls the model, or the engine in its place. ``between(model)`` runs
    after each micro-batch, at both."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, Turn], torch.Tensor]
    groups: Groups | None = None
    optimizer: dict[str, Any] = field(default_factory=lambda: ADAMW)
    dense_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    config: dict[str, Any] = field(default_factory=dict)
    steps: int = 4
    accumulation: int = 1
    clip: float = 0.0
    between: Callable[[Any, Turn], None] | None = None
    dense_schedule: Callable[[torch.optim.Optimizer], Any] | None = None


def trainable(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [param for param in model.parameters() if param.requires_grad]}]


def train_dense(case: Case, ranks: int) -> Iterator[nn.Module]:
    """Plain torch: the mean over ranks and micro-batches, rank after rank, each rank with its own
    buffers. Yields after every step.

    A parameter that no rank used gets a zero gradient, as in every optimizer over flat buffers;
    plain torch would pass it over.
    """
    torch.manual_seed(1)
    model = case.build()
    optimizer = case.dense_optimizer((case.groups or trainable)(model))
    schedule = case.dense_schedule(optimizer) if case.dense_schedule is not None else None
    params = [param for param in model.parameters() if param.requires_grad]
    buffers = [{name: buffer.clone() for name, buffer in model.named_buffers()} for _ in range(ranks)]
    for step in range(case.steps):
        for number in range(case.accumulation):
            for rank in reversed(range(ranks)):  # rank 0's buffers are the ones that stay
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[rank][name])
                (case.loss(model, Turn(step, number, rank)) / (ranks * case.accumulation)).backward()
                if case.between is not None:
                    case.between(model, Turn(step, number, rank))
                buffers[rank] = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            elif param.grad.is_sparse:
                param.grad = param.grad.to_dense()
        if case.clip:
            nn.utils.clip_grad_norm_(params, case.clip)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        yield model


def build_engine(case: Case, zero: dict[str, Any], **kwargs: Any) -> zero_trial.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip,
        "comm_timeout_seconds": 30.0,
        "optimizer": case.optimizer,
        "zero_optimization": zero,
    }
    torch.manual_seed(1)
    model = case.build()
    if case.groups is not None:
        kwargs.setdefault("model_parameters", case.groups(model))
    return zero_trial.initialize(model=model, config=config | case.config, **kwargs)[0]


def train_ranks(case: Case, engine: zero_trial.Engine) -> Iterator[zero_trial.Engine]:
    for step in range(case.steps):
        for number in range(case.accumulation):
            turn = Turn(step, number, engine.global_rank)
            engine.backward(case.loss(engine, turn))
            if case.between is not None:
                case.between(engine, turn)
            engine.step()
        yield engine


def difference(engine: zero_trial.Engine, reference: nn.Module) -> float:
    """Over all parameters, and on rank 0 its buffers; a value that is not finite counts as
    infinite. Collective."""
    state, worst = engine.module_state_dict(), 0.0
    params = dict(reference.named_parameters(remove_duplicate=False))
    for name, value in reference.state_dict().items():
        if value.numel() and (name in params or engine.global_rank == 0):
            gap = (state[name].float() - value.float()).abs().max().item()
            worst = max(worst, gap if gap == gap else float("inf"))
    return worst


def compare(case: Case, zero: dict[str, Any], **kwargs: Any) -> float:
    """The largest difference after the last step."""
    engine = build_engine(case, zero, **kwargs)
    steps = list(zip(train_dense(case, engine.dp_world_size), train_ranks(case, engine), strict=True))
    gap = difference(engine, steps[-1][0])
    engine.destroy()
    return gap
