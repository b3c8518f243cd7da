"""Flat buffers: every element of every parameter is found once, where it was put."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_trial.errors import CheckpointError
from zero_trial.importing.zero_shards import FlatRange, each_parameter_runs, whole_group_runs

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=6).map(
    lambda shapes: {f"p{index}": shape for index, shape in enumerate(shapes)}
)


def values_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    start, found = 0, {}
    for name, shape in shapes.items():
        found[name] = torch.arange(start, start + prod(shape)).reshape(shape)
        start += prod(shape)
    return found


def gathered(
    runs: list[FlatRange], buffers: list[torch.Tensor], shapes: dict[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    found = {name: torch.full((prod(shape),), -1) for name, shape in shapes.items()}
    for run in runs:
        part = found[run.name][run.start : run.stop]
        assert bool((part == -1).all())
        part.copy_(buffers[run.rank][run.offset : run.offset + run.stop - run.start])
    return {name: flat.reshape(shapes[name]) for name, flat in found.items()}


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(1, 5), st.integers(1, 2), st.booleans())
def test_a_whole_group(shapes: dict[str, tuple[int, ...]], ranks: int, factor: int, gapped: bool) -> None:
    """As stages 1 and 2 lay it out: end to end, padded to a multiple, cut into equal partitions."""
    values, gaps = values_of(shapes), [index % 3 for index in range(len(shapes))] if gapped else [0] * len(shapes)
    parts = [
        part
        for (_, value), gap in zip(values.items(), gaps, strict=True)
        for part in (value.reshape(-1), torch.full((gap,), -7))
    ]
    flat = torch.cat([*parts, torch.zeros(0, dtype=torch.int64)])
    flat = torch.cat([flat, torch.full((-len(flat) % (ranks * factor),), -7)])
    buffers = list(flat.reshape(ranks, -1))
    runs = whole_group_runs(shapes, len(buffers[0]), ranks, gaps if gapped else None, "test")
    found = gathered(runs, buffers, shapes)
    assert all(torch.equal(found[name], value) for name, value in values.items())


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(1, 5))
def test_each_parameter(shapes: dict[str, tuple[int, ...]], ranks: int) -> None:
    """As stage 3 lays it out: each parameter in ``ranks`` parts of ceil(numel / ranks)."""
    values = values_of(shapes)
    columns = []
    for value in values.values():
        share = -(-value.numel() // ranks)
        columns.append(
            torch.cat([value.reshape(-1), torch.full((share * ranks - value.numel(),), -7)]).reshape(ranks, share)
        )
    buffers = list(torch.cat([*columns, torch.zeros((ranks, 0), dtype=torch.int64)], dim=1))
    found = gathered(each_parameter_runs(shapes, len(buffers[0]), ranks, "test"), buffers, shapes)
    assert all(torch.equal(found[name], value) for name, value in values.items())


def test_the_picture() -> None:
    """The example of the module's docstring."""
    assert whole_group_runs({"a": (5,), "b": (4,)}, 6, 2, None, "t") == [
        FlatRange("a", (5,), 0, 0, 5, 0),
        FlatRange("b", (4,), 0, 0, 1, 5),
        FlatRange("b", (4,), 1, 1, 4, 0),
    ]
    assert each_parameter_runs({"a": (5,), "b": (4,)}, 5, 2, "t") == [
        FlatRange("a", (5,), 0, 0, 3, 0),
        FlatRange("a", (5,), 1, 3, 5, 0),
        FlatRange("b", (4,), 0, 0, 2, 3),
        FlatRange("b", (4,), 1, 2, 4, 3),
    ]


@pytest.mark.parametrize("partition", [0, 4, 8, 9])
def test_buffers_of_another_size(partition: int) -> None:
    with pytest.raises(CheckpointError, match=r"there: the flat buffers do not fit the parameters' shapes"):
        whole_group_runs({"a": (5,), "b": (6,)}, partition, 2, None, "there")
    with pytest.raises(CheckpointError, match="do not fit"):
        each_parameter_runs({"a": (5,), "b": (6,)}, partition, 2, "there")


def test_gaps_for_other_parameters() -> None:
    with pytest.raises(CheckpointError, match="do not fit"):
        whole_group_runs({"a": (4,)}, 4, 1, [0, 0], "there")
