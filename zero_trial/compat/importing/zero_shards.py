"""The optimizer of ZeRO stages 1 to 3 as DeepSpeed saves it: flat buffers by rank, cut into
parameters.

stages 1, 2   aaaaabbb|bccccc..               a group's parameters end to end, padded, cut into one
                                              equal partition per rank
stage 3       rank 0 aaabbc  rank 1 aa.bbc    each parameter cut by itself, ceil(numel / ranks)
                                              elements each; a rank's partitions end to end
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from zero_trial.checkpoint.format import Slice
from zero_trial.compat.importing.facts import one_number, optimizer_groups, optimizer_state
from zero_trial.compat.importing.imported import ImportOptions
from zero_trial.compat.importing.torch_file import (
    UnknownObject,
    as_dict,
    as_integers,
    as_list,
    as_shape,
    as_tensor,
)
from zero_trial.errors import CheckpointError

State = Mapping[Any, Any]


@dataclass(frozen=True)
class FlatGroup:
    """One flat buffer of the optimizer on all ranks: its masters and each kind of its state, by
    rank. ``group``: the one with its hyperparameters."""

    group: int
    runs: Sequence[FlatRange]
    masters: Sequence[torch.Tensor]
    states: Mapping[str, Sequence[torch.Tensor]]
    scalars: Mapping[str, float]

    def slices(self, rank: int, with_state: bool, where: str) -> Iterator[Slice]:
        """Yield what ``rank``'s buffers hold of the parameters, padding left out. Raises
        CheckpointError for a buffer that is too short."""
        buffers = {"param": self.masters[rank]}
        if with_state:
            buffers |= {f"state/{kind}": of_ranks[rank] for kind, of_ranks in self.states.items()}
        flats = {kind: stored.reshape(-1) for kind, stored in buffers.items()}
        for run in (run for run in self.runs if run.rank == rank):
            for kind, flat in flats.items():
                part = flat[run.offset : run.offset + run.stop - run.start]
                if part.numel() != run.stop - run.start:
                    raise CheckpointError("a flat buffer is too short", where=where, got=f"{kind} of {run.name}")
                yield Slice(f"{kind}/{run.name}", run.shape, run.start, run.stop, part)


def stage_of(optimizer: State) -> int:
    """Return the ZeRO stage that wrote this; DeepSpeed's bf16 optimizer does not say, and has stage
    1's layout."""
    found = optimizer.get("zero_stage", 1)
    if isinstance(found, UnknownObject):
        found = found.args[0] if found.args else None
    if found not in (1, 2, 3):
        raise CheckpointError("an unknown ZeRO stage", where="zero_stage", got=found, expected="1, 2 or 3")
    return int(found)


def flat_groups(model: State, optimizers: Sequence[State], options: ImportOptions, where: str) -> list[FlatGroup]:
    """Read all buffers of all ranks, matched with the shapes that the model's file names. Raises
    CheckpointError where they do not match."""
    stage, ranks = stage_of(optimizers[0]), len(optimizers)
    counts = optimizers[0].get("partition_count", ranks)
    most = max(as_integers(counts, f"{where}, partition_count")) if isinstance(counts, list) and counts else counts
    if most != ranks:
        raise CheckpointError(
            "some ranks' files are missing, or groups of ranks hold copies",
            where=where,
            got=f"{ranks} files",
            expected=f"partition_count {counts}",
        )
    key, inner = (
        ("fp32_flat_groups", "optimizer_state_dict")
        if stage == 3
        else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    buffers = [as_list(optimizer.get(key), f"{where}, {key}") for optimizer in optimizers]
    shapes = shapes_of(model, options, where)
    if {len(row) for row in buffers} != {len(shapes)}:
        got = f"{len(buffers[0])} flat buffers for {len(shapes)} lists of shapes"
        raise CheckpointError("the optimizer's buffers do not match the model's shapes", where=where, got=got)
    home = group_of_buffer(optimizer_groups(optimizers[0].get(inner), f"{where}, {inner}"), len(shapes))
    gaps = _gaps(optimizers[0], len(shapes), where) if stage != 3 else None
    found = []
    for index, named in enumerate(shapes):
        masters = [as_tensor(row[index], f"{where}, {key}[{index}]") for row in buffers]
        place = f"{where}, {key}[{index}]"
        if stage == 3:
            runs = each_parameter_runs(named, masters[0].numel(), ranks, place)
        else:
            runs = whole_group_runs(named, masters[0].numel(), ranks, gaps[index] if gaps is not None else None, place)
        states, scalars = _state(optimizers, inner, index, where)
        found.append(FlatGroup(home[index], runs, masters, states, scalars))
    return found


def shapes_of(model: State, options: ImportOptions, where: str) -> list[dict[str, tuple[int, ...]]]:
    """Return the trained parameters by flat buffer, in their order there."""
    place = f"{where}, param_shapes"
    return [
        {options.own(str(name)): as_shape(shape, f"{place}, {name}") for name, shape in as_dict(part, place).items()}
        for part in as_list(model.get("param_shapes"), place)
    ]


def param_groups(optimizer: State, where: str) -> list[dict[Any, Any]]:
    """Return the hyperparameters, by group; none in DeepSpeed's elastic form."""
    key = "optimizer_state_dict" if stage_of(optimizer) == 3 else "base_optimizer_state"
    return optimizer_groups(optimizer.get(key), f"{where}, {key}")


def _gaps(optimizer: State, count: int, where: str) -> list[list[int]] | None:
    """Return, for stages 1 and 2, the elements that are left free behind each parameter, by flat
    buffer."""
    found, place = optimizer.get("param_alignment_paddings"), f"{where}, param_alignment_paddings"
    if not isinstance(found, list) or not found:
        return None
    listed = [as_integers(row, place) for row in found]
    if len(listed) != count:
        raise CheckpointError("another number of flat buffers", where=place, got=len(listed), expected=count)
    return listed


def _state(
    optimizers: Sequence[State], inner: str, index: int, where: str
) -> tuple[dict[str, list[torch.Tensor]], dict[str, float]]:
    """Return the state of one buffer: tensors by kind and rank, and what is one number."""
    rows = [_state_of(optimizer.get(inner), index, f"{where}, {inner}") for optimizer in optimizers]
    if any(row.keys() != rows[0].keys() for row in rows):
        raise CheckpointError(
            "ranks have different kinds of optimizer state", where=where, got=[sorted(row) for row in rows]
        )
    states: dict[str, list[torch.Tensor]] = {}
    scalars: dict[str, float] = {}
    for kind, first in rows[0].items():
        if isinstance(first, torch.Tensor) and first.shape:
            states[str(kind)] = [as_tensor(row[kind], f"{where}, {kind}") for row in rows]
        else:
            scalars |= one_number(str(kind), first)
    for group in optimizer_groups(optimizers[0].get(inner), f"{where}, {inner}"):
        if index in group["params"]:  # where older optimizers keep it; newer ones leave a 0 there
            scalars = one_number("step", group.get("step")) | scalars
    return states, scalars


def _state_of(inner: Any, index: int, where: str) -> State:
    if isinstance(inner, list):  # DeepSpeed's elastic form: one row per group, without padding
        return as_dict(inner[index], f"{where}[{index}]") if index < len(inner) else {}
    return optimizer_state(inner, where).get(index, {})


def group_of_buffer(groups: Sequence[State], count: int) -> list[int]:
    """Return the group of each buffer. A group of stage 3 may be cut into several; ``params`` of
    the groups says which."""
    home = {place: index for index, group in enumerate(groups) for place in group["params"]}
    return [home.get(index, index) for index in range(count)]


# The layout: pure arithmetic over shapes.


Shapes = Mapping[str, tuple[int, ...]]


class FlatRange(NamedTuple):
    """Elements [start, stop) of ``name`` are in ``rank``'s flat buffer from ``offset`` on."""

    name: str
    shape: tuple[int, ...]
    rank: int
    start: int
    stop: int
    offset: int


def whole_group_runs(
    shapes: Shapes, partition: int, ranks: int, gaps: Sequence[int] | None, where: str
) -> list[FlatRange]:
    """Return the runs of stages 1 and 2: ``partition`` elements on each of ``ranks``; ``gaps``:
    elements left free behind each parameter.

    Raises CheckpointError where these parameters would not fill the buffer but for the padding that
    makes all partitions equal.
    """
    gaps = list(gaps) if gaps is not None else [0] * len(shapes)
    used = sum(prod(shape) for shape in shapes.values()) + sum(gaps)
    if len(gaps) != len(shapes) or not 0 <= partition * ranks - used < max(2 * ranks, 1):
        raise _other_layout(where, partition * ranks, used)
    found: list[FlatRange] = []
    at = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        found += _cut(name, tuple(shape), at, partition)
        at += prod(shape) + gap
    return found


def each_parameter_runs(shapes: Shapes, partition: int, ranks: int, where: str) -> list[FlatRange]:
    """Return the runs of stage 3: a rank's buffer holds ``partition`` elements. Raises
    CheckpointError where these parameters do not fill it."""
    found: list[FlatRange] = []
    at = 0
    for name, shape in shapes.items():
        numel = prod(shape)
        share = -(-numel // ranks)
        for rank in range(ranks):
            start, stop = min(rank * share, numel), min((rank + 1) * share, numel)
            if start < stop:
                found.append(FlatRange(name, tuple(shape), rank, start, stop, at))
        at += share
    if not 0 <= partition - at < 2:
        raise _other_layout(where, partition, at)
    return found


def _cut(name: str, shape: tuple[int, ...], at: int, partition: int) -> Iterator[FlatRange]:
    numel, start = prod(shape), 0
    while start < numel:
        rank, offset = divmod(at + start, partition)
        stop = min(numel, start + partition - offset)
        yield FlatRange(name, shape, rank, start, stop, offset)
        start = stop


def _other_layout(where: str, held: int, named: int) -> CheckpointError:
    return CheckpointError(
        "the flat buffers do not fit the parameters' shapes",
        where=where,
        got=f"buffers of {held} elements",
        expected=f"{named}, what the named parameters have, and padding",
        fix="Save again with DeepSpeed 0.10 or later and without expert parallelism, or import the weights alone.",
    )
