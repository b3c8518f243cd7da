"""The networks of the DCGAN, and the distance that its samples are measured by."""

from __future__ import annotations

import pytest
import torch

from tests.model_defs.folder import import_from

model, distance = import_from("dcgan", "model"), import_from("dcgan", "distance")
SMALL = model.GanConfig(size=16, latent=4, width=8)


def test_shapes_and_ranges() -> None:
    made = model.Generator(SMALL)(torch.randn(3, 4))
    assert made.shape == (3, 1, 16, 16)
    assert made.abs().max() <= 1
    assert model.Discriminator(SMALL)(made).shape == (3,)


def test_a_result_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    generator, noise = model.Generator(SMALL), torch.randn(4, 4)
    assert torch.allclose(generator(noise)[:1], generator(noise[:1]), atol=1e-6)


def test_weights_depend_on_the_seed_only() -> None:
    before = torch.get_rng_state()
    one, same, other = (model.seeded(model.Generator, SMALL, seed) for seed in (1, 1, 2))
    assert torch.equal(one.first.weight, same.first.weight)
    assert not torch.equal(one.first.weight, other.first.weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_distance_of_two_gaussians_is_the_one_that_can_be_computed_by_hand() -> None:
    """Axis-aligned: |m1 - m2|^2 + sum (s1 - s2)^2."""
    base = torch.randn(50_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    base = (base - base.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(base.T)).T)
    one = base * torch.tensor([1.0, 2.0, 3.0])
    other = base * torch.tensor([1.0, 1.0, 5.0]) + torch.tensor([3.0, 0.0, 0.0])
    assert distance.frechet_distance(one, other) == pytest.approx(9 + 0 + 1 + 4, rel=1e-6)
    assert distance.frechet_distance(one, one) == pytest.approx(0, abs=1e-9)


def test_the_features_are_the_same_everywhere() -> None:
    images = torch.linspace(-1, 1, 2 * 16 * 16).view(2, 1, 16, 16)
    first, second = distance.Features()(images), distance.Features()(images)
    assert torch.equal(first, second)
    assert first.shape == (2, 64)


def test_blots_have_the_mean_and_covariance_of_the_images() -> None:
    images = 0.1 * torch.randn(500, 1, 4, 4, generator=torch.Generator().manual_seed(2)) + 0.3
    blots = distance.gaussian_like(images, 4000, seed=1)
    assert torch.allclose(blots.mean(0), images.mean(0), atol=0.02)
    assert torch.allclose(torch.cov(blots.flatten(1).T), torch.cov(images.flatten(1).T), atol=2e-3)
    assert torch.equal(blots, distance.gaussian_like(images, 4000, seed=1))
