"""LAMB over flat pieces: Adam's direction, scaled per logical tensor by |w| / |update| (You et al.
2020, Algorithm 2).

A shard holds only parts of tensors, so the two norms of a tensor are sums over pieces, and over
ranks: every rank adds the squares of its parts into a (2, tensors) buffer and ``sum_over_shards``
adds the buffers up. That is one small collective per step for all tensors together. As in DeepSpeed
0.19.8 the ratio is clamped to [min_coeff, max_coeff], and is 1 where one of the norms is 0; unlike
there (one factor on the whole step), the moments' bias is corrected before the ratio is computed,
as in the paper.

The arithmetic is plain torch, tensor by tensor: temporaries of three times the largest part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops.dispatch import OPS
from zero_trial.ops.optimizers.shard_step import ShardOptimizer, ShardUpdate, TensorPart, require_numbers

_MOMENTS = ("exp_avg", "exp_avg_sq")


class _Part(NamedTuple):
    """One tensor's part of one piece: views to work on, its number, and its group's settings."""

    p: Tensor
    g: Tensor
    m: Tensor
    v: Tensor
    out: Tensor | None
    owner: int
    group: Mapping[str, Any]
    step: float

    def update_moments(self, multiplier: float) -> None:
        beta1, beta2 = self.group["betas"]
        g = self.g.to(self.p.dtype) * multiplier
        self.m.add_(g - self.m, alpha=1 - beta1)
        self.v.add_(g * g - self.v, alpha=1 - beta2)

    def direction(self) -> Tensor:
        """Algorithm 2, lines 9 to 11."""
        c1, c2 = (1 - beta**self.step if self.group["bias_correction"] else 1.0 for beta in self.group["betas"])
        direction: Tensor = (self.m / c1) / ((self.v / c2).sqrt() + self.group["eps"])
        return direction.add_(self.p, alpha=self.group["weight_decay"])


class FusedLamb(ShardOptimizer):
    """``bind`` first when pieces hold parts of tensors; unbound, each parameter is one tensor.

    State per element: two moments (8 bytes in fp32). Collective when bound: every rank must step,
    even without pieces of its own.
    """

    elementwise = False
    fuses = True
    # Which parts each piece has, of how many tensors, and the function that adds sums over ranks.
    # A copy has other parameters: it counts as unbound.
    _bound: tuple[Mapping[int, Sequence[TensorPart]], int, Callable[[Tensor], None]] | None = None

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        *,
        amsgrad: bool = False,
        eps_inside_sqrt: bool = False,
        max_grad_norm: float = 0.0,
    ) -> None:
        if amsgrad or eps_inside_sqrt or max_grad_norm:
            raise ConfigError(
                "FusedLamb supports only one value of these DeepSpeed arguments",
                where="optimizer.params",
                got=f"amsgrad {amsgrad}, eps_inside_sqrt {eps_inside_sqrt}, max_grad_norm {max_grad_norm}",
                expected="False, False, 0: eps is added outside the root, and gradients are clipped before the step",
            )
        fits = lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= b < 1 for b in betas)
        require_numbers(
            "LAMB",
            fits and 0 <= min_coeff <= max_coeff,
            "lr, eps, weight_decay >= 0, 0 <= beta < 1, 0 <= min_coeff <= max_coeff",
            lr=lr,
            betas=tuple(betas),
            eps=eps,
            weight_decay=weight_decay,
            min_coeff=min_coeff,
            max_coeff=max_coeff,
        )
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, defaults)

    def bind(
        self,
        segments: Mapping[int, Sequence[TensorPart]],
        num_tensors: int,
        sum_over_shards: Callable[[Tensor], None],
    ) -> None:
        """Set which elements of each piece belong to which logical tensor.

        Args:
            segments: id(piece) -> its parts of logical tensors, in order, without overlap; padding
                between them.
            num_tensors: of the whole model.
            sum_over_shards: adds a (2, num_tensors) float64 tensor over the ranks that share the
                tensors, in place.
        """
        self._bound = segments, num_tensors, sum_over_shards

    def update(self, updates: Sequence[ShardUpdate], multiplier: float) -> None:
        parts = [part for number, update in enumerate(updates) for part in self._parts(update, number)]
        count = self._bound[1] if self._bound is not None else len(parts)
        pieces = (piece for group in self.param_groups for piece in group["params"])
        device = next((piece.device for piece in pieces), torch.device("cpu"))
        squares = torch.zeros(2, count, dtype=torch.float64, device=device)
        for part in parts:  # Algorithm 2, lines 6 to 8
            part.update_moments(multiplier)
            squares[0, part.owner] += OPS.square_sum(part.p)
            squares[1, part.owner] += OPS.square_sum(part.direction())
        if self._bound is not None:
            self._bound[2](squares)
        norms = squares.sqrt()
        ratios, known = norms[0] / norms[1], (norms > 0).all(0)
        for part in parts:  # lines 9 to 12
            ratio = ratios[part.owner].clamp(part.group["min_coeff"], part.group["max_coeff"])
            length = torch.where(known[part.owner], ratio, 1.0).to(part.p.dtype) * float(part.group["lr"])
            part.p.sub_(part.direction() * length)
            if part.out is not None:
                part.out.copy_(part.p)

    def _parts(self, update: ShardUpdate, number: int) -> Iterator[_Part]:
        """Cut a piece into its tensors' parts. Creates missing moments, and counts its step."""
        moments, step = self.moments_of(update.weight, _MOMENTS), self.count_step(update.weight)
        group = self.param_groups[update.group]
        tensors: list[Any] = [update.weight.detach(), update.gradient, *moments, update.out]
        if self._bound is None:
            p, g, m, v, out = tensors
            yield _Part(p, g, m, v, out, number, group, step)
            return
        flat: list[Any] = [x if x is None else x.view(-1) for x in tensors]
        for owner, _, start, stop in self._bound[0][id(update.weight)]:
            views: list[Any] = [x if x is None else x[start:stop] for x in flat]
            p, g, m, v, out = views
            yield _Part(p, g, m, v, out, owner, group, step)
