"""Tests for zero_trial/sharding/model.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.sharding.parts import make_grad_buffer, make_group, parameters
from zero_trial.sharding.grouping import ManualGroup
from zero_trial.sharding.model import ManualGroups


def test_groups_and_gradient_buffers_are_found_by_domain() -> None:
    groups = [make_group(parameters([(4, 4)], seed=seed)) for seed in range(3)]
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


def test_without_domains_everything_is_owned() -> None:
    group = make_group(parameters([(4,)]))
    none = ManualGroups()
    assert none.of(group) is None and none.owns(group) and not none.is_copy("a.b")
    assert none.grad_buffers([make_grad_buffer(group)[0]]) == {}


def test_a_parameter_of_copies_takes_the_owners_values() -> None:
    told: list[tuple[str, int]] = []
    copies: Any = SimpleNamespace(index=1, size=2, broadcast=lambda values, label, owner: told.append((label, owner)))
    mine, other = parameters([(3,), (3,)])
    manual_groups = ManualGroups([ManualGroup("tied", frozenset([id(mine)]), copies, owner=0)])
    manual_groups.agree(mine, mine.data, "mine")
    manual_groups.agree(other, other.data, "other")
    assert told == [("mine", 0)]
