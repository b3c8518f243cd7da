"""The stream of samples: repeat, distribute, skip."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from zero_trial.trial.samplers import (
    DealtBatches,
    FromSampler,
    ReplicaShare,
    SampleStream,
    Sequential,
    Shuffled,
    TrainBatches,
    ValidationBatches,
    plain,
)


def take(batches: object, count: int) -> list[list[int]]:
    return list(islice(iter(batches), count))  # type: ignore[call-overload,no-any-return]


def test_epochs_are_joined_so_that_every_batch_is_full() -> None:
    assert take(TrainBatches(Sequential(5), 2), 6) == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4], [0, 1]]


def test_drop_last_leaves_out_each_epochs_tail() -> None:
    assert take(TrainBatches(Sequential(5), 2, drop_last=True), 4) == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_batches_are_dealt_out_in_turn() -> None:
    assert take(TrainBatches(Sequential(8), 2, ReplicaShare(0, 2)), 3) == [[0, 1], [4, 5], [0, 1]]
    assert take(TrainBatches(Sequential(8), 2, ReplicaShare(1, 2)), 3) == [[2, 3], [6, 7], [2, 3]]


@pytest.mark.parametrize("length", [5, 8, 13])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_skipping_is_the_same_as_not_reading_on(length: int, drop_last: bool, replicas: int) -> None:
    order = Shuffled(length, seed=3)
    for rank in range(replicas):
        whole = take(TrainBatches(order, 2, ReplicaShare(rank, replicas), 0, drop_last), 25)
        for skip in (0, 1, 2, 7, 20):
            assert (
                take(TrainBatches(order, 2, ReplicaShare(rank, replicas), skip, drop_last), 5) == whole[skip : skip + 5]
            )


@pytest.mark.parametrize("split", [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)])
def test_a_step_trains_the_same_samples_whatever_the_replicas(split: tuple[int, int]) -> None:
    """Global batch 12 in three steps, from 31 samples: over the seam of two epochs, none repeated,
    none left out."""
    replicas, size = split
    order = Shuffled(31, seed=1)
    expected = SampleStream(order).samples(0, 36)
    for step in range(3):
        parts = [take(TrainBatches(order, size, ReplicaShare(rank, replicas), step), 1)[0] for rank in range(replicas)]
        assert [index for part in parts for index in part] == expected[step * 12 : step * 12 + 12]
    assert sorted(expected[:31]) == list(range(31))


def test_a_shuffle_is_a_function_of_seed_and_epoch_and_touches_no_other_random_state() -> None:
    before = torch.get_rng_state()
    first = Shuffled(50, seed=1)
    zero, one, other = plain(first.epoch(0)), plain(first.epoch(1)), plain(Shuffled(50, seed=2).epoch(0))
    assert zero == plain(Shuffled(50, seed=1).epoch(0))
    assert sorted(zero) == list(range(50)) and zero != list(range(50))
    assert zero != one and zero != other
    assert torch.equal(before, torch.get_rng_state())


def test_one_pass_reads_everything_once_and_the_last_batches_may_be_small() -> None:
    first, second = (ValidationBatches(Sequential(7), 2, ReplicaShare(rank, 2)) for rank in range(2))
    assert list(first) == [[0, 1], [4, 5]] and list(second) == [[2, 3], [6]]
    assert list(ValidationBatches(Sequential(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(ValidationBatches(Sequential(7), 2, drop_last=True)) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("length", range(26))
def test_in_one_pass_replicas_have_equally_many_batches_and_lose_less_than_one_sample_each(
    length: int, replicas: int
) -> None:
    passes = [ValidationBatches(Sequential(length), 3, ReplicaShare(rank, replicas)) for rank in range(replicas)]
    batches = [list(one) for one in passes]
    assert [len(part) for part in batches] == [len(one) for one in passes] == [len(passes[0])] * replicas
    read = sorted(index for part in batches for batch in part for index in batch)
    assert read == list(range(length - passes[0].left_out)) and passes[0].left_out < replicas
    assert all(0 < len(batch) <= 3 for part in batches for batch in part)


def test_batches_per_epoch_are_the_same_on_every_replica() -> None:
    assert [len(TrainBatches(Sequential(23), 2, ReplicaShare(rank, 3))) for rank in range(3)] == [3, 3, 3]


def test_no_samples_no_batches() -> None:
    assert list(TrainBatches(Sequential(0), 2)) == []
    assert list(TrainBatches(Sequential(1), 2, drop_last=True)) == []


class Epochs:
    """A user's sampler that wants to know the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> object:
        return iter([self.epoch * 10 + index for index in range(3)])


def test_a_users_sampler_gets_the_epoch() -> None:
    order = FromSampler(Epochs(), 3)  # type: ignore[arg-type]
    assert SampleStream(order).samples(2, 5) == [2, 10, 11, 12, 20]


def test_a_users_batch_sampler_keeps_its_sizes() -> None:
    given = [[0, 1, 2], [3], [4, 5]]
    assert take(DealtBatches(given, 3, ReplicaShare(1, 2)), 3) == [[3], [0, 1, 2], [4, 5]]
    assert take(DealtBatches(given, 3, ReplicaShare(1, 2), skip=1), 2) == [[0, 1, 2], [4, 5]]
    assert list(DealtBatches(given, 3, ReplicaShare(0, 2), repeat=False)) == [[0, 1, 2], [4, 5]]
    assert (len(DealtBatches(given, 3, ReplicaShare(0, 2))), len(DealtBatches(given, 3, ReplicaShare(1, 2)))) == (2, 1)
    assert list(DealtBatches([], 0)) == []
