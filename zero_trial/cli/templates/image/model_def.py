"""A small convolutional network that recognizes letters in unseen fonts."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from zero_trial import DataLoader, ZeroTrial, ZeroTrialContext
from zero_trial.data import GlyphImages, glyph_images


class ConvNet(nn.Module):
    """Images (batch, 1, size, size) -> logits (batch, classes)."""

    def __init__(self, size: int, width: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.second = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.head = nn.Linear(2 * width * (size // 4) ** 2, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(images)), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        logits: Tensor = self.head(x.flatten(1))
        return logits


class ImageTrial(ZeroTrial):
    """Reports the loss and the fraction of correctly recognized letters, on held-out fonts."""

    def __init__(self, context: ZeroTrialContext) -> None:
        self.context, hp, data = context, context.get_hparams(), context.get_data_config()
        self.train_images = glyph_images(hp.model.size, data["characters"], "train", variants=data["variants"])
        self.val_images = glyph_images(hp.model.size, data["characters"], "validation")
        self.engine = context.initialize(model=ConvNet(**hp.model, classes=len(data["characters"])))

    def build_training_data_loader(self) -> DataLoader:
        batch = self.context.get_train_micro_batch_size_per_gpu()
        return DataLoader(dataset(self.train_images), batch, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(dataset(self.val_images), self.context.get_train_micro_batch_size_per_gpu())

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Tensor:
        images, labels = self.context.to_device(next(dataloader_iter))
        loss = F.cross_entropy(self.engine(images), labels)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        images, labels = self.context.to_device(next(dataloader_iter))
        logits = self.engine(images)
        right = (logits.argmax(1) == labels).float().mean()
        return {"validation_loss": F.cross_entropy(logits, labels), "accuracy": right}

    def summary(self) -> dict[str, Any]:
        """Return a description of the letters."""
        return {"data": self.val_images.describe()}


def dataset(images: GlyphImages) -> TensorDataset:
    """Return images as floats from 0 (paper) to 1 (ink), with their labels."""
    return TensorDataset(images.images.float() / 255, images.labels)
