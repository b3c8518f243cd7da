"""The GPT of ``model.py`` as a list of layers. Each pipeline rank builds its own, with their
weights in the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from model import Block, Embedding, GPTConfig, Linear
from torch import Tensor, nn

from zero_trial.pipeline.layers import LayerSpec, TiedLayerSpec


class Positions(nn.Module):
    """Adds each position's vector, then dropout: (batch, sequence, width) -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.table = Embedding(config.sequence, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.table(torch.arange(x.shape[1], device=x.device)))


class FinalNorm(nn.LayerNorm):
    """The norm before the head."""


def logits(embedding: nn.Module, x: Tensor) -> Tensor:
    """Compute the logits with the embedding's matrix."""
    return F.linear(x, embedding.weight)


def next_byte_loss(predicted: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy per byte in nats, as ``GPT.forward`` computes it."""
    return F.cross_entropy(predicted.flatten(0, 1).float(), targets.flatten())


class LayerSeeds:
    """Gives each layer the random numbers that it would have if the whole model were built from
    ``seed``.

    To build layer i, the layers before it are built and dropped, one at a time: that takes time,
    but no lasting memory.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.specs: list[LayerSpec] = []

    def build(self, spec: LayerSpec) -> nn.Module:
        """Return the module of ``spec``. The process's random state does not change."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if torch.empty(0).device.type != "meta":  # on meta, layers are only counted
                for earlier in self.specs[: self.specs.index(spec)]:
                    LayerSpec.build(earlier)
            return LayerSpec.build(spec)


class DrawnSpec(LayerSpec):
    """A layer with the weights that it has in the whole model."""

    def __init__(self, seeds: LayerSeeds, typename: type[nn.Module], *args: Any, **kwargs: Any) -> None:
        super().__init__(typename, *args, **kwargs)
        self.seeds = seeds
        seeds.specs.append(self)

    def build(self, log: bool = False) -> nn.Module:
        return self.seeds.build(self)


class DrawnTiedSpec(TiedLayerSpec):
    """The same for a tied layer: it is always built as the first layer of its key."""

    def __init__(self, seeds: LayerSeeds, key: str, typename: type[nn.Module], *args: Any, **kwargs: Any) -> None:
        super().__init__(key, typename, *args, **kwargs)
        self.seeds = seeds
        seeds.specs.append(self)

    def build(self, log: bool = False) -> nn.Module:
        same = (spec for spec in self.seeds.specs if isinstance(spec, DrawnTiedSpec) and spec.key == self.key)
        return self.seeds.build(next(same))


def gpt_layers(config: GPTConfig, seed: int) -> list[LayerSpec]:
    """Return the layers of ``GPT(config, seed)`` in order, from tokens to logits, with the same
    weights.

    With ``config.tied`` the first and the last layer share one matrix, on whichever ranks they are.
    """
    seeds = LayerSeeds(seed)
    embedding = (Embedding, config.vocabulary, config.width)
    body: Sequence[LayerSpec] = list(_body(config, seeds, tied=config.tied, embedding=embedding))
    if config.tied:
        return [*body, DrawnTiedSpec(seeds, "embedding", *embedding, forward_fn=logits)]
    return [*body, DrawnSpec(seeds, Linear, config.width, config.vocabulary, bias=False)]


def _body(config: GPTConfig, seeds: LayerSeeds, *, tied: bool, embedding: tuple[Any, ...]) -> Iterator[LayerSpec]:
    yield DrawnTiedSpec(seeds, "embedding", *embedding) if tied else DrawnSpec(seeds, *embedding)
    yield DrawnSpec(seeds, Positions, config)
    for _ in range(config.layers):
        yield DrawnSpec(seeds, Block, config)
    yield DrawnSpec(seeds, FinalNorm, config.width)
