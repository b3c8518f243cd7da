"""Tests for zero_trial/sharding/grouping.py; the norm over the parts is in tests/engine/test_behaviour_parts.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_trial.sharding.grouping import (
    GroupingLimits,
    ParamFacts,
    into_buckets,
    is_model_parallel,
    split_parts_from_copies,
)


@pytest.mark.parametrize("mark", ["tensor_model_parallel", "model_parallel"])
def test_marks_of_megatron_and_deepspeed(mark: str) -> None:
    param = nn.Parameter(torch.zeros(2))
    assert not is_model_parallel(param)
    setattr(param, mark, True)
    assert is_model_parallel(param)
    setattr(param, mark, False)
    assert not is_model_parallel(param)


def test_no_group_holds_parts_and_copies() -> None:
    params = {name: nn.Parameter(torch.zeros(2)) for name in "abcd"}
    for name in "bd":
        params[name].model_parallel = True  # type: ignore[attr-defined]
    members = split_parts_from_copies([ParamFacts(name, 2, ("fp32",), 0) for name in params], params)
    groupings = into_buckets(members, GroupingLimits())
    assert sorted("".join(m.name for m in g.members) for g in groupings) == ["ac", "bd"]
