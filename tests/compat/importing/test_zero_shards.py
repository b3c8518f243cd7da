"""Flat buffers of ZeRO stages 1 to 3, cut into parameters."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compat.importing.synthetic import foreign
from zero_trial.compat.importing.facts import one_number
from zero_trial.compat.importing.imported import ImportOptions
from zero_trial.compat.importing.zero_shards import (
    FlatGroup,
    FlatRange,
    each_parameter_runs,
    flat_groups,
    param_groups,
    stage_of,
    whole_group_runs,
)
from zero_trial.errors import CheckpointError

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


SHAPES_SHARDS = {"a": (3,), "b": (2, 2)}  # 7 elements: 4 and 3 on two ranks, one of padding
WHOLE = torch.arange(8.0)


def rank_of_stage_2(rank: int, *, lean: bool = True, **more: Any) -> dict[str, Any]:
    part = WHOLE[rank * 4 : rank * 4 + 4]
    masters = part[:3] if lean and rank == 1 else part
    state = {"step": torch.tensor(5.0), "exp_avg": part + 100}
    return {
        "zero_stage": foreign("deepspeed.ZeroStageEnum", (2,)),
        "partition_count": [2],
        "single_partition_of_fp32_groups": [masters],
        "base_optimizer_state": {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    } | more


MODEL = {"param_shapes": [SHAPES_SHARDS]}


def groups_of(optimizers: list[dict[str, Any]], model: dict[str, Any] = MODEL) -> list[FlatGroup]:
    return flat_groups(model, optimizers, ImportOptions(), "test")


def joined(groups: list[FlatGroup], ranks: int) -> dict[str, torch.Tensor]:
    """Every tensor put together from its slices."""
    found: dict[str, torch.Tensor] = {}
    for rank in range(ranks):
        for group in groups:
            for part in group.slices(rank, True, "test"):
                whole = found.setdefault(part.name, torch.full(part.shape, -1.0))
                whole.view(-1)[part.start : part.stop] = part.tensor
    return found


def expect(found: dict[str, torch.Tensor], add: float = 100) -> None:
    assert torch.equal(found["param/a"], WHOLE[:3]) and torch.equal(found["param/b"], WHOLE[3:7].reshape(2, 2))
    assert torch.equal(found["state/exp_avg/a"], WHOLE[:3] + add) and torch.equal(
        found["state/exp_avg/b"].view(-1), WHOLE[3:7] + add
    )


@pytest.mark.parametrize("lean", [True, False])
def test_stage_2(lean: bool) -> None:
    (group,) = found = groups_of([rank_of_stage_2(rank, lean=lean) for rank in range(2)])
    expect(joined(found, 2))
    assert group.scalars == {"step": 5.0} and group.group == 0
    assert not any(part.name.startswith("state") for part in group.slices(0, False, "test"))


def test_the_elastic_form() -> None:
    """State in a list, without padding and without hyperparameters."""
    rows = []
    for rank in range(2):
        part = WHOLE[rank * 4 : rank * 4 + 4 - rank]
        rows.append(rank_of_stage_2(rank, base_optimizer_state=[{"exp_avg": part + 100}]))
    expect(joined(groups_of(rows), 2))
    assert param_groups(rows[0], "here") == []


def test_deepspeeds_bf16_optimizer_does_not_say_its_stage() -> None:
    rows = [rank_of_stage_2(rank, lean=False) for rank in range(2)]
    for row in rows:
        del row["zero_stage"]
    assert stage_of(rows[0]) == 1
    expect(joined(groups_of(rows), 2))


def test_parameters_that_begin_at_aligned_places() -> None:
    flat = torch.tensor([0.0, 1, 2, -9, 3, 4, 5, 6])
    rows = [
        rank_of_stage_2(
            rank,
            single_partition_of_fp32_groups=[flat[rank * 4 : rank * 4 + 4]],
            base_optimizer_state={
                "state": {0: {"exp_avg": flat[rank * 4 : rank * 4 + 4] + 100}},
                "param_groups": [],
            },
            param_alignment_paddings=[[1, 0]],
        )
        for rank in range(2)
    ]
    expect(joined(groups_of(rows), 2))


def rank_of_stage_3(rank: int) -> dict[str, Any]:
    """Each parameter in two halves: a is 2 + 1 and one of padding; the second buffer is of the same
    group."""
    first, second = torch.tensor([[0.0, 1], [2, -9]])[rank], torch.tensor([[3.0, 4], [5, 6]])[rank]
    state = {index: {"exp_avg": part + 100} for index, part in enumerate((first, second))}
    return {
        "zero_stage": 3,
        "partition_count": 2,
        "fp32_flat_groups": [first, second],
        "optimizer_state_dict": {"state": state, "param_groups": [{"lr": 0.1, "step": 4, "params": [0, 1]}]},
    }


def test_stage_3_in_several_buffers() -> None:
    found = groups_of([rank_of_stage_3(rank) for rank in range(2)], {"param_shapes": [{"a": (3,)}, {"b": (2, 2)}]})
    expect(joined(found, 2))
    assert [group.group for group in found] == [0, 0]
    assert [group.scalars for group in found] == [{"step": 4.0}, {"step": 4.0}]


def test_the_step_of_a_tensor_goes_before_the_groups() -> None:
    """Newer FusedAdam leaves a 0 in the group."""
    rows = [rank_of_stage_2(rank) for rank in range(2)]
    for row in rows:
        row["base_optimizer_state"]["param_groups"][0]["step"] = 0
    assert groups_of(rows)[0].scalars == {"step": 5.0}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"partition_count": [3]}, "some ranks' files are missing"),
        ({"partition_count": 4}, "some ranks' files are missing"),
        ({"zero_stage": 7}, "unknown ZeRO stage"),
        ({"zero_stage": foreign("x")}, "unknown ZeRO stage"),
        (
            {"single_partition_of_fp32_groups": None},
            "single_partition_of_fp32_groups: unexpected content: got NoneType",
        ),
        ({"single_partition_of_fp32_groups": []}, "do not match the model's shapes"),
        ({"single_partition_of_fp32_groups": [foreign("my.Tensor")]}, r"unexpected content: got my\.Tensor"),
        ({"single_partition_of_fp32_groups": [torch.zeros(9)]}, "do not fit the parameters' shapes"),
        ({"base_optimizer_state": {"state": {0: {"exp_avg": torch.zeros(2)}}}}, "a flat buffer is too short"),
        ({"base_optimizer_state": {"state": {0: {"other": torch.zeros(4)}}}}, "ranks have different kinds"),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], word: str) -> None:
    rows = [rank_of_stage_2(rank) for rank in range(2)]
    rows[0] |= change
    if "short" in word:
        rows[1]["base_optimizer_state"] = change["base_optimizer_state"]
    with pytest.raises(CheckpointError, match=word):
        joined(groups_of(rows), 2)


def test_shapes_of_another_kind() -> None:
    with pytest.raises(CheckpointError, match="param_shapes, a: unexpected content: got int 3"):
        groups_of([rank_of_stage_2(rank) for rank in range(2)], {"param_shapes": [{"a": 3}]})


def test_numbers() -> None:
    assert one_number("step", torch.tensor(3.0)) == {"step": 3.0}
    assert one_number("step", 3) == {"step": 3.0}
    assert one_number("step", True) == one_number("step", "3") == one_number("x", torch.zeros(2)) == {}
