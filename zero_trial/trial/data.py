"""A trial's data on one rank: DataLoader, feed, epochs, position for an exact resume."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, RandomSampler, SequentialSampler

from zero_trial.errors import DataError
from zero_trial.trial.context import ModelParallelUnit, ZeroTrialContext
from zero_trial.trial.runtime.protocols import Distributed
from zero_trial.trial.samplers import (
    DealtBatches,
    EpochOrder,
    ReplicaShare,
    TrainBatches,
    ValidationBatches,
)
from zero_trial.trial.trial import ZeroTrial


class DataLoader:
    """The description of a data loader, with torch's arguments. The trial returns it, and the
    controller creates each rank's loader from it.

    ``dataset`` is map-style (with a length and an index). With ``shuffle``, each epoch has its own
    permutation, drawn from the trial's seed by a separate generator. In training, consecutive
    epochs are joined so that every batch is full; with ``drop_last``, each epoch's last, smaller
    batch is dropped instead. Validation makes a single pass, and its last batch may be smaller.
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
        self.workers = {  # how batches are fetched; torch's names
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
        }

    def __iter__(self) -> Any:
        """Iterate over everything once, for use outside of a trial."""
        return iter(self.get_data_loader())

    def __len__(self) -> int:
        return len(self.get_data_loader())

    def get_data_loader(
        self, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0, seed: int = 0
    ) -> TorchDataLoader[Any]:
        """Return the loader of replica ``rank``: repeat, then distribute, then skip (see
        samplers.py).

        ``skip`` counts this replica's micro-batches. ``seed`` is used unless the loader has its
        own. ``len()`` is the number of this replica's batches per epoch.
        """
        seed = seed if self.seed is None else self.seed
        batches = self._batches(repeat, skip, ReplicaShare(rank, num_replicas), seed)
        arguments: dict[str, Any] = {key: value for key, value in self.workers.items() if value is not None}
        # Workers' base seeds come from a separate generator: creating an iterator must not
        # advance the global random state.
        generator = torch.Generator().manual_seed(seed % 2**63)
        return TorchDataLoader(self.dataset, batch_sampler=batches, generator=generator, **arguments)  # type: ignore[arg-type]

    def _batches(
        self, repeat: bool, skip: int, share: ReplicaShare, seed: int
    ) -> TrainBatches | ValidationBatches | DealtBatches:
        if self.batch_sampler is not None or self.batch_size is None:
            batches = self.batch_sampler or []
            return DealtBatches(batches, len(batches), share, skip, repeat)  # type: ignore[arg-type]
        length = len(self.dataset if self.sampler is None else self.sampler)  # type: ignore[arg-type]
        order = EpochOrder(length, seed if self.shuffle else None, self.sampler)
        if repeat:
            return TrainBatches(order, self.batch_size, share, skip, self.drop_last)
        return ValidationBatches(order, self.batch_size, share, self.drop_last)


def _check(dataset: Any, batch_size: Any, shuffle: bool, sampler: Any, batch_sampler: Any, drop_last: bool) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            "an iterable dataset cannot be sharded and resumed exactly",
            where="DataLoader",
            got=type(dataset).__name__,
            expected="a map-style dataset, with a length and an index",
            fix="Return torch's DataLoader and call context.disable_dataset_reproducibility_checks().",
        )
    if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
        raise DataError(
            "batch_sampler cannot be combined with batch_size, shuffle, sampler or drop_last", where="DataLoader"
        )
    if sampler is not None and shuffle:
        raise DataError("sampler cannot be combined with shuffle", where="DataLoader")
    if batch_sampler is None and (not isinstance(batch_size, int) or batch_size < 1):
        raise DataError("batch_size must be a positive number", where="DataLoader", got=batch_size)


TRAIN_LOADER = "build_training_data_loader"
_END = object()
UNKNOWN_LENGTH = 2**62  # epochs of a loader that does not know its length never end


class TrainFeed:
    """Iterator over micro-batches. ``taken`` counts those of the whole trial, including those
    before a resume.

    ``samples_each``: samples in one micro-batch over all replicas, 0 if the number varies.
    ``source`` is the loader that the trial returned; its ``state_dict`` is saved if it has one.
    """

    def __init__(
        self, loader: Any, name: str, taken: int = 0, repeat: bool = False, samples_each: int = 0, source: Any = None
    ) -> None:
        self._loader = loader
        self._name = name
        self._repeat = repeat
        self._batches = iter(loader)
        self.taken = taken
        self._samples_each = samples_each
        self._source = source

    @property
    def position(self) -> DataPosition:
        """Return the current position of this replica."""
        own = self._source.state_dict() if hasattr(self._source, "state_dict") else None
        return DataPosition(self.taken * self._samples_each, self.taken, own)

    def __iter__(self) -> TrainFeed:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches, _END)
        if batch is _END and self._repeat:
            self._batches = iter(self._loader)
            batch = next(self._batches, _END)
        if batch is _END:
            raise DataError(
                f"{self._name} returned an empty loader",
                where=type(self._loader).__name__,
                got="0 batches on this rank",
                expected="at least one",
                fix="Check the path of the data and its split; with drop_last, check that a batch is not larger than a rank's samples.",
            )
        self.taken += 1
        return batch


@dataclass(frozen=True)
class DataPosition:
    """The position in the data, of this process or an earlier one: samples over all replicas,
    micro-batches of one replica, and the state of this rank's loader, JSON-able."""

    samples: int = 0
    micro_batches: int = 0
    loader: Any = None


class ForeignLoader(DataError, RuntimeError):
    """For a loader that can neither be sharded nor resumed; a RuntimeError, as in Determined."""


def accept_loader(loader: Any, name: str, check: bool) -> Any:
    """Return the loader to read from: one of Determined's is converted to ours, with its options.

    Raises ForeignLoader for a loader that can neither be sharded nor resumed exactly, unless
    ``check`` is off.
    """
    if isinstance(loader, DataLoader):
        return loader
    determined = sys.modules.get("determined.pytorch")  # imported only if a trial uses it
    if isinstance(loader, getattr(determined, "DataLoader", ())):
        return _from_determined(loader)
    if loader is None or isinstance(loader, (str, bytes)) or not hasattr(loader, "__iter__"):
        raise DataError(
            f"{name} must return a data loader", got=type(loader).__name__, expected="zero_trial.trial.DataLoader"
        )
    if check:
        raise ForeignLoader(
            f"{name} returned {type(loader).__module__}.{type(loader).__name__}. Only zero_trial.trial.DataLoader gives exact sharding, "
            "reproducibility of the shuffle and exact resume",
            fix="Return one (from zero_trial.trial import DataLoader: the same arguments), or, to disable this check, call "
            "context.disable_dataset_reproducibility_checks() in the trial's __init__; you must then shard the data over the ranks yourself.",
        )
    return loader


def _from_determined(loader: Any) -> DataLoader:
    """Return our loader with the dataset and options of a ``determined.pytorch.DataLoader``.

    Its shuffle draws from the loader's generator if it has one, otherwise from the trial's seed.
    """
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    options = {name: getattr(loader, name) for name in (*names, "persistent_workers")}
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
    if loader.batch_size is None:
        return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, **options)
    order, length = loader.sampler, len(loader.dataset)
    shuffle = type(order) is RandomSampler and not order.replacement and order.num_samples == length
    own = None if shuffle or type(order) is SequentialSampler else order
    seed = None if loader.generator is None else loader.generator.initial_seed()
    batches = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    return DataLoader(loader.dataset, shuffle=shuffle, sampler=own, seed=seed, **batches, **options)


def samples_of(loader: Any) -> int | None:
    """Return samples per epoch over all replicas of our own loader; None if unknown."""
    if isinstance(loader, DataLoader) and loader.batch_sampler is None:
        return len(loader.sampler if loader.sampler is not None else loader.dataset)  # type: ignore[arg-type]
    return None


def local_batches(loader: Any, mpu: ModelParallelUnit) -> int:
    """Return the micro-batches per epoch of this replica."""
    if isinstance(loader, DataLoader):
        return len(
            loader.get_data_loader(repeat=True, num_replicas=mpu.data_parallel_world_size, rank=mpu.data_parallel_rank)
        )
    try:
        return len(loader)
    except TypeError:
        return UNKNOWN_LENGTH


def open_feed(loader: Any, name: str, mpu: ModelParallelUnit, seed: int, resume: DataPosition) -> TrainFeed:
    """Return this rank's feed, starting at ``resume``.

    Our own loader seeks without reading. Another loader restores its own ``state_dict`` if it has
    one; otherwise its batches are read and dropped.
    """
    if isinstance(loader, DataLoader):
        skip = _skip(loader, mpu, resume)
        replica = loader.get_data_loader(True, skip, mpu.data_parallel_world_size, mpu.data_parallel_rank, seed)
        fixed = loader.batch_sampler is None and loader.batch_size is not None
        each = (loader.batch_size or 0) * mpu.data_parallel_world_size if fixed else 0
        return TrainFeed(replica, name, skip, samples_each=each)
    if resume.loader is not None and hasattr(loader, "load_state_dict"):
        loader.load_state_dict(resume.loader)
        return TrainFeed(loader, name, resume.micro_batches, repeat=True, source=loader)
    feed = TrainFeed(loader, name, repeat=True, source=loader)
    for _ in range(resume.micro_batches):
        next(feed)
    return feed


def _skip(loader: DataLoader, mpu: ModelParallelUnit, resume: DataPosition) -> int:
    """Return this replica's micro-batches up to ``resume``. Raises DataError."""
    if loader.batch_sampler is not None or loader.batch_size is None:
        return resume.micro_batches
    skip, rest = divmod(resume.samples, loader.batch_size * mpu.data_parallel_world_size)
    if rest:
        raise DataError(
            "the run cannot continue at exactly the next sample",
            where="resume",
            got=f"{resume.samples} samples so far",
            expected=f"a multiple of micro batch {loader.batch_size} x {mpu.data_parallel_world_size} replicas",
            fix="Choose a micro batch that divides the earlier global batch.",
        )
    return skip


def agreed_minimum(distributed: Distributed, batches: int | None, loader: str, note: Callable[[str], None]) -> int:
    """Collective. Return the smallest number of batches over the ranks that read data (the other
    ranks pass None).

    Logs a note if the numbers differ. Raises DataError on every rank, naming ranks that have none.
    """
    numbers = batches_by_rank(distributed, batches, loader)
    known = [number for number in numbers if number is not None]
    if min(known) != max(known):
        note(f"{loader}: ranks have different numbers of batches {numbers}; {min(known)} of each are used")
    return min(known)


def batches_by_rank(distributed: Distributed, batches: int | None, loader: str) -> list[int | None]:
    """Collective. Return the number of batches of each rank; None for ranks that read no data.

    Raises DataError on every rank if ranks have no batches, and names them.
    """
    numbers: list[int | None] = distributed.allgather(batches)
    empty = [rank for rank, number in enumerate(numbers) if number == 0]
    if empty or all(number is None for number in numbers):
        raise DataError(
            f"{loader} returned an empty loader",
            where=f"rank {', '.join(map(str, empty))}",
            got=f"batches per rank: {numbers}",
            expected="at least one on each",
            fix="Use a smaller batch, fewer ranks, or more data.",
        )
    return numbers


def epoch_steps(
    distributed: Distributed, loader: Any, mpu: ModelParallelUnit, accumulation: int, note: Callable[[str], None]
) -> int:
    """Collective. Return optimizer steps per epoch, at least one."""
    mine = None
    if mpu.should_build_data_loader:
        mine = local_batches(loader, mpu)
        if mine == 0 and samples_of(loader):
            # our own feed joins epochs, so an epoch may have fewer samples than a step needs
            mine = 1
    micro = agreed_minimum(distributed, mine, TRAIN_LOADER, note)
    if micro < accumulation:
        note(
            f"{TRAIN_LOADER}: an epoch has {micro} micro-batches, but one step needs {accumulation}; an epoch counts as one step"
        )
    return max(micro // accumulation, 1)


@dataclass(frozen=True)
class TrainData:
    """``feed`` is None on ranks that read no data."""

    feed: TrainFeed | None
    epoch_length: int  # steps, agreed by all ranks


def open_train_data(trial: ZeroTrial, context: ZeroTrialContext, resume: DataPosition) -> TrainData:
    """Collective. Build the loader and move to position ``resume``. Raises DataError."""
    mpu, loader = context.mpu, None
    if mpu.should_build_data_loader:
        loader = trial.build_training_data_loader()
        loader = accept_loader(loader, TRAIN_LOADER, context.check_reproducibility)
        compare_batch(loader, context)
    accumulation = context.get_num_micro_batches_per_slot()
    length = epoch_steps(context.distributed, loader, mpu, accumulation, context.note)
    reads = mpu.should_build_data_loader
    return TrainData(open_feed(loader, TRAIN_LOADER, mpu, context.platform.seed, resume) if reads else None, length)


def compare_batch(loader: Any, context: ZeroTrialContext) -> None:
    """Log a note if the loader's batch size differs from the engine's micro batch."""
    given = loader.batch_size if isinstance(loader, DataLoader) and loader.batch_sampler is None else None
    micro = context.get_train_micro_batch_size_per_gpu()
    if given is not None and given != micro:
        context.note(f"{TRAIN_LOADER}: batches of {given} samples, but the engine's micro batch is {micro}")
    samples, replicas = samples_of(loader), context.mpu.data_parallel_world_size
    if samples is not None and 0 < samples < micro * replicas:
        whole = f"{micro} of {replicas} replicas" if replicas > 1 else f"{micro}"
        context.note(
            f"{TRAIN_LOADER}: {samples} samples are fewer than one micro-batch ({whole}), so each sample is repeated in it"
        )


def data_position(feed: TrainFeed | None, context: ZeroTrialContext) -> DataPosition:
    """Collective. Return the ranks' common position, or the lowest, with a note, if they differ."""
    own = feed.position if feed is not None else None
    ranks = context.distributed.allgather(None if own is None else [own.micro_batches, own.samples])
    known = [position for position in ranks if position is not None]
    if known and min(known) != max(known):
        context.note(f"ranks have consumed different numbers of batches {ranks}; a resume continues from {min(known)}")
    micro_batches, samples = min(known, default=[0, 0])
    return DataPosition(samples, micro_batches, None if own is None else own.loader)
