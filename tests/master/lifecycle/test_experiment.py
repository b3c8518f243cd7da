"""The life of an experiment, as a table."""

from __future__ import annotations

import pytest

from zero_trial.master.lifecycle.experiment import Activate, Cancel, Event, Kill, Pause, SearchOver, Settled, step
from zero_trial.master.records import ExperimentState as S

STORIES: list[tuple[S, Event, S, str]] = [
    (S.ACTIVE, Pause(), S.PAUSED, "pause_trials"),
    (S.PAUSED, Activate(), S.ACTIVE, "start_trials"),
    (S.ACTIVE, Activate(), S.ACTIVE, ""),
    (S.PAUSED, Pause(), S.PAUSED, ""),
    (S.ACTIVE, Cancel(), S.STOPPING_CANCELED, "cancel_trials"),
    (S.PAUSED, Cancel(), S.STOPPING_CANCELED, "cancel_trials"),
    (S.ACTIVE, Kill(), S.STOPPING_KILLED, "kill_trials"),
    (S.STOPPING_CANCELED, Kill(), S.STOPPING_KILLED, "kill_trials"),
    (S.STOPPING_KILLED, Cancel(), S.STOPPING_KILLED, ""),
    (S.ACTIVE, SearchOver(failed=False), S.STOPPING_COMPLETED, ""),
    (S.ACTIVE, SearchOver(failed=True), S.STOPPING_ERROR, ""),
    (S.STOPPING_CANCELED, SearchOver(failed=False), S.STOPPING_CANCELED, ""),
    (S.STOPPING_COMPLETED, Cancel(), S.STOPPING_CANCELED, "cancel_trials"),
    (S.STOPPING_COMPLETED, Pause(), S.STOPPING_COMPLETED, ""),
    (S.STOPPING_COMPLETED, Settled(), S.COMPLETED, "end"),
    (S.STOPPING_ERROR, Settled(), S.ERROR, "end"),
    (S.STOPPING_CANCELED, Settled(), S.CANCELED, "end"),
    (S.STOPPING_KILLED, Settled(), S.CANCELED, "end"),
    (S.ACTIVE, Settled(), S.ACTIVE, ""),
    (S.PAUSED, Settled(), S.PAUSED, ""),
    (S.COMPLETED, Kill(), S.COMPLETED, ""),
    (S.ERROR, Activate(), S.ERROR, ""),
    (S.DELETING, Cancel(), S.DELETING, ""),
]


@pytest.mark.parametrize(("before", "event", "after", "effects"), STORIES, ids=str)
def test_story(before: S, event: Event, after: S, effects: str) -> None:
    state, done = step(before, event)
    assert (state, " ".join(effect.value for effect in done)) == (after, effects)
