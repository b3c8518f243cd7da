"""Tests for zero_trial/sharding/model.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.sharding.parts import make_landing, make_unit, parameters
from zero_trial.sharding.grouping import ManualGroup
from zero_trial.sharding.model import ManualGroups


def test_units_and_landings_are_found_by_domain() -> None:
    units = [make_unit(parameters([(4, 4)], seed=seed)) for seed in range(3)]
    copies: Any = SimpleNamespace(index=1, size=2)
    domains = ManualGroups(
        [
            ManualGroup("a", frozenset(map(id, (*units[0].params, *units[2].params)))),
            ManualGroup("tied", frozenset(map(id, units[1].params)), copies, owner=0, module="embed"),
        ]
    )
    landings = [make_landing(unit)[0] for unit in units]
    assert domains.landings(landings) == {"a": [landings[0], landings[2]], "tied": [landings[1]]}
    assert [domains.owns(unit) for unit in units] == [True, False, True]
    assert domains.is_copy("embed.weight") and not domains.is_copy("embedding.weight")


def test_without_domains_everything_is_owned() -> None:
    unit = make_unit(parameters([(4,)]))
    none = ManualGroups()
    assert none.of(unit) is None and none.owns(unit) and not none.is_copy("a.b")
    assert none.landings([make_landing(unit)[0]]) == {}


def test_a_parameter_of_copies_takes_the_owners_values() -> None:
    told: list[tuple[str, int]] = []
    copies: Any = SimpleNamespace(index=1, size=2, broadcast=lambda values, label, owner: told.append((label, owner)))
    mine, other = parameters([(3,), (3,)])
    domains = ManualGroups([ManualGroup("tied", frozenset([id(mine)]), copies, owner=0)])
    domains.agree(mine, mine.data, "mine")
    domains.agree(other, other.data, "other")
    assert told == [("mine", 0)]
