"""What is read for a step; how ranks agree about it is tested with an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zero_trial.comm import MeshShape, build_mesh
from zero_trial.errors import DataError
from zero_trial.pipeline.executor import StepInput, read_step, sample_count
from zero_trial.pipeline.schedule import ChunkPlacement


def split(batch: Any) -> tuple[Any, Any]:
    return batch


def eat(batches: list[Any], wanted: int) -> StepInput:
    return read_step(iter(batches), wanted, build_mesh(MeshShape()), ChunkPlacement.loop(1), split)


def pair(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(samples, 2), torch.zeros(samples)


def test_as_many_as_wanted_are_read():
    rest = iter([pair(2), pair(2), pair(2)])
    meal = read_step(rest, 2, build_mesh(MeshShape()), ChunkPlacement.loop(1), split)
    assert (meal.micro_batches, list(meal.samples), meal.total, meal.labels_travel) == (2, [2, 2], 4, False)
    assert len(list(rest)) == 1


def test_shares_add_up():
    alike, short = eat([pair(2), pair(2), pair(2)], 3), eat([pair(2), pair(1)], 2)
    assert alike.share(2) == 1 / 3
    assert [short.share(2), short.share(1)] == [2 / 3, 1 / 3]


def test_the_end():
    assert eat([pair(2)], 3).micro_batches == 1
    with pytest.raises(StopIteration):
        eat([], 3)
    with pytest.raises(DataError, match="rank 0: the rank of the first layer has nothing to read"):
        read_step(None, 1, build_mesh(MeshShape()), ChunkPlacement.loop(1), split)


def test_samples_of_a_value():
    assert sample_count({"x": torch.ones(3, 2), "y": torch.ones(5)}) == 3
    assert sample_count((None, torch.tensor(1))) == 1
    assert sample_count([]) == 1
