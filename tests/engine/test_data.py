"""Loaders for plain scripts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import IterableDataset

from zero_trial.engine.compat import RepeatingLoader, sharded_loader
from zero_trial.errors import DataError


def seen(loader: object) -> list[int]:
    return [int(value) for batch in loader for value in batch]  # type: ignore[attr-defined]


def test_ranks_share_the_data_and_every_pass_is_shuffled_anew() -> None:
    data = list(range(20))
    loaders = [sharded_loader(data, 3, rank, 2) for rank in range(2)]
    first, second = ([seen(loader) for loader in loaders] for _ in range(2))
    for parts in (first, second):
        assert sorted(parts[0] + parts[1]) == data
    assert first != second
    assert first == [seen(sharded_loader(data, 3, rank, 2)) for rank in range(2)]


def test_a_short_last_batch_is_kept_unless_it_is_to_be_dropped() -> None:
    assert [len(batch) for batch in sharded_loader(list(range(7)), 4, 0, 1)] == [4, 3]
    assert [len(batch) for batch in sharded_loader(list(range(7)), 4, 0, 1, drop_last=True)] == [4]


def test_iterable_data_sets_are_left_alone() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(range(5))

    assert seen(sharded_loader(Stream(), 2, 1, 2)) == [0, 1, 2, 3, 4]


def test_repeating_starts_again() -> None:
    endless = RepeatingLoader([torch.tensor([1]), torch.tensor([2])])
    assert [int(next(endless)) for _ in range(5)] == [1, 2, 1, 2, 1]


def test_repeating_nothing_is_an_error() -> None:
    with pytest.raises(DataError, match=r"RepeatingLoader\(list\): the loader yields nothing"):
        next(RepeatingLoader([]))
