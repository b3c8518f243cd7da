"""The life of an experiment, as a table."""

from __future__ import annotations

import pytest

from zero_trial.master.core.lifecycle import (
    ActivateExperiment,
    CancelExperiment,
    ExperimentEvent,
    KillExperiment,
    PauseExperiment,
    SearchOver,
    Settled,
    step_experiment,
)
from zero_trial.master.records import ExperimentState as S

STORIES: list[tuple[S, ExperimentEvent, S, str]] = [
    (S.ACTIVE, PauseExperiment(), S.PAUSED, "pause_trials"),
    (S.PAUSED, ActivateExperiment(), S.ACTIVE, "start_trials"),
    (S.ACTIVE, ActivateExperiment(), S.ACTIVE, ""),
    (S.PAUSED, PauseExperiment(), S.PAUSED, ""),
    (S.ACTIVE, CancelExperiment(), S.STOPPING_CANCELED, "cancel_trials"),
    (S.PAUSED, CancelExperiment(), S.STOPPING_CANCELED, "cancel_trials"),
    (S.ACTIVE, KillExperiment(), S.STOPPING_KILLED, "kill_trials"),
    (S.STOPPING_CANCELED, KillExperiment(), S.STOPPING_KILLED, "kill_trials"),
    (S.STOPPING_KILLED, CancelExperiment(), S.STOPPING_KILLED, ""),
    (S.ACTIVE, SearchOver(failed=False), S.STOPPING_COMPLETED, ""),
    (S.ACTIVE, SearchOver(failed=True), S.STOPPING_ERROR, ""),
    (S.STOPPING_CANCELED, SearchOver(failed=False), S.STOPPING_CANCELED, ""),
    (S.STOPPING_COMPLETED, CancelExperiment(), S.STOPPING_CANCELED, "cancel_trials"),
    (S.STOPPING_COMPLETED, PauseExperiment(), S.STOPPING_COMPLETED, ""),
    (S.STOPPING_COMPLETED, Settled(), S.COMPLETED, "end"),
    (S.STOPPING_ERROR, Settled(), S.ERROR, "end"),
    (S.STOPPING_CANCELED, Settled(), S.CANCELED, "end"),
    (S.STOPPING_KILLED, Settled(), S.CANCELED, "end"),
    (S.ACTIVE, Settled(), S.ACTIVE, ""),
    (S.PAUSED, Settled(), S.PAUSED, ""),
    (S.COMPLETED, KillExperiment(), S.COMPLETED, ""),
    (S.ERROR, ActivateExperiment(), S.ERROR, ""),
    (S.DELETING, CancelExperiment(), S.DELETING, ""),
]


@pytest.mark.parametrize(("before", "event", "after", "effects"), STORIES, ids=str)
def test_story(before: S, event: ExperimentEvent, after: S, effects: str) -> None:
    state, done = step_experiment(before, event)
    assert (state, " ".join(effect.value for effect in done)) == (after, effects)
