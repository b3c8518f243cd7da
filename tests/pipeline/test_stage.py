"""Forwards and backwards of one rank's chunks, whole and in halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zero_trial.pipeline.channel import Payload
from zero_trial.pipeline.stage import Stage


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


def whole(x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    two, leaf = Two(), x.clone().requires_grad_()
    two.run(1, 0, leaf).backward(gradient)
    return leaf.grad, two.gradients()


X, GRADIENT = torch.arange(8.0).view(2, 4) / 8, torch.ones(2, 4)


def test_a_backward_gives_the_gradient_of_the_input():
    two = Two()
    two.forward(1, 0, X.clone(), True)
    (found,) = two.stage.backward(1, 0, [GRADIENT])
    assert torch.equal(found, whole(X, GRADIENT)[0])


@pytest.mark.parametrize("splits", [True, False])
def test_the_halves_are_the_whole(splits: bool):
    """A chunk that cannot be split does all of it in the first half."""
    two = Two(splits)
    two.forward(1, 0, X.clone(), True)
    (found,) = two.stage.backward_inputs(1, 0, [GRADIENT])
    expected, weights = whole(X, GRADIENT)
    assert torch.equal(found, expected)
    assert bool(two.gradients()) != splits
    two.stage.backward_weights(1, 0)
    assert all(torch.equal(a, b) for a, b in zip(two.gradients(), weights, strict=True))


def test_a_first_chunk_has_nothing_to_do_before_its_weights():
    two = Two()
    two.forward(0, 0, X.clone(), False)
    assert two.stage.backward_inputs(0, 0, [GRADIENT]) == []
    assert two.gradients() == []
    two.stage.backward_weights(0, 0)
    assert len(two.gradients()) == 2


def test_an_output_without_a_gradient_is_left_out():
    two = Two()
    two.forward(1, 0, X.clone(), True)
    assert two.stage.backward(1, 0, [None]) == [None]
    assert two.gradients() == []


def test_the_peak_counts_what_lives_at_once():
    two = Two()
    for micro_batch in range(3):
        two.forward(0, micro_batch, X.clone(), False)
    two.stage.backward(0, 0, [GRADIENT])
    two.forward(1, 0, X.clone(), True)
    assert two.stage.peak == 3
    two.stage.evaluate(0, 9, Payload(X))
    assert two.stage.peak == 3


def test_evaluation_keeps_no_graph():
    assert not Two().stage.evaluate(0, 0, Payload(X)).requires_grad
