"""The user's class: what it must have, and what it has already."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trial.harness import LineTrial
from zero_trial.trial import Reducer, ZeroTrial
from zero_trial.trial.trial import overrides


class Least(ZeroTrial):
    """Only what is required."""

    def __init__(self) -> None:
        pass

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        return 0.0

    def build_training_data_loader(self) -> Any:
        return []


def test_two_methods_are_required() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ZeroTrial(None)  # type: ignore[abstract,arg-type]
    trial = Least()
    assert trial.evaluation_reducer() is Reducer.AVG and trial.build_callbacks() == {} and trial.summary() == {}
    assert trial.build_validation_data_loader() is None and trial.tokens_per_sample is None


def test_samples_in_a_batch() -> None:
    batch = torch.zeros(5, 3)
    for nested in (batch, [batch, 1], {"x": (batch,)}):
        assert Least().get_batch_length(nested) == 5


def test_whether_a_method_is_the_users_own() -> None:
    line = LineTrial.__new__(LineTrial)
    assert overrides(line, "evaluate_batch") and not overrides(line, "evaluate_full_dataset")
    assert not overrides(Least(), "evaluate_batch")
