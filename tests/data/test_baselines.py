"""The two yardsticks, against numbers that can be worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from zero_trial.data.text import unigram_bits_per_byte, xz_bits_per_byte
from zero_trial.errors import DataError


def test_unigram_by_hand() -> None:
    train = torch.tensor([7, 7, 7, 9], dtype=torch.uint8)  # p(7) = 4/260, p(9) = 2/260, anything else 1/260
    val = torch.tensor([7, 9, 200], dtype=torch.uint8)
    expected = -(math.log2(4 / 260) + math.log2(2 / 260) + math.log2(1 / 260)) / 3
    assert unigram_bits_per_byte(train, val) == pytest.approx(expected, rel=1e-12)


def test_unigram_without_training_text_is_eight_bits() -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    assert unigram_bits_per_byte(nothing, torch.tensor([1, 2], dtype=torch.uint8)) == pytest.approx(8.0)


def test_xz_finds_repetition_and_not_noise() -> None:
    noise = torch.randint(0, 256, (20_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert xz_bits_per_byte(noise) > 8.0
    assert xz_bits_per_byte(noise[:100].repeat(200)) < 0.2
    assert xz_bits_per_byte(noise, max_bytes=5) == pytest.approx(
        8 * 64 / 5, rel=0.2
    )  # a container of some 60 bytes round 5 bytes


def test_no_validation_text_is_an_error() -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    for measure in (lambda: unigram_bits_per_byte(nothing, nothing), lambda: xz_bits_per_byte(nothing)):
        with pytest.raises(DataError, match="no validation text"):
            measure()
