"""Layer specs: built late, counted without memory."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from zero_trial.errors import ConfigError
from zero_trial.pipeline.layers import LayerSpec, TiedLayerSpec, layer_facts, tied_chunks
from zero_trial.pipeline.partition import LayerFacts, partition


def square(value: torch.Tensor) -> torch.Tensor:
    return value * value


def test_a_spec_is_built_when_asked():
    spec = LayerSpec(nn.Linear, 3, 2, bias=False)
    assert repr(spec) == "Linear(3, 2, bias=False)"
    first, second = spec.build(), spec.build()
    assert isinstance(first, nn.Linear) and first.bias is None and first is not second


def test_building_can_be_logged(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        LayerSpec(nn.ReLU).build(log=True)
    assert caplog.messages == ["building ReLU()"]


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
    assert layer_facts(frozen) == LayerFacts("Linear", 2)
    assert layer_facts(square) == LayerFacts("square", 0)
    assert layer_facts(TiedLayerSpec("embed", nn.Embedding, 10, 4)) == LayerFacts("Embedding", 40)
    with pytest.raises(ConfigError, match="this is no layer"):
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
    assert bounds == [0, 2, 4, 6]
    assert tied_chunks(layers, bounds) == {"embed": (0, 2), "norm": (0, 2)}
    assert tied_chunks(layers, [0, 6]) == {"embed": (0,), "norm": (0,)}
