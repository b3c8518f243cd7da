"""Bits per byte that need no model: what a loss has to beat before it means anything."""

from __future__ import annotations

import lzma

import torch

from zero_trial.errors import DataError

BYTE_VALUES = 256


def unigram_bits_per_byte(train: torch.Tensor, val: torch.Tensor) -> float:
    """Cross entropy of ``val`` under the byte frequencies of ``train``, in bits per byte.

    Both are 1-D uint8. Add-one (Laplace) smoothing: p(b) = (count(b) + 1) / (len(train) + 256), so a byte that
    training never showed costs a finite number of bits.
    """
    _not_empty(val)
    counts = torch.bincount(train.long(), minlength=BYTE_VALUES).double() + 1.0
    bits = -torch.log2(counts / counts.sum())
    return float(bits[val.long()].mean())


def xz_bits_per_byte(val: torch.Tensor, max_bytes: int = 4_000_000) -> float:
    """Size of ``val`` (1-D uint8, its first ``max_bytes``) as one xz stream at preset 6, in bits per input byte.

    xz sees the validation text alone and learns while it reads; the model has seen other files before. It is a
    yardstick, not a like for like rival.
    """
    _not_empty(val)
    sample = val[:max_bytes].numpy().tobytes() if max_bytes < val.numel() else val.numpy().tobytes()
    return 8.0 * len(lzma.compress(sample, preset=6)) / len(sample)


def _not_empty(val: torch.Tensor) -> None:
    if val.numel() == 0:
        raise DataError("there is no validation text to measure a baseline on", where="baseline", got="0 bytes")
