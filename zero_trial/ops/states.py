"""Optimizer states in fewer bits, in plain torch: what csrc/include/zt_states.h does, bit for bit.

    fp32    4 bytes per element of a state
    bf16    2 bytes
    8bit    1 byte, and 2 for the scale of each block of 32 neighbours: 1.0625 in whole blocks

A step reads a state into fp32, computes in fp32 and rounds when it stores. It rounds up or down at
random, so that the error of each step has mean 0: with beta2 = 0.999 a step changes Adam's second
moment by less than half the distance of two bfloat16 numbers, and rounding to nearest would keep
the old value for ever. The noise is a hash of the tensor's key (its name and the number of the
step) and of the element's place in its tensor. It is the same on every device, at every ZeRO stage
and number of ranks, and after a resume; nothing else needs to be saved.

Codes of 8 bits follow Dettmers et al. 2022 ("8-bit Optimizers via Block-wise Quantization"): a
scale for each block, and codes that are dense near 0. They are spaced by a power (Xi et al. 2024,
COAT) instead of by a table: signed states are ``scale (k / 127) |k / 127|``, squares ``scale (k /
255)^4``. The scale is the block's largest magnitude, rounded up to bfloat16. A block is 32
elements, the ALIGN of a flat buffer, so that no shard of any stage or number of ranks cuts one and
a checkpoint moves codes and scales as they are.

    a square above 0    never becomes code 0: Adam divides by its root
    largest is NaN or infinite    the whole block reads as NaN
    largest is subnormal    the block is stored as 0
"""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from zero_trial.errors import ConfigError

FORMATS = ("fp32", "bf16", "8bit")
BLOCK = 32  # elements with a common scale
STATE_BF16, STATE_8BIT = 1, 4  # ZtState of zt_states.h
_SCALE = ".scale"


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


def scale_name(kind: str) -> str:
    """Return the name of the scales of state ``kind``."""
    return kind + _SCALE


def is_scale(kind: str) -> bool:
    """Return whether the state of that name holds the scales of another one."""
    return isinstance(kind, str) and kind.endswith(_SCALE)


def blocks_of(numel: int) -> int:
    """Return how many blocks have so many elements."""
    return -(-numel // BLOCK)


def dtype_of(name: str, signed: bool) -> torch.dtype:
    """Return the dtype in which a state is stored."""
    if name == "bf16":
        return torch.bfloat16
    return torch.int8 if signed else torch.uint8


def noise(key: int, first: int, numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return sixteen bits per element for the first and for the second state, (numel,) int64
    each."""
    place = torch.arange(first, first + numel, dtype=torch.int64, device=device)
    h = (place + key) & 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    h = h ^ (h >> 16)
    return h & 0xFFFF, h >> 16


def widen(stored: Tensor, scale: Tensor | None) -> Tensor:
    """Return the fp32 values of a stored state (n,); ``scale`` (blocks,) of 8-bit codes."""
    if scale is None:
        return stored.float()
    signed = stored.dtype == torch.int8
    t = stored.float() * torch.tensor(1 / 127 if signed else 1 / 255, dtype=torch.float32, device=stored.device)
    square = t * (t.abs() if signed else t)
    return (square if signed else square * square) * _each(scale.float(), stored.numel())


def narrow(values: Tensor, stored: Tensor, scale: Tensor | None, bits: Tensor) -> None:
    """Store fp32 ``values`` (n,) in ``stored``, and the scales of 8-bit codes in ``scale``.

    ``bits`` (n,) are :func:`noise`; half of their range, 1 << 15, rounds to nearest.
    """
    if scale is None:
        stored.copy_(_to_bf16(values, bits))
        return
    padded = torch.nn.functional.pad(values, (0, scale.numel() * BLOCK - values.numel()))
    magnitude = _bits(padded) & 0x7FFFFFFF
    largest = magnitude.view(-1, BLOCK).amax(dim=1)
    up = (largest + 0xFFFF) >> 16
    up = torch.where(largest < 0x00800000, 0, torch.where(up >= 0x7F80, 0x7FC0, up))
    scale.copy_(up.to(torch.int16).view(torch.bfloat16))
    wide = scale.float()
    inverse = torch.where(up == 0, torch.zeros_like(wide), torch.ones_like(wide) / wide)
    stored.copy_(_codes(values, _each(inverse, values.numel()), bits, stored.dtype == torch.int8))


def _to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    raw = _bits(values)
    up = torch.where(values.isnan(), 0x7FC0, ((raw + bits) & 0xFFFFFFFF) >> 16)
    return torch.where(up >= 1 << 15, up - (1 << 16), up).to(torch.int16).view(torch.bfloat16)


def _codes(values: Tensor, inverse: Tensor, bits: Tensor, signed: bool) -> Tensor:
    """Return the code below or above each value, so that the mean over ``bits`` is the value."""
    most = 127.0 if signed else 255.0
    part = values.abs() * inverse * (most**2 if signed else most**4)
    root = part.sqrt() if signed else part.sqrt().sqrt()
    k = torch.where(root < most, root, most).floor()  # false for NaN
    odd = k + k + 1
    below = k * k if signed else (k * k) * (k * k)
    step = odd if signed else ((k * k + odd) + k * k) * odd
    up = torch.where(bits.float() * 2.0**-16 * step < part - below, k + 1, k)
    code = up.clamp(max=most)
    if signed:
        return torch.where(values < 0, -code, code).to(torch.int8)
    return torch.where(part > 0, code.clamp(min=1.0), code).to(torch.uint8)


def _bits(values: Tensor) -> Tensor:
    """Return the bits of fp32 values as numbers from 0 to 2^32 - 1."""
    return values.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def _each(per_block: Tensor, numel: int) -> Tensor:
    """Return what each of ``numel`` elements has of its block."""
    return per_block.repeat_interleave(BLOCK)[:numel]
