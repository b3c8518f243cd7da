"""What a trial may ask about its experiment."""

from __future__ import annotations

import pytest

from tests.trial.fake_engine import fake_factory
from zero_trial.errors import ConfigError
from zero_trial.runtime.in_memory import InMemoryPlatform
from zero_trial.trial.context import ZeroTrialContext


def test_the_platform_answers() -> None:
    around = InMemoryPlatform(
        hparams={"lr": 0.1, "model": {"width": 8}},
        experiment={"data": {"source": "text"}, "name": "e"},
        seed=7,
        trial_id="t",
        experiment_id="x",
        steps_completed=3,
    )
    view = ZeroTrialContext(around, fake_factory())
    assert view.get_hparam("lr") == 0.1 and view.get_hparams().model.width == 8
    assert view.get_data_config() == {"source": "text"} and view.get_experiment_config()["name"] == "e"
    assert (view.get_trial_id(), view.get_experiment_id(), view.get_trial_seed(), view.get_initial_batch()) == (
        "t",
        "x",
        7,
        3,
    )
    with pytest.raises(
        ConfigError, match=r"hyperparameters.width: no such hyperparameter: expected one of \['lr', 'model'\]"
    ):
        view.get_hparam("width")
    view.note("hello")
    assert around.record.events == [{"kind": "note", "message": "hello"}]
