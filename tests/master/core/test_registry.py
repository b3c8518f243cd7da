"""The model registry: what happens to checkpoints that are versions of models."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.master.fakes import Sandbox
from zero_trial.master.records import Checkpoint, CheckpointState, Conflict, GcPolicy, Invalid


def save(master: Sandbox, trial_id: int, steps: int) -> str:
    """A file on the disk, and a report of it."""
    order, name = master.run_of(trial_id), str(uuid.uuid4())
    folder = Path(order.config["checkpoint_storage"]["host_path"]) / name
    folder.mkdir(parents=True)
    (folder / "weights").write_text("x" * 10)
    master.clock.now += 1
    state, metadata = CheckpointState.COMPLETED, {"steps_completed": steps}
    run = order.allocation
    master.checkpoints.report(
        Checkpoint(name, state, None, None, run.task_id, run.id, 0.0, metadata, resources={"weights": 10})
    )
    return name


def test_a_registered_checkpoint_outlives_the_policy_and_keeps_its_experiment(master: Sandbox) -> None:
    owner = master.add_user("determined", admin=True)
    master.create(checkpoint_storage={"save_trial_best": 0, "save_trial_latest": 1})
    first, second, last = (save(master, 1, steps) for steps in (1, 2, 3))
    folder = master.checkpoints.directory(last).parent
    master.registry.create({"name": "gpt"}, owner, 1)
    master.registry.register("gpt", first, {}, owner)
    assert {item.uuid for item in master.experiments.preview_gc(1, GcPolicy(0, 0, 1))} == {second}
    master.exit(1)
    master.garbage_collector.collect()
    assert {path.name for path in folder.iterdir()} == {first, last}
    with pytest.raises(Invalid):
        master.experiments.delete(1)
    master.registry.delete_version("gpt", 1, owner)
    master.experiments.delete(1)
    with pytest.raises(Conflict):  # its files go: a version of it would be of nothing
        master.registry.register("gpt", last, {}, owner)
    master.garbage_collector.collect()
    assert not folder.exists() or not any(folder.iterdir())
