"""The ops in plain torch: in place, with the formulas of ``reference`` and in chunks, so that
temporaries stay small.

For devices, dtypes and layouts that no native kernel takes, and what the kernels are compared with.
Computes in the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops import states as storage
from zero_trial.ops.spec import OptimizerOp

CHUNK = 1 << 20  # elements

Step = Callable[..., None]


def skips(found_inf: Tensor | None) -> bool:
    """Return whether to skip the step. Reads the device."""
    return found_inf is not None and bool(found_inf)


def step_of(op: OptimizerOp) -> Step:
    """Make the op over one tensor; it takes the arguments of its schema."""
    end, at = 2 + len(op.states), len(op.number_names) + op.multiplier_at

    def step(*given: Any) -> None:
        tensors, (out, found_inf), numbers = given[:end], given[end : end + 2], given[end + 2 :]
        if op.step_at is not None:
            op.check_step(numbers[op.step_at])
        if skips(found_inf):
            return
        multiplier, rest = numbers[at], numbers[:at] + numbers[at + 1 :]
        for P, G, *states, low in _chunks(*tensors, out):
            new = op.formula(P, _gradient(G, P, multiplier), *states, *rest)
            _store(*zip((P, *states), new, strict=False), (low, new[0]))

    return step


def in_turn(op: OptimizerOp, step: Step) -> Step:
    """Make the op over many tensors from ``step``, the one over one tensor. It reads ``factor`` on
    the host."""
    end, count = 2 + len(op.states), len(op.number_names)

    def steps(*given: Any) -> None:
        tensors, (out, found_inf, factor), rest = given[:end], given[end : end + 3], given[end + 3 :]
        columns, shared = rest[:count], list(rest[count:])
        same_lengths(*tensors, *columns, *([out] if out else []))
        shared[op.multiplier_at] = times(shared[op.multiplier_at], factor)
        rows = zip(zip(*tensors, strict=True), zip(*columns, strict=True), strict=True)
        for index, (each, own) in enumerate(rows):
            step(*each, out[index] if out else None, found_inf, *own, *shared)

    return steps


@dataclass(frozen=True)
class NarrowCall:
    """One tensor of an op whose states are in bf16."""

    p: Tensor
    g: Tensor
    states: Sequence[Tensor]
    out: Tensor | None
    key: int
    first: int
    own: tuple[Any, ...]


def narrow_calls(op: OptimizerOp, given: Sequence[Any]) -> tuple[list[NarrowCall], Any, Any, list[Any]]:
    """Return an op's tensors one by one, found_inf, factor and the shared arguments. Raises
    ConfigError for what does not fit."""
    end = 2 + len(op.states)
    p, g, *states = given[:end]
    out, found_inf, factor, key, first = given[end : end + 5]
    rest = given[end + 5 :]
    columns, shared = rest[: len(op.number_names)], list(rest[len(op.number_names) :])
    same_sizes(p, g, *states, *([out] if out else []))
    same_lengths(p, key, first, *columns)
    calls = []
    for index, weight in enumerate(p):
        own_states = [each[index] for each in states]
        if any(state.dtype != torch.bfloat16 for state in own_states):
            raise ConfigError(
                "states are stored in another way",
                where=op.narrow,
                got=", ".join(str(x.dtype) for x in own_states),
                expected="torch.bfloat16",
            )
        if weight.dtype != torch.float32 or not all(
            x.is_contiguous() for x in (weight, *own_states, *([out[index]] if out else []))
        ):
            raise ConfigError(
                "states in bf16 need contiguous fp32 parameters, states and copies",
                where=op.narrow,
                got=f"{weight.dtype} with strides {weight.stride()}",
            )
        if op.step_at is not None:
            op.check_step(columns[op.step_at][index])
        low, own = out[index] if out else None, tuple(column[index] for column in columns)
        calls.append(NarrowCall(weight, g[index], own_states, low, key[index], first[index], own))
    return calls, found_inf, factor, shared


def narrow_of(op: OptimizerOp) -> Step:
    """Make the op over many tensors whose states are in bf16."""

    def steps(*given: Any) -> None:
        calls, found_inf, factor, shared = narrow_calls(op, given)
        if not skips(found_inf):
            step_narrow(op, calls, factor, shared)

    return steps


def step_narrow(op: OptimizerOp, calls: Sequence[NarrowCall], factor: Tensor | None, shared: Sequence[Any]) -> None:
    """Step tensors whose states are in bf16, in fp32. Reads ``factor`` on the host."""
    multiplier = times(shared[op.multiplier_at], factor)
    rest = [value for index, value in enumerate(shared) if index != op.multiplier_at]
    for call in calls:
        for start in range(0, call.p.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            stored = [state.view(-1)[part] for state in call.states]
            p = call.p.view(-1)[part]
            gradient = _gradient(call.g.reshape(-1)[part], p, multiplier)
            new = op.formula(p, gradient, *(state.float() for state in stored), *call.own, *rest)
            noise = storage.noise(call.key, call.first + start, p.numel(), p.device)
            _store((p, new[0]), (p.new_empty(0) if call.out is None else call.out.view(-1)[part], new[0]))
            for state, values, bits in zip(stored, new[1:], noise, strict=False):
                state.copy_(storage.round_at_random(values, bits))


def times(multiplier: float, factor: Tensor | None) -> float:
    """Return what kernels multiply gradients by: the product in fp32, as they compute it. Reads
    ``factor`` on the host."""
    if factor is None:
        return multiplier
    return float(torch.tensor(multiplier, dtype=torch.float32) * factor.detach().cpu().float().reshape(()))


def _gradient(g: Tensor, p: Tensor, multiplier: float) -> Tensor:
    g = g.to(p.dtype)
    return g if multiplier == 1.0 else g * multiplier


def _chunks(*tensors: Tensor | None) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same elements of all tensors, chunk by chunk; None becomes an empty tensor, which
    :func:`_store` skips."""
    given = [tensor for tensor in tensors if tensor is not None]
    together = all(tensor.is_contiguous() for tensor in given)
    cut = {id(tensor): tensor.view(-1).split(CHUNK) if together else [tensor] for tensor in given}
    for index in range(len(cut[id(given[0])])):
        yield tuple(cut[id(tensor)][index] if tensor is not None else given[0].new_empty(0) for tensor in tensors)


def _store(*pairs: tuple[Tensor, Tensor | None]) -> None:
    for target, value in pairs:
        if value is not None and target.numel():
            target.copy_(value)


# LAMB takes two passes. Between them the norms of a tensor that is cut over ranks are added up.


def lamb_moments_(
    p: Sequence[Tensor], g: Sequence[Tensor], m: Sequence[Tensor], v: Sequence[Tensor],
    found_inf: Tensor | None, factor: Tensor | None, beta1: Sequence[float], beta2: Sequence[float],
    eps: Sequence[float], weight_decay: Sequence[float], step: Sequence[float], multiplier: float, bias_correction: bool,
) -> Tensor:  # fmt: skip
    """Update the moments of each tensor in place; return the sums of p^2 and of direction^2, (2,
    tensors) in float64, 0 where skipped."""
    same_sizes(p, g, m, v)
    same_lengths(p, beta1, beta2, eps, weight_decay, step)
    squares = torch.zeros(2, len(p), dtype=torch.float64, device=p[0].device if p else None)
    if skips(found_inf):
        return squares
    for i, (weight, gradient) in enumerate(zip(p, g, strict=True)):
        h = gradient.to(weight.dtype) * multiplier
        h = h if factor is None else h * factor.to(weight.dtype)
        m[i].add_(h - m[i], alpha=1 - beta1[i])
        v[i].add_(h * h - v[i], alpha=1 - beta2[i])
        direction = _direction(
            weight, m[i], v[i], beta1[i], beta2[i], eps[i], weight_decay[i], step[i], bias_correction
        )
        squares[0, i], squares[1, i] = square_sum(weight), square_sum(direction)
    return squares


def lamb_apply_(
    p: Sequence[Tensor], m: Sequence[Tensor], v: Sequence[Tensor], out: Sequence[Tensor], found_inf: Tensor | None,
    ratio: Tensor, lr: Sequence[float], beta1: Sequence[float], beta2: Sequence[float], eps: Sequence[float],
    weight_decay: Sequence[float], step: Sequence[float], bias_correction: bool,
) -> None:  # fmt: skip
    """Take p -= lr ratio direction; ``ratio`` (tensors,) in fp32."""
    same_sizes(p, m, v, *([out] if out else []))
    if skips(found_inf):
        return
    for i, weight in enumerate(p):
        direction = _direction(
            weight, m[i], v[i], beta1[i], beta2[i], eps[i], weight_decay[i], step[i], bias_correction
        )
        weight.sub_(direction * (ratio[i].to(weight.dtype) * lr[i]))
        if out:
            out[i].copy_(weight)


def _direction(
    p: Tensor, m: Tensor, v: Tensor, beta1: float, beta2: float, eps: float, decay: float, t: float, corrected: bool
) -> Tensor:
    c1, c2 = (1 - beta1**t, 1 - beta2**t) if corrected else (1.0, 1.0)
    # You et al. 2020, Algorithm 2, lines 9 to 11
    return (m / c1) / ((v / c2).sqrt() + eps) + decay * p


def square_sum(x: Tensor) -> Tensor:
    """Return the sum of squares in float64, a scalar tensor; not finite if and only if an element
    is not."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for chunk in x.view(-1).split(CHUNK) if x.is_contiguous() else [x]:
        total += chunk.double().square().sum()
    return total


def step_control_(square_sum: Tensor, loss_scale: Tensor | None, control: Tensor, unscale: float, clip: float) -> None:
    """Write control = (norm, factor, found_inf).

    norm = sqrt(square_sum) unscale / loss_scale; the factor unscales, and clips the norm to
    ``clip`` (0: no limit).
    """
    if control.shape != (3,) or control.dtype != torch.float32 or square_sum.numel() != 1:
        raise ConfigError(
            "step_control_ works on one sum and three results",
            got=f"{tuple(square_sum.shape)} and {tuple(control.shape)} {control.dtype}",
            expected="() and (3,) torch.float32",
        )
    total = square_sum.detach().double().reshape(())
    factor = torch.full_like(total, unscale)
    if loss_scale is not None:
        factor = factor / loss_scale.detach().double().reshape(())
    norm = total.sqrt() * factor
    finite = torch.isfinite(norm)
    limited = torch.ones_like(norm)
    # a tensor over a tensor: a number over one is a product with the reciprocal, rounded twice
    if clip > 0:
        limited = torch.where(finite, (torch.full_like(norm, clip) / (norm + 1e-6)).clamp(max=1.0), limited)
    control.copy_(torch.stack([norm, factor * limited, (~finite).double()]))


def copy_many_(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Copy and cast each source into its target."""
    same_sizes(into, source)
    for target, values in zip(into, source, strict=True):
        target.copy_(values.view_as(target))


def add_many_(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Add each source to its target; the sum is rounded once."""
    same_sizes(into, source)
    for target, values in zip(into, source, strict=True):
        if target.dtype.itemsize < values.dtype.itemsize:  # torch would round the source first
            target.copy_(target.to(values.dtype) + values.view_as(target))
        else:
            target.add_(values.view_as(target))


def same_lengths(*lists: Sized) -> None:
    """Raise ConfigError unless all lists have the same length."""
    if len({len(each) for each in lists}) > 1:
        raise ConfigError("lists of an op have different lengths", got=", ".join(str(len(each)) for each in lists))


def same_sizes(*lists: Sequence[Tensor]) -> None:
    """Raise ConfigError unless all lists have the same length, and tensors at the same index the
    same size."""
    same_lengths(*lists)
    for index, row in enumerate(zip(*lists, strict=True)):
        sizes = [tensor.numel() for tensor in row]
        if len(set(sizes)) > 1:
            raise ConfigError(f"tensors number {index} have different sizes", got=", ".join(map(str, sizes)))
