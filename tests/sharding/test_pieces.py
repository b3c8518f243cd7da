"""Tests for zero_trial/sharding/optimizer.py."""

from __future__ import annotations

import torch
from torch import nn

from tests.sharding.parts import make_model
from tests.sharding.two_groups import Small, build
from tests.support.pool import Pools
from zero_trial.errors import ConfigError
from zero_trial.sharding.optimizer import cut_pieces


def test_pieces_are_runs_of_one_optimizer_group() -> None:
    model = build(1)
    pieces = cut_pieces(model.grad_buffers, whole_tensors=False)
    assert {piece.opt_group for piece in pieces} == {0, 1}
    for grad_buffer in model.grad_buffers:
        spans = sorted((piece.low, piece.high) for piece in pieces if piece.grad_buffer is grad_buffer)
        assert spans[0][0] == 0
        assert spans[-1][1] == grad_buffer.group.layout.shard_numel
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))  # noqa: RUF007


def test_pieces_are_cut_at_multiples_counted_from_the_shards_start() -> None:
    model = build(1)
    for piece in cut_pieces(model.grad_buffers, whole_tensors=False, most=32):
        assert piece.low // 32 == (piece.high - 1) // 32
    whole = sum(piece.numel for piece in cut_pieces(model.grad_buffers, whole_tensors=False))
    assert sum(piece.numel for piece in cut_pieces(model.grad_buffers, whole_tensors=False, most=32)) == whole


def test_a_tensor_without_elements_is_no_piece() -> None:
    module = Small()
    module.nothing = nn.Parameter(torch.empty(0, 3))
    pieces = cut_pieces(make_model(module, 0).grad_buffers, whole_tensors=True)
    assert len(pieces) == len(list(Small().parameters()))


def test_whole_tensors_where_nothing_is_sharded() -> None:
    """Muon, Shampoo, Adafactor: an optimizer that looks at rows and columns gets real shapes."""
    model = build(0)
    pieces = cut_pieces(model.grad_buffers, whole_tensors=True)
    shapes = sorted(tuple(param.shape) or (1,) for param in Small().parameters())
    assert sorted(tuple(piece.weight.shape) for piece in pieces) == shapes
    assert {tuple(piece.weight.shape): piece.opt_group for piece in pieces}[(7, 11)] == 0
    assert {tuple(piece.weight.shape): piece.opt_group for piece in pieces}[(7,)] == 1


def refuses_whole_tensors() -> str:
    try:
        cut_pieces(build(1).grad_buffers, whole_tensors=True)
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_whole_tensors_of_shards_are_refused(ranks: Pools) -> None:
    assert all("needs whole tensors, and sharding cuts them" in text for text in ranks(2).run(refuses_whole_tensors))
