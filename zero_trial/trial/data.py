"""The data loader: what torch's offers, plus exact sharding over the replicas, a reproducible shuffle and an exact
resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

from zero_trial.errors import DataError
from zero_trial.trial.samplers import (
    DealtBatches,
    EpochOrder,
    FromSampler,
    OnePass,
    Sequential,
    Share,
    Shuffled,
    TrainBatches,
)


@dataclass(frozen=True)
class Workers:
    """How batches are fetched: torch's arguments of the same names."""

    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False


class DataLoader:
    """A description of a loader, with torch's arguments. The trial returns one; the controller makes each rank's
    loader of it.

    ``dataset`` is map-style (it has a length and takes an index). With ``shuffle`` the order is a permutation per
    epoch, drawn from the trial's seed by a generator of its own. In training the epochs are joined end to end, so
    that every batch is full; ``drop_last`` leaves out each epoch's last, smaller batch instead. In validation the
    pass is single and the last batch may be smaller.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        batch_size: int | None = 1,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[list[int]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        seed: int | None = None,
    ) -> None:
        _check(dataset, batch_size, shuffle, sampler, batch_sampler, drop_last)
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.sampler = sampler
        self.batch_sampler = batch_sampler
        self.drop_last = drop_last
        self.seed = seed
        self.workers = Workers(
            num_workers,
            collate_fn,
            pin_memory,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            prefetch_factor,
            persistent_workers,
        )

    def __iter__(self) -> Any:
        """A single pass over everything, for use outside of a trial."""
        return iter(self.get_data_loader())

    def __len__(self) -> int:
        return len(self.get_data_loader())

    def get_data_loader(
        self, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0, seed: int = 0
    ) -> TorchDataLoader[Any]:
        """The loader of replica ``rank``. Repeat, then distribute, then skip (see samplers.py).

        ``skip`` counts this replica's micro-batches. ``seed`` is used unless the loader was given its own. ``len()``
        is this replica's batches per epoch.
        """
        seed = seed if self.seed is None else self.seed
        batches = self._batches(repeat, skip, Share(rank, num_replicas), seed)
        arguments = {key: value for key, value in vars(self.workers).items() if value is not None}
        # Workers' base seeds come from a generator of their own: making an iterator must not move the global random
        # state.
        generator = torch.Generator().manual_seed(seed % 2**63)
        return TorchDataLoader(self.dataset, batch_sampler=batches, generator=generator, **arguments)  # type: ignore[arg-type]

    def _batches(self, repeat: bool, skip: int, share: Share, seed: int) -> TrainBatches | OnePass | DealtBatches:
        if self.batch_sampler is not None or self.batch_size is None:
            batches = self.batch_sampler or []
            return DealtBatches(batches, len(batches), share, skip, repeat)  # type: ignore[arg-type]
        order = self._order(seed)
        if repeat:
            return TrainBatches(order, self.batch_size, share, skip, self.drop_last)
        return OnePass(order, self.batch_size, share, self.drop_last)

    def _order(self, seed: int) -> EpochOrder:
        if self.sampler is not None:
            return FromSampler(self.sampler, len(self.sampler))  # type: ignore[arg-type]
        length = len(self.dataset)  # type: ignore[arg-type]
        return Shuffled(length, seed) if self.shuffle else Sequential(length)


def _check(dataset: Any, batch_size: Any, shuffle: bool, sampler: Any, batch_sampler: Any, drop_last: bool) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            "an iterable dataset cannot be sharded and resumed exactly",
            where="DataLoader",
            got=type(dataset).__name__,
            expected="a dataset with a length that takes an index",
            fix="Return torch's DataLoader and call context.disable_dataset_reproducibility_checks().",
        )
    if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
        raise DataError("batch_sampler excludes batch_size, shuffle, sampler and drop_last", where="DataLoader")
    if sampler is not None and shuffle:
        raise DataError("sampler excludes shuffle", where="DataLoader")
    if batch_sampler is None and (not isinstance(batch_size, int) or batch_size < 1):
        raise DataError("batch_size must be a positive number", where="DataLoader", got=batch_size)
