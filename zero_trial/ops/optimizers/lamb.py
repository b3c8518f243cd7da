"""LAMB over flat pieces: Adam's direction, scaled per logical tensor by |w| / |update| (You et al. 2020, Algorithm 2).

A shard holds only parts of tensors, so the two norms of a tensor are sums over pieces, and over ranks: every rank adds
the squares of its parts into a (2, tensors) buffer and ``sum_over_shards`` adds the buffers up. That is one small
collective per step for all tensors together. As in DeepSpeed 0.19.8 the ratio is clamped to [min_coeff, max_coeff], and
is 1 where one of the norms is 0; unlike there (one factor on the whole step), the moments' bias is corrected before the
ratio is taken, as the paper says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops.optimizers.pieces import PieceOptimizer, gradients


class Segment(NamedTuple):
    """Elements [start, stop) of a piece belong to logical tensor ``tensor_index``."""

    tensor_index: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Cut:
    """A piece as consecutive parts: how long each is, and whose (gaps, that is padding, belong to tensor number
    ``num``)."""

    lengths: list[int]
    owners: list[int]
    cache: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """``owners`` and ``lengths`` as int64 tensors; made once per device."""
        if device not in self.cache:
            self.cache[device] = (torch.tensor(self.owners, device=device), torch.tensor(self.lengths, device=device))
        return self.cache[device]


class _Pending(NamedTuple):
    """What a piece waits with until the norms of all ranks are known."""

    piece: Tensor
    update: Tensor
    cut: _Cut
    lr: float
    clamp: tuple[float, float]


def _no_shards(_: Tensor) -> None:
    """Every tensor lies whole in one piece of this rank: nothing to add."""


class Lamb(PieceOptimizer):
    """``bind`` first when pieces hold parts of tensors; unbound, each parameter is one tensor.

    Collective over the shard axis once bound: every rank must step, with or without own pieces.
    """

    elementwise = False

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
    ) -> None:
        if (
            lr < 0
            or eps < 0
            or weight_decay < 0
            or not all(0 <= b < 1 for b in betas)
            or not 0 <= min_coeff <= max_coeff
        ):
            raise ConfigError(
                "LAMB cannot use these numbers",
                where="optimizer.params",
                got=f"lr {lr}, betas {tuple(betas)}, eps {eps}, weight_decay {weight_decay}, "
                f"min_coeff {min_coeff}, max_coeff {max_coeff}",
                expected="lr, eps, weight_decay >= 0, 0 <= beta < 1, 0 <= min_coeff <= max_coeff",
            )
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, defaults)
        self._cuts: dict[int, _Cut] | None = None
        self._num_tensors = 0
        self._sum_over_shards: Callable[[Tensor], None] = _no_shards

    def bind(
        self,
        segments: Mapping[int, Sequence[Segment]],
        num_tensors: int,
        sum_over_shards: Callable[[Tensor], None],
    ) -> None:
        """``segments``: id(piece) -> its parts of logical tensors, in order, without overlap; what lies between is
        padding.

        ``sum_over_shards`` adds a (2, num_tensors) float64 tensor over the ranks that share the tensors, in place.
        Raises ConfigError for a segment outside its piece or its tensor numbers.
        """
        pieces = {id(piece): piece for group in self.param_groups for piece in group["params"]}
        missing = pieces.keys() - segments.keys()
        if missing:
            raise ConfigError("LAMB needs the segments of every piece", got=f"none for {len(missing)} of {len(pieces)}")
        self._cuts = {key: _cut(segments[key], piece.numel(), num_tensors) for key, piece in pieces.items()}
        self._num_tensors = num_tensors
        self._sum_over_shards = sum_over_shards

    def update(self) -> None:
        waiting = [pending for group in self.param_groups for pending in self._directions(group)]
        pieces = (piece for group in self.param_groups for piece in group["params"])
        device = next((piece.device for piece in pieces), torch.device("cpu"))
        num_tensors = len(waiting) if self._cuts is None else self._num_tensors
        squares = torch.zeros(2, num_tensors + 1, dtype=torch.float64, device=device)
        for row, tensors in enumerate(([w.piece for w in waiting], [w.update for w in waiting])):
            self._add_squares(squares[row], tensors, waiting)
        sums = squares[:, :num_tensors].contiguous()
        self._sum_over_shards(sums)
        squares[:, :num_tensors] = sums
        norms = squares.sqrt()
        ratio = torch.where((norms[0] > 0) & (norms[1] > 0), norms[0] / norms[1], 1.0)
        for index, pending in enumerate(waiting):
            self._apply(pending, ratio, index)

    def _directions(self, group: dict[str, Any]) -> list[_Pending]:
        """Adam's moments and direction r + weight_decay * w of a group's pieces (Algorithm 2, lines 6 to 11)."""
        w = self.pieces(group, ("exp_avg", "exp_avg_sq"))
        if not w:
            return []
        k, (beta1, beta2) = self.grad_multiplier, group["betas"]
        g, m, v = gradients(w), self.moment(w, "exp_avg"), self.moment(w, "exp_avg_sq")
        torch._foreach_mul_(m, beta1)
        torch._foreach_add_(m, g, alpha=(1 - beta1) * k)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, g, g, (1 - beta2) * k * k)
        corrections = [self._count(piece, group) for piece in w]
        r = torch._foreach_div(v, [c2 for _, c2 in corrections])
        torch._foreach_sqrt_(r)
        torch._foreach_add_(r, group["eps"])
        torch._foreach_mul_(r, [c1 for c1, _ in corrections])
        r = torch._foreach_div(m, r)  # (m / c1) / (sqrt(v / c2) + eps)
        if group["weight_decay"]:
            torch._foreach_add_(r, w, alpha=group["weight_decay"])
        clamp = (group["min_coeff"], group["max_coeff"])
        return [_Pending(p, u, self._cut_of(p), group["lr"], clamp) for p, u in zip(w, r, strict=True)]

    def _count(self, piece: Tensor, group: dict[str, Any]) -> tuple[float, float]:
        """Count this step of the piece; returns the divisors 1 - beta**t of its moments."""
        state = self.state[piece]
        state["step"] = state.get("step", torch.zeros((), dtype=torch.float32)) + 1
        if not group["bias_correction"]:
            return 1.0, 1.0
        t, (beta1, beta2) = float(state["step"]), group["betas"]
        return 1 - beta1**t, 1 - beta2**t

    def _cut_of(self, piece: Tensor) -> _Cut:
        if self._cuts is None:
            return _Cut([piece.numel()], [-1])
        return self._cuts[id(piece)]

    def _add_squares(self, row: Tensor, tensors: list[Tensor], waiting: list[_Pending]) -> None:
        if not tensors:
            return
        parts = [part for t, w in zip(tensors, waiting, strict=True) for part in torch.split(t.view(-1), w.cut.lengths)]
        squares = torch.stack(torch._foreach_norm(parts, 2)).to(row.dtype).square_()
        if self._cuts is None:
            row[: len(squares)] = squares
        else:
            row.index_add_(0, torch.cat([w.cut.on(row.device)[0] for w in waiting]), squares)

    def _apply(self, pending: _Pending, ratio: Tensor, index: int) -> None:
        w = pending.piece
        if self._cuts is None:
            mine = ratio[index].clamp(*pending.clamp).to(w.dtype)
        else:
            owners, lengths = pending.cut.on(w.device)
            mine = ratio[owners].clamp(*pending.clamp).to(w.dtype)
            mine = torch.repeat_interleave(mine, lengths, output_size=w.numel()).view_as(w)
        w.addcmul_(pending.update, mine, value=-pending.lr)


def _cut(segments: Sequence[Segment], numel: int, num_tensors: int) -> _Cut:
    lengths, owners, end = [], [], 0
    for tensor_index, start, stop in segments:
        if not (end <= start <= stop <= numel and 0 <= tensor_index < num_tensors):
            raise ConfigError(
                "a segment does not fit its piece",
                got=f"tensor {tensor_index}, elements {start} to {stop}",
                expected=f"tensors 0 to {num_tensors - 1}, elements {end} to {numel}, in order",
            )
        lengths += [start - end, stop - start]
        owners += [num_tensors, tensor_index]
        end = stop
    lengths.append(numel - end)
    owners.append(num_tensors)
    kept = [(length, owner) for length, owner in zip(lengths, owners, strict=True) if length]
    return _Cut([length for length, _ in kept], [owner for _, owner in kept])
