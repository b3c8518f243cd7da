"""The optimizer of stage 0: numbers matched with names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compat.importing.synthetic import model_content
from zero_trial.compat.importing.deepspeed_files import ModelStates
from zero_trial.compat.importing.imported import ImportOptions
from zero_trial.compat.importing.numbered_state import NumberedOptimizer, deal
from zero_trial.errors import CheckpointError


def by_shape(shapes: Mapping[str, int], places: Sequence[Sequence[int]]) -> list[list[tuple[str, int]]]:
    """Shapes are single numbers here."""
    return deal(
        list(shapes),
        [len(row) for row in places],
        lambda name, group, place: place + 1 if places[group][place] == shapes[name] else -1,
        "test",
    )


def test_groups_that_take_turns() -> None:
    shapes = {"a.weight": 9, "a.bias": 3, "b.weight": 9, "b.bias": 3}
    assert by_shape(shapes, [[9, 9], [3, 3]]) == [[("a.weight", 0), ("b.weight", 1)], [("a.bias", 0), ("b.bias", 1)]]


def test_what_is_left_over_is_frozen() -> None:
    assert by_shape({"a": 1, "b": 2, "c": 3}, [[1, 3]]) == [[("a", 0), ("c", 1)]]


def test_two_ways_are_an_error_with_a_way_out() -> None:
    with pytest.raises(
        CheckpointError, match=r"test: .*shapes do not tell which is which: got more than one way.*--names FILE"
    ):
        by_shape({"a": 1, "b": 1}, [[1]])
    with pytest.raises(CheckpointError, match="more than one way"):
        by_shape({"a": 1, "b": 1}, [[1], [1]])


def test_no_way_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="no way to match them"):
        by_shape({"a": 1, "b": 2}, [[2, 1]])


def test_runs_of_a_flat_buffer() -> None:
    """Places may be offsets: then a parameter takes as many as it has elements."""
    sizes = {"a": 2, "b": 5, "c": 3}
    found = deal(list(sizes), [5], lambda name, group, place: place + sizes[name] if name != "b" else -1, "test")
    assert found == [[("a", 0), ("c", 2)]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.data())
def test_against_all_ways(shapes: list[int], data: st.DataObject) -> None:
    """Every parameter in one of two groups or frozen: the answer is right if it is the only one,
    and an error else."""
    homes = [data.draw(st.integers(-1, 1)) for _ in shapes]
    places = [[shape for shape, home in zip(shapes, homes, strict=True) if home == group] for group in (0, 1)]
    ways = {
        way
        for way in itertools.product((-1, 0, 1), repeat=len(shapes))
        if all(
            [shape for shape, home in zip(shapes, way, strict=True) if home == group] == places[group]
            for group in (0, 1)
        )
    }
    named = {f"p{index}": shape for index, shape in enumerate(shapes)}
    if len(ways) > 1:
        with pytest.raises(CheckpointError, match="more than one way"):
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


def optimizer(content: dict[str, Any], of: ModelStates | None = None, names: Any = None) -> NumberedOptimizer:
    return NumberedOptimizer(content, of or model(), ImportOptions(names=names))


def expect(found: NumberedOptimizer, masters: bool) -> None:
    slices = {part.name: part.tensor for part in found.slices()}
    wanted = {f"state/exp_avg/{name}": value + 100 for name, value in VALUES.items()}
    wanted |= {f"param/{name}": value for name, value in VALUES.items()} if masters else {}
    assert slices.keys() == wanted.keys()
    assert all(torch.equal(slices[name], value) and slices[name].shape == value.shape for name, value in wanted.items())
    assert found.kinds == ["exp_avg"] and found.has_masters() is masters
    assert found.scalars() == {"0": {"step": 3.0}, "1": {"step": 3.0}}


def test_torchs_own_form() -> None:
    expect(optimizer(torch_state()), masters=False)


def test_masters_tensor_by_tensor() -> None:
    """In 16 bit the values tell, too: the groups' order is another one than the shapes alone would
    allow."""
    content = {
        "optimizer_state_dict": torch_state(),
        "fp32_groups": [[VALUES[name] for name in group] for group in GROUPS],
    }
    expect(optimizer(content, model(torch.bfloat16)), masters=True)


def test_masters_in_one_flat_tensor_per_group() -> None:
    flats = [torch.cat([VALUES[name].reshape(-1) for name in group]) for group in GROUPS]
    content = {
        "fp32_groups_flat": list(flats),
        "optimizer_state_dict": {
            "state": state_of(flats),
            "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}],
        },
    }
    expect(optimizer(content, model(torch.float16)), masters=True)


def test_a_frozen_twin_differs_in_its_values_alone() -> None:
    """Two weights of one shape, one of them frozen: 32 bit has nothing to tell them by, masters
    have their values."""
    content = torch_state([["b.weight"]])
    with pytest.raises(CheckpointError, match=r"test\.pt, optimizer: .*more than one way"):
        optimizer(content)
    assert optimizer(content, names=[["b.weight"]]).names == [[("b.weight", 0)]]
    mastered = {"optimizer_state_dict": content, "fp32_groups": [[VALUES["b.weight"]]]}
    assert optimizer(mastered).names == [[("b.weight", 0)]]


@pytest.mark.parametrize(
    ("names", "word"),
    [
        ([["b.weight", "a.bias"], []], "a given name cannot be that tensor's"),
        ([["a.weight"], ["a.bias", "b.bias", "gain"]], "too few names are given"),
        ([["no one"]], "group 0, place 0: no one"),
        ([["a.weight", "b.weight", "gain"]], "group 0, place 2: gain"),
    ],
)
def test_names_that_cannot_be(names: list[list[str]], word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        optimizer(torch_state(), names=names)


def test_a_parameter_without_state_so_far() -> None:
    """It had no gradient yet: any shape may be there."""
    content = torch_state()
    del content["state"][1]
    found = optimizer(content)
    assert found.names[0] == [("a.weight", 0), ("b.weight", 1)]
    assert "state/exp_avg/b.weight" not in {part.name for part in found.slices()}


def test_steps_of_their_own() -> None:
    content = torch_state()
    content["state"][1]["step"] = torch.tensor(2.0)
    with pytest.raises(
        CheckpointError, match=r"a step of their own: got 3.0 and 2.0 in group 0\. Import with --no-optimizer"
    ):
        optimizer(content).scalars()


def test_not_an_optimizer() -> None:
    with pytest.raises(CheckpointError, match="not the state of an optimizer"):
        optimizer({"state": {}})
