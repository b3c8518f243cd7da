"""Tests for zero_trial/sharding/optimizer.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.sharding.parts import make_model
from tests.sharding.two_groups import Small, by_decay
from zero_trial.errors import ConfigError
from zero_trial.sharding.optimizer import ShardedOptimizer, StepStatus, cut_pieces, rebind


def test_a_clients_optimizer_steps_on_pieces_with_its_own_groups() -> None:
    torch.manual_seed(0)
    module = Small()
    opt_groups = by_decay(module)
    base = torch.optim.AdamW(
        [{"params": opt_groups[0], "lr": 0.5}, {"params": opt_groups[1], "lr": 0.25, "weight_decay": 0.0}]
    )
    model = make_model(module, 1, opt_groups=opt_groups)
    pieces = cut_pieces(model.grad_buffers, whole_tensors=False)
    rebind(base, pieces)
    assert [opt_group["lr"] for opt_group in base.param_groups] == [0.5, 0.25]
    for index, opt_group in enumerate(base.param_groups):
        assert [id(p) for p in opt_group["params"]] == [
            id(piece.weight) for piece in pieces if piece.opt_group == index
        ]
    optimizer = ShardedOptimizer(base, pieces, status=Scaled())
    base.param_groups[0]["lr"] = 0.125  # a scheduler holds the base
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert (optimizer.loss_scale, optimizer.cur_scale) == (8.0, 8.0)


class Scaled(StepStatus):
    loss_scale = 8.0  # type: ignore[assignment]


STEPPED = [
    (torch.optim.AdamW, {}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (torch.optim.RMSprop, {}),
]


@pytest.mark.parametrize(("kind", "options"), STEPPED)
def test_a_client_optimizer_must_be_fresh(kind: Any, options: dict[str, Any]) -> None:
    for stepped in (False, True):
        module = Small()
        base = kind(module.parameters(), **options)
        if stepped:
            module(torch.ones(2, 11)).backward()
            base.step()
        model = make_model(module, 0)
        pieces = cut_pieces(model.grad_buffers, whole_tensors=False)
        if stepped:
            with pytest.raises(ConfigError, match="has stepped before"):
                rebind(base, pieces)
        else:
            rebind(base, pieces)
            for piece in pieces:
                piece.weight.grad = torch.ones_like(piece.weight)
            base.step()
