"""Amounts of memory."""

from __future__ import annotations

import torch

from zero_trial.planning.memory_plan import rank_limit


def test_ranks_share_the_machine() -> None:
    whole = rank_limit(torch.device("cpu"), 1)
    assert whole is not None and rank_limit(torch.device("cpu"), 4) == whole // 4
