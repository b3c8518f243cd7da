"""Ranks agree on the length of an epoch."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchDataLoader

from tests.trial.harness import Points
from zero_trial.errors import DataError
from zero_trial.runtime.in_memory import run_ranks
from zero_trial.runtime.protocols import Distributed, JsonDistributed
from zero_trial.trial import DataLoader, ModelParallelUnit
from zero_trial.trial.data import agreed_minimum, epoch_steps


def agree(numbers: list[int | None]) -> list[Any]:
    notes: list[str] = []

    def work(ranks: Distributed) -> tuple[int, list[str]]:
        return agreed_minimum(ranks, numbers[ranks.rank], "build_x", notes.append), notes

    return run_ranks(len(numbers), work)


def test_the_smallest_counts_and_is_said() -> None:
    outcomes = agree([5, None, 3])
    assert [minimum for minimum, _ in outcomes] == [3, 3, 3]
    assert "build_x: ranks have different numbers of batches [5, None, 3]; 3 of each are used" in outcomes[0][1]


def test_equal_numbers_are_no_news() -> None:
    assert agree([4, 4])[0] == (4, [])


def test_a_rank_without_batches_is_named_on_every_rank() -> None:
    for error in agree([2, 0]):
        assert isinstance(error, DataError)
        assert str(error).startswith("rank 1: build_x returned a loader that yields nothing")


@pytest.mark.parametrize(
    ("loader", "accumulation", "steps"),
    [
        (DataLoader(Points(24), 2), 1, 12),
        (DataLoader(Points(25), 2), 5, 2),
        (DataLoader(Points(3), 2), 5, 1),
        (DataLoader(Points(1), 2), 1, 1),
        (TorchDataLoader(Points(25), 2), 5, 2),
    ],
)
def test_steps_per_epoch(loader: Any, accumulation: int, steps: int) -> None:
    mpu = ModelParallelUnit(0, 1, True, True)
    assert epoch_steps(JsonDistributed(), loader, mpu, accumulation, lambda note: None) == steps


def test_ranks_that_read_no_data_learn_the_length() -> None:
    def work(ranks: Distributed) -> int:
        reads = ranks.rank == 0
        loader = DataLoader(Points(10), 2) if reads else None
        return epoch_steps(ranks, loader, ModelParallelUnit(0, 1, reads, reads), 1, lambda note: None)

    assert run_ranks(2, work) == [5, 5]
