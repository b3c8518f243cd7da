"""One seed for every generator."""

from __future__ import annotations

import random
import sys

import torch

from zero_trial.trial.trial import seed_everything


def draw() -> list[float]:
    numpy = sys.modules.get("numpy")
    return [random.random(), torch.rand(()).item(), *([float(numpy.random.rand())] if numpy else [])]


def test_the_same_seed_the_same_numbers() -> None:
    seed_everything(5)
    first = draw()
    seed_everything(5)
    assert draw() == first
    seed_everything(6)
    assert all(a != b for a, b in zip(draw(), first, strict=True))
