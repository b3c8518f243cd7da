"""The byte-level GPT of model_defs/gpt as a pipeline: the same text, the same weights at the start, the same loss."""

from __future__ import annotations

import math
from typing import Any

import torch
from layers import gpt_layers, next_byte_loss
from model import GPTConfig

from zero_trial import PipelineModule, ZeroTrial, ZeroTrialContext
from zero_trial.data import ByteDataset, local_corpus, unigram_bits_per_byte, xz_bits_per_byte
from zero_trial.trial import DataLoader


class GPTPipelineTrial(ZeroTrial):
    """How many stages there are, in which order they work and how ZeRO shards each of them is ds_config's to say."""

    def __init__(self, context: ZeroTrialContext) -> None:
        self.context, hp, data = context, context.get_hparams(), context.get_data_config()
        self.corpus = local_corpus(data.get("source", "stdlib"), max_bytes=data.get("max_bytes"))
        self.tokens_per_sample = hp.model.sequence
        self.train_data = ByteDataset(self.corpus.train, hp.model.sequence)
        self.val_data = ByteDataset(self.corpus.val, hp.model.sequence, data.get("validation_windows"))
        layers = gpt_layers(GPTConfig(**hp.model), seed=context.get_trial_seed())
        self.engine = context.initialize(model=PipelineModule(layers, loss_fn=next_byte_loss))

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(self.train_data, self.context.get_train_micro_batch_size_per_gpu(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.val_data, self.context.get_train_micro_batch_size_per_gpu())

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> torch.Tensor:
        return self.engine.train_batch(dataloader_iter)

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.engine.eval_batch(dataloader_iter)
        return {"validation_loss": loss, "val_bits_per_byte": loss / math.log(2)}

    def summary(self) -> dict[str, Any]:
        """The baselines, measured on the same held-out files, and which text it was."""
        unigram = unigram_bits_per_byte(self.corpus.train, self.val_data.predicted_bytes())
        xz = xz_bits_per_byte(self.corpus.val)
        return {"unigram_bits_per_byte": unigram, "xz_bits_per_byte": xz, "data": self.corpus.describe()}
