"""A byte-level language model, trained on the text in const.yaml."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_trial import DataLoader, ZeroTrial, ZeroTrialContext
from zero_trial.data import ByteDataset, local_corpus, unigram_bits_per_byte

BYTES = 256


class Block(nn.Module):
    """Causal attention and two linear layers with residuals, on (batch, sequence, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        after: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return after


class LanguageModel(nn.Module):
    """Inputs and targets, both (batch, sequence) int64 -> the mean loss per byte, in nats."""

    def __init__(self, sequence: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.bytes(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class TextTrial(ZeroTrial):
    """Reports nats per byte and bits per byte on held-out files."""

    def __init__(self, context: ZeroTrialContext) -> None:
        self.context, hp, data = context, context.get_hparams(), context.get_data_config()
        self.corpus = local_corpus(data["source"])
        self.tokens_per_sample = hp.model.sequence
        self.train_data = ByteDataset(self.corpus.train, hp.model.sequence)
        self.val_data = ByteDataset(self.corpus.val, hp.model.sequence, windows=data["validation_windows"])
        self.engine = context.initialize(model=LanguageModel(**hp.model))

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(self.train_data, self.context.get_train_micro_batch_size_per_gpu(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.val_data, self.context.get_train_micro_batch_size_per_gpu())

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Tensor:
        inputs, targets = self.context.to_device(next(dataloader_iter))
        loss: Tensor = self.engine(inputs, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        inputs, targets = self.context.to_device(next(dataloader_iter))
        loss = self.engine(inputs, targets)
        return {"validation_loss": loss, "val_bits_per_byte": loss / math.log(2)}

    def summary(self) -> dict[str, Any]:
        """Return the baseline of byte frequencies, and a description of the text."""
        unigram = unigram_bits_per_byte(self.corpus.train, self.val_data.predicted_bytes())
        return {"unigram_bits_per_byte": unigram, "data": self.corpus.describe()}
