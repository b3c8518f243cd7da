"""One message that holds all differences between a checkpoint and a model."""

from __future__ import annotations

import pytest

from zero_trial.checkpoint.reader import compare_tensors, require_match
from zero_trial.errors import CheckpointError

STORED = {"wte": (50257, 768), "ln": (768,), "old": (3,)}
WANTED = {"wte": (50304, 768), "ln": (768,), "head.weight": (2, 2), "head.bias": (2,)}


def test_the_message() -> None:
    assert compare_tensors(STORED, WANTED).describe() == (
        "checkpoint has 3 tensors, model has 4. Missing: head.bias, head.weight. Not in the model: old. "
        "Shape differs: wte (50257, 768) vs (50304, 768)"
    )


def test_equal_is_silent() -> None:
    require_match(STORED, STORED, where="x")


@pytest.mark.parametrize("allow", [{}, {"allow_missing": True}, {"allow_extra": True}])
def test_what_is_not_allowed_is_raised(allow: dict[str, bool]) -> None:
    with pytest.raises(CheckpointError, match=r"folder: checkpoint has 2 tensors, model has 2"):
        require_match({"a": (1,), "b": (1,)}, {"a": (1,), "c": (1,)}, where="folder", **allow)


def test_allowed_differences_pass_but_never_shapes() -> None:
    require_match({"a": (1,), "b": (1,)}, {"a": (1,), "c": (1,)}, where="x", allow_missing=True, allow_extra=True)
    with pytest.raises(CheckpointError, match="Shape differs"):
        require_match({"a": (1,)}, {"a": (2,)}, where="x", allow_missing=True, allow_extra=True)


def test_long_lists_are_shortened() -> None:
    wanted = {f"layer.{i:02}": (1,) for i in range(20)}
    assert "layer.07 and 12 more" in compare_tensors({}, wanted).describe()
