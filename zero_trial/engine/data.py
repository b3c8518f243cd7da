"""The loader that ``initialize(training_data=...)`` and ``engine.deepspeed_io`` give: this rank's part of a data set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from zero_trial.errors import DataError


class ShardedLoader(DataLoader[Any]):
    """A DataLoader over one rank's part that is shuffled anew, alike on all ranks, at every pass."""

    def __init__(self, dataset: Any, sampler: DistributedSampler[Any], **options: Any) -> None:
        self._passes = 0
        self._own_sampler = sampler
        super().__init__(dataset, sampler=sampler, **options)

    def __iter__(self) -> Any:
        self._own_sampler.set_epoch(self._passes)
        self._passes += 1
        return super().__iter__()


class RepeatingLoader:
    """``loader`` without an end: starts it again whenever it is exhausted. Raises DataError if it yields nothing at all."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        for _ in range(2):
            for batch in self._batches:
                return batch
            self._batches = iter(self.loader)
        raise DataError(
            "the loader yields nothing",
            where=f"RepeatingLoader({type(self.loader).__name__})",
            expected="at least one batch",
        )


def sharded_loader(
    dataset: Any, batch_size: int, rank: int, ranks: int, *, drop_last: bool = False, **kwargs: Any
) -> DataLoader[Any]:
    """Batches of ``batch_size`` samples; shuffled alike on all ranks and split between them. Iterable data sets shard themselves."""
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, batch_size=batch_size, drop_last=drop_last, **kwargs)
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=ranks, rank=rank, shuffle=True, drop_last=drop_last
    )
    return ShardedLoader(dataset, sampler, batch_size=batch_size, drop_last=drop_last, **kwargs)
