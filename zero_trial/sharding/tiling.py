"""A linear layer in tiles, so that ZeRO stage 3 never holds all of a huge one at once.

    y = x W^T + b         W (out, in) in out_splits x in_splits tiles, each an nn.Linear of its own:
                          y[p] = sum over q of x[q] W[p, q]^T, + b[p] with the last q

Each tile is gathered when its turn comes, and freed after it, unless the layer is inside a larger
block, which is gathered as a whole. The sum over q is rounded in another order than nn.Linear's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn

from zero_trial.errors import ConfigError, TrialError
from zero_trial.sharding.param_access import GatheredParameters


class TiledLinear(nn.Module):
    """``nn.Linear`` in ``out_splits`` x ``in_splits`` tiles, which are ``self.linears[out][in]``.

    Args:
        in_splits: tiles along the input's last dim; the first ones get the features that are left
            over.
        out_splits: tiles along the output's last dim, in the same way.
        input_is_already_split: the forward gets a sequence of ``in_splits`` tensors.
        combine_out_splits: the forward returns one tensor, and not a list of ``out_splits``.
        linear_cls: builds a tile: called with its features, ``bias`` and ``kwargs``.
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
        self.in_parts, self.out_parts = _bounds(in_features, in_splits), _bounds(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(columns, rows, bias=bias and column == in_splits - 1, **kwargs)
                for column, columns in enumerate(_widths(self.in_parts))
            )
            for rows in _widths(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """Return (..., out_features), or its ``out_splits`` parts. ``input_``: (..., in_features),
        or its ``in_splits`` parts."""
        inputs = self._parts(input_)
        outputs: list[Any] = []
        for row, tiles in enumerate(self.linears):
            total = None
            for column, tile in enumerate(cast("nn.ModuleList", tiles)):
                total = self._reduce_local_output(column, row, total, tile(inputs[column]))
            outputs.append(total)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    def _parts(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.in_splits == 1:
            return [cast("torch.Tensor", input_)]
        if not self.input_is_already_split:
            given = cast("torch.Tensor", input_)
            return self._split_global_input(given, _widths(_bounds(given.shape[-1], self.in_splits)))
        if len(input_) != self.in_splits:
            raise TrialError(
                "not the parts of an input", where="TiledLinear", got=len(input_), expected=f"{self.in_splits} tensors"
            )
        return list(input_)

    def _split_global_input(self, input: torch.Tensor, split_sizes: list[int]) -> Sequence[torch.Tensor]:
        """Cut the input along its last dim; for subclasses with other inputs."""
        return torch.split(input, split_sizes, dim=-1)

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        """Add a tile's output to the sum of those before it, None before the first; for subclasses
        whose tiles return something else."""
        return new_out if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        """Join the outputs of all rows of tiles; for subclasses."""
        return torch.cat(list(outputs), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Copy weight (out, in) and bias (out,) of ``other``, sharded or not; of the values, rank
        0's count. Collective where either is sharded. Raises ConfigError for other shapes."""
        weight, bias = cast("nn.Parameter", other.weight), cast("nn.Parameter | None", other.bias)
        wanted = (self.out_features, self.in_features), (self.out_features,) if self.use_bias else None
        got = tuple(weight.shape), tuple(bias.shape) if bias is not None else None
        if got != wanted:
            raise ConfigError(
                "the layer does not have these weight and bias",
                where="TiledLinear.copy_params_from",
                got=got,
                expected=wanted,
            )
        with GatheredParameters([weight] if bias is None else [weight, bias]):
            for row, tiles in enumerate(self.linears):
                rows = slice(self.out_parts[row], self.out_parts[row + 1])
                for column, tile in enumerate(cast("nn.ModuleList", tiles)):
                    columns = slice(self.in_parts[column], self.in_parts[column + 1])
                    with GatheredParameters(tile, modifier_rank=0):
                        cast("nn.Parameter", tile.weight).copy_(weight[rows, columns])
                        if bias is not None and column == self.in_splits - 1:
                            cast("nn.Parameter", tile.bias).copy_(bias[rows])


class TiledLinearReturnBias(TiledLinear):
    """Tiles that return ``(output, bias or None)``, as Megatron-LM's linear layers with
    ``skip_bias_add`` do."""

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        output, bias = new_out
        before, kept = current_out if current_out is not None else (None, None)
        return super()._reduce_local_output(in_id, out_id, before, output), kept if bias is None else bias

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        joined = super()._combine_output_splits([output for output, _ in outputs])
        return joined, super()._combine_output_splits(biases) if biases else None


def _bounds(features: int, parts: int) -> list[int]:
    """Return where each of ``parts`` nearly equal parts begins, and the end: the first ones are one
    larger."""
    size, more = divmod(features, parts)
    return [part * size + min(part, more) for part in range(parts + 1)]


def _widths(bounds: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(bounds)]
