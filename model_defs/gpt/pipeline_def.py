"""The byte-level GPT as a pipeline: the same data, the same initial weights, the same loss."""

from __future__ import annotations

import math
from typing import Any

import torch
from layers import gpt_layers, next_byte_loss
from model import GPTConfig
from model_def import GPTTrial

from zero_trial import PipelineModule


class GPTPipelineTrial(GPTTrial):
    """Trains the GPT as a pipeline; its ds_config says how many stages there are, their schedule
    and their ZeRO stage."""

    def build_model(self, config: GPTConfig, seed: int) -> PipelineModule:
        return PipelineModule(gpt_layers(config, seed), loss_fn=next_byte_loss)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> torch.Tensor:
        return self.engine.train_batch(dataloader_iter)

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.engine.eval_batch(dataloader_iter)
        return {"validation_loss": loss, "val_bits_per_byte": loss / math.log(2)}
