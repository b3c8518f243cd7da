"""The loader that ``initialize(training_data=...)`` and ``engine.deepspeed_io`` give: this rank's part of a data set."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


def sharded_loader(dataset: Any, batch_size: int, rank: int, ranks: int, *, drop_last: bool = False, **kwargs: Any) -> DataLoader[Any]:
    """Batches of ``batch_size`` samples; shuffled alike on all ranks and split between them. Iterable data sets shard themselves."""
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, batch_size=batch_size, drop_last=drop_last, **kwargs)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=True, drop_last=drop_last)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=drop_last, **kwargs)
