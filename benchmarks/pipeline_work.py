"""What a pipeline is measured with: layers that take a stated time, so that the schedule is measured and not the processors.

Each layer waits (``time.sleep``) in its forward, for its input's gradient and for its weight's gradient: many ranks can wait at once on few
cores, as many devices would compute at once. The arithmetic around it is next to nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

WIDTH, ROWS = 64, 4


@dataclass(frozen=True)
class Times:
    """Seconds of one layer for one micro-batch."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def total(self) -> float:
        return self.forward + self.input_gradient + self.weight_gradient


class _OnTheWay(torch.autograd.Function):
    """Passes a value on, with a wait in either direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        if forward:
            time.sleep(forward)
        ctx.backward_seconds = backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return grad, None, None


class Layer(nn.Module):
    """One layer that waits; its first weights are alike everywhere."""

    def __init__(self, times: Times) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.9, 1.1, WIDTH))
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        # Two nodes, so that a backward in two halves can have one without the other; the product between them is torch's own.
        arrived = _OnTheWay.apply(x, self.times.forward, self.times.input_gradient)
        return arrived * _OnTheWay.apply(self.weight, 0.0, self.times.weight_gradient)


def layers(stages: int, per_stage: int, times: Times) -> list[Layer]:
    """``stages * per_stage`` layers; those of one stage take ``times`` together."""
    each = Times(*(value / per_stage for value in (times.forward, times.input_gradient, times.weight_gradient)))
    return [Layer(each) for _ in range(stages * per_stage)]


def batches(micro_batches: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of a step, the same everywhere."""
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(ROWS, WIDTH, generator=generator), torch.zeros(ROWS, WIDTH)) for _ in range(micro_batches)]


loss_of = mse_loss
