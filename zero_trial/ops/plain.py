"""The ops in plain torch: in place, with the formulas of ``reference`` and in chunks, so that temporaries stay small.

For devices, dtypes and layouts that no native kernel takes. Computes in the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops import reference

CHUNK = 1 << 20  # elements


def skips(found_inf: Tensor | None) -> bool:
    """Whether the step is to be left out. Reads the device."""
    return found_inf is not None and bool(found_inf)


def adam_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    out: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: float,
    multiplier: float,
    decoupled: bool,
) -> None:
    """Adam (``decoupled`` False) or AdamW, step number ``step`` from 1."""
    if skips(found_inf):
        return
    formula = reference.adamw if decoupled else reference.adam
    for P, G, M, V, low in _chunks(p, g, m, v, out):
        result = formula(
            P,
            _gradient(G, P, multiplier),
            M,
            V,
            step,
            lr=lr,
            betas=(beta1, beta2),
            eps=eps,
            weight_decay=weight_decay,
        )
        _store((P, result.p), (M, result.m), (V, result.v), (low, result.p))


def lion_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    out: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    multiplier: float,
) -> None:
    """Lion."""
    if skips(found_inf):
        return
    for P, G, M, low in _chunks(p, g, m, out):
        result = reference.lion(
            P, _gradient(G, P, multiplier), M, lr=lr, betas=(beta1, beta2), weight_decay=weight_decay
        )
        _store((P, result.p), (M, result.m), (low, result.p))


def adagrad_(
    p: Tensor,
    g: Tensor,
    s: Tensor,
    out: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    eps: float,
    weight_decay: float,
    multiplier: float,
) -> None:
    """Adagrad; ``lr`` with its decay already in it."""
    if skips(found_inf):
        return
    for P, G, S, low in _chunks(p, g, s, out):
        result = reference.adagrad(P, _gradient(G, P, multiplier), S, lr=lr, eps=eps, weight_decay=weight_decay)
        _store((P, result.p), (S, result.s), (low, result.p))


def sgd_(
    p: Tensor,
    g: Tensor,
    b: Tensor,
    out: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    first: bool,
    nesterov: bool,
    multiplier: float,
) -> None:
    """SGD with momentum; ``first``: the buffer becomes the gradient, undamped."""
    if skips(found_inf):
        return
    for P, G, B, low in _chunks(p, g, b, out):
        result = reference.sgd(
            P,
            _gradient(G, P, multiplier),
            None if first else B,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            nesterov=nesterov,
            weight_decay=weight_decay,
        )
        _store((P, result.p), (B, result.b), (low, result.p))


def square_sum(x: Tensor) -> Tensor:
    """Sum of squares in float64, a scalar tensor; not finite if and only if an element is not."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for chunk in _flat(x):
        total += chunk.double().square().sum()
    return total


def _gradient(g: Tensor, p: Tensor, multiplier: float) -> Tensor:
    g = g.to(p.dtype)
    return g if multiplier == 1.0 else g * multiplier


def _flat(x: Tensor) -> Sequence[Tensor]:
    return x.view(-1).split(CHUNK) if x.is_contiguous() else [x]


def _chunks(*tensors: Tensor | None) -> Iterator[tuple[Tensor, ...]]:
    """The same elements of all tensors, piece by piece; None stays an empty tensor for :func:`_store`."""
    given = [tensor for tensor in tensors if tensor is not None]
    together = all(tensor.is_contiguous() for tensor in given)
    cut = {id(tensor): tensor.view(-1).split(CHUNK) if together else [tensor] for tensor in given}
    for index in range(len(cut[id(given[0])])):
        yield tuple(cut[id(tensor)][index] if tensor is not None else given[0].new_empty(0) for tensor in tensors)


def _store(*pairs: tuple[Tensor, Tensor | None]) -> None:
    for target, value in pairs:
        if value is not None and target.numel():
            target.copy_(value)


# Ops over many flat tensors in one call, and the scalars of a step: what CUDA does in one launch, here in turn, on any device.
#
#     p, g, m, v, s, b    lists of tensors as the single ops take them; ``out`` is as long, or empty
#     found_inf           one-element fp32 tensor; where it is not 0 nothing is changed; or None
#     factor              one-element fp32 tensor that multiplies the gradients on top of ``multiplier``; or None
#     lr, beta1 ...       one number per tensor: tensors of several parameter groups go in one call
#
# ``step_control_`` writes (norm, factor, found_inf) into a (3,) fp32 tensor, whose parts are what the steps take: the host waits for nothing.


_FLAGS = "Tensor? found_inf, Tensor? factor"


_LAMB = "float[] beta1, float[] beta2, float[] eps, float[] weight_decay, float[] step"


SCHEMAS = {
    "adam_many_": f"(Tensor(a!)[] p, Tensor[] g, Tensor(b!)[] m, Tensor(c!)[] v, Tensor(d!)[] out, {_FLAGS}, float[] lr, "
    "float[] beta1, float[] beta2, float[] eps, float[] weight_decay, float[] step, float multiplier, bool decoupled) -> ()",
    "lion_many_": f"(Tensor(a!)[] p, Tensor[] g, Tensor(b!)[] m, Tensor(c!)[] out, {_FLAGS}, float[] lr, float[] beta1, "
    "float[] beta2, float[] weight_decay, float multiplier) -> ()",
    "adagrad_many_": f"(Tensor(a!)[] p, Tensor[] g, Tensor(b!)[] s, Tensor(c!)[] out, {_FLAGS}, float[] lr, float[] eps, "
    "float[] weight_decay, float multiplier) -> ()",
    "sgd_many_": f"(Tensor(a!)[] p, Tensor[] g, Tensor(b!)[] b, Tensor(c!)[] out, {_FLAGS}, float[] lr, float[] momentum, "
    "float[] dampening, float[] weight_decay, bool[] first, bool nesterov, float multiplier) -> ()",
    "lamb_moments_": f"(Tensor[] p, Tensor[] g, Tensor(a!)[] m, Tensor(b!)[] v, {_FLAGS}, {_LAMB}, float multiplier, "
    "bool bias_correction) -> Tensor",
    "lamb_apply_": f"(Tensor(a!)[] p, Tensor[] m, Tensor[] v, Tensor(b!)[] out, Tensor? found_inf, Tensor ratio, float[] lr, "
    f"{_LAMB}, bool bias_correction) -> ()",
    "step_control_": "(Tensor square_sum, Tensor? loss_scale, Tensor(a!) control, float unscale, float clip) -> ()",
    "copy_many_": "(Tensor(a!)[] into, Tensor[] source) -> ()",
    "add_many_": "(Tensor(a!)[] into, Tensor[] source) -> ()",
}


Step = Callable[..., None]


def in_turn(
    step: Step,
    tensors: Sequence[Sequence[Tensor]],
    out: Sequence[Tensor],
    found_inf: Tensor | None,
    factor: Tensor | None,
    numbers: Sequence[Sequence[Any]],
    multiplier: float,
    *rest: Any,
) -> None:
    """``step`` on each tensor with its numbers. Reads ``factor`` on the host."""
    same_lengths(*tensors, *numbers, *([out] if out else []))
    multiplier = times(multiplier, factor)
    for index, (each, own) in enumerate(zip(zip(*tensors, strict=True), zip(*numbers, strict=True), strict=True)):
        step(*each, out[index] if out else None, found_inf, *own, *(v(multiplier) if callable(v) else v for v in rest))


def times(multiplier: float, factor: Tensor | None) -> float:
    """What kernels multiply gradients by: the product in fp32, as they make it. Reads ``factor`` on the host."""
    if factor is None:
        return multiplier
    return float(torch.tensor(multiplier, dtype=torch.float32) * factor.detach().cpu().float().reshape(()))


def adam_many_(
    step: Step, p: Any, g: Any, m: Any, v: Any, out: Any, found_inf: Any, factor: Any, lr: Any, beta1: Any, beta2: Any,
    eps: Any, weight_decay: Any, steps: Any, multiplier: float, decoupled: bool,
) -> None:  # fmt: skip
    """Adam or AdamW of each."""
    numbers = (lr, beta1, beta2, eps, weight_decay, steps)
    in_turn(step, (p, g, m, v), out, found_inf, factor, numbers, multiplier, _same, decoupled)


def lion_many_(
    step: Step, p: Any, g: Any, m: Any, out: Any, found_inf: Any, factor: Any, lr: Any, beta1: Any, beta2: Any,
    weight_decay: Any, multiplier: float,
) -> None:  # fmt: skip
    """Lion of each."""
    in_turn(step, (p, g, m), out, found_inf, factor, (lr, beta1, beta2, weight_decay), multiplier, _same)


def adagrad_many_(
    step: Step, p: Any, g: Any, s: Any, out: Any, found_inf: Any, factor: Any, lr: Any, eps: Any, weight_decay: Any,
    multiplier: float,
) -> None:  # fmt: skip
    """Adagrad of each."""
    in_turn(step, (p, g, s), out, found_inf, factor, (lr, eps, weight_decay), multiplier, _same)


def sgd_many_(
    step: Step, p: Any, g: Any, b: Any, out: Any, found_inf: Any, factor: Any, lr: Any, momentum: Any, dampening: Any,
    weight_decay: Any, first: Any, nesterov: bool, multiplier: float,
) -> None:  # fmt: skip
    """SGD with momentum of each."""
    numbers = (lr, momentum, dampening, weight_decay, first)
    in_turn(step, (p, g, b), out, found_inf, factor, numbers, multiplier, nesterov, _same)


def _same(multiplier: float) -> float:
    """Where the multiplier stands among a step's arguments."""
    return multiplier


# --- LAMB -------------------------------------------------------------------------------------------------------------


def lamb_moments_(
    p: Sequence[Tensor], g: Sequence[Tensor], m: Sequence[Tensor], v: Sequence[Tensor],
    found_inf: Tensor | None, factor: Tensor | None, beta1: Sequence[float], beta2: Sequence[float],
    eps: Sequence[float], weight_decay: Sequence[float], step: Sequence[float], multiplier: float, bias_correction: bool,
) -> Tensor:  # fmt: skip
    """Moments of each tensor in place; returns the sums of p^2 and of direction^2, (2, tensors) in float64, 0 where skipped."""
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
    """p -= lr ratio direction; ``ratio`` (tensors,) in fp32."""
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
    return (m / c1) / ((v / c2).sqrt() + eps) + decay * p  # You et al. 2020, Algorithm 2, lines 9 to 11


# --- scalars and buffers ----------------------------------------------------------------------------------------------


def step_control_(square_sum: Tensor, loss_scale: Tensor | None, control: Tensor, unscale: float, clip: float) -> None:
    """control = (norm, factor, found_inf): norm = sqrt(square_sum) unscale / loss_scale; the factor unscales and clips to ``clip`` (0: no)."""
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
    if clip > 0:  # a tensor over a tensor: a number over one is a product with the reciprocal, rounded twice
        limited = torch.where(finite, (torch.full_like(norm, clip) / (norm + 1e-6)).clamp(max=1.0), limited)
    control.copy_(torch.stack([norm, factor * limited, (~finite).double()]))


def copy_many_(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Each source into its target, cast."""
    same_sizes(into, source)
    for target, values in zip(into, source, strict=True):
        target.copy_(values.view_as(target))


def add_many_(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Each source added to its target; the sum is rounded once."""
    same_sizes(into, source)
    for target, values in zip(into, source, strict=True):
        if target.dtype.itemsize < values.dtype.itemsize:  # torch would round the source first
            target.copy_(target.to(values.dtype) + values.view_as(target))
        else:
            target.add_(values.view_as(target))


def same_lengths(*lists: Sized) -> None:
    """Raises ConfigError unless the lists, of tensors or of a number for each, are as long as each other."""
    if len({len(each) for each in lists}) > 1:
        raise ConfigError("lists of an op have different lengths", got=", ".join(str(len(each)) for each in lists))


def same_sizes(*lists: Sequence[Tensor]) -> None:
    """Raises ConfigError unless the lists are as long as each other and their tensors as large."""
    same_lengths(*lists)
    for index, row in enumerate(zip(*lists, strict=True)):
        sizes = [tensor.numel() for tensor in row]
        if len(set(sizes)) > 1:
            raise ConfigError(f"tensors number {index} have different sizes", got=", ".join(map(str, sizes)))
