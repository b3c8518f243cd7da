"""A trial's training data on one rank: the loader that the user built, the feed made of it, and where the run is in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero_trial.trial.context import ZeroTrialContext
from zero_trial.trial.data import DataLoader
from zero_trial.trial.epochs import epoch_steps
from zero_trial.trial.feed import Resume, TrainFeed, check_reproducible, open_feed, samples_of
from zero_trial.trial.trial import ZeroTrial

NAME = "build_training_data_loader"


@dataclass(frozen=True)
class TrainData:
    """``feed`` is None on ranks that read no data."""

    feed: TrainFeed | None
    epoch_length: int  # steps, agreed by all ranks


@dataclass(frozen=True)
class DataPosition:
    """How much data was handed out: samples over all replicas, micro-batches of one, and this rank's loader state."""

    samples: int
    micro_batches: int
    loader: Any


def open_train_data(trial: ZeroTrial, context: ZeroTrialContext, resume: Resume) -> TrainData:
    """Collective.

    Builds the loader and goes to where ``resume`` says. Raises DataError.
    """
    mpu, loader = context.mpu, None
    if mpu.should_build_data_loader:
        loader = trial.build_training_data_loader()
        check_reproducible(loader, NAME, context.check_reproducibility)
        compare_batch(loader, context)
    accumulation = context.get_num_micro_batches_per_slot()
    length = epoch_steps(context.distributed, loader, mpu, accumulation, context.note)
    reads = mpu.should_build_data_loader
    return TrainData(open_feed(loader, NAME, mpu, context.platform.seed, resume) if reads else None, length)


def compare_batch(loader: Any, context: ZeroTrialContext) -> None:
    """Global batch and throughput are counted by the engine's micro batch: a loader that gives another is worth a word."""
    given = loader.batch_size if isinstance(loader, DataLoader) and loader.batch_sampler is None else None
    micro = context.get_train_micro_batch_size_per_gpu()
    if given is not None and given != micro:
        context.note(f"{NAME}: batches of {given} samples, but the engine's micro batch is {micro}")
    samples, replicas = samples_of(loader), context.mpu.data_parallel_world_size
    if samples is not None and 0 < samples < micro * replicas:
        whole = f"{micro} of {replicas} replicas" if replicas > 1 else f"{micro}"
        context.note(
            f"{NAME}: {samples} samples are fewer than one micro-batch ({whole}); each comes several times in it"
        )


def data_position(feed: TrainFeed | None, context: ZeroTrialContext) -> DataPosition:
    """Collective. The position that the ranks agree on; the lowest, said aloud, if they do not."""
    own = feed.state_dict() if feed is not None else None
    ranks = context.distributed.allgather(None if own is None else [own["micro_batches"], own["samples"]])
    known = [position for position in ranks if position is not None]
    if known and min(known) != max(known):
        context.note(f"ranks have taken different numbers of batches {ranks}; a resume goes on from {min(known)}")
    micro_batches, samples = min(known, default=[0, 0])
    return DataPosition(samples, micro_batches, None if own is None else own["loader"])
