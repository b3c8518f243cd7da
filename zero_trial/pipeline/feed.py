"""Read the input of one pipeline step, as all ranks agree before anything runs.

The rank of the first chunk reads inputs; that of the last reads labels if it has an iterator of its
own, which must give the same batches; if it has none, labels travel through the pipe. All exchange
how many micro-batches and samples they got, so that all see the end of the data, or of one rank's
data, and none hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zero_trial.comm import Mesh
from zero_trial.errors import DataError
from zero_trial.pipeline.channel import tensors_in
from zero_trial.pipeline.schedule import ChunkPlacement

HAS_ITERATOR, GOT, SAMPLES, LEAST, MOST = range(5)

Read = Callable[[Any], tuple[Any, Any]]
"""Turns what the iterator gives into (inputs, label) on the device."""


@dataclass(frozen=True)
class StepInput:
    """What this rank has read for a step, and what all ranks have agreed on.

    Args:
        inputs: by micro-batch, only where the first chunk is.
        labels: by micro-batch, only where they are used or sent from.
        samples: of each micro-batch, known where ``inputs`` are.
        labels_travel: labels go through the pipe beside the activations.
        micro_batches: of the step, the same on all ranks.
        total: samples that all reading ranks have together.
        alike: all micro-batches of all ranks have the same number of samples.
        lines: ranks that read inputs: data-parallel ones, and model-parallel ones, which read the
            same.
    """

    inputs: Sequence[Any] = ()
    labels: Sequence[Any] = ()
    samples: Sequence[int] = ()
    labels_travel: bool = False
    micro_batches: int = 0
    total: int = 0
    alike: bool = True
    lines: int = 1

    def share(self, samples: int) -> float:
        """Return the part that a micro-batch of ``samples`` is of what all lines read; the parts
        add up to 1."""
        if self.alike:
            return 1.0 / (self.micro_batches * self.lines)
        return samples / self.total


def read_step(
    iterator: Iterator[Any] | None, wanted: int, mesh: Mesh, placement: ChunkPlacement, split: Read
) -> StepInput:
    """Read at most ``wanted`` micro-batches, as many as every reading rank has. Collective over the
    world.

    Raises StopIteration on all ranks where none has any; DataError where one has fewer than
    another, or where the first stage has no iterator.
    """
    here = mesh.coordinates["pipe"]
    first, last = placement.ranks[0], placement.ranks[-1]
    reads = iterator is not None and here in (first, last)
    inputs: list[Any] = []
    labels: list[Any] = []
    if reads and iterator is not None:
        for _ in range(wanted):
            try:
                value, label = split(next(iterator))
            except StopIteration:
                break
            inputs.append(value)
            labels.append(label)
    samples = [sample_count(value) for value in inputs] if here == first else []
    row = [int(reads), len(inputs), sum(samples), min(samples, default=0), max(samples, default=0)]
    table = mesh.world.gather_row(row, "what each rank has read")
    stage_of = [mesh.shape.coordinates(rank)["pipe"] for rank in range(mesh.world.size)]
    count = _agreed(table, stage_of, first)
    rows = [row for row, stage in zip(table, stage_of, strict=True) if stage == first]
    last_row = table[mesh.pipe.ranks[last]]
    travel = first != last and not last_row[HAS_ITERATOR]
    keeps_labels = here == last if not travel else here == first
    return StepInput(
        inputs if here == first else [],
        labels if keeps_labels else [],
        samples,
        travel,
        micro_batches=count,
        total=sum(row[SAMPLES] for row in rows),
        alike=min(row[LEAST] for row in rows) == max(row[MOST] for row in rows),
        lines=len(rows),
    )


def sample_count(value: Any) -> int:
    """Return the length of the first tensor's first dimension; 1 where there is none."""
    tensors = tensors_in(value)
    return int(tensors[0].shape[0]) if tensors and tensors[0].dim() else 1


def _agreed(table: Sequence[Sequence[int]], stage_of: Sequence[int], first: int) -> int:
    """Return the number of micro-batches that every reading rank has, or raise what the table
    means."""
    without = [rank for rank, row in enumerate(table) if stage_of[rank] == first and not row[HAS_ITERATOR]]
    if without:
        raise DataError(
            "the rank of the first layer has nothing to read",
            where=f"rank {without[0]}",
            got="no iterator",
            fix="Pass one to train_batch() or eval_batch() there, or call engine.set_dataiterator().",
        )
    got = {rank: row[GOT] for rank, row in enumerate(table) if row[HAS_ITERATOR]}
    if max(got.values()) == 0:
        raise StopIteration
    if len(set(got.values())) > 1:
        fewest = min(got, key=lambda rank: got[rank])
        counts = ", ".join(f"rank {rank} {count}" for rank, count in got.items())
        raise DataError(
            "an iterator has ended before the others'",
            where=f"rank {fewest}",
            got=f"micro-batches: {counts}",
            expected="equally many on every rank that reads",
            fix="Give all of them loaders of one length, or drop the last batches.",
        )
    return next(iter(got.values()))
