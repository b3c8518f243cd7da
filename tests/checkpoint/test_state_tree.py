"""Plain state as JSON and tensors and back, and the state of random generators."""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_trial.checkpoint.state_tree import capture_rng, decode_state, encode_state, restore_rng
from zero_trial.errors import CheckpointError


def there_and_back(value: Any) -> Any:
    document, tensors = encode_state(value, "x")
    return decode_state(json.loads(json.dumps(document, allow_nan=False)), tensors.__getitem__)


def test_an_optimizers_state() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([p], betas=(0.8, 0.9))
    p.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state_dict()
    document, tensors = encode_state(state, "optimizer")
    assert "optimizer/state/0/exp_avg" in tensors
    back = decode_state(json.loads(json.dumps(document)), tensors.__getitem__)
    assert back["param_groups"] == state["param_groups"] and back["param_groups"][0]["betas"] == (0.8, 0.9)
    assert torch.equal(back["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
    optimizer.load_state_dict(back)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -(2**80), 0.1, "é\n", [1, [2.5, None]], (1, (2, "a")), {"a": {"b": (1,)}}, {1: 2, (3, 4): "x"},
        {"1": 1, 1: 2}, {3, 4}, b"\x00\xff", {"$tuple": [1, 2]}, {"$class": "os.system"}, {}, [], (), Counter("aab"),
        torch.float32, math.inf, -math.inf,
    ],
)  # fmt: skip
def test_equal_and_of_the_same_type(value: Any) -> None:
    back = there_and_back(value)
    assert back == value and type(back) is type(value)


def test_nan_comes_back() -> None:
    assert math.isnan(there_and_back([math.nan])[0])


def test_tensors_and_arrays() -> None:
    value = {"t": torch.ones(2, 2, dtype=torch.bfloat16), 1: torch.zeros(()), "1": torch.ones(1), "n": np.arange(3.0)}
    back = there_and_back(value)
    assert torch.equal(back["t"], value["t"]) and back[1].item() == 0.0 and back["1"].item() == 1.0
    assert isinstance(back["n"], np.ndarray) and back["n"].tolist() == [0.0, 1.0, 2.0]
    assert there_and_back(np.int64(3)) == 3


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.sampled_from(["$tuple", "$items", "$", "a"])
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(trees)
def test_any_tree(value: Any) -> None:
    back = there_and_back(value)
    assert back == value and repr(back) == repr(value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(object(), "object"), (len, "builtin"), (Path("/x"), "Path"), (np.array(["a"]), "ndarray"), (1j, "complex")],
)
def test_what_is_not_plain_is_refused_with_its_place(value: Any, kind: str) -> None:
    with pytest.raises(CheckpointError, match=kind) as raised:
        encode_state({"client": [0, value]}, "state")
    assert raised.value.where == "state/client/1"


def test_a_value_that_contains_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode_state(loop, "state")


@pytest.mark.parametrize("document", [{"$class": "os.system"}, {"$tuple": [1], "x": 2}, {"$object": {}}])
def test_unknown_markers_are_refused(document: Any) -> None:
    with pytest.raises(CheckpointError):
        decode_state(document, lambda _: torch.empty(0))


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


# an odd number of normals leaves a cached second one
@pytest.mark.parametrize("odd", [False, True])
def test_what_follows_is_the_same(odd: bool) -> None:
    if odd:
        draw()
    document, tensors = encode_state(capture_rng(), "rng/rank-0")
    expected = [draw() for _ in range(3)]
    state = decode_state(json.loads(json.dumps(document)), tensors.__getitem__)
    restore_rng(state)
    assert [draw() for _ in range(3)] == expected


def test_numpy_is_left_out_where_it_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    assert "numpy" not in capture_rng()


@pytest.mark.parametrize("state", [{}, {"torch": torch.zeros(3, dtype=torch.uint8)}, {"torch": 3}])
def test_something_else_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="rng"):
        restore_rng(state)
