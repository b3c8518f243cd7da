"""A byte-level GPT on local text: the trial in thirty lines."""

from __future__ import annotations

import math
from typing import Any

import torch
from model import GPT, GPTConfig
from torch import nn

from zero_trial import DataLoader, ZeroTrial, ZeroTrialContext
from zero_trial.data import ByteDataset, local_corpus, unigram_bits_per_byte, xz_bits_per_byte


class GPTTrial(ZeroTrial):
    """Trains on the text that ``data`` names; reports nats per byte and bits per byte of held-out
    files."""

    def __init__(self, context: ZeroTrialContext) -> None:
        self.context, hp, data = context, context.get_hparams(), context.get_data_config()
        self.corpus = local_corpus(data.get("source", "stdlib"), max_bytes=data.get("max_bytes"))
        self.tokens_per_sample = hp.model.sequence
        self.train_data = ByteDataset(self.corpus.train, hp.model.sequence)
        self.val_data = ByteDataset(self.corpus.val, hp.model.sequence, data.get("validation_windows"))
        self.engine = context.initialize(model=self.build_model(GPTConfig(**hp.model), context.get_trial_seed()))

    def build_model(self, config: GPTConfig, seed: int) -> nn.Module:
        return GPT(config, seed)

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(self.train_data, self.context.get_train_micro_batch_size_per_gpu(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.val_data, self.context.get_train_micro_batch_size_per_gpu())

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> torch.Tensor:
        inputs, targets = self.context.to_device(next(dataloader_iter))
        loss = self.engine(inputs, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        inputs, targets = self.context.to_device(next(dataloader_iter))
        loss = self.engine(inputs, targets)
        return {"validation_loss": loss, "val_bits_per_byte": loss / math.log(2)}

    def summary(self) -> dict[str, Any]:
        """Return baselines, measured on the same held-out files, and a description of the text."""
        unigram = unigram_bits_per_byte(self.corpus.train, self.val_data.predicted_bytes())
        xz = xz_bits_per_byte(self.corpus.val)
        return {"unigram_bits_per_byte": unigram, "xz_bits_per_byte": xz, "data": self.corpus.describe()}
