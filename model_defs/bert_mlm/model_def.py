"""A Transformer encoder that predicts masked bytes of local text, as a trial."""

from __future__ import annotations

import math
from typing import Any

import torch
from data import VOCABULARY, MaskedBytes
from model import EncoderConfig, MaskedLanguageModel

from zero_trial import DataLoader, ZeroTrial, ZeroTrialContext
from zero_trial.data import local_corpus, unigram_bits_per_byte


class BertTrial(ZeroTrial):
    """Reports the validation loss in nats and in bits per masked byte."""

    def __init__(self, context: ZeroTrialContext) -> None:
        self.context, hp, data = context, context.get_hparams(), context.get_data_config()
        seed, sequence = context.get_trial_seed(), hp.model.sequence
        self.corpus = local_corpus(data.get("source", "stdlib"), max_bytes=data.get("max_bytes"))
        self.tokens_per_sample = sequence
        self.train_data = MaskedBytes(self.corpus.train, sequence, seed)
        self.val_data = MaskedBytes(self.corpus.val, sequence, seed, data.get("validation_windows"))
        config = EncoderConfig(vocabulary=VOCABULARY, **hp.model)
        self.engine = context.initialize(model=MaskedLanguageModel(config, seed))

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(self.train_data, self.context.get_train_micro_batch_size_per_gpu(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.val_data, self.context.get_train_micro_batch_size_per_gpu())

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> torch.Tensor:
        tokens, targets = self.context.to_device(next(dataloader_iter))
        loss = self.engine(tokens, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        tokens, targets = self.context.to_device(next(dataloader_iter))
        loss = self.engine(tokens, targets)
        return {"validation_loss": loss, "val_bits_per_masked_byte": loss / math.log(2)}

    def summary(self) -> dict[str, Any]:
        """Return the baseline: byte frequencies of the training text, measured on the very bytes
        that are masked."""
        unigram = unigram_bits_per_byte(self.corpus.train, self.val_data.predicted_bytes())
        return {"unigram_bits_per_masked_byte": unigram, "data": self.corpus.describe()}
