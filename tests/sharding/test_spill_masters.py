"""Tests for zero_trial/sharding/offload/nvme_optimizer.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.sharding.parts import make_group, parameters
from zero_trial.sharding.offload.nvme_optimizer import MasterSwap
from zero_trial.sharding.offload.swap_file import SwapFile
from zero_trial.sharding.param_group import ParamGroup, is_absent


def group(numel: int, dtype: torch.dtype = torch.bfloat16, trainable: bool = True) -> ParamGroup:
    return make_group(parameters([(numel,)]), dtype=dtype, trainable=trainable)


def test_a_master_goes_and_an_fp32_parameter_stays(tmp_path: Path) -> None:
    shelf = MasterSwap(SwapFile(tmp_path))
    narrow, wide, frozen = group(64), group(64, torch.float32), group(64, trainable=False)
    values = narrow.master.clone()
    for each in (narrow, wide, frozen):
        shelf.take(each)
    assert is_absent(narrow.master) and wide.master is wide.shard and frozen.master is frozen.shard
    assert list(shelf.offsets) == [id(narrow)]
    assert [shelf.keeps_state_of(each) for each in (narrow, wide, frozen)] == [True, True, False]
    back = torch.empty_like(values)
    shelf.shelf.read(shelf.offsets[id(narrow)], back).wait()
    assert torch.equal(back, values)


@pytest.mark.parametrize(
    ("budget", "chosen"), [(None, [0, 1, 2]), (0, []), (96, [0, 2]), (127, [0, 2]), (160, [0, 1]), (1000, [0, 1, 2])]
)
def test_groups_go_while_they_fit(tmp_path: Path, budget: int | None, chosen: list[int]) -> None:
    shelf = MasterSwap(SwapFile(tmp_path), budget)
    groups = [group(64), group(96), group(32)]
    for each in groups:
        shelf.take(each)
    assert [index for index, each in enumerate(groups) if shelf.keeps_state_of(each)] == chosen
    assert [index for index, each in enumerate(groups) if is_absent(each.master)] == chosen


def test_what_is_not_trained_takes_nothing_of_the_budget(tmp_path: Path) -> None:
    shelf = MasterSwap(SwapFile(tmp_path), 64)
    shelf.take(group(64, trainable=False))
    trained = group(64)
    shelf.take(trained)
    assert shelf.keeps_state_of(trained)
