"""A linear layer in tiles, so that ZeRO stage 3 never holds all of a huge one at once.

    y = x W^T + b         W (out, in) in out_splits x in_splits tiles, each an nn.Linear of its own:
                          y[p] = sum over q of x[q] W[p, q]^T, + b[p] with the last q

Each tile is gathered before its use and freed after it, unless the layer is inside a larger block,
which is gathered as a whole. The sum over q is rounded in a different order from nn.Linear's.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from zero_trial.errors import ConfigError, TrialError
from zero_trial.sharding.param_access import GatheredParameters


class TiledLinear(nn.Module):
    """An ``nn.Linear`` in ``out_splits`` x ``in_splits`` tiles, ``self.linears[out][in]``.

    Args:
        in_splits: tiles along the input's last dim; the first tiles get the remaining features.
        out_splits: tiles along the output's last dim, in the same way.
        input_is_already_split: the forward gets a sequence of ``in_splits`` tensors.
        combine_out_splits: return one tensor instead of a list of ``out_splits``.
        linear_cls: builds a tile; called with its features, ``bias`` and ``kwargs``.
        init_linear: a layer to copy the values from.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (
            ("in_splits", in_splits, in_features),
            ("out_splits", out_splits, out_features),
        ):
            if not 1 <= splits <= features:
                raise TrialError(
                    "not a number of tiles", where=f"TiledLinear({name})", got=splits, expected=f"1 to {features}"
                )
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(columns, rows, bias=bias and column == in_splits - 1, **kwargs)
                for column, columns in enumerate(_widths(in_features, in_splits))
            )
            for rows in _widths(out_features, out_splits)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """Return a tensor (..., out_features), or a list of its ``out_splits`` parts."""
        inputs = self._parts(input_)
        outputs = [
            self._sum([tile(part) for tile, part in zip(cast("nn.ModuleList", tiles), inputs, strict=True)])
            for tiles in self.linears
        ]
        return self._joined(outputs) if self.combine_out_splits else outputs

    def _parts(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.in_splits == 1 or not self.input_is_already_split:
            return cast("torch.Tensor", input_).tensor_split(self.in_splits, dim=-1)
        if len(input_) != self.in_splits:
            raise TrialError(
                "not the parts of an input", where="TiledLinear", got=len(input_), expected=f"{self.in_splits} tensors"
            )
        return list(input_)

    def _sum(self, outputs: list[Any]) -> Any:
        """Add the outputs of a row of tiles, in their order."""
        return functools.reduce(operator.add, outputs)

    def _joined(self, outputs: Sequence[Any]) -> Any:
        return torch.cat(list(outputs), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Copy weight (out, in) and bias (out,) from ``other``, sharded or not, with rank 0's
        values. Collective if either layer is sharded. Raises ConfigError if shapes differ."""
        weight, bias = cast("nn.Parameter", other.weight), cast("nn.Parameter | None", other.bias)
        wanted = (self.out_features, self.in_features), (self.out_features,) if self.use_bias else None
        got = tuple(weight.shape), tuple(bias.shape) if bias is not None else None
        if got != wanted:
            raise ConfigError(
                "the layer does not have this weight and bias",
                where="TiledLinear.copy_params_from",
                got=got,
                expected=wanted,
            )
        with GatheredParameters([weight] if bias is None else [weight, bias]):
            for row, tiles in zip(range(self.out_splits), self.linears, strict=True):
                values = weight.tensor_split(self.out_splits)[row].tensor_split(self.in_splits, dim=1)
                for tile, part in zip(cast("nn.ModuleList", tiles), values, strict=True):
                    with GatheredParameters(tile, modifier_rank=0):
                        cast("nn.Parameter", tile.weight).copy_(part)
                        if tile.bias is not None and bias is not None:
                            cast("nn.Parameter", tile.bias).copy_(bias.tensor_split(self.out_splits)[row])


class TiledLinearReturnBias(TiledLinear):
    """Tiles that return ``(output, bias or None)``, like Megatron-LM's ``skip_bias_add``."""

    def _sum(self, outputs: list[Any]) -> Any:
        """Add the outputs; the last tile of a row has the bias."""
        return super()._sum([output for output, _ in outputs]), outputs[-1][1]

    def _joined(self, outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        joined = super()._joined([output for output, _ in outputs])
        return joined, super()._joined(biases) if biases else None


def _widths(features: int, parts: int) -> list[int]:
    """Return the sizes of nearly equal parts, as ``torch.tensor_split`` cuts them."""
    return [len(part) for part in torch.empty(features, device="meta").tensor_split(parts)]
