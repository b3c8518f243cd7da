"""Tensors, hyperparameters and comparisons that the tests of the CUDA ops share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TILE = 2048
COPY_OF = {torch.float32: torch.bfloat16, torch.bfloat16: torch.bfloat16, torch.float16: torch.float16}
# Every place among eight elements, sizes up to several vectors, and both sides of the borders of
# tiles and chunks.
EVERY_SIZE = (*range(1, 41), *range(TILE - 2, TILE + 10), 2 * TILE - 1, 2 * TILE + 3)
EVERYWHERE = [(shift, n) for shift in range(8) for n in EVERY_SIZE]
LENGTHS = (5, TILE, 1, 3 * TILE + 1, 0, 700, 4 * TILE)


def randn(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def at(shift: int, values: Tensor) -> Tensor:
    """The values, so many elements after an address that is a multiple of 64, and NaN on both
    sides."""
    room = torch.full((values.numel() + shift + 3,), math.nan, dtype=values.dtype)
    room[shift : shift + values.numel()] = values
    assert room.data_ptr() % 64 == 0
    return room[shift : shift + values.numel()]


def bits(x: Tensor) -> Tensor:
    """What must be equal; NaN is NaN, whatever its payload."""
    if x.is_floating_point():
        x = torch.where(x.isnan(), torch.full_like(x, math.nan), x)
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(bits(got), bits(want))


# A step's own numbers, and what all tensors share.
STEPS: dict[str, Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]] = {
    "adam_": lambda t, k: ((1e-3, 0.9, 0.999, 1e-8, 0.1, float(t)), (k, True)),
    "adam_ L2": lambda t, k: ((1e-3, 0.9, 0.99, 1e-6, 0.1, float(t)), (k, False)),
    "lion_": lambda t, k: ((1e-3, 0.9, 0.99, 0.1), (k,)),
    "adagrad_": lambda t, k: ((1e-2, 1e-10, 0.1), (k,)),
    "sgd_": lambda t, k: ((1e-2, 0.9, 0.1, 0.1, t == 1), (False, k)),
    "sgd_ Nesterov": lambda t, k: ((1e-2, 0.9, 0.0, 0.1, t == 1), (True, k)),
}


def call_of(name: str, tensors: Sequence[Tensor], out: Tensor | None, t: int = 1, k: float = 1.0) -> tuple[Any, ...]:
    """The arguments of an op for one tensor."""
    own, shared = STEPS[name](t, k)
    return (*([x] for x in tensors), [] if out is None else [out], [], [], *([x] for x in own), *shared)


def states(name: str, n: int) -> list[Tensor]:
    return [torch.zeros(n) for _ in range(2 if name.startswith("adam_") else 1)]
