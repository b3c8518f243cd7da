"""A Transformer encoder that predicts masked bytes (Devlin et al. 2019), with pre-norm blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02  # Devlin et al. 2019
IGNORED = -100  # a target that does not count


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of an encoder; the vocabulary is 256 bytes and the special tokens of ``data.py``."""

    vocabulary: int = 259
    sequence: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.1


class Linear(nn.Linear):
    """A linear layer that starts from a narrow normal distribution, and from zero bias."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """A table of vectors that starts from a narrow normal distribution."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class EncoderBlock(nn.Module):
    """One encoder block: every position sees every other; (batch, sequence, width) -> the same.

    The query, key and value layer has no bias, because the gradient of a key bias is zero in
    theory.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = Linear(config.width, 3 * config.width, bias=False)
        self.out = Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        hidden = 4 * config.width
        self.mlp = nn.Sequential(Linear(config.width, hidden), nn.GELU(), Linear(hidden, config.width))
        self.drop = nn.Dropout(config.dropout)

    def attend(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attend(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class MaskedLanguageModel(nn.Module):
    """Masked tokens (batch, sequence) int64 -> logits (batch, sequence, vocabulary), or the mean
    loss over targets.

    Targets are the original tokens at masked places and ``IGNORED`` elsewhere; the loss is in nats
    per masked byte. The output layer shares its matrix with the token embedding, as in BERT. With
    ``seed`` the weights depend on the seed only, and torch's own random state is left as it was.
    """

    def __init__(self, config: EncoderConfig, seed: int | None = None) -> None:
        if config.width % config.heads:
            raise ValueError(f"width {config.width} must be a multiple of heads {config.heads}")
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            self.tokens = Embedding(config.vocabulary, config.width)
            self.positions = Embedding(config.sequence, config.width)
            self.norm = nn.LayerNorm(config.width)
            self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.layers))
            self.transform = nn.Sequential(
                nn.LayerNorm(config.width), Linear(config.width, config.width), nn.GELU(), nn.LayerNorm(config.width)
            )
            self.decoder = Linear(config.width, config.vocabulary)
        self.decoder.weight = self.tokens.weight
        self.drop = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.norm(self.tokens(tokens) + self.positions(places)))
        for block in self.blocks:
            x = block(x)
        logits = self.decoder(self.transform(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
