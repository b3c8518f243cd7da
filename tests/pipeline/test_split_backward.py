"""A backward in two halves gives what one backward gives, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zero_trial.pipeline.channel import Payload
from zero_trial.pipeline.stage import SplitBackward, StageBoundary, split_graph


class Mixed(nn.Module):
    """A shared weight, a branch that does not touch the input, an unused and a frozen weight, attention, norms."""

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
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_wait_for_the_second_half():
    module = chain()
    gate, anchor, output = gated(module, torch.randn(2, 6))
    halves = SplitBackward([output], gate.node, anchor)
    halves.inputs([torch.ones_like(output)])
    assert gradients(module) == {}
    halves.weights()
    assert len(gradients(module)) == 5


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


def test_micro_batches_may_overtake_each_other():
    """I0 I1 W0 W1 is what zero-bubble schedules do: two graphs of the same weights live at once."""
    torch.manual_seed(1)
    module, inputs = chain(), torch.randn(2, 3, 6)
    for x in inputs:
        module(x).square().sum().backward()
    expected = gradients(module)
    module.zero_grad()
    halves = []
    for x in inputs:
        gate, anchor, output = gated(module, x)
        halves.append(SplitBackward([output.square().sum()], gate.node, anchor))
        halves[-1].inputs([torch.tensor(1.0)])
    for half in halves:
        half.weights()
    found = gradients(module)
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)  # another memory alignment


def test_the_anatomy_of_a_layer():
    module = nn.Linear(6, 2)
    gate, _, output = gated(module, torch.randn(1, 6))
    found = split_graph([F.relu(output)], gate.node)
    assert [{tuple(weight.shape) for weight in place.weights} for place in found.places] == [{(2, 6), (2,)}]
    assert found.shared == []
