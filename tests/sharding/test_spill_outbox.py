"""Tests for zero_trial/sharding/offload/nvme_optimizer.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.sharding.parts import make_grad_buffer, make_group, parameters
from zero_trial.sharding.offload.nvme_optimizer import RoundedBuffers, SwappedPiece


def piece_of(outbox: RoundedBuffers, away: Any = None) -> SwappedPiece:
    group = make_group(parameters([(64,)]), dtype=torch.bfloat16)
    group.offloaded = away
    return SwappedPiece(group, make_grad_buffer(group)[0], 0, 32, 64, nn.Parameter(group.master[32:64]), outbox)


def test_new_values_lie_in_the_outbox_during_the_update() -> None:
    outbox = RoundedBuffers()
    piece, other = piece_of(outbox, away=object()), piece_of(outbox, away=object())
    assert piece.rounded is None
    room = torch.zeros(32, dtype=torch.bfloat16)
    outbox.open(piece, room)
    assert piece.rounded is room and other.rounded is None
    assert outbox.take(piece) is room and piece.rounded is None
    with pytest.raises(KeyError):
        outbox.take(piece)


def test_a_shard_in_memory_takes_them_itself() -> None:
    piece = piece_of(RoundedBuffers())
    rounded = piece.rounded
    assert rounded is not None and rounded.data_ptr() == piece.group.shard[32:].data_ptr()


def test_a_step_that_was_broken_off_leaves_nothing() -> None:
    outbox = RoundedBuffers()
    piece = piece_of(outbox, away=object())
    outbox.open(piece, torch.zeros(32))
    outbox.clear()
    assert piece.rounded is None
