"""The chunks of one rank: where received tensors enter a graph, forwards, and backwards whole and
in two halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zero_trial.pipeline.channel import Payload
from zero_trial.pipeline.stage import SplitBackward, Stage, StageBoundary


def anchor() -> torch.Tensor:
    return torch.zeros((), requires_grad=True)


def test_gradients_come_out_where_tensors_went_in():
    """A tensor that is not used has none."""
    first, second, index, unused = torch.ones(3), torch.full((3,), 2.0), torch.tensor([0, 2]), torch.ones(2)
    value = {"a": first, "i": index, "b": [second], "unused": unused}
    gate = StageBoundary(Payload(value, [first, index, second, unused], [True, False, True, True]), anchor())
    value = gate.open()
    assert value["i"] is index
    (value["a"] * value["b"][0] * 5).sum().backward()
    a, b, none = gate.take()
    assert none is None and torch.equal(a, torch.full((3,), 10.0)) and torch.equal(b, torch.full((3,), 5.0))


def test_a_layer_may_work_in_place_on_it():
    received = torch.tensor([-1.0, 2.0])
    gate = StageBoundary(Payload(received, [received], [True]), anchor())
    torch.relu_(gate.open()).sum().backward()
    assert torch.equal(gate.take()[0], torch.tensor([0.0, 1.0]))


def test_nothing_is_copied():
    received = torch.ones(4)
    gate = StageBoundary(Payload(received, [received], [True]), anchor())
    inside = gate.open()
    assert inside.data_ptr() == received.data_ptr() and not inside.is_leaf and not inside._is_view()


class Two:
    """A stage of two chunks of one layer each."""

    def __init__(self, splits: bool = True) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.stage = Stage(self.run, lambda chunk: splits)

    def run(self, chunk: int, micro_batch: int, value: Any) -> Any:
        return torch.tanh(self.layers[chunk](value))

    def forward(self, chunk: int, micro_batch: int, x: torch.Tensor, wanted: bool) -> torch.Tensor:
        output = self.stage.forward(chunk, micro_batch, Payload(x, [x], [wanted]))
        self.stage.keep(chunk, micro_batch, [output])
        return output

    def gradients(self) -> list[torch.Tensor]:
        return [param.grad.clone() for param in self.layers.parameters() if param.grad is not None]


X, GRADIENT = torch.arange(8.0).view(2, 4) / 8, torch.ones(2, 4)


def test_a_first_chunk_has_nothing_to_do_before_its_weights():
    two = Two()
    two.forward(0, 0, X.clone(), False)
    assert two.stage.backward_inputs(0, 0, [GRADIENT]) == [] and two.gradients() == []
    two.stage.backward_weights(0, 0)
    assert len(two.gradients()) == 2


def test_an_output_without_a_gradient_is_left_out():
    two = Two()
    two.forward(1, 0, X.clone(), True)
    assert two.stage.backward(1, 0, [None]) == [None] and two.gradients() == []


class Mixed(nn.Module):
    """A shared weight, a branch that does not touch the input, an unused and a frozen weight,
    attention, norms."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.offset = nn.Parameter(torch.randn(6))
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(x) + self.offset.exp() * 2
        return self.norm(self.frozen(self.encoder(self.shared(torch.tanh(x)))))


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.ReLU(inplace=True), nn.Linear(6, 6, bias=False)
    )


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 5, 3), nn.BatchNorm1d(5), nn.ReLU(), nn.Conv1d(5, 3, 2))


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad.clone() for name, param in module.named_parameters() if param.grad is not None}


def gated(module: nn.Module, x: torch.Tensor) -> tuple[StageBoundary, torch.Tensor, torch.Tensor]:
    anchor = torch.zeros((), requires_grad=True)
    received = x.clone()
    gate = StageBoundary(Payload(received, [received], [True]), anchor)
    return gate, anchor, module(gate.open())


@pytest.mark.parametrize("build", [chain, Mixed, convolution])
def test_both_halves_are_the_whole(build: Callable[[], nn.Module]):
    torch.manual_seed(0)
    module, x = build(), torch.randn(3, 4, 6)
    leaf = x.clone().requires_grad_()
    output = module(leaf * 1)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    expected = gradients(module)
    module.zero_grad()
    gate, anchor, output = gated(module, x)
    halves = SplitBackward([output], gate.node, anchor)
    halves.inputs([gradient])
    assert torch.equal(gate.take()[0], leaf.grad)
    halves.weights()
    found = gradients(module)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_hooks_of_landed_gradients_see_the_second_half():
    module, seen = chain(), []
    for name, param in module.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    gate, anchor, output = gated(module, torch.randn(2, 6))
    halves = SplitBackward([output], gate.node, anchor)
    halves.inputs([torch.ones_like(output)])
    assert seen == []
    halves.weights()
    assert sorted(seen) == sorted(name for name, _ in module.named_parameters())


def test_a_shared_weight_is_done_with_the_inputs():
    module = Mixed()
    gate, anchor, output = gated(module, torch.randn(3, 4, 6))
    halves = SplitBackward([output], gate.node, anchor)
    halves.inputs([torch.ones_like(output)])
    assert set(gradients(module)) == {"shared.weight", "shared.bias"}
