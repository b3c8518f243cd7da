"""Who reads data and whose metrics count."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from zero_trial.runtime.protocols import JsonDistributed
from zero_trial.trial.context import ModelParallelUnit, make_data_parallel_mpu, make_engine_mpu


@dataclass
class Grid:
    """A rank of a mesh of two replicas, some pipeline ranks and some slices."""

    pipe: int
    pipes: int
    piece: int

    def get_data_parallel_rank(self) -> int:
        return 1

    def get_data_parallel_world_size(self) -> int:
        return 2

    def get_pipe_parallel_rank(self) -> int:
        return self.pipe

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipes

    def get_slice_parallel_rank(self) -> int:
        return self.piece


def test_every_rank_is_a_replica() -> None:
    assert make_data_parallel_mpu(JsonDistributed(3, 4)) == ModelParallelUnit(3, 4, True, True)


@pytest.mark.parametrize(
    ("grid", "reports", "loads"),
    [
        (Grid(0, 1, 0), True, True),
        (Grid(0, 1, 1), False, False),
        (Grid(0, 3, 0), False, True),
        (Grid(1, 3, 0), False, False),
        (Grid(2, 3, 0), True, True),
        (Grid(2, 3, 1), False, False),
    ],
)
def test_each_replica_counts_once(grid: Grid, reports: bool, loads: bool) -> None:
    assert make_engine_mpu(grid) == ModelParallelUnit(1, 2, reports, loads)


def test_a_schedule_may_place_the_last_layer_elsewhere() -> None:
    """With ZB-V pipeline rank 0 has both ends."""
    first, turn = (make_engine_mpu(Grid(pipe, 2, 0), pipe == 0, pipe == 0) for pipe in (0, 1))
    assert (first.should_report_metrics, first.should_build_data_loader) == (True, True)
    assert (turn.should_report_metrics, turn.should_build_data_loader) == (False, False)
