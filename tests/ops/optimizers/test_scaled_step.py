"""A multiplied step equals a step on multiplied gradients, for every way of doing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from zero_trial.ops.optimizers.fused import FusedLion
from zero_trial.ops.optimizers.lamb import FusedLamb
from zero_trial.ops.optimizers.shard_step import scaled_step

Build = Callable[[list[Any]], torch.optim.Optimizer]

CASES: dict[str, Build] = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "Lion": lambda p: FusedLion(p, lr=0.1),
    "Lamb": lambda p: FusedLamb(p, lr=0.1),
}


@pytest.mark.parametrize("multiplier", [0.5, 0.0, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_equals_a_step_on_multiplied_gradients(name: str, multiplier: float) -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.randn(3))]
    plain = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    ours_optimizer, plain_optimizer = CASES[name](ours), CASES[name](plain)
    for _ in range(3):
        for a, b in zip(ours, plain, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad * multiplier
        scaled_step(ours_optimizer, multiplier)
        plain_optimizer.step()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.detach(), b.detach())


@pytest.mark.parametrize("name", ["fused AdamW", "Lion"])
def test_the_multiplier_lasts_one_step(name: str) -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = CASES[name]([p])
    p.grad = torch.ones(2)
    scaled_step(optimizer, 0.25)
    assert not hasattr(optimizer, "grad_scale")
    before = p.detach().clone()
    p.grad.zero_()
    p.grad.add_(1)
    optimizer.step()
    other = torch.nn.Parameter(torch.ones(2))
    plain = CASES[name]([other])
    for gradient in (0.25, 1.0):
        other.grad = torch.full((2,), gradient)
        plain.step()
    assert torch.equal(p, other) and not torch.equal(p, before)


class Doubling(torch.optim.AdamW):
    """A user's subclass, whose step may do anything with the gradients."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(2)
        return super().step(closure)


def test_subclasses_get_really_multiplied_gradients() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = Doubling([p], fused=True)
    p.grad = torch.ones(2)
    scaled_step(optimizer, 0.25)
    assert torch.equal(p.grad, torch.full((2,), 0.5))
