"""The training batches of one rank: an endless iterator that knows how many it has handed out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero_trial.errors import DataError
from zero_trial.trial.data import DataLoader
from zero_trial.trial.mpu import ModelParallelUnit

UNKNOWN_LENGTH = 2**62  # epochs of a loader that does not know its length never end


class TrainFeed:
    """Iterator over micro-batches. ``taken`` counts those of the whole trial, also those before a resume.

    ``samples_each``: samples of one micro-batch over all replicas, 0 where it is not fixed. ``source`` is the loader
    that the trial returned, asked for its ``state_dict`` if it has one.
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

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, JSON-able: micro-batches of this replica, samples over all, the loader's own state."""
        own = self._source.state_dict() if hasattr(self._source, "state_dict") else None
        return {"micro_batches": self.taken, "samples": self.taken * self._samples_each, "loader": own}

    def __iter__(self) -> TrainFeed:
        return self

    def __next__(self) -> Any:
        for attempt in range(2):
            try:
                batch = next(self._batches)
            except StopIteration:
                if attempt == 0 and self._repeat:
                    self._batches = iter(self._loader)
                    continue
                raise nothing(self._name, self._loader) from None
            self.taken += 1
            return batch
        raise nothing(self._name, self._loader)

    def jump(self, batches: int) -> None:
        """Reads and drops ``batches``: the resume of a loader that cannot seek."""
        for _ in range(batches):
            next(self)


def nothing(name: str, loader: Any) -> DataError:
    """The error for a loader without batches."""
    return DataError(
        f"{name} returned a loader that yields nothing",
        where=type(loader).__name__,
        got="0 batches on this rank",
        expected="at least one",
        fix="Check the path of the data and its split; with drop_last, that a batch is not larger than a rank's samples.",
    )


@dataclass(frozen=True)
class Resume:
    """How far an earlier process was in the data: samples over all replicas, micro-batches of one, and a loader's own
    state.
    """

    samples: int = 0
    micro_batches: int = 0
    loader_state: Any = None


class ForeignLoader(DataError, RuntimeError):
    """A loader that nobody here shards or resumes. Also a RuntimeError, which is what Determined raises for it."""


def check_reproducible(loader: Any, name: str, check: bool) -> None:
    """ForeignLoader for a loader that we can neither shard nor resume exactly, unless the trial has said that it knows."""
    if isinstance(loader, DataLoader):
        return
    if loader is None or isinstance(loader, (str, bytes)) or not hasattr(loader, "__iter__"):
        raise DataError(
            f"{name} must return a data loader", got=type(loader).__name__, expected="zero_trial.trial.DataLoader"
        )
    if check:
        raise ForeignLoader(
            f"{name} returned {type(loader).__module__}.{type(loader).__name__}. Only zero_trial.trial.DataLoader gives exact sharding, "
            "reproducibility of the shuffle and exact resume",
            fix="Return one (from zero_trial.trial import DataLoader: the same arguments), or, to disable this check, call "
            "context.disable_dataset_reproducibility_checks() in the trial's __init__; sharding the data over the ranks is then up to you.",
        )


def samples_of(loader: Any) -> int | None:
    """Samples per epoch over all replicas, of our own loader; None where they cannot be known."""
    if isinstance(loader, DataLoader) and loader.batch_sampler is None:
        return len(loader.sampler if loader.sampler is not None else loader.dataset)  # type: ignore[arg-type]
    return None


def local_batches(loader: Any, mpu: ModelParallelUnit) -> int:
    """Micro-batches per epoch of this replica."""
    if isinstance(loader, DataLoader):
        return len(
            loader.get_data_loader(repeat=True, num_replicas=mpu.data_parallel_world_size, rank=mpu.data_parallel_rank)
        )
    try:
        return len(loader)
    except TypeError:
        return UNKNOWN_LENGTH


def open_feed(loader: Any, name: str, mpu: ModelParallelUnit, seed: int, resume: Resume) -> TrainFeed:
    """The feed of this rank from where ``resume`` says.

    Our own loader seeks without reading. Another loader takes back its own ``state_dict`` if it has one, or else its
    batches are read and dropped.
    """
    if isinstance(loader, DataLoader):
        skip = _skip(loader, mpu, resume)
        replica = loader.get_data_loader(True, skip, mpu.data_parallel_world_size, mpu.data_parallel_rank, seed)
        fixed = loader.batch_sampler is None and loader.batch_size is not None
        each = (loader.batch_size or 0) * mpu.data_parallel_world_size if fixed else 0
        return TrainFeed(replica, name, skip, samples_each=each)
    if resume.loader_state is not None and hasattr(loader, "load_state_dict"):
        loader.load_state_dict(resume.loader_state)
        return TrainFeed(loader, name, resume.micro_batches, repeat=True, source=loader)
    feed = TrainFeed(loader, name, repeat=True, source=loader)
    feed.jump(resume.micro_batches)
    return feed


def _skip(loader: DataLoader, mpu: ModelParallelUnit, resume: Resume) -> int:
    """This replica's micro-batches up to ``resume``.

    Raises DataError if the samples so far are no whole number of them.
    """
    if loader.batch_sampler is not None or loader.batch_size is None:
        return resume.micro_batches
    skip, rest = divmod(resume.samples, loader.batch_size * mpu.data_parallel_world_size)
    if rest:
        raise DataError(
            "the run cannot go on at exactly the next sample",
            where="resume",
            got=f"{resume.samples} samples so far",
            expected=f"a multiple of micro batch {loader.batch_size} x {mpu.data_parallel_world_size} replicas",
            fix="Choose a micro batch that divides the global batch of before.",
        )
    return skip
