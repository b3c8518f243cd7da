"""What is to go, goes; and goes on going after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.master.core.test_checkpoints import base, save
from tests.master.fakes import Sandbox
from zero_trial.master.agent import storage
from zero_trial.master.errors import Conflict, NotFound


def test_an_experiment_is_deleted_with_all_that_is_its_own(master: Sandbox) -> None:
    first = master.create()
    folder = base(master, 1)
    mine = save(master, 1, 1)
    board = folder / master.state.info.cluster_id / "tensorboard" / "experiment" / str(first.id)
    board.mkdir(parents=True)
    master.exit(1)
    second = master.create()
    other = save(master, 2, 1)
    with pytest.raises(Conflict):
        master.experiments.delete(second.id)
    master.experiments.delete(first.id)
    assert master.states(first.id)[0] == "DELETING"
    master.garbage_collector.work()
    with pytest.raises(NotFound):
        master.experiments.get(first.id)
    assert not (folder / mine).exists() and (folder / other).exists() and not board.exists()
    assert not master.directory.trial_logs(1).exists()


def test_a_deletion_that_was_begun_is_finished_by_the_next_master(
    master: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = master.create()
    folder, name = base(master, 1), save(master, 1, 1)
    master.exit(1)
    master.experiments.delete(made.id)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(storage, "delete_tensorboard", crash)
        with pytest.raises(KeyboardInterrupt):
            master.garbage_collector.work()
    master.restart()
    master.garbage_collector.work()
    assert not (folder / name).exists() and master.experiments.all() == []


def test_what_cannot_be_deleted_is_said(master: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    made = master.create()
    save(master, 1, 1)
    master.exit(1)

    def refuse(base: Path, name: str) -> bool:
        raise PermissionError("no")

    monkeypatch.setattr(storage, "delete", refuse)
    master.experiments.delete(made.id)
    master.garbage_collector.work()
    found = master.experiments.get(made.id)
    assert found.state.value == "DELETE_FAILED" and "no" in found.error


def test_what_a_fork_starts_from_is_kept_until_the_fork_has_ended(master: Sandbox) -> None:
    master.create(
        checkpoint_storage={
            "type": "shared_fs",
            "host_path": str(master.directory.storage),
            "save_trial_latest": 0,
            "save_trial_best": 0,
        }
    )
    folder, name = base(master, 1), save(master, 1, 1)
    master.create(searcher={"name": "single", "metric": "val", "source_checkpoint_uuid": name})
    master.exit(1)
    master.garbage_collector.work()
    assert (folder / name).exists()


def test_checkpoints_elsewhere_are_left_alone(master: Sandbox) -> None:
    from zero_trial.master.records import Checkpoint, CheckpointState

    master.create(checkpoint_storage={"type": "s3", "bucket": "b", "save_trial_latest": 0, "save_trial_best": 0})
    run = master.run_of(1).allocation
    name = "0b0b0b0b-0000-4000-8000-000000000000"
    master.checkpoints.report(
        Checkpoint(name, CheckpointState.COMPLETED, None, None, run.task_id, run.id, 0.0, {}, {"w": 1})
    )
    master.exit(1)
    master.garbage_collector.work()
    assert master.checkpoints.get(name).state is CheckpointState.COMPLETED


def test_it_works_in_a_thread_of_its_own(master: Sandbox) -> None:
    made = master.create()
    master.exit(1)
    master.garbage_collector.start()
    master.experiments.delete(made.id)
    for _ in range(200):
        if not master.experiments.all():
            break
        master.state.has_garbage.set()
        master.state.closed.wait(0.02)
    master.garbage_collector.close()
    assert master.experiments.all() == []
