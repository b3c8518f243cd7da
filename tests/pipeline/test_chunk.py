"""Chunks: the parts of a model compute what the whole does."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import nn

from zero_trial.pipeline.layers import Chunk, LayerSeeds, LayerSpec, TiedLayerSpec


def head(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    return value @ module.weight.T


LAYERS = [
    TiedLayerSpec("embed", nn.Embedding, 11, 4),
    LayerSpec(nn.Linear, 4, 6),
    torch.relu,
    LayerSpec(nn.Linear, 6, 4),
    TiedLayerSpec("embed", nn.Embedding, 11, 4, forward_fn=head),
]


class NeverBuilt(nn.Module):
    def __init__(self) -> None:
        raise AssertionError("built")


def test_only_its_own_layers_are_built():
    layers = [LayerSpec(NeverBuilt), LayerSpec(nn.Linear, 2, 3), nn.ReLU(), LayerSpec(NeverBuilt)]
    chunk = Chunk(layers, 1, 3)
    assert [name for name, _ in chunk.named_parameters()] == ["1.weight", "1.bias"]
    assert chunk(torch.ones(5, 2)).shape == (5, 3)


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


def test_names_do_not_depend_on_the_cut():
    names = {name for a, b in ((0, 2), (2, 5)) for name, _ in Chunk(LAYERS, a, b).named_parameters()}
    assert names == {name for name, _ in Chunk(LAYERS, 0, 5).named_parameters()}
    assert names == {"tied_modules.embed.weight", "1.weight", "1.bias", "3.weight", "3.bias"}


def test_seeds_of_one_s_own():
    seen: list[int] = []
    Chunk(LAYERS, 1, 4, seeds=LayerSeeds(100, seen.append))
    assert seen == [101, 102, 103]
    random.seed(0)
    first = Chunk(LAYERS, 1, 2, seeds=LayerSeeds(7))
    second = Chunk(LAYERS, 1, 2, seeds=LayerSeeds(8))
    assert not torch.equal(first.get_parameter("1.weight"), second.get_parameter("1.weight"))
