"""Where DeepSpeed's flat buffers hold the elements of each parameter: pure arithmetic over shapes.

stages 1, 2   a group's parameters end to end, padded, cut into one equal partition per rank     aaaaabbb|bccccc..
stage 3       each parameter cut by itself, ceil(numel / ranks) elements each; a rank's
              partitions end to end                                                              rank 0 aaabbc  rank 1 aa.bbc
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from zero_trial.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]


class Run(NamedTuple):
    """Elements [start, stop) of ``name`` lie in ``rank``'s flat buffer from ``offset`` on."""

    name: str
    shape: tuple[int, ...]
    rank: int
    start: int
    stop: int
    offset: int


def whole_group_runs(shapes: Shapes, partition: int, ranks: int, gaps: Sequence[int] | None, where: str) -> list[Run]:
    """Stages 1 and 2: ``partition`` elements on each of ``ranks``; ``gaps``: elements left free behind each parameter.

    Raises CheckpointError where these parameters would not fill the buffer but for the padding that makes all partitions equal.
    """
    gaps = list(gaps) if gaps is not None else [0] * len(shapes)
    used = sum(prod(shape) for shape in shapes.values()) + sum(gaps)
    if len(gaps) != len(shapes) or not 0 <= partition * ranks - used < max(2 * ranks, 1):
        raise _other_layout(where, partition * ranks, used)
    found: list[Run] = []
    at = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        found += _cut(name, tuple(shape), at, partition)
        at += prod(shape) + gap
    return found


def each_parameter_runs(shapes: Shapes, partition: int, ranks: int, where: str) -> list[Run]:
    """Stage 3: a rank's buffer holds ``partition`` elements. Raises CheckpointError where these parameters do not fill it."""
    found: list[Run] = []
    at = 0
    for name, shape in shapes.items():
        numel = prod(shape)
        share = -(-numel // ranks)
        for rank in range(ranks):
            start, stop = min(rank * share, numel), min((rank + 1) * share, numel)
            if start < stop:
                found.append(Run(name, tuple(shape), rank, start, stop, at))
        at += share
    if not 0 <= partition - at < 2:
        raise _other_layout(where, partition, at)
    return found


def _cut(name: str, shape: tuple[int, ...], at: int, partition: int) -> Iterator[Run]:
    numel, start = prod(shape), 0
    while start < numel:
        rank, offset = divmod(at + start, partition)
        stop = min(numel, start + partition - offset)
        yield Run(name, shape, rank, start, stop, offset)
        start = stop


def _other_layout(where: str, held: int, named: int) -> CheckpointError:
    return CheckpointError(
        "the flat buffers do not fit the parameters' shapes",
        where=where,
        got=f"buffers of {held} elements",
        expected=f"{named}, what the named parameters have, and padding",
        fix="Save again with DeepSpeed 0.10 or later and without expert parallelism, or import the weights alone.",
    )
