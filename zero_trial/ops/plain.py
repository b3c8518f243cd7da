"""The ops in plain torch: in place, with the formulas of ``reference`` and in chunks, so that temporaries stay small.

For devices, dtypes and layouts that no native kernel takes. Computes in the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

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
