"""Process topologies under DeepSpeed's names: ranks as points of a grid with named axes. Pure.

zero_trial's own mesh is ``mesh.topology``; these are for code that was written for DeepSpeed and
builds or reads a topology.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from zero_trial.errors import ConfigError


class ProcessTopology:
    """A grid of ranks, row by row: the last axis changes fastest.

    ``mapping`` is from coordinate (a named tuple of the axes) to rank.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(dim < 1 for dim in dims):
            raise ConfigError(
                "a topology needs distinct axes with a size of 1 or more each",
                where="topology",
                got=f"axes {list(axes)}, dims {list(dims)}",
            )
        self.axes = list(axes)
        self.dims = list(dims)
        coordinate: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        self.ProcessCoord = coordinate
        self.mapping: dict[Any, int] = {
            coordinate(*place): rank for rank, place in enumerate(product(*(range(dim) for dim in self.dims)))
        }
        self._places = list(self.mapping)

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a coordinate of all axes. Raises ConfigError where an axis is missing
        or a coordinate is outside."""
        if set(coord_kwargs) != set(self.axes):
            raise ConfigError(
                "get_rank needs every axis", where="topology", got=sorted(coord_kwargs), expected=self.axes
            )
        place = self.ProcessCoord(**coord_kwargs)
        if place not in self.mapping:
            raise ConfigError(
                "no rank is at this coordinate", where="topology", got=place, expected=f"below {self.dims}"
            )
        return self.mapping[place]

    def get_axis_names(self) -> list[str]:
        """Return the axes, slowest first."""
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return the coordinate as text, such as ``model_00``: part of DeepSpeed's checkpoint file
        names."""
        place = self.get_coord(rank)
        return outer_sep.join(
            f"{axis}{inner_sep}{getattr(place, axis):02d}" for axis in self.axes if axis not in omit_axes
        )

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis; 0 for one that is not there."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the coordinate of a rank, a named tuple."""
        if not 0 <= rank < len(self._places):
            raise ConfigError(
                "no such rank in the topology", where="topology", got=rank, expected=f"0 to {len(self._places) - 1}"
            )
        return self._places[rank]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ on this axis only, which communicate along it.
        Empty for an axis that is not there."""
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        sizes = (range(self.get_dim(name)) for name in others)
        return [self.filter_match(**dict(zip(others, place, strict=True))) for place in product(*sizes)]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks whose coordinates have these values."""
        return [
            rank
            for place, rank in self.mapping.items()
            if all(getattr(place, axis) == at for axis, at in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks whose coordinate on ``axis`` is ``idx``."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Return the number of ranks."""
        return prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipelines whose data-parallel ranks are neighbours: gradients stay on a host, activations
    cross hosts."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline, data and model parallelism; the model-parallel ranks are neighbours."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])
