"""How long each layer takes, by a clock of our own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from zero_trial.errors import ConfigError
from zero_trial.pipeline.layers import ROUNDS, LayerSpec, layer_times


class Clock:
    """Says what was worked since the start; a layer adds to it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(nn.Module):
    def __init__(self, clock: Clock, costs: Iterator[float]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.clock, self.costs = clock, costs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += next(self.costs)
        return self.linear(x)


def test_the_best_of_several_rounds_counts():
    clock = Clock()
    first, second = iter([5.0, 2.0, 3.0]), iter([7.0, 8.0, 9.0])
    layers: list[Any] = [Slow(clock, first), torch.relu, Slow(clock, second)]
    assert layer_times(layers, torch.ones(2, 3), None, clock) == [2.0, 0.0, 7.0]
    assert ROUNDS == 3


def test_the_random_state_stays():
    torch.manual_seed(4)
    expected = torch.rand(1)
    torch.manual_seed(4)
    layer_times([LayerSpec(nn.Linear, 3, 3), nn.Dropout()], lambda: torch.ones(2, 3), None)
    assert torch.equal(torch.rand(1), expected)


def test_tokens_and_layers_in_place_are_welcome():
    layers = [LayerSpec(nn.Embedding, 5, 3), nn.ReLU(inplace=True), LayerSpec(nn.Linear, 3, 2)]
    assert len(layer_times(layers, torch.tensor([[1, 4]]), None)) == 3


def test_an_example_is_needed():
    with pytest.raises(ConfigError, match=r"PipelineModule\(profile_input\): a partition by profile needs an example"):
        layer_times([nn.Linear(1, 1)], None, None)
