"""Optimizer states in bf16, in plain torch: what csrc/include/zt_states.h does, bit for bit.

A step reads a state into fp32, computes in fp32 and rounds when it stores. It rounds up or down at
random, so that the error of each step has mean 0: with beta2 = 0.999 a step changes Adam's second
moment by less than half the distance of two bfloat16 numbers, and rounding to nearest would keep
the old value forever. The noise is a hash of the tensor's key (its name and the number of the step)
and of the element's place in its tensor. It is the same on every device, at every ZeRO stage and
number of ranks, and after a resume; nothing else needs to be saved.
"""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from zero_trial.errors import ConfigError

FORMATS = ("fp32", "bf16")


class StatePart(NamedTuple):
    """Elements [start, stop) of a piece are those of one tensor from its element ``first`` on;
    ``seed`` is the tensor's."""

    seed: int
    first: int
    start: int
    stop: int


def require_format(name: str, where: str) -> str:
    """Return ``name``. Raises ConfigError for an unknown format."""
    if name not in FORMATS:
        raise ConfigError(
            "no such format of optimizer states", where=where, got=repr(name), expected=", ".join(FORMATS)
        )
    return name


def seed_of(name: str) -> int:
    """Return the seed of the tensor of that name."""
    return crc32(name.encode())


def key_of(seed: int, step: float) -> int:
    """Return the key of a tensor's noise in a step."""
    return crc32(int(step).to_bytes(8, "little"), seed)


def noise(key: int, first: int, numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return sixteen bits per element for the first and for the second state, (numel,) int64
    each."""
    place = torch.arange(first, first + numel, dtype=torch.int64, device=device)
    h = (place + key) & 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    h = h ^ (h >> 16)
    return h & 0xFFFF, h >> 16


def round_at_random(values: Tensor, bits: Tensor) -> Tensor:
    """Return fp32 ``values`` (n,) in bf16, rounded up or down by ``bits`` (n,) of :func:`noise`."""
    raw = values.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    up = torch.where(values.isnan(), 0x7FC0, ((raw + bits) & 0xFFFFFFFF) >> 16)
    return torch.where(up >= 1 << 15, up - (1 << 16), up).to(torch.int16).view(torch.bfloat16)
