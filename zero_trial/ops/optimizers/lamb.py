"""LAMB over flat pieces: Adam's direction, scaled per logical tensor by |w| / |update| (You et al.
2020, Algorithm 2).

A shard holds only parts of tensors, so the two norms of a tensor are sums over pieces, and over
ranks: every rank adds the squares of its parts into a (2, tensors) buffer and ``sum_over_shards``
adds the buffers up. That is one small collective per step for all tensors together. As in DeepSpeed
0.19.8 the ratio is clamped to [min_coeff, max_coeff], and is 1 where one of the norms is 0; unlike
there (one factor on the whole step), the moments' bias is corrected before the ratio is taken, as
the paper says.

    bytes per fp32 parameter and step    24 for moments and norms, 16 for the update (2 more for a
                                         16-bit copy): no temporaries
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_trial.errors import ConfigError
from zero_trial.ops.dispatch import OPS
from zero_trial.ops.optimizers.shard_step import ShardOptimizer, ShardUpdate

_MOMENTS = ("exp_avg", "exp_avg_sq")
_CONSTANTS = 32  # lists of numbers that are kept on the device


class TensorSegment(NamedTuple):
    """Elements [start, stop) of a piece belong to logical tensor ``tensor_index``."""

    tensor_index: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Cut:
    """A piece as consecutive parts: how long each is, and whose; None is padding, which LAMB leaves
    alone."""

    lengths: list[int]
    owners: list[int | None]


class _Part(NamedTuple):
    """What one tensor has of one piece: views to work on, its number, and its group's settings."""

    p: Tensor
    g: Tensor
    m: Tensor
    v: Tensor
    out: Tensor | None
    owner: int
    group: Mapping[str, Any]
    step: float


def _no_shards(_: Tensor) -> None:
    """Add nothing: every tensor is whole in one piece of this rank."""


class FusedLamb(ShardOptimizer):
    """``bind`` first when pieces hold parts of tensors; unbound, each parameter is one tensor.

    State per element: two moments (8 bytes in fp32). Collective when bound: every rank must step,
    also without own pieces.
    """

    elementwise = False
    fuses = True

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
                "FusedLamb takes these arguments of DeepSpeed's with one value only",
                where="optimizer.params",
                got=f"amsgrad {amsgrad}, eps_inside_sqrt {eps_inside_sqrt}, max_grad_norm {max_grad_norm}",
                expected="False, False, 0: eps is added outside the root, and gradients are clipped before the step",
            )
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
        self._unbind()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take state. A copy has other parameters, which count as whole tensors until it is bound
        itself."""
        bound = "_cuts" in self.__dict__
        super().__setstate__(state)
        if not bound:
            self._unbind()

    def _unbind(self) -> None:
        self._cuts: dict[int, _Cut] | None = None
        self._num_tensors = 0
        self._sum_over_shards: Callable[[Tensor], None] = _no_shards
        self._constants: dict[tuple[Any, ...], Tensor] = {}

    def bind(
        self,
        segments: Mapping[int, Sequence[TensorSegment]],
        num_tensors: int,
        sum_over_shards: Callable[[Tensor], None],
    ) -> None:
        """Set which elements of each piece belong to which logical tensor. Raises ConfigError for a
        segment outside its piece.

        Args:
            segments: id(piece) -> its parts of logical tensors, in order, without overlap; padding
                between them.
            num_tensors: of the whole model.
            sum_over_shards: adds a (2, num_tensors) float64 tensor over the ranks that share the
                tensors, in place.
        """
        pieces = {id(piece): piece for group in self.param_groups for piece in group["params"]}
        missing = pieces.keys() - segments.keys()
        if missing:
            raise ConfigError("LAMB needs the segments of every piece", got=f"none for {len(missing)} of {len(pieces)}")
        self._cuts = {key: _cut(segments[key], piece.numel(), num_tensors) for key, piece in pieces.items()}
        self._num_tensors = num_tensors
        self._sum_over_shards = sum_over_shards

    def update(self, updates: Sequence[ShardUpdate], multiplier: float) -> None:
        parts = [part for number, update in enumerate(updates) for part in self._parts(update, number)]
        count = self._num_tensors if self._cuts is not None else len(parts)
        pieces = (piece for group in self.param_groups for piece in group["params"])
        device = next((piece.device for piece in pieces), torch.device("cpu"))
        squares = torch.zeros(2, count, dtype=torch.float64, device=device)
        alike = _alike(parts)
        owners = [self._constant([part.owner for part in those], torch.int64, device) for those in alike]
        for those, whose in zip(alike, owners, strict=True):  # Algorithm 2, lines 6 to 8
            p, g, m, v = ([part[at] for part in those] for at in range(4))
            corrected = those[0].group["bias_correction"]
            own = OPS.lamb_moments_(p, g, m, v, *_numbers(those), multiplier, corrected)
            squares.index_add_(1, whose, own)
        self._sum_over_shards(squares)
        norms = squares.sqrt()
        for those, whose in zip(alike, owners, strict=True):
            self._apply(those, norms[:, whose])

    def _parts(self, update: ShardUpdate, number: int) -> Iterator[_Part]:
        """Cut a piece into its tensors' parts. Makes its moments where they are missing, and counts
        its step."""
        moments, step = self.moments_of(update.weight, _MOMENTS), self.count_step(update.weight)
        group = self.param_groups[update.group]
        tensors: list[Any] = [update.weight.detach(), update.gradient, *moments, update.out]
        if self._cuts is None:
            p, g, m, v, out = tensors
            yield _Part(p, g, m, v, out, number, group, step)
            return
        cut = self._cuts[id(update.weight)]
        columns: list[Any] = [[None] * len(cut.owners) if x is None else x.view(-1).split(cut.lengths) for x in tensors]
        for owner, p, g, m, v, out in zip(cut.owners, *columns, strict=True):
            if owner is not None:
                yield _Part(p, g, m, v, out, owner, group, step)

    def _apply(self, parts: Sequence[_Part], norms: Tensor) -> None:
        """Step each part along its direction, as long as its tensor's ratio says (lines 9 to 12);
        ``norms`` (2, parts)."""
        low, high = (
            self._constant([part.group[key] for part in parts], torch.float64, norms.device)
            for key in ("min_coeff", "max_coeff")
        )
        known = (norms[0] > 0) & (norms[1] > 0)
        ratio = torch.where(known, (norms[0] / norms[1]).clamp(low, high), 1.0).float()
        p, m, v = ([part[at] for part in parts] for at in (0, 2, 3))
        out = [part.out for part in parts if part.out is not None]
        lr = [float(part.group["lr"]) for part in parts]
        OPS.lamb_apply_(p, m, v, out, ratio, lr, *_numbers(parts), parts[0].group["bias_correction"])

    def _constant(self, values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return ``values`` as a tensor, kept between steps: copying them to a CUDA device in every
        step would wait for it."""
        key = (*values, dtype, device)
        if key not in self._constants:
            if len(self._constants) >= _CONSTANTS:
                self._constants.clear()
            self._constants[key] = torch.tensor(values, dtype=dtype, device=device)
        return self._constants[key]


def _alike(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Group parts that one call can take: with or without bias correction, with or without a
    copy."""
    found: dict[tuple[bool, bool], list[_Part]] = {}
    for part in parts:
        found.setdefault((part.group["bias_correction"], part.out is None), []).append(part)
    return list(found.values())


def _numbers(parts: Sequence[_Part]) -> list[list[float]]:
    """Return the lists of beta1, beta2, eps, weight decay and step of the parts."""
    rows = [(*part.group["betas"], part.group["eps"], part.group["weight_decay"], part.step) for part in parts]
    return [list(column) for column in zip(*rows, strict=True)]


def _cut(segments: Sequence[TensorSegment], numel: int, num_tensors: int) -> _Cut:
    lengths: list[int] = []
    owners: list[int | None] = []
    end = 0
    for tensor_index, start, stop in segments:
        if not (end <= start <= stop <= numel and 0 <= tensor_index < num_tensors):
            raise ConfigError(
                "a segment does not fit its piece",
                got=f"tensor {tensor_index}, elements {start} to {stop}",
                expected=f"tensors 0 to {num_tensors - 1}, elements {end} to {numel}, in order",
            )
        lengths += [start - end, stop - start]
        owners += [None, tensor_index]
        end = stop
    lengths.append(numel - end)
    owners.append(None)
    kept = [(length, owner) for length, owner in zip(lengths, owners, strict=True) if length]
    return _Cut([length for length, _ in kept], [owner for _, owner in kept])
