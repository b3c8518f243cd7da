"""How a model's parameters are grouped; the norm over model-parallel parts is in
tests/engine/test_parallel_models.py."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.sharding.parts import make_grad_buffer, make_group, parameters
from zero_trial.errors import ConfigError
from zero_trial.sharding.grouping import (
    ROOT,
    GroupingLimits,
    GroupSpec,
    Kind,
    LeafRules,
    ManualGroup,
    ManualGroups,
    ParamFacts,
    block_of,
    collect_params,
    find_blocks,
    into_blocks,
    into_buckets,
    is_model_parallel,
    merge_small,
)
from zero_trial.sharding.layout import lay_out
from zero_trial.sharding.living_dtypes import LivingDtypes
from zero_trial.sharding.precision import dtype_policy

MIB = 1 << 20


def net(kind: str = "Net", numel: int = 0, **children: nn.Module) -> nn.Module:
    """A module of a class of that name, with ``numel`` parameters of its own."""
    made = type(kind, (nn.Module,), {})()
    made.weight = nn.Parameter(torch.empty(numel))
    for name, child in children.items():
        made.add_module(name, child)
    return made  # type: ignore[no-any-return]


def stack(count: int, each: int) -> nn.ModuleList:
    return nn.ModuleList(net("Block", each) for _ in range(count))


TREES: list[tuple[nn.Module, list[str]]] = [
    (net(wte=net("Embedding", 100), h=stack(6, 100), head=net("Linear")), [f"h.{i}" for i in range(6)]),
    (  # alike children of a Sequential are blocks, and odd ones are not
        net(body=nn.Sequential(net("Stem", 100), net("Linear", 300), nn.ReLU(), net("Linear", 300))),
        ["body.1", "body.3"],
    ),
    (  # two towers in a list are no blocks; their layers are
        net(towers=nn.ModuleList(net("Tower", layers=stack(4, 100)) for _ in range(2))),
        [f"towers.{i}.layers.{j}" for i in range(2) for j in range(4)],
    ),
    (  # a small member with a list inside stays one block
        net(h=nn.ModuleList(net("Block", 20, experts=stack(4, 20)) for _ in range(8))),
        [f"h.{i}" for i in range(8)],
    ),
    (
        net(grid=nn.ModuleList([stack(2, 50), stack(2, 50), nn.Dropout()])),
        ["grid.0.0", "grid.0.1", "grid.1.0", "grid.1.1"],
    ),
]


@pytest.mark.parametrize(("model", "blocks"), TREES)
def test_the_blocks_of_a_model(model: nn.Module, blocks: list[str]) -> None:
    assert find_blocks(model) == blocks


def encoder() -> nn.Module:
    return net("Model", encoder=net("Encoder", layers=stack(3, 100)))


@pytest.mark.parametrize(
    ("rules", "key"),
    [
        (LeafRules(classes=("Absent",)), "classes"),
        (LeafRules(names=("encoder", "encoder.layer")), "names"),
        (LeafRules(name_suffixes=("encoder.layers",)), "name_suffixes"),  # a list has no forward
    ],
)
def test_a_leaf_that_does_not_exist_is_an_error(rules: LeafRules, key: str) -> None:
    with pytest.raises(ConfigError, match=f"leaf_module.{key}"):
        rules.mark(encoder())
    LeafRules(classes=("Block", "Absent"), names=("encoder",)).mark(encoder())  # a list for several models


OWNERS = [
    (["h.1.weight"], "h.1"),
    (["h.10.weight"], "h.10"),  # not h.1
    (["wte.weight"], ROOT),
    (["wte.weight", "head.weight"], ROOT),
    (["h.1.a", "h.1.b"], "h.1"),  # tied within a block
    (["h.1.a", "h.10.a"], ROOT),  # shared by two
    (["h.1"], "h.1"),  # a block that is itself a parameter's name
    (["h.1.inner.w"], "h.1.inner"),  # the innermost
]


@pytest.mark.parametrize(("names", "owner"), OWNERS)
def test_owner_of(names: list[str], owner: str) -> None:
    assert block_of(names, ["h.1", "h.10", "h.1.inner"]) == owner


FP32 = Kind(torch.float32, torch.device("cpu"), True)


def members(*sizes: int) -> list[ParamFacts]:
    return [ParamFacts(f"p{index}", size, FP32, 0) for index, size in enumerate(sizes)]


def names(grouping: object) -> list[str]:
    return [member.name for member in grouping.members]  # type: ignore[attr-defined]


def test_buckets_are_filled_from_the_last_parameter_backwards() -> None:
    made = into_buckets(members(4 * MIB, MIB, MIB, 2 * MIB), GroupingLimits(bucket=2 * MIB))
    assert [names(bucket) for bucket in made] == [["p3"], ["p1", "p2"], ["p0"]]
    assert [bucket.name for bucket in made] == ["bucket0", "bucket1", "bucket2"]
    assert all(bucket.always for bucket in made)


def test_a_bucket_is_a_quarter_of_the_model_but_not_below_a_mebi() -> None:
    assert [names(b) for b in into_buckets(members(MIB, MIB, MIB, MIB), GroupingLimits())] == [
        ["p3"],
        ["p2"],
        ["p1"],
        ["p0"],
    ]
    assert [names(b) for b in into_buckets(members(*[1000] * 10), GroupingLimits())] == [[f"p{i}" for i in range(10)]]
    assert len(into_buckets(members(*[1000] * 10), GroupingLimits(bucket=3000))) == 4


sizes = st.lists(
    st.tuples(
        st.integers(0, 5000), st.sampled_from(["a", "b"]), st.integers(-1, 2), st.sampled_from(["", "h.0", "h.1"])
    ),
    max_size=25,
)


def mixed(rows: list[tuple[int, str, int, str]]) -> list[ParamFacts]:
    return [
        ParamFacts(f"p{i}", numel, FP32._replace(manual_group=key, trained=opt_group >= 0), opt_group, block)
        for i, (numel, key, opt_group, block) in enumerate(rows)
    ]


@given(sizes, st.integers(1, 8000))
def test_every_parameter_is_in_one_bucket_of_its_own_kind(rows: list[tuple[int, str, int, str]], limit: int) -> None:
    given_members = mixed(rows)
    made = into_buckets(given_members, GroupingLimits(bucket=limit))
    assert sorted(name for bucket in made for name in names(bucket)) == sorted(member.name for member in given_members)
    for bucket in made:
        assert len({member.kind for member in bucket.members}) == 1
        opt_groups = [member.opt_group for member in bucket.members]
        assert opt_groups == sorted(opt_groups), "each optimizer group is one run"
        assert len(bucket.members) == 1 or sum(member.numel for member in bucket.members) <= limit
    assert len({bucket.name for bucket in made}) == len(made)


@given(sizes, st.integers(0, 5000), st.integers(0, 20000))
def test_every_parameter_is_in_one_block_or_persists(
    rows: list[tuple[int, str, int, str]], threshold: int, budget: int
) -> None:
    given_members = mixed(rows)
    made = into_blocks(given_members, GroupingLimits(persistence=threshold, model_persistence=budget))
    assert sorted(name for group in made for name in names(group)) == sorted(member.name for member in given_members)
    assert sum(member.numel for group in made if group.always for member in group.members) <= budget
    for group in made:
        assert len({member.kind for member in group.members}) == 1
        if group.always:
            assert all(member.numel < threshold for member in group.members)
        else:
            assert {member.block for member in group.members} == {group.block}


def test_blocks_come_as_backward_reaches_them_with_root_and_small_ones_last() -> None:
    rows = [("wte", 900, ""), ("h.0.w", 900, "h.0"), ("h.0.b", 5, "h.0"), ("h.1.w", 900, "h.1"), ("head", 900, "")]
    made = into_blocks(
        [ParamFacts(name, numel, FP32, 0, block) for name, numel, block in rows], GroupingLimits(persistence=100)
    )
    assert [(group.name, names(group), group.always) for group in made] == [
        ("h.1", ["h.1.w"], False),
        ("h.0", ["h.0.w"], False),
        ("root", ["wte", "head"], False),
        ("small.bucket0", ["h.0.b"], True),
    ]


BLOCKS = [f"h.{index}" for index in range(5)]


@pytest.mark.parametrize(
    ("smallest", "expected"),
    [
        (0, [["h.0"], ["h.1"], ["h.2"], ["h.3"], ["h.4"]]),
        (100, [["h.0"], ["h.1"], ["h.2"], ["h.3"], ["h.4"]]),
        (101, [["h.0", "h.1"], ["h.2", "h.3"], ["h.4"]]),
        (250, [["h.0", "h.1", "h.2"], ["h.3", "h.4"]]),
        (MIB, [BLOCKS]),
    ],
)
def test_small_neighbours_are_put_together(smallest: int, expected: list[list[str]]) -> None:
    given_members = [ParamFacts(f"{block}.w", 100, FP32, 0, block) for block in BLOCKS]
    merged = merge_small(BLOCKS, given_members, smallest)
    assert [list(blocks) for blocks in merged.values()] == expected
    assert all(
        name == (blocks[0] if len(blocks) == 1 else f"{blocks[0]}..{blocks[-1]}") for name, blocks in merged.items()
    )


def test_blocks_of_different_stacks_and_empty_ones_are_not_put_together() -> None:
    blocks = ["enc.0", "enc.1", "dec.0", "dec.1", "dec.2"]
    given_members = [ParamFacts(f"{block}.w", 10, FP32, 0, block) for block in blocks if block != "dec.1"]
    assert list(merge_small(blocks, given_members, MIB).values()) == [("enc.0", "enc.1"), ("dec.0", "dec.2")]


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 3)), min_size=1, max_size=10))
def test_runs_cover_the_buffer_without_gaps(rows: list[tuple[int, int]]) -> None:
    given_members = [ParamFacts(str(i), numel, FP32, group) for i, (numel, group) in enumerate(rows)]
    spec = GroupSpec("", tuple(sorted(given_members, key=lambda member: member.opt_group)), True)
    layout = lay_out([(member.name, (member.numel,)) for member in spec.members], 2)
    runs = spec.runs(layout)
    edges = sorted(runs.values())
    assert (edges[0][0], edges[-1][1]) == (0, layout.numel)
    assert all(before[1] == after[0] for before, after in pairwise(edges))
    for slot, member in zip(layout.slots, spec.members, strict=True):
        assert runs[member.opt_group][0] <= slot.offset < runs[member.opt_group][1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def opt_groups(module: nn.Module) -> dict[int, int]:
    return {id(param): 0 for param in module.parameters()}


def collected(module: nn.Module, numbers: dict[int, int], **options: Any) -> Any:
    living = LivingDtypes(module, dtype_policy(options.pop("precision", "fp32")))
    options = {"living": living, "with_frozen": True} | options
    return collect_params(module, numbers, ManualGroups(), frozenset(find_blocks(module)), **options)


def test_members_know_block_group_and_kind() -> None:
    module = Tied()
    numbers = opt_groups(module) | {id(module.layers[1].bias): 1}
    module.layers[2].weight.requires_grad_(False)
    members, params = collected(module, numbers, precision="bf16")
    found = {member.name: member for member in members}
    assert found["embed.weight"].block == "" and found["layers.1.bias"].block == "layers.1"
    assert found["layers.1.bias"].opt_group == 1 and found["layers.2.weight"].opt_group == -1
    assert found["layers.2.weight"].kind != found["layers.1.weight"].kind
    assert found["layers.1.weight"].kind.dtype is torch.bfloat16 and params["embed.weight"] is module.embed.weight


def test_frozen_parameters_and_strangers() -> None:
    """A frozen one, even of complex numbers, is sharded only where parameters are; one that trains
    but is in no group is left alone."""
    module = Tied()
    module.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64), requires_grad=False)
    numbers = opt_groups(module)
    del numbers[id(module.layers[0].bias)]
    module.layers[2].weight.requires_grad_(False)
    for with_frozen in (False, True):
        members, params = collected(module, numbers, with_frozen=with_frozen)
        assert "layers.0.bias" not in params
        assert all((name in params) is with_frozen for name in ("layers.2.weight", "phase"))
        assert len(members) == len(params)


@pytest.mark.parametrize("mark", ["tensor_model_parallel", "model_parallel"])
def test_marks_of_megatron_and_deepspeed(mark: str) -> None:
    param = nn.Parameter(torch.zeros(2))
    assert not is_model_parallel(param)
    setattr(param, mark, True)
    assert is_model_parallel(param)
    setattr(param, mark, False)
    assert not is_model_parallel(param)


def test_no_group_holds_parts_and_copies() -> None:
    module = nn.ParameterDict({name: torch.zeros(2) for name in "abcd"})
    for name in "bd":
        module[name].model_parallel = True
    members, _ = collected(module, opt_groups(module), with_parts=True)
    groupings = into_buckets(members, GroupingLimits())
    assert sorted("".join(m.name for m in g.members) for g in groupings) == ["ac", "bd"]


def test_groups_and_gradient_buffers_are_found_by_manual_group() -> None:
    names = ("a", "tied", "a")
    groups = [make_group(parameters([(4, 4)], seed=seed), block=name) for seed, name in enumerate(names)]
    copies: Any = SimpleNamespace(index=1, size=2)
    manual_groups = ManualGroups(
        [
            ManualGroup("a", frozenset(map(id, (*groups[0].params, *groups[2].params)))),
            ManualGroup("tied", frozenset(map(id, groups[1].params)), copies, owner=0, module="embed"),
        ]
    )
    grad_buffers = [make_grad_buffer(group)[0] for group in groups]
    assert manual_groups.grad_buffers(grad_buffers) == {
        "a": [grad_buffers[0], grad_buffers[2]],
        "tied": [grad_buffers[1]],
    }
    assert [manual_groups.owns(group) for group in groups] == [True, False, True]
    assert manual_groups.is_copy("embed.weight") and not manual_groups.is_copy("embedding.weight")
