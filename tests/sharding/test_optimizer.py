"""Tests for zero_trial/sharding/optimizer.py."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.parts import add_optimizer, address, run_update
from tests.sharding.two_groups import build
from zero_trial.errors import TrialError
from zero_trial.ops.optimizers import FusedLamb
from zero_trial.sharding.optimizer import ShardedOptimizer, cut_pieces


def test_the_base_optimizer_steps_on_flat_pieces_of_the_masters() -> None:
    model = build(1)
    optimizer = add_optimizer(model, torch.optim.SGD, lr=1.0)
    piece = optimizer.pieces[0]
    assert address(piece.weight) == address(piece.group.master)
    before = piece.weight.detach().clone()
    for grad_buffer in model.grad_buffers:
        grad_buffer.shard.fill_(2.0)
    run_update(optimizer, 0.25)
    assert torch.allclose(piece.weight, before - 0.5)
    assert piece.weight.grad is None


def test_a_step_past_the_engine_is_refused() -> None:
    """As in a loop of plain torch: masters would change, and no parameter."""
    with pytest.raises(TrialError, match=r"optimizer\.step: the engine steps this optimizer.*Call engine\.step\(\)"):
        ShardedOptimizer(FusedLamb([{"params": []}]), []).step()
    with pytest.raises(TrialError, match=r"optimizer\.step"):
        ShardedOptimizer(FusedLamb([{"params": []}]), []).step(lambda: 1.0)  # type: ignore[arg-type]


def test_tensors_are_numbered_over_all_groups_also_where_a_rank_has_no_piece() -> None:
    """Otherwise a rank whose part of a group is padding would add its squares to other tensors than its peers."""
    model = build(0)
    grad_buffers = model.grad_buffers
    pieces = cut_pieces(grad_buffers[-1:], whole_tensors=False)
    opt_groups = [{"params": [piece.weight for piece in pieces if piece.opt_group == index]} for index in (0, 1)]
    optimizer = ShardedOptimizer(FusedLamb(opt_groups), pieces)
    names = {slot.name for grad_buffer in grad_buffers for slot in grad_buffer.group.layout.slots}
    asked: list[tuple[int, ...]] = []
    optimizer.bind_tensors(
        [grad_buffer.group for grad_buffer in grad_buffers], lambda sums: asked.append(tuple(sums.shape))
    )
    run_update(optimizer, 1.0)
    assert asked == [(2, len(names))] and len(names) > len(pieces[0].group.layout.slots)
    nothing = ShardedOptimizer(FusedLamb([{"params": []}]), [])
    nothing.bind_tensors(
        [grad_buffer.group for grad_buffer in grad_buffers], lambda sums: asked.append(tuple(sums.shape))
    )
    run_update(nothing, 1.0)
    assert asked == [(2, len(names))] * 2  # also a rank without any piece takes part
