"""A small convolutional network as one ``nn.Sequential``: the idea of AlexNet (Krizhevsky et al.
2012) at the size of a letter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class NetConfig:
    """``size``: side of the square grey images; ``width``: channels of the first layer, the others
    follow."""

    size: int = 28
    width: int = 32
    hidden: int = 256
    dropout: float = 0.2


def letter_net(config: NetConfig, classes: int, seed: int) -> nn.Sequential:
    """Build (batch, 1, size, size) -> (batch, classes). The weights depend on the seed only;
    torch's random state does not change.
    """
    first, second, third = config.width, 2 * config.width, 3 * config.width
    side = config.size // 2 // 2 // 2  # three times halved
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, first, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(second, third, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(third, second, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(config.dropout),
            nn.Linear(second * side * side, config.hidden),
            nn.ReLU(),
            nn.Linear(config.hidden, classes),
        )
