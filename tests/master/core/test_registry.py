"""The model registry: what happens to checkpoints that are versions of models."""

from __future__ import annotations

import pytest

from tests.master.core.test_checkpoints import save
from tests.master.fakes import Sandbox
from zero_trial.master.records import Conflict, GcPolicy, Invalid


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
