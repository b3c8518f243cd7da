"""Tests for zero_trial/sharding/optimizer.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.sharding.parts import address, make_grad_buffer, make_group, parameters
from zero_trial.sharding.optimizer import DeviceStore, ShardPiece


def piece(numel: int = 64, dtype: torch.dtype = torch.float32) -> ShardPiece:
    group = make_group(parameters([(numel,)]), dtype=dtype)
    grad_buffer, _ = make_grad_buffer(group)
    return ShardPiece(group, grad_buffer, 0, 0, numel, nn.Parameter(group.master[:numel]))


def test_a_step_borrows_every_piece_once() -> None:
    pieces = [piece(), piece()]
    store = DeviceStore(pieces)
    seen = []
    for batch in store.batches():
        store.borrow(batch)
        seen.extend(batch)
        assert [store.give_back(batch, rounded) for rounded in (True, False)] == [True, False]
    assert seen == pieces
    assert [len(batch) for batch in store.batches()] == [2], "again, for the next step"


def test_gradients_need_no_copy_where_dtypes_agree() -> None:
    own = piece()
    own.grad_buffer.shard.fill_(2.0)
    assert address(own.gradient()) == address(own.grad_buffer.shard)
    other = piece(dtype=torch.bfloat16)
    other.grad_buffer.shard.fill_(2.0)
    gradient = other.gradient()
    assert gradient.dtype == torch.float32
    assert gradient.eq(2).all()


def test_a_gradient_has_the_weights_shape() -> None:
    group = make_group(parameters([(4, 16)]))
    grad_buffer, _ = make_grad_buffer(group)
    grad_buffer.shard.copy_(torch.arange(64.0))
    whole = ShardPiece(group, grad_buffer, 0, 0, 64, nn.Parameter(group.master.view(4, 16)))
    assert torch.equal(whole.gradient(), torch.arange(64.0).view(4, 16))
    part = ShardPiece(group, grad_buffer, 0, 32, 64, nn.Parameter(group.master[32:64]))
    assert part.gradient().tolist() == list(range(32, 64))
    assert part.numel == 32


@pytest.mark.parametrize(("room", "sizes"), [(1000, [4]), (128, [2, 2]), (127, [1, 1, 1, 1]), (1, [1, 1, 1, 1])])
def test_casts_are_bounded_by_batches(room: int, sizes: list[int]) -> None:
    pieces = [piece(dtype=torch.bfloat16) for _ in range(4)]
    assert [len(batch) for batch in DeviceStore(pieces, cast_numel=room).batches()] == sizes
    assert [len(batch) for batch in DeviceStore([piece() for _ in range(4)], cast_numel=room).batches()] == [4]
