"""All domains of one model: which of them a unit, a landing or a name belongs to, and what is a copy of another pipeline stage's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zero_trial.zero.domain import Domain
from zero_trial.zero.landing import Landing
from zero_trial.zero.unit import Unit


class Domains:
    """Empty for a model that gathers and reduces by itself; else every parameter is in one of them."""

    def __init__(self, domains: Sequence[Domain] = ()) -> None:
        self.all = tuple(domains)
        self.by_name = {domain.name: domain for domain in domains}
        self._holders: dict[int, list[Domain]] = {}
        for domain in domains:
            for param in domain.params:
                self._holders.setdefault(param, []).append(domain)

    def of(self, unit: Unit) -> Domain | None:
        """No unit spans two."""
        found = self._holders.get(id(unit.params[0]), ()) if unit.params else ()
        return found[0] if found else None

    def landings(self, landings: Sequence[Landing]) -> dict[str, list[Landing]]:
        """These by domain, in their order."""
        found: dict[str, list[Landing]] = {name: [] for name in self.by_name}
        for landing in landings:
            if (domain := self.of(landing.unit)) is not None:
                found[domain.name].append(landing)
        return found

    def owns(self, unit: Unit) -> bool:
        """Whether this rank's pipeline stage is the one that counts the unit's norm and saves it: all units but copies."""
        domain = self.of(unit)
        return domain is None or domain.owned

    def is_copy(self, name: str) -> bool:
        """Whether a parameter or buffer is a copy of another pipeline stage's, which saves it."""
        return any(name.startswith(f"{domain.module}.") for domain in self.all if not domain.owned)

    def agree(self, param: nn.Parameter, values: torch.Tensor, label: str) -> None:
        """``values`` of ``param`` become its owner's. Collective over the copies."""
        for domain in self._holders.get(id(param), ()):
            domain.agree(values, label)
