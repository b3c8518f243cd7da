"""Modules marked as leaves by class, name, end of a name, or ds_config, and what follows."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.support.dense import STAGES
from tests.support.models import TinyLM, make_engine
from zero_trial.errors import ConfigError
from zero_trial.sharding.grouping import find_blocks
from zero_trial.zero import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)


def test_modules_are_marked_by_class_or_name() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.ModuleList([nn.Linear(2, 2)]))
    for wanted in (nn.Linear, "Linear", "torch.nn.modules.linear.Linear"):
        assert len(set_z3_leaf_modules(model, [wanted])) == 3
        assert get_z3_leaf_modules(model) == [part for part in model.modules() if isinstance(part, nn.Linear)]
        assert len(unset_z3_leaf_modules(model, [wanted])) == 3 and get_z3_leaf_modules(model) == []
    assert set_z3_leaf_modules(model[0], [nn.Sequential]) == [model[0]] and find_blocks(model) == ["0", "1.0"]
    with pytest.raises(ValueError, match="Conv2d"):  # as scripts for DeepSpeed catch it
        set_z3_leaf_modules(model, [nn.Conv2d])
    assert set_z3_leaf_modules(model, [nn.Conv2d], raise_if_not_found=False) == []


def test_modules_are_marked_by_name_and_by_the_end_of_it() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ModuleList([nn.Linear(2, 2)]))
    by_name, by_suffix, both = set_z3_leaf_modules_by_name, set_z3_leaf_modules_by_suffix, [model[0][0], model[1][0]]
    assert by_name(model, ["0", "1.0"]) == ([model[0], model[1][0]], [])
    assert get_z3_leaf_modules(model) == [model[0], model[1][0]]
    assert by_name(model, ["0", "1.0", "2"], False, False) == ([model[0], model[1][0]], ["2"])
    assert by_suffix(model, [".0", "1.0"]) == (both, []) and get_z3_leaf_modules(model) == both
    assert by_suffix(model, [".0", "x"], False, False) == (both, ["x"]) and get_z3_leaf_modules(model) == []
    for mark in (by_name, by_suffix):
        with pytest.raises(ConfigError, match=mark.__name__):
            mark(model, ["x"])
    set_z3_leaf_module(model[0], True)
    assert z3_leaf_module(model[0]) and find_blocks(model) == ["0", "1.0"]


@pytest.mark.parametrize(
    ("stage", "leaf"),
    [
        ("zero2", {"classes": ["Block"]}),
        ("zero3", {"classes": ["Block"]}),
        ("zero3", {"names": ["blocks.0", "blocks.1"]}),
        ("zero3", {"name_suffixes": ["s.0", "s.1"]}),
    ],
)
def test_what_a_ds_config_names_is_marked_at_stage_3(stage: str, leaf: dict[str, Any]) -> None:
    model = TinyLM()
    kind = type(model.blocks[0]).__name__
    leaf = {key: [kind if entry == "Block" else entry for entry in value] for key, value in leaf.items()}
    made = make_engine(lambda: model, {"zero_optimization": STAGES[stage] | {"leaf_module": leaf}})
    marked = get_z3_leaf_modules(made.module)
    assert (model.blocks[1] in marked, model.embed in marked) == (stage == "zero3", False)
    assert z3_leaf_parameter(model.blocks[1].up.weight) == (stage == "zero3")
    assert not z3_leaf_parameter(model.embed.weight)


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_a_list_is_a_leaf_only_inside_another_one(stage: str) -> None:
    """It can be marked, as in DeepSpeed, but it has no forward in which it could be gathered."""
    model = TinyLM()
    assert set_z3_leaf_modules(model, [nn.ModuleList]) == get_z3_leaf_modules(model) == [model.blocks]
    if stage == "zero3":
        with pytest.raises(ConfigError, match="blocks"):
            make_engine(lambda: model, {"zero_optimization": STAGES[stage]})
        set_z3_leaf_module(model, True)
    assert make_engine(lambda: model, {"zero_optimization": STAGES[stage]}).config.zero_optimization.stage == int(
        stage[-1]
    )


def test_a_ds_config_marks_a_list_inside_a_leaf() -> None:
    model = TinyLM()
    leaf = {"classes": ["TinyLM"], "name_suffixes": ["blocks"]}
    make_engine(lambda: model, {"zero_optimization": STAGES["zero3"] | {"leaf_module": leaf}})
    assert get_z3_leaf_modules(model) == [model, model.blocks]
