"""One change: what follows from an event, all of it or nothing."""

from __future__ import annotations

import pytest

from tests.master.fakes import Master
from zero_trial.master.store import trials


def test_a_single_trial_from_creation_to_completion(master: Master) -> None:
    made = master.create()
    order = master.run_of(1)
    assert order.allocation.slots == (0,) and order.hparams == {"a": 1} and order.token
    assert (order.steps_completed, order.latest_checkpoint, order.allocation.run_id) == (0, None, 1)
    master.validate(1, 0.5)
    master.exit(1)
    assert master.states(made.id) == ("COMPLETED", ["COMPLETED"])
    assert master.cluster.experiments.get(made.id).best_metric == 0.5


def test_a_crash_is_tried_again_and_then_an_error(master: Master) -> None:
    made = master.create(max_restarts=2)
    for run in (1, 2, 3):
        assert master.run_of(1).allocation.run_id == run
        master.exit(1, code=3)
    assert master.states(made.id) == ("ERROR", ["ERROR"])
    assert master.cluster.trials.get(1).restarts == 2
    assert "exit code 3" in master.cluster.trials.get(1).reason
    assert "exit code 3" in master.cluster.experiments.get(made.id).error


def test_a_change_that_fails_changes_nothing(master: Master) -> None:
    made = master.create()
    with pytest.raises(RuntimeError), master.hub.change() as change:
        trials.change(change.connection, 1, reason="half")
        raise RuntimeError("in the middle")
    assert master.cluster.trials.get(1).reason == ""
    assert master.states(made.id) == ("ACTIVE", ["ACTIVE"])
