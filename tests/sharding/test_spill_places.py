"""Tests for zero_trial/sharding/offload/nvme_optimizer.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.sharding.late_shelf import LateShelf
from tests.sharding.parts import make_grad_buffer, make_group, parameters
from zero_trial.sharding.offload.nvme_optimizer import MASTER, ROUNDED, MasterSwap, StateColumn, places_of, regions_of
from zero_trial.sharding.offload.nvme_params import ParamSwapper
from zero_trial.sharding.offload.swap_file import BLOCK, CUT
from zero_trial.sharding.optimizer import ShardPiece
from zero_trial.sharding.param_group import ParamGroup

COLUMNS = {torch.float32: [StateColumn("exp_avg", torch.float32), StateColumn("exp_avg_sq", torch.float32)]}


def regions(
    dtype: torch.dtype, *, state: bool, params: bool, budget: int | None = None
) -> tuple[ParamGroup, dict[str, Any], list[Any]]:
    """Of a group of 5000 elements; with the shelves of state and of parameters."""
    group = make_group(parameters([(5000,)]), stage=3, dtype=dtype)
    masters = MasterSwap(LateShelf(), budget) if state else None
    shards = ParamSwapper(LateShelf(), most=CUT, count=1) if params else None
    for keeper in (masters, shards):
        if keeper is not None:
            keeper.take(group)
    shelves = [keeper.shelf if keeper is not None else None for keeper in (masters, shards)]
    return group, regions_of(group, COLUMNS if state else {}, masters, shards), shelves


@pytest.mark.parametrize(
    ("dtype", "state", "params", "expected"),
    [
        (torch.bfloat16, True, False, {MASTER: 0, "exp_avg": 0, "exp_avg_sq": 0}),
        (torch.bfloat16, False, True, {ROUNDED: 1}),
        (torch.bfloat16, True, True, {MASTER: 0, ROUNDED: 1, "exp_avg": 0, "exp_avg_sq": 0}),
        (torch.float32, True, False, {"exp_avg": 0, "exp_avg_sq": 0}),
        (torch.float32, False, True, {MASTER: 1}),
        (torch.float32, True, True, {MASTER: 1, "exp_avg": 0, "exp_avg_sq": 0}),
    ],
)
def test_what_is_in_which_file(dtype: torch.dtype, state: bool, params: bool, expected: dict[str, int]) -> None:
    """0 is the file of masters and state, 1 that of parameters: an fp32 parameter is its own master."""
    _, found, shelves = regions(dtype, state=state, params=params)
    assert {kind: shelves.index(shelf) for kind, (shelf, _, _) in found.items()} == expected
    assert all(offset % BLOCK == 0 for _, offset, _ in found.values())
    assert {kind: width for kind, (_, _, width) in found.items() if kind in (MASTER, ROUNDED)} == {
        kind: (torch.float32 if kind == MASTER else dtype) for kind in expected if kind in (MASTER, ROUNDED)
    }


def test_state_beyond_the_budget_is_in_no_file() -> None:
    assert regions(torch.bfloat16, state=True, params=False, budget=100)[1] == {}


def test_a_piece_that_begins_inside_a_block() -> None:
    """Files and buffers agree about where in a block it begins, so that the middle of a transfer goes past the page cache."""
    group, found, _ = regions(torch.bfloat16, state=True, params=True)
    piece = ShardPiece(group, make_grad_buffer(group)[0], 0, 100, 4500, nn.Parameter(torch.zeros(4400)))
    places, size = places_of(piece, found, 2 * CUT)
    assert all(place.offset % BLOCK == place.start % BLOCK == 100 * place.dtype.itemsize for place in places.values())
    ends = [place.start + place.numel * place.dtype.itemsize for place in places.values()]
    starts = [place.start for place in places.values()]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False)) and ends[-1] <= size
    assert size == 3 * (8 * CUT + BLOCK) + (4 * CUT + BLOCK)
    area = torch.arange(size, dtype=torch.uint8)
    place = places[ROUNDED]
    assert place.of_buffer(area).numel() == 4400 and place.of_buffer(area).dtype == torch.bfloat16
    assert torch.equal(place.of_buffer(area).view(torch.uint8), area[place.start : place.start + 8800])
