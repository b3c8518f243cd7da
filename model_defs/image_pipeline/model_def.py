"""Which letter is this? A convolutional network as a pipeline, tested on letters of fonts that it
never saw."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from data import letters, samples
from model import NetConfig, letter_net
from torch.nn.functional import cross_entropy

from zero_trial import DataLoader, PipelineModule, ZeroTrial, ZeroTrialContext


class LetterTrial(ZeroTrial):
    """Reports the loss in nats and the accuracy, both on held-out font families (or files)."""

    def __init__(self, context: ZeroTrialContext) -> None:
        self.context, hp, data = context, context.get_hparams(), context.get_data_config()
        config = NetConfig(**hp.model)
        self.train_images, self.val_images = (letters(data, config.size, split) for split in ("train", "validation"))
        net = letter_net(config, len(self.train_images.classes), seed=context.get_trial_seed())
        pipeline = PipelineModule.from_sequential(net, loss_fn=cross_entropy, partition_method="type:Conv2d|Linear")
        self.engine = context.initialize(model=pipeline)

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(
            samples(self.train_images), self.context.get_train_micro_batch_size_per_gpu(), shuffle=True, drop_last=True
        )

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(samples(self.val_images), self.context.get_train_micro_batch_size_per_gpu())

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> torch.Tensor:
        return self.engine.train_batch(dataloader_iter)

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        """Evaluate the micro-batches of one pass; the outputs are on the last stage, which reads
        its labels by itself."""
        count = self.context.get_num_micro_batches_per_slot()
        batches = list(islice(dataloader_iter, count)) if dataloader_iter is not None else []
        feed = iter(batches) if dataloader_iter is not None else None
        loss, logits = self.engine.eval_batch(feed, return_logits=True)
        if logits is None:
            return {}
        right = [
            (output.argmax(1).cpu() == labels).float().mean()
            for output, (_, labels) in zip(logits, batches, strict=True)
        ]
        return {"validation_loss": loss, "accuracy": torch.stack(right).mean()}

    def summary(self) -> dict[str, Any]:
        """Return a description of the letters, and the accuracy of guessing."""
        chance = 1 / len(self.train_images.classes)
        return {
            "chance_accuracy": chance,
            "train_data": self.train_images.describe(),
            "validation_data": self.val_images.describe(),
        }
