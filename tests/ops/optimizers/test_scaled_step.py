"""A multiplied step equals a step on multiplied gradients, for every way of doing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from zero_trial.ops.optimizers import (
    DeviceScalars,
    FusedAdagrad,
    FusedAdam,
    FusedLamb,
    FusedLion,
    FusedSGD,
    Lion,
    ShardOptimizer,
    ShardUpdate,
    device_scaled_step,
    scaled_step,
    supports_device_scalars,
    undo_step,
)

Build = Callable[[list[Any]], torch.optim.Optimizer]

CASES: dict[str, Build] = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "Lion": lambda p: Lion(p, lr=0.1),
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


def test_the_multiplier_does_not_survive_a_failing_step() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = CASES["fused AdamW"]([p])
    p.grad = torch.ones(2)
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        scaled_step(optimizer, 0.25)
    assert not hasattr(optimizer, "grad_scale")


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


# Scalars that are read from the device.

GATED: dict[str, Build] = {
    "FusedAdam": lambda p: FusedAdam(p, lr=0.1, weight_decay=0.1),
    "FusedAdam, L2": lambda p: FusedAdam(p, lr=0.1, weight_decay=0.1, adam_w_mode=False),
    "FusedLion": lambda p: FusedLion(p, lr=0.1),
    "FusedSGD": lambda p: FusedSGD(p, lr=0.1, dampening=0.1),
    "FusedAdagrad": lambda p: FusedAdagrad(p, lr=0.1, lr_decay=0.1),
    "FusedLamb": lambda p: FusedLamb(p, lr=0.1, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}
FACTOR = 0.3


def host_step(optimizer: torch.optim.Optimizer, params: list[Any], gradients: list[torch.Tensor]) -> None:
    if isinstance(optimizer, ShardOptimizer):
        work = [ShardUpdate(p, g, None, 0) for p, g in zip(params, gradients, strict=True)]
        optimizer.step(updates=work, multiplier=FACTOR)
        return
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.clone()
    scaled_step(optimizer, FACTOR)


def device_step(optimizer: torch.optim.Optimizer, params: list[Any], gradients: list[torch.Tensor], bad: bool) -> None:
    """The same numbers in tensors; a bad step is tried and taken back."""
    found = torch.tensor(float(bad))
    known = len(optimizer.state)
    if isinstance(optimizer, ShardOptimizer):
        work = [ShardUpdate(p, g, None, 0) for p, g in zip(params, gradients, strict=True)]
        optimizer.step(updates=work, scalars=DeviceScalars(torch.tensor([FACTOR]), found))
    else:
        for p, g in zip(params, gradients, strict=True):
            p.grad = g.clone()
        device_scaled_step(optimizer, torch.tensor(1 / FACTOR), found)
    if bad:
        undo_step(optimizer, known)


@pytest.mark.parametrize("name", GATED)
def test_the_device_gives_the_factor_and_may_skip(name: str) -> None:
    """Steps 0, 2 and 3 are bad: afterwards nothing shows that they were tried, neither weights nor
    state nor counts."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.randn(3))]
    plain = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    gated, optimizer = GATED[name](ours), GATED[name](plain)
    assert supports_device_scalars(gated)
    for step in range(6):
        gradients = [torch.randn_like(p) for p in plain]
        bad = step in (0, 2, 3)
        if not bad:
            host_step(optimizer, plain, gradients)
        spoilt = [g / (0.0 if bad else 1.0) for g in gradients]
        device_step(gated, ours, spoilt, bad)
        for a, b in zip(ours, plain, strict=True):
            assert torch.equal(a, b)
            mine, theirs = gated.state.get(a, {}), optimizer.state.get(b, {})
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[key], theirs[key]) for key in mine), (step, mine, theirs)


def test_which_optimizers_need_the_host():
    piece = [torch.nn.Parameter(torch.ones(2))]
    for build in (CASES["foreach AdamW"], CASES["RMSprop"], CASES["Lion"]):
        assert not supports_device_scalars(build(piece))


def test_torchs_optimizer_keeps_no_scalar_of_a_step():
    piece = torch.nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([piece], lr=0.1, fused=True)
    piece.grad = torch.ones(2)
    device_scaled_step(sgd, torch.ones(()), torch.zeros(()))
    assert not hasattr(sgd, "grad_scale") and not hasattr(sgd, "found_inf")
