"""The training batches of a rank, and where a resumed run takes them up."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchDataLoader

from tests.trial.harness import Points
from zero_trial.errors import DataError
from zero_trial.trial import DataLoader, ModelParallelUnit
from zero_trial.trial.data import (
    UNKNOWN_LENGTH,
    Resume,
    TrainFeed,
    check_reproducible,
    local_batches,
    open_feed,
    samples_of,
)

ALONE = ModelParallelUnit(0, 1, True, True)
SECOND_OF_TWO = ModelParallelUnit(1, 2, True, True)


def test_our_own_loader_seeks_by_samples() -> None:
    data = Points(40)
    feed = open_feed(DataLoader(data, 2), "x", SECOND_OF_TWO, 0, Resume(samples=12, micro_batches=99))
    assert feed.taken == 3 and next(feed)[0].tolist() == [14, 15] and feed.taken == 4
    assert data.read == [14, 15]
    assert feed.state_dict() == {"micro_batches": 4, "samples": 16, "loader": None}


def test_a_position_between_two_batches_is_refused() -> None:
    with pytest.raises(DataError, match=r"got 6 samples so far, expected a multiple of micro batch 4 x 1 replicas"):
        open_feed(DataLoader(Points(40), 4), "x", ALONE, 0, Resume(samples=6))


def test_a_batch_sampler_is_sought_by_micro_batches() -> None:
    feed = open_feed(DataLoader(Points(9), batch_sampler=[[1], [2], [3, 4]]), "x", ALONE, 0, Resume(0, 2))
    assert next(feed)[0].tolist() == [3, 4] and next(feed)[0].tolist() == [1]


def test_another_loader_is_repeated_and_read_up_to_the_position() -> None:
    feed = open_feed(TorchDataLoader(Points(6), 2), "x", ALONE, 0, Resume(0, 4))
    assert [next(feed)[0].tolist() for _ in range(3)] == [[2, 3], [4, 5], [0, 1]] and feed.taken == 7


class Stateful:
    """A loader that knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < 10:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_loader_with_a_state_takes_it_back() -> None:
    feed = open_feed(Stateful(), "x", ALONE, 0, Resume(0, 4, {"at": 4}))
    assert next(feed) == 5 and feed.taken == 5
    assert feed.state_dict() == {"micro_batches": 5, "samples": 0, "loader": {"at": 5}}


def test_a_loader_that_yields_nothing() -> None:
    with pytest.raises(DataError, match="build_x returned a loader that yields nothing"):
        next(TrainFeed([], "build_x", repeat=True))


def test_other_loaders_need_the_trials_word() -> None:
    loader = TorchDataLoader(Points(2))
    with pytest.raises(RuntimeError, match=r"reproducibility[\s\S]*disable this check") as raised:
        check_reproducible(loader, "x", check=True)
    assert isinstance(raised.value, DataError) and raised.value.exit_code == 2  # a user's mistake, without a traceback
    check_reproducible(loader, "x", check=False)
    check_reproducible(DataLoader(Points(2)), "x", check=True)
    for nothing in (None, 3, "text"):
        with pytest.raises(DataError, match="must return a data loader"):
            check_reproducible(nothing, "x", check=False)


def test_lengths() -> None:
    assert local_batches(DataLoader(Points(23), 2), SECOND_OF_TWO) == 5
    assert local_batches(TorchDataLoader(Points(23), 2), SECOND_OF_TWO) == 12
    assert local_batches(iter([]), ALONE) == UNKNOWN_LENGTH
    assert samples_of(DataLoader(Points(23), 2)) == 23 and samples_of(DataLoader(Points(23), sampler=[1, 2])) == 2
    assert samples_of(TorchDataLoader(Points(23))) is None
