"""Layers: specs that are built late and counted without memory, chunks that compute what the whole
does, and the time of each layer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from zero_trial.errors import ConfigError
from zero_trial.pipeline.layers import (
    ROUNDS,
    Chunk,
    LayerFacts,
    LayerSeeds,
    LayerSpec,
    TiedLayerSpec,
    layer_facts,
    layer_times,
    partition,
    tied_chunks,
)


def square(value: torch.Tensor) -> torch.Tensor:
    return value * value


def test_a_spec_is_built_when_asked():
    spec = LayerSpec(nn.Linear, 3, 2, bias=False)
    assert repr(spec) == "Linear(3, 2, bias=False)"
    first, second = spec.build(), spec.build()
    assert isinstance(first, nn.Linear) and first.bias is None and first is not second


@pytest.mark.parametrize("other", [square, nn.Linear(1, 1), int])
def test_a_spec_is_for_a_class_of_modules(other: object):
    with pytest.raises(ConfigError, match=r"expected a subclass of torch.nn.Module"):
        LayerSpec(other)  # type: ignore[arg-type]


def test_a_tied_spec_has_deepspeed_s_arguments():
    spec = TiedLayerSpec("embed", nn.Embedding, 10, 4, forward_fn=lambda module, x: x @ module.weight.T)
    assert (spec.key, spec.tied_weight_attr) == ("embed", ["weight"])
    assert TiedLayerSpec("k", nn.Linear, 1, 1, tied_weight_attr="bias").tied_weight_attr == ["bias"]
    assert TiedLayerSpec("k", nn.Linear, 1, 1, tied_weight_attr=["weight", "bias"]).tied_weight_attr == [
        "weight",
        "bias",
    ]


def test_counting_draws_nothing_and_allocates_nothing():
    before = torch.get_rng_state()
    assert layer_facts(LayerSpec(nn.Linear, 100_000, 100_000)) == LayerFacts("Linear", 100_000 * 100_001)
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_counted():
    frozen = nn.Linear(3, 2)
    frozen.weight.requires_grad_(False)
    assert layer_facts(frozen) == LayerFacts("Linear", 2) and layer_facts(square) == LayerFacts("square", 0)
    assert layer_facts(TiedLayerSpec("embed", nn.Embedding, 10, 4)) == LayerFacts("Embedding", 40)
    with pytest.raises(ConfigError, match="this is not a layer"):
        layer_facts(3)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2) * torch.ones(2).mean().item())


def test_a_constructor_that_reads_values():
    with pytest.raises(
        ConfigError, match=r"Reader\(\): the layer cannot be built on the meta device.*: got RuntimeError: "
    ):
        layer_facts(LayerSpec(Reader))
    assert layer_facts(Reader()) == LayerFacts("Reader", 2)


def test_ties_of_a_partition():
    embed = TiedLayerSpec("embed", nn.Embedding, 10, 4)
    layers = [
        embed,
        TiedLayerSpec("norm", nn.LayerNorm, 4),
        LayerSpec(nn.Linear, 4, 4),
        square,
        TiedLayerSpec("norm", nn.LayerNorm, 4),
        embed,
    ]
    bounds = partition("uniform", [layer_facts(layer) for layer in layers], 3)
    assert bounds == [0, 2, 4, 6] and tied_chunks(layers, bounds) == {"embed": (0, 2), "norm": (0, 2)}
    assert tied_chunks(layers, [0, 6]) == {"embed": (0,), "norm": (0,)}


def head(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    return value @ module.weight.T


LAYERS = [
    TiedLayerSpec("embed", nn.Embedding, 11, 4),
    LayerSpec(nn.Linear, 4, 6),
    torch.relu,
    LayerSpec(nn.Linear, 6, 4),
    TiedLayerSpec("embed", nn.Embedding, 11, 4, forward_fn=head),
]


@pytest.mark.parametrize("bounds", [[0, 5], [0, 2, 5], [0, 1, 3, 4, 5]])
def test_the_parts_are_the_whole(bounds: list[int]):
    """With seeds per layer and one shared embedding, every cut gives the same numbers."""
    whole = Chunk(LAYERS, 0, 5, seeds=LayerSeeds())
    tied = nn.ModuleDict()
    chunks = [Chunk(LAYERS, a, b, tied=tied, seeds=LayerSeeds()) for a, b in pairwise(bounds)]
    value = torch.tensor([[1, 2, 10]])
    expected = whole(value)
    for chunk in chunks:
        value = chunk(value)
    assert torch.equal(value, expected)
    value.sum().backward()
    expected.sum().backward()
    assert torch.equal(tied["embed"].weight.grad, whole.tied_modules["embed"].weight.grad)


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
    assert layer_times(layers, torch.ones(2, 3), None, clock) == [2.0, 0.0, 7.0] and ROUNDS == 3


def test_the_random_state_stays():
    torch.manual_seed(4)
    expected = torch.rand(1)
    torch.manual_seed(4)
    layer_times([LayerSpec(nn.Linear, 3, 3), nn.Dropout()], lambda: torch.ones(2, 3), None)
    assert torch.equal(torch.rand(1), expected)


def test_an_example_is_needed():
    with pytest.raises(ConfigError, match=r"PipelineModule\(profile_input\): a partition by profile needs an example"):
        layer_times([nn.Linear(1, 1)], None, None)
