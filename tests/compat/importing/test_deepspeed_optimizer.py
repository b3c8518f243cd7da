"""The optimizer as DeepSpeed saves it: flat buffers of ZeRO stages 1 to 3 cut into parameters, and
numbers of stage 0 matched with names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compat.importing.checkpoints import foreign, model_content
from zero_trial.compat.importing.deepspeed_files import ModelStates
from zero_trial.compat.importing.deepspeed_optimizer import (
    FlatGroup,
    FlatRange,
    NumberedOptimizer,
    deal,
    each_parameter_runs,
    flat_groups,
    stage_of,
    whole_group_runs,
)
from zero_trial.compat.importing.imported import ImportOptions
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


@settings(max_examples=40)
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


@settings(max_examples=40)
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


@pytest.mark.parametrize("partition", [0, 4, 8, 9])
def test_buffers_of_another_size(partition: int) -> None:
    with pytest.raises(CheckpointError, match=r"there: the flat buffers do not fit the parameters' shapes"):
        whole_group_runs({"a": (5,), "b": (6,)}, partition, 2, None, "there")
    with pytest.raises(CheckpointError, match="do not fit"):
        each_parameter_runs({"a": (5,), "b": (6,)}, partition, 2, "there")
    with pytest.raises(CheckpointError, match="do not fit"):
        whole_group_runs({"a": (4,)}, 4, 1, [0, 0], "there")  # gaps of other parameters


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


def test_forms_of_stages_1_and_2() -> None:
    """Those that checkpoints of the real DeepSpeed do not have: lean buffers, a step of 0 in the
    group, as newer FusedAdam leaves it, no word of the stage, and parameters at aligned places."""
    rows = [rank_of_stage_2(rank) for rank in range(2)]
    for row in rows:
        row["base_optimizer_state"]["param_groups"][0]["step"] = 0
    (group,) = found = groups_of(rows)
    expect(joined(found, 2))
    assert group.scalars == {"step": 5.0} and group.group == 0
    assert not any(part.name.startswith("state") for part in group.slices(0, False, "test"))
    flat = torch.tensor([0.0, 1, 2, -9, 3, 4, 5, 6]).reshape(2, 4)
    rows = [
        rank_of_stage_2(
            rank,
            single_partition_of_fp32_groups=[flat[rank]],
            base_optimizer_state={"state": {0: {"exp_avg": flat[rank] + 100}}, "param_groups": []},
            param_alignment_paddings=[[1, 0]],
        )
        for rank in range(2)
    ]
    for row in rows:
        del row["zero_stage"]
    assert stage_of(rows[0]) == 1
    expect(joined(groups_of(rows), 2))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"partition_count": [3]}, "some ranks' files are missing"),
        ({"partition_count": 4}, "some ranks' files are missing"),
        ({"zero_stage": 7}, "unknown ZeRO stage"),
        ({"zero_stage": foreign("x")}, "unknown ZeRO stage"),
        ({"single_partition_of_fp32_groups": None}, "_fp32_groups: unexpected content: got NoneType"),
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


def by_shape(shapes: Mapping[str, int], places: Sequence[Sequence[int]]) -> list[list[tuple[str, int]]]:
    """Shapes are single numbers here."""
    return deal(
        list(shapes),
        [len(row) for row in places],
        lambda name, group, place: place + 1 if places[group][place] == shapes[name] else -1,
        "test",
    )


def test_two_ways_or_none_are_an_error_with_a_way_out() -> None:
    unclear = r"test: .*shapes are ambiguous: got several possible matches.*--names FILE"
    with pytest.raises(CheckpointError, match=unclear):
        by_shape({"a": 1, "b": 1}, [[1]])
    with pytest.raises(CheckpointError, match="several possible matches"):
        by_shape({"a": 1, "b": 1}, [[1], [1]])
    with pytest.raises(CheckpointError, match="no possible match"):
        by_shape({"a": 1, "b": 2}, [[2, 1]])


@settings(max_examples=40)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.data())
def test_against_all_ways(shapes: list[int], data: st.DataObject) -> None:
    """Every parameter in one of two groups or frozen: the answer is right if it is the only one,
    and an error else."""
    homes = [data.draw(st.integers(-1, 1)) for _ in shapes]

    def dealt(way: Sequence[int]) -> list[list[int]]:
        return [[shape for shape, home in zip(shapes, way, strict=True) if home == group] for group in (0, 1)]

    places = dealt(homes)
    ways = {way for way in itertools.product((-1, 0, 1), repeat=len(shapes)) if dealt(way) == places}
    named = {f"p{index}": shape for index, shape in enumerate(shapes)}
    if len(ways) > 1:
        with pytest.raises(CheckpointError, match="several possible matches"):
            by_shape(named, places)
        return
    found = by_shape(named, places)
    assert [[name for name, _ in row] for row in found] == [
        [f"p{index}" for index, home in enumerate(homes) if home == group] for group in (0, 1)
    ]


VALUES = {
    "a.weight": torch.arange(4.0).reshape(2, 2),
    "a.bias": torch.tensor([10.0, 11]),
    "b.weight": torch.arange(20.0, 24).reshape(2, 2),
    "b.bias": torch.tensor([30.0, 31]),
    "gain": torch.tensor(2.0),
}
GROUPS = [["a.weight", "b.weight"], ["a.bias", "b.bias", "gain"]]


def model(dtype: torch.dtype = torch.float32) -> ModelStates:
    return ModelStates(
        [model_content({name: value.to(dtype) for name, value in VALUES.items()})], ImportOptions(), "test.pt"
    )


def state_of(values: list[torch.Tensor], step: float = 3.0) -> dict[int, Any]:
    return {index: {"step": torch.tensor(step), "exp_avg": value + 100} for index, value in enumerate(values)}


def torch_state(groups: list[list[str]] = GROUPS) -> dict[str, Any]:
    order = [name for group in groups for name in group]
    numbers = {name: index for index, name in enumerate(order)}
    return {
        "state": state_of([VALUES[name] for name in order]),
        "param_groups": [{"lr": 0.1, "params": [numbers[name] for name in group]} for group in groups],
    }


def numbered(content: dict[str, Any], of: ModelStates | None = None, names: Any = None) -> NumberedOptimizer:
    return NumberedOptimizer(content, of or model(), ImportOptions(names=names))


def expect_numbered(found: NumberedOptimizer, masters: bool) -> None:
    slices = {part.name: part.tensor for part in found.slices()}
    wanted = {f"state/exp_avg/{name}": value + 100 for name, value in VALUES.items()}
    wanted |= {f"param/{name}": value for name, value in VALUES.items()} if masters else {}
    assert slices.keys() == wanted.keys()
    assert all(torch.equal(slices[name], value) and slices[name].shape == value.shape for name, value in wanted.items())
    assert found.kinds == ["exp_avg"] and found.has_masters() is masters
    assert found.scalars() == {"0": {"step": 3.0}, "1": {"step": 3.0}}


def test_forms_of_stage_0() -> None:
    """torch's own; masters tensor by tensor, whose values tell in 16 bit that the groups' order is
    another one than the shapes alone would allow; and masters in one flat tensor per group."""
    expect_numbered(numbered(torch_state()), masters=False)
    content = {"optimizer_state_dict": torch_state()}
    content["fp32_groups"] = [[VALUES[name] for name in group] for group in GROUPS]  # type: ignore[assignment]
    expect_numbered(numbered(content, model(torch.bfloat16)), masters=True)
    flats = [torch.cat([VALUES[name].reshape(-1) for name in group]) for group in GROUPS]
    groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
    content = {"optimizer_state_dict": {"state": state_of(flats), "param_groups": groups}}
    expect_numbered(numbered(content | {"fp32_groups_flat": list(flats)}, model(torch.float16)), masters=True)


def test_a_frozen_twin_differs_in_its_values_alone() -> None:
    """Two weights of one shape, one of them frozen: 32 bit has nothing to tell them by, masters
    have their values."""
    content = torch_state([["b.weight"]])
    with pytest.raises(CheckpointError, match=r"test\.pt, optimizer: .*several possible matches"):
        numbered(content)
    assert numbered(content, names=[["b.weight"]]).names == [[("b.weight", 0)]]
    mastered = {"optimizer_state_dict": content, "fp32_groups": [[VALUES["b.weight"]]]}
    assert numbered(mastered).names == [[("b.weight", 0)]]


@pytest.mark.parametrize(
    ("names", "word"),
    [
        ([["b.weight", "a.bias"], []], "a given name does not fit that tensor"),
        ([["a.weight"], ["a.bias", "b.bias", "gain"]], "too few names"),
        ([["no one"]], "group 0, place 0: no one"),
        ([["a.weight", "b.weight", "gain"]], "group 0, place 2: gain"),
    ],
)
def test_names_that_cannot_be(names: list[list[str]], word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        numbered(torch_state(), names=names)


def test_states_that_are_missing_or_differ() -> None:
    """A parameter that had no gradient yet has none: any shape may be there."""
    content = torch_state()
    del content["state"][1]
    found = numbered(content)
    assert found.names[0] == [("a.weight", 0), ("b.weight", 1)]
    assert "state/exp_avg/b.weight" not in {part.name for part in found.slices()}
    content = torch_state()
    content["state"][1]["step"] = torch.tensor(2.0)
    own = r"different values of step: got 3.0 and 2.0 in group 0\. Import with --no-optimizer"
    with pytest.raises(CheckpointError, match=own):
        numbered(content).scalars()
    with pytest.raises(CheckpointError, match="not the state of an optimizer"):
        numbered({"state": {}})
