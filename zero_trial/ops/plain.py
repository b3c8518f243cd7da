"""The ops in plain torch: in place, with the formulas of ``reference`` and in chunks, so that
temporaries stay small.

Used for devices, dtypes and layouts that no native kernel supports, and as the reference that the
kernels are compared with. Computes in the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops.spec import CODES, OptimizerOp

CHUNK = 1 << 20  # elements


class TensorStep(NamedTuple):
    """One tensor of an op.

    ``own``: its numbers; ``noise``: key and place of its element 0, if its states are in bf16.
    ``native``: kernels support the tensors, which are flat arrays on one device: the parameter in
    fp32, gradient and copy in any of the three types.
    """

    p: Tensor
    g: Tensor
    states: Sequence[Tensor]
    out: Tensor | None
    own: Sequence[Any]
    noise: tuple[int, int] | None = None
    native: bool = False


def steps_of(op: OptimizerOp, given: Sequence[Any]) -> tuple[list[TensorStep], Sequence[Any]]:
    """Return an op's tensors one by one, and shared arguments. Raises ConfigError."""
    end = 2 + len(op.states)
    tensors, (out, keys, places) = given[:end], given[end : end + 3]
    columns, shared = given[end + 3 :][: len(op.number_names)], given[end + 3 + len(op.number_names) :]
    first = tensors[0]
    for each in (*tensors, *columns, out or first, keys or first, places or first):
        if len(each) != len(first):
            raise ConfigError("lists of an op have different lengths", got=f"{len(first)}, {len(each)}")
    if op.step_at is not None and not min(columns[op.step_at], default=1) >= 1:
        raise ConfigError("steps are numbered from 1", where=f"{op.name}_", got=min(columns[op.step_at]))
    found = []
    rows = zip(zip(*tensors, strict=True), zip(*columns, strict=True), strict=True)
    for index, ((p, g, *states), own) in enumerate(rows):
        low = out[index] if out else None
        native = _check(index, p, g, states, low, bool(keys))
        if keys:
            p, g, states = p.view(-1), g.reshape(-1), [state.view(-1) for state in states]
            low = None if low is None else low.view(-1)
        found.append(TensorStep(p, g, states, low, own, (keys[index], places[index]) if keys else None, native))
    return found, shared


def _check(index: int, p: Tensor, g: Tensor, states: Sequence[Tensor], out: Tensor | None, narrow: bool) -> bool:
    """Return whether kernels support these tensors. Raises ConfigError for tensors from which torch
    would compute nonsense, or on which it would fail without a clear message."""
    kind, tensors = (
        torch.bfloat16 if narrow else torch.float32,
        (p, g, *states) if out is None else (p, g, *states, out),
    )
    native, dense, alike, known = p.dtype is torch.float32, True, True, True
    for x in tensors:
        if x.numel() != p.numel():
            got = ", ".join(str(tensor.numel()) for tensor in tensors)
            raise ConfigError(f"tensors number {index} have different sizes", got=got)
        dense, alike = dense and x.is_contiguous(), alike and x.shape == p.shape
        known = known and x.is_floating_point()
        native = native and x.device == p.device and x.dtype in CODES
    if p.requires_grad and torch.is_grad_enabled():
        raise ConfigError(
            "an optimizer step is not differentiable, but the parameter requires grad",
            fix="Call it under torch.no_grad().",
        )
    if not known:
        got = ", ".join(str(tensor.dtype) for tensor in tensors)
        raise ConfigError("an optimizer step needs real floating-point numbers", got=got)
    if not dense and not alike:
        got = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ConfigError("non-contiguous tensors of different shapes have no common element order", got=got)
    stored = states[0].dtype is kind and states[-1].dtype is kind
    flat = dense or (narrow and all(x.is_contiguous() for x in tensors if x is not g))
    if narrow and not (stored and flat and p.dtype is torch.float32):
        raise ConfigError(
            "states in bf16 need contiguous fp32 parameters, states and copies",
            got=f"{p.dtype} with strides {p.stride()}, states in {states[0].dtype}",
        )
    return native and dense and stored


def take_step(op: OptimizerOp, step: TensorStep, shared: Sequence[Any]) -> None:
    """Step one tensor."""
    at, place = op.multiplier_at, 0
    multiplier, rest = shared[at], (*shared[:at], *shared[at + 1 :])
    for p, g, *states, low in _chunks(step.p, step.g, *step.states, step.out):
        g = g.to(p.dtype)
        wide = states if step.noise is None else [state.float() for state in states]
        new, *moments = op.formula(p, g if multiplier == 1.0 else g * multiplier, *wide, *step.own, *rest)
        if step.noise is not None:
            noise = noise_of(step.noise[0], step.noise[1] + place, p.numel(), p.device)
            moments = [round_at_random(*each) for each in zip(moments, noise, strict=False)]
        for target, value in zip((p, *states), (new, *moments), strict=False):
            target.copy_(value)
        if low is not None:
            low.copy_(new)
        place += p.numel()


def _chunks(*tensors: Tensor | None) -> Iterator[list[Any]]:
    """Yield the same elements of all tensors, chunk by chunk; None stays None."""
    together = all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    cut = [x if x is None else x.view(-1).split(CHUNK) if together else (x,) for x in tensors]
    for index in range(len(cut[0] or ())):
        yield [parts if parts is None else parts[index] for parts in cut]


def square_sum(x: Tensor) -> Tensor:
    """Return the sum of squares in float64; not finite if and only if an element is not."""
    if x.is_complex():
        raise ConfigError("square_sum only works on real numbers", got=x.dtype)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for chunk in x.view(-1).split(CHUNK) if x.is_contiguous() else [x]:
        total += chunk.double().square().sum()
    return total


# --- states in bf16: what csrc/include/zt_states.h does, bit for bit ------------------------------
#
# A step reads a state into fp32, computes in fp32 and rounds when it stores. It rounds up or down
# at random, so that the error of each step has mean 0: with beta2 = 0.999 a step changes Adam's
# second moment by less than half the distance between two bfloat16 numbers, and rounding to nearest
# would keep the old value forever. The noise is a hash of the tensor's key (its name and the number
# of the step) and of the element's place in its tensor. It is the same on every device, at every
# ZeRO stage and number of ranks, and after a resume; nothing else needs to be saved.


FORMATS = ("fp32", "bf16")


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


def noise_of(key: int, first: int, numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return sixteen bits per element for each of the two states, both (numel,) int64."""
    place = torch.arange(first, first + numel, dtype=torch.int64, device=device)
    h = (place + key) & 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    h = h ^ (h >> 16)
    return h & 0xFFFF, h >> 16


def round_at_random(values: Tensor, bits: Tensor) -> Tensor:
    """Return fp32 ``values`` (n,) in bf16, rounded up or down by ``bits`` (n,) of noise."""
    raw = values.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    up = torch.where(values.isnan(), 0x7FC0, ((raw + bits) & 0xFFFFFFFF) >> 16)
    return torch.where(up >= 1 << 15, up - (1 << 16), up).to(torch.int16).view(torch.bfloat16)
