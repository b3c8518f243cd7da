"""The ops in plain torch: in place, with the formulas of ``reference`` and in chunks, so that
temporaries stay small.

For devices, dtypes and layouts that no native kernel takes, and what the kernels are compared with.
Computes in the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops import states as storage
from zero_trial.ops.spec import CODES, OptimizerOp

CHUNK = 1 << 20  # elements


class TensorStep(NamedTuple):
    """One tensor of an op.

    ``own``: its numbers; ``noise``: key and place of its element 0, if its states are in bf16.
    ``native``: kernels take the tensors, which are flat arrays on one device: the parameter in
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
    """Return an op's tensors one by one, and the shared arguments. Raises ConfigError for what no
    implementation can compute."""
    end = 2 + len(op.states)
    columns, shared = given[end + 3 :][: len(op.number_names)], given[end + 3 + len(op.number_names) :]
    found = tensor_steps(given[:end], given[end], columns, given[end + 1 : end + 3])
    if op.step_at is not None and not min(columns[op.step_at], default=1) >= 1:
        raise ConfigError("steps are numbered from 1", where=f"{op.name}_", got=min(columns[op.step_at]))
    return found, shared


def tensor_steps(
    tensors: Sequence[Sequence[Tensor]],
    out: Sequence[Tensor],
    columns: Sequence[Sequence[Any]],
    noise: Sequence[Sequence[int]] = ((), ()),
) -> list[TensorStep]:
    """Put lists together, one entry per tensor. ``tensors``: p, g and one or two states; ``noise``:
    keys and places."""
    count, (keys, places) = len(tensors[0]), noise
    for each in (*tensors, *columns, out or tensors[0], keys or tensors[0], places or tensors[0]):
        if len(each) != count:
            raise ConfigError("lists of an op have different lengths", got=f"{count}, {len(each)}")
    found = []
    for index, ((p, g, *states), own) in enumerate(
        zip(zip(*tensors, strict=True), zip(*columns, strict=True), strict=True)
    ):
        low = out[index] if out else None
        native = _check(index, p, g, states, low, bool(keys))
        if keys:
            p, g, states = p.view(-1), g.reshape(-1), [state.view(-1) for state in states]
            low = None if low is None else low.view(-1)
        found.append(TensorStep(p, g, states, low, own, (keys[index], places[index]) if keys else None, native))
    return found


def _check(index: int, p: Tensor, g: Tensor, states: Sequence[Tensor], out: Tensor | None, narrow: bool) -> bool:
    """Return whether kernels take these tensors. Raises ConfigError for what torch would compute
    nonsense from, or fail on without a reason."""
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
            "an optimizer step has no derivative, and the parameter requires one",
            fix="Call it under torch.no_grad().",
        )
    if not known:
        got = ", ".join(str(tensor.dtype) for tensor in tensors)
        raise ConfigError("an optimizer step works on real floating point numbers", got=got)
    if not dense and not alike:
        got = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ConfigError("tensors of different shapes that are not contiguous have no common order", got=got)
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
            noise = storage.noise(step.noise[0], step.noise[1] + place, p.numel(), p.device)
            moments = [storage.round_at_random(*each) for each in zip(moments, noise, strict=False)]
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


# LAMB takes two passes. Between them the norms of a tensor that is cut over ranks are added up.


def lamb_moments(steps: Sequence[TensorStep], multiplier: float, bias_correction: bool) -> Tensor:
    """Update the moments of each tensor in place; return the sums of p^2 and of direction^2, (2,
    tensors) in float64. ``own``: beta1, beta2, eps, weight decay, step."""
    squares = torch.zeros(2, len(steps), dtype=torch.float64, device=steps[0].p.device if steps else None)
    for i, (p, g, (m, v), _, own, _, _) in enumerate(steps):
        h = g.to(p.dtype) * multiplier
        m.add_(h - m, alpha=1 - own[0])
        v.add_(h * h - v, alpha=1 - own[1])
        squares[0, i], squares[1, i] = square_sum(p), square_sum(_direction(p, m, v, own, bias_correction))
    return squares


def lamb_apply(steps: Sequence[TensorStep], ratio: Tensor, bias_correction: bool) -> None:
    """Take p -= lr ratio direction; ``ratio`` (tensors,) in fp32. ``own``: lr, and as above."""
    for i, (p, _, (m, v), out, (lr, *own), _, _) in enumerate(steps):
        p.sub_(_direction(p, m, v, own, bias_correction) * (ratio[i].to(p.dtype) * lr))
        if out is not None:
            out.copy_(p)


def _direction(p: Tensor, m: Tensor, v: Tensor, own: Sequence[float], corrected: bool) -> Tensor:
    beta1, beta2, eps, decay, t = own
    c1, c2 = (1 - beta1**t, 1 - beta2**t) if corrected else (1.0, 1.0)
    # You et al. 2020, Algorithm 2, lines 9 to 11
    return (m / c1) / ((v / c2).sqrt() + eps) + decay * p


def square_sum(x: Tensor) -> Tensor:
    """Return the sum of squares in float64, a scalar tensor; not finite if and only if an element
    is not."""
    if x.is_complex():
        raise ConfigError("square_sum works on real numbers", got=x.dtype)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for chunk in x.view(-1).split(CHUNK) if x.is_contiguous() else [x]:
        total += chunk.double().square().sum()
    return total
