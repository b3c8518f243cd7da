"""A model, a way to train it, and all its values: for engines that keep them somewhere else."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tests.support.dense import STAGES, Case, Turn, build_engine
from zero_trial import zero


class Net(nn.Module):
    """Weights of more than one buffer, tied, frozen and empty ones, dropout, and sizes that fill no
    block of a disk."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 91)
        self.blocks = nn.ModuleList([nn.Linear(91, 91) for _ in range(3)])
        self.blocks[2].weight = self.blocks[0].weight
        self.frozen = nn.Linear(91, 91).requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.last = nn.Linear(91, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + nn.functional.dropout(torch.tanh(block(x)), 0.2)
        return self.last(self.frozen(x))


def loss(model: Any, turn: Turn) -> torch.Tensor:
    device = next(model.parameters()).device  # of the module or the engine
    return (model(turn.normal(4, 6).to(device)) - 1).float().square().mean()


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Biases without decay: groups that end inside a block of the disk."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0},
    ]


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 1}},
}
PLAIN = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}


def engine_of(stage: str, config: dict[str, Any], folder: str | None, count: int = 3, **kwargs: Any) -> Any:
    zero_config = dict(STAGES[stage]) | {"reduce_bucket_size": 20_000}
    if folder is not None:
        offload = {"device": "nvme", "nvme_path": folder, "buffer_count": count}
        zero_config |= {"offload_optimizer": offload, "sub_group_size": 4096}
    case = Case(Net, loss, groups=two_groups, config=PLAIN | config)
    return build_engine(case, zero_config, **kwargs)


def train(engine: Any, steps: range) -> list[tuple[float, float | None, float]]:
    """(loss, gradient norm, loss scale); in fp16 the gradient of step 1 overflows on the last
    rank."""
    trace = []
    for step in steps:
        for number in range(engine.gradient_accumulation_steps()):
            value = loss(engine, Turn(step, number, engine.global_rank))
            bad = step == 1 and engine.global_rank == engine.world_size - 1 and engine.fp16_enabled()
            engine.backward(value * float("inf") if bad else value)
            engine.step()
        trace.append((value.item(), engine.get_global_grad_norm() if not bad else 0.0, engine.loss_scale))
    return trace


def alike(trace: Any, known: Any) -> bool:
    """Losses and loss scales bit for bit. Groups are blocks where parameters are freed and buckets
    elsewhere, so the square sums of the norm, in float64, are added in another order."""
    norms = [[math.nan if math.isnan(row[1]) else row[1] for row in rows] for rows in (trace, known)]
    same = [(row[0], row[2]) for row in trace] == [(row[0], row[2]) for row in known]
    return same and all(a is b or math.isclose(a, b, rel_tol=1e-14) for a, b in zip(*norms, strict=True))


def values_of(engine: Any) -> dict[str, torch.Tensor]:
    """Parameters, buffers, masters and moments by name. Collective."""
    buffers = dict(engine.module.named_buffers())
    state = engine.module_state_dict()
    found = {f"{'buffer' if name in buffers else 'param'} {name}": value.clone() for name, value in state.items()}
    for name, param in engine.module.named_parameters():
        if param.requires_grad and param.numel() and engine.optimizer is not None:
            found[f"master {name}"] = zero.safe_get_full_fp32_param(param)
            for kind in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                if (state := zero.safe_get_full_optimizer_state(param, kind)) is not None:
                    found[f"{kind} {name}"] = state
    return found


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return sorted(
        name for name in a.keys() | b.keys() if name not in a or name not in b or not torch.equal(a[name], b[name])
    )


def offloaded_zero(stage: str, params: str, state: str, folder: Any, **more: Any) -> dict[str, Any]:
    """A zero_optimization section in which groups are small and all that may leave does."""
    zero: dict[str, Any] = {"stage": STAGES[stage]["stage"], "sub_group_size": 4096}
    zero |= {"reduce_bucket_size": 3000, "param_persistence_threshold": 20, "module_granularity_threshold": 1}
    if params != "none":
        zero["offload_param"] = {"device": params, "nvme_path": folder, "max_in_cpu": 0, "buffer_count": 2} | more
        zero["reshard_after"] = "forward"
    if state != "none":
        zero["offload_optimizer"] = {"device": state, "nvme_path": folder, "buffer_count": 2}
    return zero


def trained(engine: Any, steps: int = 3) -> tuple[Any, dict[str, torch.Tensor], int]:
    """The trace of the steps, all values on the host, and how many groups were away."""
    torch.manual_seed(70 + engine.global_rank)
    trace, values = train(engine, range(steps)), values_of(engine)
    away = sum(group.offloaded is not None for group in engine.sharded.groups)
    values = {name: value.cpu() for name, value in values.items()}
    engine.destroy()
    return trace, values, away
