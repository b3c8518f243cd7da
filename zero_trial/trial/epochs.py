"""How many steps an epoch has: what all ranks agree on when their loaders do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zero_trial.errors import DataError
from zero_trial.platform.protocols import Distributed
from zero_trial.trial.feed import local_batches, samples_of
from zero_trial.trial.mpu import ModelParallelUnit

Note = Callable[[str], None]


def agreed_minimum(distributed: Distributed, batches: int | None, loader: str, note: Note) -> int:
    """Collective. The smallest number of batches over the ranks that read data (the others pass None).

    Raises DataError on every rank, naming the ranks that have none. Says so if the numbers differ.
    """
    numbers = distributed.allgather(batches)
    known: list[int] = [number for number in numbers if number is not None]
    empty = [rank for rank, number in enumerate(numbers) if number == 0]
    if empty or not known:
        raise DataError(
            f"{loader} returned a loader that yields nothing",
            where=f"rank {', '.join(map(str, empty))}",
            got=f"batches per rank: {numbers}",
            expected="at least one on each",
            fix="Use a smaller batch, fewer ranks, or more data.",
        )
    if min(known) != max(known):
        note(f"{loader}: ranks have different numbers of batches {numbers}; {min(known)} of each are used")
    return min(known)


def epoch_steps(distributed: Distributed, loader: Any, mpu: ModelParallelUnit, accumulation: int, note: Note) -> int:
    """Collective. Optimizer steps per epoch: the agreed number of micro-batches over the accumulation, at least one."""
    name = "build_training_data_loader"
    mine = None
    if mpu.should_build_data_loader:
        mine = local_batches(loader, mpu)
        if mine == 0 and samples_of(loader):
            mine = 1  # our own feed joins epochs end to end: fewer samples than a step needs are no hindrance
    micro = agreed_minimum(distributed, mine, name, note)
    if micro < accumulation:
        note(
            f"{name}: an epoch has {micro} micro-batches, one step needs {accumulation}; an epoch is counted as one step"
        )
    return max(micro // accumulation, 1)
