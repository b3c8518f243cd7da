"""FusedAdagrad and FusedSGD against torch's, through state and checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zero_trial.errors import ConfigError
from zero_trial.ops.optimizers import FusedAdagrad, FusedSGD, scaled_step

ADAGRAD = (FusedAdagrad, torch.optim.Adagrad, "sum", {"lr": 0.1})
SGD = (FusedSGD, torch.optim.SGD, "momentum_buffer", {"lr": 0.1, "momentum": 0.9})
CASES: list[tuple[Any, dict[str, Any]]] = [
    (ADAGRAD, {}),
    (ADAGRAD, {"lr_decay": 0.1, "weight_decay": 0.1}),
    (ADAGRAD, {"initial_accumulator_value": 0.5}),
    (SGD, {}),
    (SGD, {"nesterov": True}),
    (SGD, {"dampening": 0.3}),
    (SGD, {"weight_decay": 0.1, "momentum": 0.5}),
]


def params() -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=g)) for shape in ((5, 3), (70,), ())]


def give_gradients(seed: int, *lists: list[torch.nn.Parameter]) -> None:
    g = torch.Generator().manual_seed(seed)
    for same in zip(*lists, strict=True):
        gradient = torch.randn(same[0].shape, generator=g)
        for p in same:
            p.grad = gradient.clone()


@pytest.mark.parametrize(
    ("kind", "how"), CASES, ids=lambda value: value[0].__name__ if isinstance(value, tuple) else None
)
def test_as_torch_and_through_its_state(kind: Any, how: dict[str, Any]) -> None:
    """Each goes on with the other's state. Tolerance: twelve steps of a few roundings, on numbers
    of about 1."""
    fused, torchs, moment, settings = kind
    ours, theirs = params(), params()
    mine, other = fused(ours, **(settings | how)), torchs(theirs, **(settings | how))
    for step in range(12):
        give_gradients(step, ours, theirs)
        mine.step(), other.step()
        if step == 5:
            kept, taken = mine.state_dict(), other.state_dict()
            mine, other = fused(ours), torchs(theirs)
            mine.load_state_dict(taken), other.load_state_dict(kept)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine.state[x][moment], other.state[y][moment], rtol=1e-5, atol=1e-6)
        assert fused is not FusedAdagrad or float(mine.state[x]["step"]) == 12


def test_the_first_gradient_is_not_damped_and_the_multiplier_counts() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = FusedSGD([p], lr=1.0, dampening=0.5)
    p.grad = torch.ones(3)
    scaled_step(optimizer, 0.25)
    assert p.tolist() == [-0.25] * 3
    scaled_step(optimizer, 0.25)
    assert p.tolist() == pytest.approx([-0.25 - (0.9 * 0.25 + 0.5 * 0.25)] * 3)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (FusedAdagrad, {"lr_decay": -1.0}),
        (FusedSGD, {"momentum": 0.0}),
        (FusedSGD, {"lr": -1.0}),
        (FusedSGD, {"nesterov": True, "dampening": 0.1}),
    ],
)
def test_numbers_that_cannot_be_used(kind: Any, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot use these numbers"):
        kind(params(), **bad)
