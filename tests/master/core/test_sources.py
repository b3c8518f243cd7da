"""What somebody will start from is neither deleted nor collected; what is gone is not started from."""

from __future__ import annotations

import pytest

from tests.master.core.test_checkpoints import save
from tests.master.fakes import Sandbox
from zero_trial.master.core.sources import needed, source_of
from zero_trial.master.errors import Conflict, Invalid

FORK = {"name": "single", "metric": "val"}


def finished(master: Sandbox) -> str:
    """An ended experiment 1 with a checkpoint, whose name is returned."""
    master.create()
    name = save(master, 1, 3)
    master.exit(1)
    return name


@pytest.mark.parametrize("by", ["source_checkpoint_uuid", "source_trial_id"])
def test_an_experiment_that_a_waiting_fork_starts_from_is_not_deleted(master: Sandbox, by: str) -> None:
    name = finished(master)
    fork = master.create(searcher={**FORK, by: name if by == "source_checkpoint_uuid" else 1}, activate=False)
    with pytest.raises(Conflict, match=f"experiment {fork.id} starts from checkpoint {name}"):
        master.experiments.delete(1)
    with pytest.raises(Conflict, match="starts from"):
        master.checkpoints.delete([name])
    with pytest.raises(Conflict, match="starts from"):
        master.checkpoints.remove_files([name], ["weights"])
    master.experiments.kill(fork.id)
    master.experiments.delete(1)
    master.garbage_collector.work()
    assert [item.id for item in master.experiments.all()] == [fork.id]


def test_a_search_needs_its_source_for_the_trials_that_it_has_not_made(master: Sandbox) -> None:
    name = finished(master)
    space = {"a": {"type": "categorical", "vals": [1, 2]}}
    searcher = {"name": "grid", "metric": "val", "max_concurrent_trials": 1, "source_checkpoint_uuid": name}
    made = master.create(searcher=searcher, hyperparameters=space)
    with master.state.database.reading() as connection:
        assert needed(connection) == {name: made.id}
    master.exit(2)  # the first of two
    with pytest.raises(Conflict):
        master.experiments.delete(1)
    master.exit(3)
    with master.state.database.reading() as connection:
        assert needed(connection) == {}
    master.experiments.delete(1)


def test_its_own_checkpoints_keep_nobody_from_deleting_an_experiment(master: Sandbox) -> None:
    finished(master)
    master.experiments.delete(1)
    master.garbage_collector.work()
    assert master.experiments.all() == []


def test_a_source_that_is_gone_is_refused(master: Sandbox) -> None:
    name = finished(master)
    folder = master.directory.storage / name
    assert folder.exists()
    master.checkpoints.delete([name])
    master.garbage_collector.work()
    assert not folder.exists()
    with pytest.raises(Invalid, match="DELETED"):
        master.create(searcher={**FORK, "source_checkpoint_uuid": name})
    with pytest.raises(Invalid, match="no checkpoint to start from"):
        master.create(searcher={**FORK, "source_trial_id": 1})


def test_where_new_trials_start(master: Sandbox) -> None:
    name = finished(master)
    with master.state.database.reading() as connection:
        assert source_of(connection, {"searcher": {"source_checkpoint_uuid": "u", "source_trial_id": 1}}) == "u"
        assert source_of(connection, {"searcher": {"source_trial_id": 1}}) == name
        assert source_of(connection, {"searcher": {}}) is source_of(connection, {}) is None
