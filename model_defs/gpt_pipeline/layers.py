"""The GPT of ``model.py`` as a list of layers, of which each pipeline rank builds its own, with the weights that the whole model has there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from model import Block, Embedding, GPTConfig, Linear
from torch import Tensor, nn

from zero_trial.pipeline.layers import LayerSpec, TiedLayerSpec


class Positions(nn.Module):
    """(batch, sequence, width) -> the same, with each place's vector added, and dropout."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.table = Embedding(config.sequence, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.table(torch.arange(x.shape[1], device=x.device)))


class FinalNorm(nn.LayerNorm):
    """The norm before the head."""


def logits(embedding: nn.Module, x: Tensor) -> Tensor:
    """The head that shares the embedding's matrix."""
    return F.linear(x, embedding.weight)


def next_byte_loss(predicted: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy per byte in nats, as ``GPT.forward`` computes it."""
    return F.cross_entropy(predicted.flatten(0, 1).float(), targets.flatten())


class InTurn:
    """The random numbers of a model that is drawn layer by layer from one seed, for whoever builds only some of the layers.

    To build layer i the layers before it are drawn too and dropped, one at a time: that costs a moment, and no memory that stays.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.specs: list[LayerSpec] = []

    def build(self, spec: LayerSpec) -> nn.Module:
        """``spec``'s module; the process's own random state stays as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if torch.empty(0).device.type != "meta":  # where layers are only counted nothing is drawn
                for earlier in self.specs[: self.specs.index(spec)]:
                    LayerSpec.build(earlier)
            return LayerSpec.build(spec)


class DrawnSpec(LayerSpec):
    """A layer whose weights are those that it has in the whole model."""

    def __init__(self, turn: InTurn, typename: type[nn.Module], *args: Any, **kwargs: Any) -> None:
        super().__init__(typename, *args, **kwargs)
        self.turn = turn
        turn.specs.append(self)

    def build(self, log: bool = False) -> nn.Module:
        return self.turn.build(self)


class DrawnTiedSpec(TiedLayerSpec):
    """The same for a tied layer. Wherever it is built first, it is the module of the first layer of its key."""

    def __init__(self, turn: InTurn, key: str, typename: type[nn.Module], *args: Any, **kwargs: Any) -> None:
        super().__init__(key, typename, *args, **kwargs)
        self.turn = turn
        turn.specs.append(self)

    def build(self, log: bool = False) -> nn.Module:
        same = (spec for spec in self.turn.specs if isinstance(spec, DrawnTiedSpec) and spec.key == self.key)
        return self.turn.build(next(same))


def gpt_layers(config: GPTConfig, seed: int) -> list[LayerSpec]:
    """Layers that follow each other: ``GPT(config, seed)`` from tokens to logits, with the same weights.

    With ``config.tied`` the first and the last layer share one matrix, on whichever ranks they are.
    """
    turn = InTurn(seed)
    embedding = (Embedding, config.vocabulary, config.width)
    body: Sequence[LayerSpec] = list(_body(config, turn, tied=config.tied, embedding=embedding))
    if config.tied:
        return [*body, DrawnTiedSpec(turn, "embedding", *embedding, forward_fn=logits)]
    return [*body, DrawnSpec(turn, Linear, config.width, config.vocabulary, bias=False)]


def _body(config: GPTConfig, turn: InTurn, *, tied: bool, embedding: tuple[Any, ...]) -> Iterator[LayerSpec]:
    yield DrawnTiedSpec(turn, "embedding", *embedding) if tied else DrawnSpec(turn, *embedding)
    yield DrawnSpec(turn, Positions, config)
    for _ in range(config.layers):
        yield DrawnSpec(turn, Block, config)
    yield DrawnSpec(turn, FinalNorm, config.width)
