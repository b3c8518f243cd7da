"""The small model that was trained with DeepSpeed for a few steps and goes on here, and the data of
each step.

It has what makes importing hard: a tied weight, a frozen parameter, a single number, buffers of
both kinds, two optimizer groups that take turns in the module's order, and sizes that no number of
ranks divides. Needs torch alone: the script that made the checkpoints shares it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, WORDS, BATCH, STEPS, MORE = 8, 7, 12, 5, 5


class Traveller(nn.Module):
    """Next-word loss of ``(x, y)``, both (batch, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.body = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.out = nn.Linear(3 * WIDTH + 1, WIDTH)
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("shift", torch.tensor([0.25]))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.emb(x)
        hidden = self.norm(hidden + self.frozen(hidden)) * self.gain
        hidden = self.out(torch.tanh(self.body(hidden))) + self.shift.to(hidden.dtype)
        return functional.cross_entropy(self.head(hidden).float().flatten(0, 1), y.flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, the rest does not."""
    trained = [param for param in model.parameters() if param.requires_grad]
    matrices = [param for param in trained if param.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim < 2], "weight_decay": 0.0},
    ]


def ds_config(stage: int, kind: str) -> dict[str, Any]:
    """What both engines are given; DeepSpeed adds ``torch_adam`` to it, which needs no compiler."""
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10, "sub_group_size": 200},
        "steps_per_print": 10**9,
    }
    half = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3, "hysteresis": 2}}
    return config | {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": half}[kind]


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a step's batch: the same samples on any number of ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    x, y = torch.randint(0, WORDS, (2, BATCH, 6), generator=generator)
    size = BATCH // ranks
    return x[rank * size : (rank + 1) * size], y[rank * size : (rank + 1) * size]
