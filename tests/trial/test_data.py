"""The data loader: torch's arguments, exact sharding, reproducible shuffle; and other loaders."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from tests.trial.harness import Points
from zero_trial.errors import DataError
from zero_trial.trial import DataLoader


def indices(loader: Any, count: int | None = None) -> list[list[int]]:
    return [batch[0].tolist() for batch in islice(loader, count)]


def test_outside_of_a_trial_it_is_one_pass_over_everything() -> None:
    loader = DataLoader(Points(5), batch_size=2)
    assert indices(loader) == [[0, 1], [2, 3], [4]] and len(loader) == 3


def test_a_replicas_loader_starts_where_it_should_and_reads_nothing_before() -> None:
    data = Points(24)
    loader = DataLoader(data, batch_size=2).get_data_loader(repeat=True, skip=3, num_replicas=2, rank=1)
    assert indices(loader, 2) == [[14, 15], [18, 19]]
    assert data.read == [14, 15, 18, 19]
    before = torch.get_rng_state()
    next(iter(loader))
    assert torch.equal(before, torch.get_rng_state()), "making an iterator draws no random numbers"


def test_the_shuffle_comes_from_the_trials_seed_unless_the_loader_has_its_own() -> None:
    def order(trial_seed: int, own: int | None = None) -> list[list[int]]:
        return indices(
            DataLoader(Points(30), 5, shuffle=True, seed=own).get_data_loader(repeat=True, seed=trial_seed), 6
        )

    assert order(1) == order(1) != order(2)
    assert order(1, own=9) == order(2, own=9)


def test_worker_processes_give_the_same_batches() -> None:
    plain = DataLoader(Points(12), 2, shuffle=True).get_data_loader(repeat=True, skip=2, seed=1)
    worked = DataLoader(Points(12), 2, shuffle=True, num_workers=1, timeout=60).get_data_loader(
        repeat=True, skip=2, seed=1
    )
    assert indices(worked, 3) == indices(plain, 3)


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": Stream()}, "disable_dataset_reproducibility_checks"),
        ({"dataset": [1], "batch_size": 0}, "positive"),
        ({"dataset": [1], "batch_size": None}, "positive"),
        ({"dataset": [1], "shuffle": True, "sampler": [0]}, "excludes shuffle"),
        ({"dataset": [1], "shuffle": True, "batch_sampler": [[0]]}, "excludes batch_size"),
    ],
)
def test_what_cannot_be_sharded_or_means_nothing_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataLoader(**arguments)
