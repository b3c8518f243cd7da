"""Tests for zero_trial/sharding/unshard.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zero_trial.sharding.unshard import SideOutputs


def test_side_outputs_are_tensors_with_a_history_left_on_modules() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    aside = SideOutputs(net)
    assert aside.tensors() == []
    net[0].aux = net[0].weight.sum()
    net[0].plain = torch.ones(1)
    assert [id(t) for t in aside.tensors()] == [id(net[0].aux)]


def test_an_attribute_that_was_there_before_may_become_one() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].aux = None
    aside = SideOutputs(net)
    net[0].aux = net[0].weight.sum()
    assert len(aside.tensors()) == 1


class Routed(nn.Module):
    """A module of a user's, with an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
        self.balance = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        self.balance = out.square().mean()  # type: ignore[assignment]
        return out


def test_a_users_module_is_always_looked_at_and_torchs_are_not() -> None:
    net = Routed()
    aside = SideOutputs(net)
    assert aside.tensors() == []
    net(torch.ones(1, 2))
    assert [id(t) for t in aside.tensors()] == [id(net.balance)]
    looked_at: Any = aside._watched
    assert looked_at == [vars(net)], "four linear layers and their container cost a comparison each"
