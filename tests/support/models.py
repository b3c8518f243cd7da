"""Small models whose every parameter gets a gradient that is not zero in theory, and the dense
training that all others are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import zero_trial

WIDTH, VOCABULARY, LENGTH = 48, 50, 9


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Linear layers around three blocks. The usual sizes make shards cut through tensors."""

    def __init__(self, inputs: int = 5, width: int = 11, outputs: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.last = nn.Linear(width, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x)


class TinyLM(nn.Module):
    """Embedding, blocks, norm and a head; ``tied`` shares the embedding with the head."""

    def __init__(self, blocks: int = 3, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.drop = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = self.drop(block(x))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def tokens(step: int, batch: int) -> torch.Tensor:
    """The global batch of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCABULARY, (batch, LENGTH), generator=generator)


# Adam divides a gradient by its own size. With the usual eps of 1e-8 it passes the rounding of a
# gradient that is almost 0 on at full length, and two orders of adding up, which another processor
# or another library may choose, end as far apart as lr per step. With this eps a step turns a
# rounding d of a gradient into at most lr d / eps = d. Gradients of these models are sums with
# errors of at most 1e-7 (measured against float64), two orders thus 2e-7 apart: four steps and the
# rounding of weights near 1 leave about 1e-6, half of what tests allow.
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-3}}


def adamw(params: Any) -> torch.optim.Optimizer:
    """torch's own, as ADAMW says."""
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, eps=1e-3)


def train_dense(
    build: Callable[[], nn.Module], steps: int, batch: int, clip: float, seed: int = 1
) -> tuple[nn.Module, list[float]]:
    """One process, plain torch, the whole batch at once."""
    torch.manual_seed(seed)
    model = build()
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(steps):
        loss = model(tokens(step, batch))
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def make_engine(
    build: Callable[[], nn.Module], config: Mapping[str, Any], seed: int = 1, **kwargs: Any
) -> zero_trial.Engine:
    torch.manual_seed(seed)
    defaults = {"train_batch_size": 8, "optimizer": ADAMW, "gradient_clipping": 0.0, "comm_timeout_seconds": 30.0}
    return zero_trial.initialize(model=build(), config=defaults | dict(config), **kwargs)[0]


def train_engine(engine: zero_trial.Engine, steps: range, batch: int = 8) -> list[float]:
    """``steps`` optimizer steps on this rank's part of :func:`tokens`; the local losses."""
    ranks, rank = engine.dp_world_size, engine.mpu.get_data_parallel_rank()
    micro, rounds = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    losses = []
    for step in steps:
        whole = tokens(step, batch)
        for turn in range(rounds):
            start = (turn * ranks + rank) * micro
            loss = engine(whole[start : start + micro])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def largest_difference(engine: zero_trial.Engine, reference: nn.Module) -> float:
    """Over all parameters and buffers, after gathering. Collective."""
    state = engine.module_state_dict()
    return max(
        (state[name].float() - value.float()).abs().max().item() for name, value in reference.state_dict().items()
    )
