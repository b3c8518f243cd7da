"""A small GPT over bytes: pre-norm decoder blocks with causal attention (Radford et al. 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02  # Radford et al. 2019


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; ``sequence`` is the longest input in tokens."""

    vocabulary: int = 256
    sequence: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0
    tied: bool = False  # one matrix for the token embedding and the output layer


class Linear(nn.Linear):
    """A linear layer that starts from a normal distribution of a given width, and from zero
    bias."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, std: float = INIT_STD) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """A table of vectors that starts from a normal distribution."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class Attention(nn.Module):
    """Multi-head causal self-attention: (batch, sequence, width) -> the same.

    The query, key and value layer has no bias: softmax ignores what is the same for all keys, so
    the gradient of a key bias is zero in theory and rounding noise in practice, which Adam would
    turn into full steps.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = Linear(config.width, 3 * config.width, bias=False)
        self.out = Linear(config.width, config.width, std=INIT_STD / math.sqrt(2 * config.layers))

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))


class Block(nn.Module):
    """One decoder block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = Linear(config.width, 4 * config.width)
        self.down = Linear(4 * config.width, config.width, std=INIT_STD / math.sqrt(2 * config.layers))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class GPT(nn.Module):
    """Tokens (batch, sequence) int64 -> logits (batch, sequence, vocabulary), or the mean loss if
    targets are given.

    The loss is the cross entropy per token in nats; divided by ln 2 it is bits per byte. With
    ``seed`` the weights depend on the seed only, and torch's own random state is left as it was.
    """

    def __init__(self, config: GPTConfig, seed: int | None = None) -> None:
        if config.width % config.heads:
            raise ValueError(f"width {config.width} must be a multiple of heads {config.heads}")
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            self.tokens = Embedding(config.vocabulary, config.width)
            self.positions = Embedding(config.sequence, config.width)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.head = Linear(config.width, config.vocabulary, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
