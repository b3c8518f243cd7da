"""Random generators continue where they were."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch

from zero_trial.checkpoint.state_tree import capture_rng, decode_state, encode_state, restore_rng
from zero_trial.errors import CheckpointError


def draw() -> list[Any]:
    return [
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
    ]


@pytest.fixture(autouse=True)
def keep_the_generators_of_other_tests() -> Any:
    before = capture_rng()
    yield
    restore_rng(before)


@pytest.mark.parametrize("odd", [False, True])  # an odd number of normals leaves a cached second one
def test_what_follows_is_the_same(odd: bool) -> None:
    if odd:
        draw()
    document, tensors = encode_state(capture_rng(), "rng/rank-0")
    expected = [draw() for _ in range(3)]
    state = decode_state(json.loads(json.dumps(document)), tensors.__getitem__)
    assert restore_rng(state) == []
    assert [draw() for _ in range(3)] == expected


def test_numpy_is_left_out_where_it_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    assert "numpy" not in capture_rng()


def test_a_generator_that_is_not_here_is_reported() -> None:
    state = capture_rng() | {"cuda": torch.zeros(16, dtype=torch.uint8)}
    assert restore_rng(state) == ["cuda"]


@pytest.mark.parametrize("state", [{}, {"torch": torch.zeros(3, dtype=torch.uint8)}, {"torch": 3}])
def test_something_else_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="rng"):
        restore_rng(state)
