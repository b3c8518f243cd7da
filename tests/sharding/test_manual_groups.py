"""Manual groups: gathered, freed and reduced by a schedule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.sharding.parts import make_grad_buffer, make_group, parameters
from zero_trial.sharding.grouping import ManualGroup, ManualGroups


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
