"""The stream of samples: repeat, distribute, skip; the data loader, and other loaders."""

from __future__ import annotations

import itertools
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from tests.support.thread_ranks import run_ranks
from tests.trial.harness import LineTrial, Points, run_rank, run_world, steps
from zero_trial.errors import DataError
from zero_trial.trial import DataLoader, ModelParallelUnit
from zero_trial.trial.checkpointing import read_state
from zero_trial.trial.data import (
    UNKNOWN_LENGTH,
    DataPosition,
    TrainFeed,
    accept_loader,
    agreed_minimum,
    epoch_steps,
    local_batches,
    open_feed,
    samples_of,
)
from zero_trial.trial.runtime.protocols import Distributed
from zero_trial.trial.samplers import (
    DealtBatches,
    EpochOrder,
    ReplicaShare,
    TrainBatches,
    ValidationBatches,
    plain,
)


def take(batches: object, count: int) -> list[list[int]]:
    return list(islice(iter(batches), count))  # type: ignore[call-overload,no-any-return]


GIVEN = [[0, 1, 2], [3], [4, 5]]  # by a batch sampler of the user's


@pytest.mark.parametrize(
    ("batches", "taken"),
    [
        # epochs are joined, so that every batch is full; or each epoch's tail is left out
        (TrainBatches(EpochOrder(5), 2), [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4], [0, 1]]),
        (TrainBatches(EpochOrder(5), 2, drop_last=True), [[0, 1], [2, 3], [0, 1], [2, 3]]),
        # dealt out in turn
        (TrainBatches(EpochOrder(8), 2, ReplicaShare(0, 2)), [[0, 1], [4, 5], [0, 1]]),
        (TrainBatches(EpochOrder(8), 2, ReplicaShare(1, 2)), [[2, 3], [6, 7], [2, 3]]),
        (DealtBatches(GIVEN, 3, ReplicaShare(1, 2)), [[3], [0, 1, 2], [4, 5]]),
        (DealtBatches(GIVEN, 3, ReplicaShare(1, 2), skip=1), [[0, 1, 2], [4, 5]]),
    ],
)
def test_batches_without_end(batches: object, taken: list[list[int]]) -> None:
    assert take(batches, len(taken)) == taken


@pytest.mark.parametrize(
    ("batches", "whole"),
    [
        (ValidationBatches(EpochOrder(7), 2, ReplicaShare(0, 2)), [[0, 1], [4, 5]]),
        (ValidationBatches(EpochOrder(7), 2, ReplicaShare(1, 2)), [[2, 3], [6]]),
        (ValidationBatches(EpochOrder(5), 2), [[0, 1], [2, 3], [4]]),
        (ValidationBatches(EpochOrder(7), 2, drop_last=True), [[0, 1], [2, 3], [4, 5]]),
        (DealtBatches(GIVEN, 3, ReplicaShare(0, 2), repeat=False), [[0, 1, 2], [4, 5]]),
        (DealtBatches(GIVEN, 3, ReplicaShare(1, 2), repeat=False), [[3]]),
        (DealtBatches([], 0), []),
        (TrainBatches(EpochOrder(0), 2), []),
        (TrainBatches(EpochOrder(1), 2, drop_last=True), []),
    ],
)
def test_one_pass_and_batches_of_nothing(batches: Any, whole: list[list[int]]) -> None:
    assert list(batches) == whole and len(batches) == len(whole)


@pytest.mark.parametrize(
    ("length", "drop_last", "replicas"), [(5, False, 1), (8, True, 2), (13, False, 3), (13, True, 3)]
)
def test_skipping_is_the_same_as_not_reading_on(length: int, drop_last: bool, replicas: int) -> None:
    order = EpochOrder(length, seed=3)
    for rank in range(replicas):
        whole = take(TrainBatches(order, 2, ReplicaShare(rank, replicas), 0, drop_last), 25)
        for skip in (0, 1, 2, 7, 20):
            assert (
                take(TrainBatches(order, 2, ReplicaShare(rank, replicas), skip, drop_last), 5) == whole[skip : skip + 5]
            )


@pytest.mark.parametrize("split", [(1, 12), (3, 4), (12, 1)])
def test_a_step_trains_the_same_samples_whatever_the_replicas(split: tuple[int, int]) -> None:
    """Global batch 12 in three steps, from 31 samples: over the seam of two epochs, none repeated,
    none left out."""
    replicas, size = split
    order = EpochOrder(31, seed=1)
    expected = [index for batch in take(TrainBatches(order, 12), 3) for index in batch]
    for step in range(3):
        parts = [take(TrainBatches(order, size, ReplicaShare(rank, replicas), step), 1)[0] for rank in range(replicas)]
        assert [index for part in parts for index in part] == expected[step * 12 : step * 12 + 12]
    assert sorted(expected[:31]) == list(range(31))


def test_a_shuffle_is_a_function_of_seed_and_epoch_and_touches_no_other_random_state() -> None:
    before = torch.get_rng_state()
    first = EpochOrder(50, seed=1)
    zero, one, other = plain(first.epoch(0)), plain(first.epoch(1)), plain(EpochOrder(50, seed=2).epoch(0))
    assert zero == plain(EpochOrder(50, seed=1).epoch(0))
    assert sorted(zero) == list(range(50)) and zero != list(range(50))
    assert zero != one and zero != other
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("length", "replicas"), [*itertools.product(range(0, 26, 5), [1, 2, 3])])
def test_in_one_pass_replicas_have_equally_many_batches_and_lose_less_than_one_sample_each(
    length: int, replicas: int
) -> None:
    passes = [ValidationBatches(EpochOrder(length), 3, ReplicaShare(rank, replicas)) for rank in range(replicas)]
    batches = [list(one) for one in passes]
    assert [len(part) for part in batches] == [len(one) for one in passes] == [len(passes[0])] * replicas
    read = sorted(index for part in batches for batch in part for index in batch)
    assert read == list(range(length - passes[0].left_out)) and passes[0].left_out < replicas
    assert all(0 < len(batch) <= 3 for part in batches for batch in part)


def test_batches_per_epoch_are_the_same_on_every_replica() -> None:
    assert [len(TrainBatches(EpochOrder(23), 2, ReplicaShare(rank, 3))) for rank in range(3)] == [3, 3, 3]


class Epochs:
    """A user's sampler that wants to know the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> object:
        return iter([self.epoch * 10 + index for index in range(3)])


def test_a_users_sampler_gets_the_epoch() -> None:
    order = EpochOrder(3, sampler=Epochs())  # type: ignore[arg-type]
    assert take(TrainBatches(order, 2), 3) == [[0, 1], [2, 10], [11, 12]]


class Larger(LineTrial):
    def build_training_data_loader(self) -> Any:
        return DataLoader(Points(24), batch_size=3)


def messages(run: Any) -> list[str]:
    return [event["message"] for event in run.record.events if event["kind"] == "note"]


def test_a_batch_that_is_not_the_engines_is_said() -> None:
    assert "build_training_data_loader: batches of 3 samples, but the engine's micro batch is 2" in messages(
        run_rank(Larger, steps(1))
    )
    assert not any("micro batch is" in message for message in messages(run_rank(LineTrial, steps(1))))


class Greedy(LineTrial):
    """Rank 1 takes one batch more."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        if self.context.distributed.rank == 1 and batch_idx == 0:
            next(dataloader_iter)
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


def test_the_lowest_position_counts_where_ranks_differ(tmp_path: Path) -> None:
    first, _ = run_world(2, Greedy, steps(2), tmp_path)
    state = read_state(tmp_path / "step-000002")
    assert (state.micro_batches, state.samples) == (2, 8)
    assert any(
        "ranks have consumed different numbers of batches [[2, 8], [3, 12]]" in message for message in messages(first)
    )


def test_a_loader_without_a_length_is_one_long_epoch() -> None:
    class Streams(LineTrial):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.disable_dataset_reproducibility_checks()

        def build_training_data_loader(self) -> Any:
            from torch.utils.data import DataLoader as TorchDataLoader

            return (batch for batch in TorchDataLoader(self.data, 2))

    run = run_rank(Streams, steps(5))
    assert run.trial.calls == [(0, step) for step in range(5)]
    assert next(event for event in run.record.events if event["kind"] == "start")["epoch_steps"] is None


ALONE = ModelParallelUnit(0, 1, True, True)
SECOND_OF_TWO = ModelParallelUnit(1, 2, True, True)


# --- the data loader itself -----------------------------------------------------------------------


def indices(loader: Any, count: int | None = None) -> list[list[int]]:
    return [batch[0].tolist() for batch in islice(loader, count)]


def test_outside_of_a_trial_a_loader_is_one_pass_over_everything() -> None:
    loader = DataLoader(Points(5), batch_size=2)
    assert indices(loader) == [[0, 1], [2, 3], [4]] and len(loader) == 3


def test_a_shuffled_loader_takes_the_trials_seed_or_its_own_and_workers_change_nothing() -> None:
    def order(trial_seed: int, own: int | None = None, **workers: Any) -> list[list[int]]:
        loader = DataLoader(Points(30), 5, shuffle=True, seed=own, **workers)
        return indices(loader.get_data_loader(repeat=True, skip=2, seed=trial_seed), 6)

    before = torch.get_rng_state()
    assert order(1) == order(1) == order(1, num_workers=1, timeout=60) != order(2)
    assert order(1, own=9) == order(2, own=9)
    assert torch.equal(before, torch.get_rng_state()), "making an iterator draws no random numbers"


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": Stream()}, "disable_dataset_reproducibility_checks"),
        ({"dataset": [1], "batch_size": 0}, "positive"),
        ({"dataset": [1], "batch_size": None}, "positive"),
        ({"dataset": [1], "shuffle": True, "sampler": [0]}, "cannot be combined with shuffle"),
        ({"dataset": [1], "shuffle": True, "batch_sampler": [[0]]}, "cannot be combined with batch_size"),
    ],
)
def test_what_cannot_be_sharded_or_means_nothing_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataLoader(**arguments)


def test_our_own_loader_seeks_by_samples() -> None:
    data = Points(40)
    feed = open_feed(DataLoader(data, 2), "x", SECOND_OF_TWO, 0, DataPosition(samples=12, micro_batches=99))
    assert feed.taken == 3 and next(feed)[0].tolist() == [14, 15] and feed.taken == 4
    assert data.read == [14, 15]
    assert feed.position == DataPosition(16, 4)


def test_a_position_between_two_batches_is_refused() -> None:
    with pytest.raises(DataError, match=r"got 6 samples so far, expected a multiple of micro batch 4 x 1 replicas"):
        open_feed(DataLoader(Points(40), 4), "x", ALONE, 0, DataPosition(samples=6))


def test_a_batch_sampler_is_sought_by_micro_batches() -> None:
    feed = open_feed(DataLoader(Points(9), batch_sampler=[[1], [2], [3, 4]]), "x", ALONE, 0, DataPosition(0, 2))
    assert next(feed)[0].tolist() == [3, 4] and next(feed)[0].tolist() == [1]


def test_another_loader_is_repeated_and_read_up_to_the_position() -> None:
    feed = open_feed(TorchDataLoader(Points(6), 2), "x", ALONE, 0, DataPosition(0, 4))
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
    feed = open_feed(Stateful(), "x", ALONE, 0, DataPosition(0, 4, {"at": 4}))
    assert next(feed) == 5 and feed.taken == 5
    assert feed.position == DataPosition(0, 5, {"at": 5})


def test_a_loader_that_yields_nothing() -> None:
    with pytest.raises(DataError, match="build_x returned an empty loader"):
        next(TrainFeed([], "build_x", repeat=True))


def test_other_loaders_need_the_trials_word() -> None:
    loader = TorchDataLoader(Points(2))
    with pytest.raises(RuntimeError, match=r"reproducibility[\s\S]*disable this check") as raised:
        accept_loader(loader, "x", check=True)
    # a user's mistake, without a traceback
    assert isinstance(raised.value, DataError) and raised.value.exit_code == 2
    accept_loader(loader, "x", check=False)
    accept_loader(DataLoader(Points(2)), "x", check=True)
    for nothing in (None, 3, "text"):
        with pytest.raises(DataError, match="must return a data loader"):
            accept_loader(nothing, "x", check=False)


def test_lengths() -> None:
    assert local_batches(DataLoader(Points(23), 2), SECOND_OF_TWO) == 5
    assert local_batches(TorchDataLoader(Points(23), 2), SECOND_OF_TWO) == 12
    assert local_batches(iter([]), ALONE) == UNKNOWN_LENGTH
    assert samples_of(DataLoader(Points(23), 2)) == 23 and samples_of(DataLoader(Points(23), sampler=[1, 2])) == 2
    assert samples_of(TorchDataLoader(Points(23))) is None


def agree(numbers: list[int | None]) -> list[Any]:
    notes: list[str] = []

    def work(ranks: Distributed) -> tuple[int, list[str]]:
        return agreed_minimum(ranks, numbers[ranks.rank], "build_x", notes.append), notes

    return run_ranks(len(numbers), work)


def test_the_smallest_counts_and_is_said() -> None:
    outcomes = agree([5, None, 3])
    assert [minimum for minimum, _ in outcomes] == [3, 3, 3]
    assert "build_x: ranks have different numbers of batches [5, None, 3]; 3 of each are used" in outcomes[0][1]


def test_a_rank_without_batches_is_named_on_every_rank() -> None:
    for error in agree([2, 0]):
        assert isinstance(error, DataError)
        assert str(error).startswith("rank 1: build_x returned an empty loader")


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
    assert epoch_steps(Distributed(), loader, mpu, accumulation, lambda note: None) == steps


def test_ranks_that_read_no_data_learn_the_length() -> None:
    def work(ranks: Distributed) -> int:
        reads = ranks.rank == 0
        loader = DataLoader(Points(10), 2) if reads else None
        return epoch_steps(ranks, loader, ModelParallelUnit(0, 1, reads, reads), 1, lambda note: None)

    assert run_ranks(2, work) == [5, 5]
