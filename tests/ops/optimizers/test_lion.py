"""Lion over lists of flat pieces against the reference, with and without a gradient multiplier."""

from __future__ import annotations

import pytest
import torch

from zero_trial.errors import ConfigError
from zero_trial.ops import reference
from zero_trial.ops.optimizers import Lion

SIZES = (5, 1, 0, 33)


@pytest.mark.parametrize("multiplier", [1.0, 0.125])
def test_ten_steps_equal_the_reference(multiplier: float) -> None:
    torch.manual_seed(0)
    pieces = [torch.nn.Parameter(torch.randn(size, dtype=torch.float64)) for size in SIZES]
    expected = [(p.detach().clone(), torch.zeros_like(p)) for p in pieces]
    lion = Lion([{"params": pieces[:2], "lr": 0.1}, {"params": pieces[2:], "weight_decay": 0.2}], lr=0.01)
    for _ in range(10):
        for i, piece in enumerate(pieces):
            piece.grad = torch.randn_like(piece)
            p, m = expected[i]
            lr, decay = (0.1, 0.0) if i < 2 else (0.01, 0.2)
            expected[i] = tuple(reference.lion(p, piece.grad * multiplier, m, lr=lr, weight_decay=decay))
        lion.step(multiplier=multiplier)
    for piece, (p, m) in zip(pieces, expected, strict=True):
        torch.testing.assert_close(piece.detach(), p)
        torch.testing.assert_close(lion.state[piece]["exp_avg"], m)


def test_pieces_without_gradient_stay() -> None:
    moving, still = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    moving.grad = torch.ones(3)
    lion = Lion([moving, still], lr=0.5)
    lion.step()
    assert torch.equal(still, torch.ones(3))
    assert torch.equal(moving, torch.full((3,), 0.5))
    assert still not in lion.state


def test_state_survives_state_dict() -> None:
    first = torch.nn.Parameter(torch.ones(3))
    first.grad = torch.tensor([1.0, -2.0, 3.0])
    lion = Lion([first])
    lion.step()
    second = torch.nn.Parameter(first.detach().clone())
    other = Lion([second])
    other.load_state_dict(lion.state_dict())
    first.grad = second.grad = torch.tensor([-0.01, 0.01, -0.4])
    lion.step()
    other.step()
    assert torch.equal(first, second)


@pytest.mark.parametrize("arguments", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -0.1}])
def test_impossible_numbers_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.params"):
        Lion([torch.nn.Parameter(torch.ones(1))], **arguments)  # type: ignore[arg-type]
