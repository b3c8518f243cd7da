"""FusedAdagrad against torch's, through state and checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zero_trial.errors import ConfigError
from zero_trial.ops.optimizers import FusedAdagrad


def params() -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=g)) for shape in ((5, 3), (70,), ())]


def give_gradients(seed: int, *lists: list[torch.nn.Parameter]) -> None:
    g = torch.Generator().manual_seed(seed)
    for same in zip(*lists, strict=True):
        gradient = torch.randn(same[0].shape, generator=g)
        for p in same:
            p.grad = gradient.clone()


@pytest.mark.parametrize("how", [{}, {"lr_decay": 0.1, "weight_decay": 0.1}, {"initial_accumulator_value": 0.5}])
def test_as_torch_and_through_its_state(how: dict[str, Any]) -> None:
    """Each goes on with the other's state. Tolerance: twelve steps of a few roundings, on numbers
    of about 1."""
    ours, theirs = params(), params()
    mine, other = FusedAdagrad(ours, lr=0.1, **how), torch.optim.Adagrad(theirs, lr=0.1, **how)
    for step in range(12):
        give_gradients(step, ours, theirs)
        mine.step(), other.step()
        if step == 5:
            kept, taken = mine.state_dict(), other.state_dict()
            mine, other = FusedAdagrad(ours), torch.optim.Adagrad(theirs)
            mine.load_state_dict(taken), other.load_state_dict(kept)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine.state[x]["sum"], other.state[y]["sum"], rtol=1e-5, atol=1e-6)
        assert float(mine.state[x]["step"]) == 12


def test_numbers_that_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match="cannot use these numbers"):
        FusedAdagrad(params(), lr_decay=-1.0)
