"""The four things that a trial must know of the mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero_trial.platform.protocols import Distributed


@dataclass(frozen=True)
class ModelParallelUnit:
    """A rank's place among the data-parallel replicas, and its duties.

    ``should_report_metrics``: this rank's metrics count (once per replica, so that tensor- and pipeline-parallel peers
    do not weigh in as replicas). ``should_build_data_loader``: this rank reads batches.
    """

    data_parallel_rank: int
    data_parallel_world_size: int
    should_report_metrics: bool
    should_build_data_loader: bool


def make_data_parallel_mpu(dist: Distributed) -> ModelParallelUnit:
    """Every rank is a replica (a sharded one, maybe)."""
    return ModelParallelUnit(dist.rank, dist.size, should_report_metrics=True, should_build_data_loader=True)


def make_engine_mpu(grid: Any, first: bool | None = None, last: bool | None = None) -> ModelParallelUnit:
    """From an engine's ``mpu``: the first and last pipeline ranks of the first model-parallel slice read data; the
    last one reports.

    ``first`` and ``last``: whether this rank holds the first and the last layer, where the engine says it; a schedule
    may place both on one rank.
    """
    pipe, pipes = grid.get_pipe_parallel_rank(), grid.get_pipe_parallel_world_size()
    first = pipe == 0 if first is None else first
    last = pipe == pipes - 1 if last is None else last
    first_slice = grid.get_slice_parallel_rank() == 0
    return ModelParallelUnit(
        data_parallel_rank=grid.get_data_parallel_rank(),
        data_parallel_world_size=grid.get_data_parallel_world_size(),
        should_report_metrics=first_slice and last,
        should_build_data_loader=first_slice and (first or last),
    )
