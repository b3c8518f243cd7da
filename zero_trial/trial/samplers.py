"""Which samples a replica reads, and in what order: an endless, seekable stream of indices,
distributed batch by batch.

The order of operations is repeat, distribute, skip:

    repeat      epoch 0's order, epoch 1's order, ... end to end: depends only on (seed, epoch)
    batch       consecutive samples, ``batch_size`` each; a batch may span two epochs, so every
                batch is full
    distribute  batch k goes to replica k mod N
    skip        the first ``skip`` batches of this replica are skipped by arithmetic; nothing is
                read

Optimizer step s of a run with global batch size G therefore trains exactly the samples [s*G,
(s+1)*G) of the stream, for any number of replicas, micro batch and accumulation. A resume, on the
same or another number of ranks, neither repeats nor skips a sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import torch

# 2**64 / golden ratio (Knuth): adjacent (seed, epoch) pairs give unrelated generator seeds.
MIX = 0x9E3779B97F4A7C15

Order = Sequence[int] | torch.Tensor


@dataclass(frozen=True)
class EpochOrder:
    """The order of each epoch's samples: the dataset's order; with ``seed`` a permutation per epoch
    (8 bytes per sample) from a separate generator, so that no other random state is read or
    changed; or the order of a user's ``sampler``, iterated once per epoch, after
    ``set_epoch(epoch)`` if it has that method.

    A sampler's order must depend only on the epoch, and be the same on every rank. Otherwise ranks
    may read the same samples, and a resume is not exact.
    """

    length: int
    seed: int | None = None
    sampler: Iterable[int] | None = None

    def epoch(self, epoch: int) -> Order:
        if self.sampler is not None:
            _set_epoch(self.sampler, epoch)
            return list(self.sampler)
        if self.seed is None:
            return range(self.length)
        generator = torch.Generator().manual_seed((self.seed + epoch * MIX) % 2**63)
        return torch.randperm(self.length, generator=generator)


def _set_epoch(sampler: object, epoch: int) -> None:
    set_epoch = getattr(sampler, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


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
    """This replica's endless batches of indices, starting at batch ``skip``."""

    order: EpochOrder
    batch_size: int
    share: ReplicaShare = ReplicaShare()
    skip: int = 0
    drop_last: bool = False

    def __iter__(self) -> Iterator[list[int]]:
        size, length = self.batch_size, self.order.length
        usable = length - length % size if self.drop_last else length
        if usable <= 0:
            return
        kept, order = 0, self.order.epoch(0)
        for batch in count(self.skip):
            start, found = (batch * self.share.replicas + self.share.rank) * size, list[int]()
            while len(found) < size:
                epoch, offset = divmod(start + len(found), usable)
                if epoch != kept:
                    kept, order = epoch, self.order.epoch(epoch)
                found += plain(order[offset : min(offset + size - len(found), usable)])
            yield found

    def __len__(self) -> int:
        """Return this replica's full batches per epoch, the same number on every replica."""
        return self.order.length // (self.batch_size * self.share.replicas)


@dataclass(frozen=True)
class ValidationBatches:
    """This replica's batches of a single pass, for validation. Every replica has the same number of
    batches, so that no replica waits for another.

    The samples after the last round of full batches are split evenly into one smaller batch per
    replica. If they are fewer than the replicas, they are skipped (with ``drop_last`` always).
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
            start = self.order.length - rest + rank * each + min(rank, more)
            yield plain(samples[start : start + each + (rank < more)])

    def _rounds(self) -> tuple[int, int]:
        """Return the number of full rounds, and of samples in the smaller batches after them."""
        rounds, rest = divmod(self.order.length, self.batch_size * self.share.replicas)
        return rounds, 0 if self.drop_last or rest < self.share.replicas else rest

    @property
    def left_out(self) -> int:
        """Samples that no replica reads."""
        rounds, rest = self._rounds()
        return self.order.length - rounds * self.batch_size * self.share.replicas - rest

    def __len__(self) -> int:
        rounds, rest = self._rounds()
        return rounds + (rest > 0)


@dataclass(frozen=True)
class DealtBatches:
    """A user's batch sampler, repeated or not, with batches distributed and skipped as above."""

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
            _set_epoch(self.batches, epoch)
            yield from self.batches
            if not self.repeat or not self.length:
                return

    def __len__(self) -> int:
        return len(range(self.share.rank, self.length, self.share.replicas))
