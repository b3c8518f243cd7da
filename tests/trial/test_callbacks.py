"""The hooks' names and arguments are a contract: Determined's callbacks work here and ours there."""

from __future__ import annotations

import inspect

import pytest

from zero_trial.trial import TrialCallback


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
