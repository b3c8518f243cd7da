"""FusedAdam and FusedLion against torch and the reference; state that torch's own optimizers can take over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zero_trial.errors import ConfigError
from zero_trial.ops import reference
from zero_trial.ops.optimizers import CPUAdam, FusedAdam, FusedLion, Lion, scaled_step

TORCH: dict[bool, Any] = {True: torch.optim.AdamW, False: torch.optim.Adam}


def params(seed: int = 0) -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=g)) for shape in ((5, 3), (70,), ())]


def give_gradients(seed: int, *lists: list[torch.nn.Parameter]) -> None:
    g = torch.Generator().manual_seed(seed)
    for same in zip(*lists, strict=True):
        gradient = torch.randn(same[0].shape, generator=g)
        for p in same:
            p.grad = gradient.clone()


def largest(a: list[torch.nn.Parameter], b: list[torch.nn.Parameter]) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("decoupled", [True, False])
def test_twenty_steps_as_torch(decoupled: bool) -> None:
    """Tolerance: 20 steps of size lr = 0.01, each with a few roundings of 6e-8, on parameters of about 1."""
    ours, theirs = params(), params()
    mine = FusedAdam(ours, lr=0.01, weight_decay=0.1, adam_w_mode=decoupled)
    other = TORCH[decoupled](theirs, lr=0.01, weight_decay=0.1, fused=True)
    for step in range(20):
        give_gradients(step, ours, theirs)
        mine.step(), other.step()
    assert largest(ours, theirs) <= 2e-6
    for x, y in zip(ours, theirs, strict=True):
        assert mine.state[x].keys() == other.state[y].keys()
        for key in mine.state[x]:
            torch.testing.assert_close(mine.state[x][key], other.state[y][key], rtol=2e-5, atol=1e-7)


def test_state_goes_over_to_torch_and_back_without_a_change() -> None:
    ours, theirs = params(), params()
    mine, other = FusedAdam(ours, lr=0.01, weight_decay=0.01), torch.optim.AdamW(theirs, lr=0.01, fused=True)
    give_gradients(1, ours, theirs)
    mine.step(), other.step()
    state = mine.state_dict()["state"]
    groups = other.state_dict()["param_groups"]
    other.load_state_dict({"state": state, "param_groups": groups})
    back = FusedAdam(params(), lr=0.01, weight_decay=0.01)
    back.load_state_dict({"state": other.state_dict()["state"], "param_groups": mine.state_dict()["param_groups"]})
    for index in state:
        assert all(torch.equal(state[index][key], back.state_dict()["state"][index][key]) for key in state[index])


def test_a_resumed_optimizer_goes_on_with_the_same_bits() -> None:
    whole, first = params(), params()
    a, b = FusedAdam(whole, lr=0.01), FusedAdam(first, lr=0.01)
    for step in range(3):
        give_gradients(step, whole, first)
        a.step(), b.step()
    second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    c = FusedAdam(second)
    c.load_state_dict(b.state_dict())
    for step in range(3, 6):
        give_gradients(step, whole, second)
        a.step(), c.step()
    assert largest(whole, second) == 0.0


def test_pieces_of_any_cut_get_the_same_bits() -> None:
    whole = torch.nn.Parameter(torch.randn(1001, generator=torch.Generator().manual_seed(0)))
    parts = [torch.nn.Parameter(part.clone()) for part in whole.detach().split([3, 64, 500, 434])]
    a, b = FusedAdam([whole], weight_decay=0.1), FusedAdam(parts, weight_decay=0.1)
    for step in range(3):
        whole.grad = torch.randn(1001, generator=torch.Generator().manual_seed(step))
        for part, gradient in zip(parts, whole.grad.split([3, 64, 500, 434]), strict=True):
            part.grad = gradient
        a.step(), b.step()
    assert torch.equal(whole, torch.cat(list(parts)))


def test_lion_is_lion() -> None:
    ours, theirs = params(), params()
    mine, other = FusedLion(ours, lr=0.01, weight_decay=0.1), Lion(theirs, lr=0.01, weight_decay=0.1)
    for step in range(5):
        give_gradients(step, ours, theirs)
        scaled_step(mine, 0.5), scaled_step(other, 0.5)
    assert largest(ours, theirs) <= 1e-6
    assert mine.defaults == other.defaults


def test_groups_and_missing_gradients() -> None:
    a, b, c = params()
    optimizer = FusedAdam([{"params": [a], "lr": 0.5}, {"params": [b, c], "weight_decay": 0.3}], lr=0.1)
    want = reference.adamw(a.detach(), torch.ones_like(a), torch.zeros_like(a), torch.zeros_like(a), 1, lr=0.5)
    before = c.detach().clone()
    a.grad, b.grad = torch.ones_like(a), torch.zeros_like(b)
    small = b.detach() * (1 - 0.1 * 0.3)
    optimizer.step()
    torch.testing.assert_close(a.detach(), want.p)
    torch.testing.assert_close(b.detach(), small)
    assert torch.equal(c, before) and c not in optimizer.state


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}])
def test_numbers_that_cannot_be_used(bad: dict[str, Any]) -> None:
    for optimizer in (FusedAdam, FusedLion):
        with pytest.raises(ConfigError, match="cannot use these numbers"):
            optimizer(params(), **bad)


def test_cpu_adam_refuses_other_devices() -> None:
    CPUAdam(params())
    with pytest.raises(ConfigError, match=r"got meta, expected cpu"):
        CPUAdam([torch.nn.Parameter(torch.zeros(2, device="meta"))])
