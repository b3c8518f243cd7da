"""Tests for zero_trial/sharding/grouping.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_trial.errors import ConfigError
from zero_trial.sharding.grouping import LeafRules, collect_params, module_facts, parameter_names


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def test_the_tree_of_a_module() -> None:
    facts = module_facts(Tied())
    assert [child.name for child in facts.children] == ["embed", "layers", "head"]
    layers = facts.children[1]
    assert (layers.is_list, layers.numel, [child.name for child in layers.children]) == (
        True,
        60,
        ["layers.0", "layers.1", "layers.2"],
    )
    assert facts.numel == 100, "a tied parameter counts once"
    assert module_facts(nn.Sequential(nn.Linear(2, 2))).is_sequential


def test_all_names_of_every_parameter() -> None:
    names = {name: known for name, (_, known) in parameter_names(Tied()).items()}
    assert names["embed.weight"] == ("embed.weight", "head.weight")
    assert "head.weight" not in names
    assert names["layers.1.bias"] == ("layers.1.bias",)


def opt_groups(module: nn.Module) -> dict[int, int]:
    return {id(param): 0 for param in module.parameters()}


def test_members_know_block_group_and_kind() -> None:
    module = Tied()
    numbers = opt_groups(module) | {id(module.layers[1].bias): 1}
    module.layers[2].weight.requires_grad_(False)
    members, params, blocks = collect_params(module, numbers, LeafRules(), dtype=torch.bfloat16, with_frozen=True)
    found = {member.name: member for member in members}
    assert blocks == ["layers.0", "layers.1", "layers.2"]
    assert found["embed.weight"].block == ""
    assert found["layers.1.bias"].block == "layers.1"
    assert found["layers.1.bias"].opt_group == 1
    assert found["layers.2.weight"].opt_group == -1
    assert found["layers.2.weight"].key != found["layers.1.weight"].key
    assert found["layers.1.weight"].key[0] is torch.bfloat16
    assert params["embed.weight"] is module.embed.weight


def test_frozen_parameters_and_strangers() -> None:
    """A frozen one is sharded only where parameters are; one that trains but is in no group is nobody's."""
    module = Tied()
    numbers = opt_groups(module)
    del numbers[id(module.layers[0].bias)]
    module.layers[2].weight.requires_grad_(False)
    for with_frozen in (False, True):
        members, params, _ = collect_params(module, numbers, LeafRules(), dtype=torch.float32, with_frozen=with_frozen)
        assert "layers.0.bias" not in params
        assert ("layers.2.weight" in params) is with_frozen
        assert len(members) == len(params)


def test_a_complex_parameter_is_refused_by_name() -> None:
    """The fp32 masters would keep its real part alone."""
    module = nn.Module()
    module.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"phase: a complex parameter cannot be trained: got torch\.complex64"):
        collect_params(module, opt_groups(module), LeafRules(), dtype=torch.float32, with_frozen=True)
    module.phase.requires_grad_(False)
    assert (
        collect_params(module, opt_groups(module), LeafRules(), dtype=torch.float32, with_frozen=True)[0][0].opt_group
        == -1
    )
