"""How far generated letters are from real ones: the Fréchet distance of Heusel et al. 2017 over the
features of a small fixed network.

The network is random and the same everywhere (seed 0), so nothing has to be downloaded; distances
compare at the same size of image only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

FEATURES = 64
BATCH = 256


class Features(nn.Module):
    """Images (batch, 1, size, size) between -1 and 1 -> features (batch, FEATURES), not trained."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.Sequential(
                nn.Conv2d(1, 32, 5, stride=2, padding=2),
                nn.ReLU(),
                nn.Conv2d(32, 64, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(4),
                nn.Flatten(),
                nn.Linear(64 * 16, FEATURES),
            )
            for layer in self.layers:
                if isinstance(layer, (nn.Conv2d, nn.Linear)):
                    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.layers(part) for part in images.split(BATCH)]).double()


def frechet_distance(one: Tensor, other: Tensor) -> float:
    """|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)) of two sets of features, (n, d) float64 (Dowson &
    Landau 1982; Heusel et al. 2017, eq. 6)."""
    means = one.mean(0), other.mean(0)
    first, second = (_covariance(features) for features in (one, other))
    half = _root(first)
    # (C1 C2)^(1/2) has the trace of (C1^(1/2) C2 C1^(1/2))^(1/2), which is symmetric.
    cross = torch.linalg.eigvalsh(half @ second @ half).clamp(min=0).sqrt().sum()
    distance = (means[0] - means[1]).square().sum() + first.trace() + second.trace() - 2 * cross
    return max(float(distance), 0.0)


def gaussian_like(images: Tensor, count: int, seed: int) -> Tensor:
    """Draw ``count`` images with the mean and covariance of ``images``: blots, which a generator
    has to beat."""
    flat = images.flatten(1).double()
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, flat.shape[1], generator=generator, dtype=torch.float64)
    drawn = flat.mean(0) + noise @ _root(_covariance(flat))
    return drawn.clamp(-1, 1).float().view(count, *images.shape[1:])


def _covariance(features: Tensor) -> Tensor:
    centred = features - features.mean(0)
    return centred.T @ centred / max(len(features) - 1, 1)


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ (values.clamp(min=0).sqrt()[:, None] * vectors.T)
