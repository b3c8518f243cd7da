"""A generator and a discriminator of small grey images, after DCGAN (Radford et al. 2016) at the
size of a letter.

Group norm stands where DCGAN has batch norm: its result does not depend on how a batch is cut into
micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

GROUPS = 8


@dataclass(frozen=True)
class GanConfig:
    """``size``: side of the images, a multiple of 8; ``latent``: numbers that an image is made
    from; ``width``: channels at the full size / 2."""

    size: int = 24
    latent: int = 32
    width: int = 16


class Generator(nn.Module):
    """Noise (batch, latent) -> images (batch, 1, size, size) between -1 and 1."""

    def __init__(self, config: GanConfig) -> None:
        super().__init__()
        self.start = config.size // 8
        self.wide = 4 * config.width
        self.first = nn.Linear(config.latent, self.wide * self.start**2)
        self.layers = nn.Sequential(
            _norm(self.wide),
            nn.ReLU(),
            *_up(self.wide, 2 * config.width),
            *_up(2 * config.width, config.width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(config.width, 1, 5, padding=2),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.layers(self.first(noise).view(-1, self.wide, self.start, self.start))


class Discriminator(nn.Module):
    """Images (batch, 1, size, size) -> one logit each, (batch,): positive for a letter of a
    font."""

    def __init__(self, config: GanConfig) -> None:
        super().__init__()
        width = config.width
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            *_down(width, 2 * width),
            *_down(2 * width, 4 * width),
            nn.Flatten(),
            nn.Linear(4 * width * (config.size // 8) ** 2, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).squeeze(1)


def seeded(kind: type[nn.Module], config: GanConfig, seed: int) -> nn.Module:
    """Build a network whose weights depend on the seed only; torch's own random state does not
    change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = kind(config)
        for layer in made.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.orthogonal_(layer.weight)
                nn.init.zeros_(layer.bias)
    return made


def _norm(channels: int) -> nn.Module:
    return nn.GroupNorm(min(GROUPS, channels), channels)


def _up(before: int, after: int) -> list[nn.Module]:
    """Double the side. Doubling pixels before a convolution avoids the checkerboard of a transposed
    one (Odena et al. 2016).
    """
    return [nn.Upsample(scale_factor=2), nn.Conv2d(before, after, 3, padding=1), _norm(after), nn.ReLU()]


def _down(before: int, after: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 4, stride=2, padding=1), _norm(after), nn.LeakyReLU(0.2)]
