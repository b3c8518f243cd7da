"""Tests for zero_trial/engine/build.py; of parallel parts in test_contents.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zero_trial.engine.build import log_dtypes, log_model_parts


def mesh(rank: int = 0, parts: int = 1, size: int = 1) -> Any:
    return SimpleNamespace(rank=rank, model_part=(0, parts), model=SimpleNamespace(size=size))


def wiring(clip: float = 0.0, dtype: torch.dtype = torch.float32) -> Any:
    return SimpleNamespace(clip=clip, policy=SimpleNamespace(param=dtype))


def test_rank_0_says_which_dtypes_were_cast(caplog: pytest.LogCaptureFixture) -> None:
    log_dtypes(nn.Linear(2, 2).double(), torch.bfloat16, mesh(1))
    log_dtypes(nn.Linear(2, 2), torch.float32, mesh())
    assert caplog.messages == []
    log_dtypes(nn.Linear(2, 2).double(), torch.bfloat16, mesh())
    assert len(caplog.messages) == 1 and "float64" in caplog.messages[0]


@pytest.mark.parametrize(
    ("where", "how", "said"),
    [
        (mesh(), wiring(1.0), ""),
        (mesh(rank=1, parts=2), wiring(1.0), ""),
        (mesh(parts=2), wiring(), ""),
        (mesh(parts=2), wiring(1.0), "clips by its own gradient norm"),
        (mesh(parts=2), wiring(dtype=torch.float16), "scales its loss by itself"),
        (mesh(parts=2, size=2), wiring(), "all are taken for copies"),
    ],
)
def test_what_parts_do_by_themselves(where: Any, how: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    log_model_parts(nn.Linear(2, 2), where, how)
    assert len(caplog.messages) == bool(said)
    assert said in caplog.text


def test_a_marked_parameter_settles_it(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    model.weight.tensor_model_parallel = True  # type: ignore[assignment]
    log_model_parts(model, mesh(parts=2, size=2), wiring(1.0))
    assert caplog.messages == []
