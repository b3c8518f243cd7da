"""States: which are the end, which lead to it."""

from __future__ import annotations

from zero_trial.master.records import ExperimentState, TrialState


def test_states() -> None:
    final = {"COMPLETED", "CANCELED", "ERROR"}
    assert {state.value for state in TrialState if state.final} == final
    assert {state.value for state in ExperimentState if state.final} == {*final, "DELETING", "DELETE_FAILED"}
    for states in (TrialState, ExperimentState):
        stopping = {state.value for state in states if state.stopping}
        assert stopping == {"STOPPING_COMPLETED", "STOPPING_CANCELED", "STOPPING_KILLED", "STOPPING_ERROR"}
        assert not any(state.final and state.stopping for state in states)
