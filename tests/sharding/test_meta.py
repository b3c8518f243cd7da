"""What a model on the meta device consists of before and after it gets values."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from tests.sharding.parts import mesh_for
from zero_trial.errors import ConfigError
from zero_trial.sharding.meta import initialize_meta, place_absent

CPU = torch.device("cpu")


def test_parameters_stay_the_same_objects_with_their_marks() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    weight = model.weight
    weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    model.bias.requires_grad_(False)
    place_absent(model, CPU)
    assert model.weight is weight and weight.tensor_model_parallel  # type: ignore[attr-defined]
    assert weight.device == CPU and weight.untyped_storage().nbytes() == 4 and bool(weight.isnan().all())
    assert isinstance(weight, nn.Parameter) and weight.requires_grad and not model.bias.requires_grad


def test_a_weak_reference_is_an_error_in_words() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    held = weakref.ref(model.weight)
    with pytest.raises(ConfigError) as error:
        place_absent(model, CPU)
    assert held() is not None and error.value.where == "initialize(model)"


class Inner(nn.Module):
    """A model in transformers' way: each part initializes what no inner one has, and ties at the
    end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.done: set[nn.Module] = set()
        self.initialize()

    def initialize(self) -> None:
        for module in [*self.modules()][::-1]:
            self._initialize_weights(module)

    def _initialize_weights(self, module: nn.Module) -> None:
        if not hasattr(module, "initialized"):
            self._init_weights(module)
            module.initialized = True  # type: ignore[assignment]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)


class Outer(Inner):
    def __init__(self, ties: bool = True) -> None:
        nn.Module.__init__(self)
        self.inner = Inner()
        self.head = nn.Linear(4, 5, bias=False)
        self.initialize()
        if ties:
            self.head.weight = self.inner.embed.weight


@pytest.mark.parametrize("ties", [False, True])
def test_parts_are_initialized_in_the_order_of_their_constructors(ties: bool) -> None:
    torch.manual_seed(2)
    plain, after = Outer(ties), torch.rand(1)
    with torch.device("meta"):
        model = Outer(ties)
    torch.manual_seed(2)
    place_absent(model, CPU)
    initialize_meta(model, mesh_for(3).data)
    assert torch.equal(torch.rand(1), after)
    for (name, value), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(value, expected), name
    assert (model.head.weight is model.inner.embed.weight) is ties
