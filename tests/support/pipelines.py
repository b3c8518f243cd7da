"""Small pipelines whose layers are seeded one by one, their data, and the dense training that they
are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import zero_trial
from tests.support.models import ADAMW, LENGTH, VOCABULARY, WIDTH, Block, adamw
from zero_trial.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

SAMPLES = 2  # of a micro-batch


class Embed(nn.Module):
    """An embedding with a place of its own for each position; ``weight`` is the tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weight)


def logits(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, module.get_parameter("weight"))


def cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), labels.flatten())


def layers(blocks: int = 6, *, tied: bool = True, dropout: float = 0.0) -> list[Any]:
    """A small language model: embedding, blocks with a function between them, norm, head."""
    inner: list[Any] = []
    for _ in range(blocks):
        inner += [LayerSpec(Block)] + ([LayerSpec(nn.Dropout, dropout)] if dropout else [])
    ends = [TiedLayerSpec("embed", Embed), TiedLayerSpec("embed", Embed, forward_fn=logits)]
    if not tied:
        ends = [LayerSpec(Embed), LayerSpec(nn.Linear, WIDTH, VOCABULARY, bias=False)]
    return [ends[0], *inner, LayerSpec(nn.LayerNorm, WIDTH), ends[1]]


def micro_batch(step: int, number: int, line: int, samples: int = SAMPLES, length: int = LENGTH) -> Any:
    generator = torch.Generator().manual_seed(7919 * step + 101 * number + line)
    tokens = torch.randint(0, VOCABULARY, (samples, length), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def batches(line: int, count: int, steps: int, start: int = 0) -> Iterator[Any]:
    """The micro-batches of one data-parallel line."""
    for step in range(start, start + steps):
        for number in range(count):
            yield micro_batch(step, number, line)


def train_dense(
    build: Any, steps: int, count: int, lines: int, clip: float = 0.0
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Plain torch on the whole model: the mean over lines and micro-batches. The parameters and the
    losses."""
    model = PipelineModule(build, num_stages=1, loss_fn=cross_entropy, seed_layers=True)
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(steps):
        total = 0.0
        for number in range(count):
            for line in range(lines):
                inputs, labels = micro_batch(step, number, line)
                loss = cross_entropy(model(inputs), labels) / (count * lines)
                loss.backward()
                total += loss.item()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {name: param.detach().clone() for name, param in model.named_parameters()}, losses


def make_engine(
    build: Any, stages: int, zero: dict[str, Any], count: int, *, weights: Any = None, **config: Any
) -> Any:
    """``build``: layers of tokens, or a pipeline module."""
    settings = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": count,
        "gradient_clipping": 0.0,
        "comm_timeout_seconds": 30.0,
        "optimizer": ADAMW,
        "zero_optimization": zero,
    }
    if not isinstance(build, PipelineModule):
        build = PipelineModule(build, num_stages=stages, loss_fn=cross_entropy, seed_layers=True)
    return zero_trial.initialize(model=build, config=settings | config, weights=weights)[0]


def difference(engine: Any, reference: dict[str, torch.Tensor]) -> float:
    """Over all parameters of this rank's stage; a value that is not finite counts as infinite.
    Collective over shard."""
    state, worst = engine.module_state_dict(), 0.0
    for name, value in state.items():
        gap = (value.float() - reference[name]).abs().max().item()
        worst = max(worst, gap if gap == gap else float("inf"))
    return worst
