"""Muon's update against torch's own, and what a device decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zero_trial.errors import ConfigError
from zero_trial.ops.optimizers.fused import Muon
from zero_trial.ops.optimizers.shard_step import ShardUpdate


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch < 2.9")
@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_matrix_moves_as_with_torch(shape: tuple[int, int], nesterov: bool) -> None:
    ours, theirs = (nn.Parameter(drawn(*shape)) for _ in range(2))
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}
    mine = Muon([{"params": [ours], "use_muon": True, **settings}], nesterov=nesterov)
    plain = torch.optim.Muon([theirs], nesterov=nesterov, **settings)
    for step in range(3):
        ours.grad, theirs.grad = (drawn(*shape, seed=step + 1) for _ in range(2))
        mine.step()
        plain.step()
    assert torch.equal(ours, theirs)
    assert torch.equal(mine.state[ours]["momentum_buffer"], plain.state[theirs]["momentum_buffer"])


def test_filters_of_a_convolution_are_rows_of_a_matrix() -> None:
    filters, rows = nn.Parameter(drawn(4, 3, 2, 2)), nn.Parameter(drawn(4, 12))
    optimizer = Muon([{"params": [filters, rows], "use_muon": True, "lr": 0.1}])
    filters.grad, rows.grad = drawn(4, 3, 2, 2, seed=1), drawn(4, 12, seed=1)
    optimizer.step()
    assert torch.equal(filters.view(4, 12), rows)


def test_bare_tensors_are_sorted_by_their_dimensions() -> None:
    matrix, bias = nn.Parameter(drawn(3, 4)), nn.Parameter(drawn(3))
    optimizer = Muon([matrix, bias])
    assert [(group["use_muon"], len(group["params"])) for group in optimizer.param_groups] == [(True, 1), (False, 1)]
    matrix.grad, bias.grad = drawn(3, 4, seed=1), drawn(3, seed=2)
    optimizer.step()
    assert set(optimizer.state[matrix]) == {"momentum_buffer"}
    assert set(optimizer.state[bias]) == {"exp_avg", "exp_avg_sq", "step"}


def test_a_step_on_a_flat_gradient_rounds_the_new_weight() -> None:
    weight, other = nn.Parameter(drawn(3, 4)), nn.Parameter(drawn(3, 4))
    gradient = drawn(3, 4, seed=1)
    given: list[dict[str, Any]] = [{"params": [each], "use_muon": True, "lr": 0.1} for each in (weight, other)]
    optimizer, plain = (Muon([group]) for group in given)
    rounded = torch.zeros(3, 4, dtype=torch.bfloat16)
    optimizer.step(updates=[ShardUpdate(weight, gradient.view(-1), rounded, 0)], multiplier=0.5)
    plain.step(updates=[ShardUpdate(other, gradient * 0.5, None, 0)])
    assert torch.equal(weight, other) and torch.equal(rounded, weight.bfloat16())


def test_numbers_that_make_no_sense_are_refused() -> None:
    for wrong in ({"lr": -1.0}, {"momentum": 1.0}, {"weight_decay": -0.1}, {"ns_steps": 0}):
        with pytest.raises(ConfigError, match="Muon does not accept these values"):
            Muon([{"params": [nn.Parameter(drawn(2, 2))], "use_muon": True, **wrong}])
