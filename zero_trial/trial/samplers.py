"""Which samples a replica reads, and in what order: an endless, seekable stream of indices, dealt
out batch by batch.

The order of operations is repeat, distribute, skip:

    repeat      epoch 0's order, epoch 1's order, ... end to end: a function of (seed, epoch) alone
    batch       consecutive samples, ``batch_size`` each; a batch may span the seam of two epochs,
                so every batch is full
    distribute  batch k goes to replica k mod N
    skip        the first ``skip`` batches of this replica are jumped over by arithmetic; nothing is
                read

Optimizer step s of a run with global batch size G therefore trains exactly the samples [s*G,
(s+1)*G) of the stream, whatever the number of replicas, the micro batch and the accumulation are.
Resuming, on the same ranks or on others, neither repeats nor skips a sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Protocol

import torch

# 2**64 / golden ratio (Knuth): neighbouring (seed, epoch) pairs give unrelated generator seeds.
MIX = 0x9E3779B97F4A7C15

Order = Sequence[int] | torch.Tensor


class EpochOrder(Protocol):
    """The order of one epoch's samples, as a function of the epoch."""

    def __len__(self) -> int: ...

    def epoch(self, epoch: int) -> Order: ...


@dataclass(frozen=True)
class Sequential:
    """The samples in the order of the dataset."""

    length: int

    def __len__(self) -> int:
        return self.length

    def epoch(self, epoch: int) -> Order:
        return range(self.length)


@dataclass(frozen=True)
class Shuffled:
    """A permutation per epoch (8 bytes per sample) from a generator of its own.

    No other random state is read or changed.
    """

    length: int
    seed: int

    def __len__(self) -> int:
        return self.length

    def epoch(self, epoch: int) -> Order:
        generator = torch.Generator().manual_seed((self.seed + epoch * MIX) % 2**63)
        return torch.randperm(self.length, generator=generator)


@dataclass(frozen=True)
class FromSampler:
    """A user's sampler, run through once per epoch, after ``set_epoch(epoch)`` if it has that
    method.

    Its order must be a function of the epoch alone, the same on every rank. Otherwise ranks read
    the same samples, and a resume is not exact.
    """

    sampler: Iterable[int]
    length: int

    def __len__(self) -> int:
        return self.length

    def epoch(self, epoch: int) -> Order:
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return list(self.sampler)


class SampleStream:
    """The endless stream of samples, read anywhere; ``epoch_length`` cuts every epoch's tail
    (drop_last).

    Keeps one epoch's order.
    """

    def __init__(self, order: EpochOrder, epoch_length: int | None = None) -> None:
        self._order = order
        self._length = len(order) if epoch_length is None else epoch_length
        self._kept: tuple[int, Order] | None = None

    def samples(self, start: int, count: int) -> list[int]:
        """Return samples [start, start + count) of the stream. The cost is that of ``count``, for
        any ``start``."""
        found: list[int] = []
        while len(found) < count:
            epoch, offset = divmod(start + len(found), self._length)
            stop = min(offset + count - len(found), self._length)
            found += plain(self._epoch(epoch)[offset:stop])
        return found

    def _epoch(self, epoch: int) -> Order:
        if self._kept is None or self._kept[0] != epoch:
            self._kept = (epoch, self._order.epoch(epoch))
        return self._kept[1]


def plain(order: Order) -> list[int]:
    """Return an order's samples as Python integers."""
    return order.tolist() if isinstance(order, torch.Tensor) else list(order)


@dataclass(frozen=True)
class ReplicaShare:
    """Replica ``rank`` of ``replicas``."""

    rank: int = 0
    replicas: int = 1


@dataclass(frozen=True)
class TrainBatches:
    """This replica's endless batches of indices, from its ``skip``-th on."""

    order: EpochOrder
    batch_size: int
    share: ReplicaShare = ReplicaShare()
    skip: int = 0
    drop_last: bool = False

    def __iter__(self) -> Iterator[list[int]]:
        size, length = self.batch_size, len(self.order)
        usable = length - length % size if self.drop_last else length
        if usable <= 0:
            return
        stream = SampleStream(self.order, usable)
        for batch in count(self.skip):
            yield stream.samples((batch * self.share.replicas + self.share.rank) * size, size)

    def __len__(self) -> int:
        """Return this replica's full batches per epoch, the same number on every replica."""
        return len(self.order) // (self.batch_size * self.share.replicas)


@dataclass(frozen=True)
class ValidationBatches:
    """This replica's batches of a single pass, for validation. Every replica has equally many, so
    that none waits for another.

    What is left after the last round of full batches is split evenly into one smaller batch each;
    only if there are fewer samples than replicas are they left out (``drop_last`` leaves them out
    always).
    """

    order: EpochOrder
    batch_size: int
    share: ReplicaShare = ReplicaShare()
    drop_last: bool = False

    def __iter__(self) -> Iterator[list[int]]:
        samples, size, replicas, rank = self.order.epoch(0), self.batch_size, self.share.replicas, self.share.rank
        rounds, rest = self._rounds()
        for start in range(rank * size, rounds * size * replicas, size * replicas):
            yield plain(samples[start : start + size])
        if rest:
            each, more = divmod(rest, replicas)
            start = len(self.order) - rest + rank * each + min(rank, more)
            yield plain(samples[start : start + each + (rank < more)])

    def _rounds(self) -> tuple[int, int]:
        """Return the rounds of full batches, and the samples of the smaller ones after them."""
        rounds, rest = divmod(len(self.order), self.batch_size * self.share.replicas)
        return rounds, 0 if self.drop_last or rest < self.share.replicas else rest

    @property
    def left_out(self) -> int:
        """Samples that no replica reads."""
        rounds, rest = self._rounds()
        return len(self.order) - rounds * self.batch_size * self.share.replicas - rest

    def __len__(self) -> int:
        rounds, rest = self._rounds()
        return rounds + (rest > 0)


@dataclass(frozen=True)
class DealtBatches:
    """A user's batch sampler, repeated (or not), dealt out and skipped like the rest; batches keep
    the sizes that it gives them.
    """

    batches: Iterable[list[int]]
    length: int
    share: ReplicaShare = ReplicaShare()
    skip: int = 0
    repeat: bool = True

    def __iter__(self) -> Iterator[list[int]]:
        first = self.skip * self.share.replicas + self.share.rank
        return islice(self._all(), first, None, self.share.replicas)

    def _all(self) -> Iterator[list[int]]:
        for epoch in count():
            set_epoch = getattr(self.batches, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            yield from self.batches
            if not self.repeat or not self.length:
                return

    def __len__(self) -> int:
        return len(range(self.share.rank, self.length, self.share.replicas))
