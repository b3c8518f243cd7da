"""Weights and buffers of a file of model states, whole or in each rank's part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.importing.synthetic import model_content, stored
from zero_trial.errors import CheckpointError
from zero_trial.importing.deepspeed_files import ModelStates
from zero_trial.importing.imported import ImportOptions


def states(*contents: dict[str, Any], **wishes: Any) -> ModelStates:
    return ModelStates(list(contents), ImportOptions(**wishes), "test.pt")


def test_parameters_buffers_and_ties() -> None:
    weight = torch.ones(2, 2)
    content = model_content({"a": weight, "mean": torch.zeros(2), "c": torch.zeros(3)}, ("mean",))
    content["module"] |= {"b": content["module"]["a"], "_extra_state": {"x": 1}}
    model = states(content)
    assert model.parameters == ["a", "c"] and model.aliases == {"b": "a"} and model.not_tensors == ["_extra_state"]
    (row,) = model.weights({"c"}, sharded=False)
    assert [part.name for part in row] == ["param/a", "buffer/mean"]


def test_what_deepspeed_lists_as_shared() -> None:
    model = states(
        model_content({"x.a": torch.zeros(2), "x.b": torch.zeros(2)}, shared_params={"x.b": "x.a"}), strip="x."
    )
    assert model.aliases == {"b": "a"} and model.parameters == ["a"]


def test_frozen_parameters_of_stage_3_are_in_parts() -> None:
    """Seven elements on two ranks: four, three and one of padding."""
    contents = [
        model_content(
            {"frozen": torch.zeros(0), "none": torch.zeros(0)},
            frozen_param_shapes={"frozen": (7,), "none": (0, 3)},
            frozen_param_fragments={
                "frozen": stored(torch.arange(rank * 4.0, rank * 4 + 4)),
                "none": stored(torch.zeros(0)),
            },
        )
        for rank in range(2)
    ]
    rows = states(*contents).weights(set(), sharded=True)
    assert [(part.name, part.start, part.stop) for part in rows[0]] == [("param/frozen", 0, 4), ("param/none", 0, 0)]
    assert torch.equal(rows[1][0].tensor, torch.tensor([4.0, 5, 6]))


def test_a_fragment_that_is_not_there() -> None:
    contents = [model_content({"frozen": torch.zeros(0)}, frozen_param_shapes={"frozen": (7,)}) for _ in range(2)]
    with pytest.raises(CheckpointError, match=r"a part of a frozen parameter is missing: got frozen, rank 0"):
        states(*contents).weights(set(), sharded=True)


def test_a_placeholder_without_values() -> None:
    with pytest.raises(CheckpointError, match="there are no values of a parameter: got a"):
        states(model_content({"a": torch.zeros(0)})).weights(set(), sharded=True)


def test_no_weights() -> None:
    with pytest.raises(
        CheckpointError, match="there are no weights in the file of model states: got module is NoneType"
    ):
        states({"module": None})


def test_the_optimizer_means_the_same_tensors() -> None:
    model = states(model_content({"a": torch.zeros(2, 3), "sharded": torch.zeros(0)}))
    model.check_shapes({"a": (2, 3), "sharded": (4,)})
    for shapes in ({"a": (3, 2)}, {"b": (2,)}):
        with pytest.raises(CheckpointError, match="differs in the module and the optimizer"):
            model.check_shapes(shapes)


def test_no_tensor_is_lost_where_two_names_become_one() -> None:
    content = model_content({"module.a": torch.zeros(2), "a": torch.ones(3)})
    assert set(states(content).tensors) == {"module.a", "a"}
    with pytest.raises(CheckpointError, match="two tensors have one name"):
        states(content, strip="module.")
