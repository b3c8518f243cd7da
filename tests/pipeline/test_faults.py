"""The words for what a layer raised."""

from __future__ import annotations

import torch
from torch import nn

from zero_trial.pipeline.executor import layer_fault
from zero_trial.pipeline.schedule import Action


def raised(call: object, *args: object) -> Exception:
    try:
        call(*args)  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def broken(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, torch.ones(2, 7))


def test_rank_stage_micro_batch_action_and_line():
    error = raised(broken, torch.ones(1, 3))
    text = str(layer_fault(error, 6, 3, 4, Action.parse("3I2")))
    assert text.startswith(
        "rank 6, pipeline stage 3 of 4, micro-batch 2, action 3I2: a pipeline stage failed: got RuntimeError: mat1"
    )
    assert "test_faults.py, line" in text
    assert "nn.functional.linear(x, torch.ones(2, 7))" in text


def test_without_words_and_without_a_micro_batch():
    text = str(layer_fault(KeyError(), 0, 0, 1, Action.parse("0REDUCE")))
    assert text == "rank 0, pipeline stage 0 of 1, action 0REDUCE: a pipeline stage failed: got KeyError."
