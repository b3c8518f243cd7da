"""The user's class, seeds and callbacks."""

from __future__ import annotations

import inspect
import random
import sys
from typing import Any

import pytest
import torch

from tests.trial.harness import LineTrial
from zero_trial.trial import Reducer, TrialCallback, ZeroTrial
from zero_trial.trial.trial import overrides, seed_everything


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


def draw() -> list[float]:
    numpy = sys.modules.get("numpy")
    return [random.random(), torch.rand(()).item(), *([float(numpy.random.rand())] if numpy else [])]


def test_the_same_seed_the_same_numbers() -> None:
    seed_everything(5)
    first = draw()
    seed_everything(5)
    assert draw() == first
    seed_everything(6)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_a_callback_that_overrides_nothing_does_nothing() -> None:
    callback = TrialCallback()
    assert callback.state_dict() == {}
    callback.on_trial_startup(0, None)
    callback.on_training_workload_end({}, [])
    callback.on_checkpoint_load_start(None)
    callback.load_state_dict({})


def test_every_hook_is_one_of_determineds_with_its_arguments() -> None:
    pytest.importorskip("determined", reason="determined is an extra")
    pytest.importorskip("determined.pytorch")
    from determined.pytorch import PyTorchCallback

    for name, hook in inspect.getmembers(TrialCallback, inspect.isfunction):
        theirs = getattr(PyTorchCallback, name)
        assert list(inspect.signature(hook).parameters) == list(inspect.signature(theirs).parameters), name
