"""Checkpoints: reported, kept, deleted."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.master.fakes import Sandbox
from zero_trial.master.errors import Conflict, Invalid, NotFound, Unsupported
from zero_trial.master.records import Checkpoint, CheckpointState


def save(master: Sandbox, trial_id: int, steps: int, files: tuple[str, ...] = ("weights", "metadata.json")) -> str:
    """What the harness does: files on disk, then a report."""
    run = master.run_of(trial_id).allocation
    name = str(uuid.uuid4())
    folder = base(master, trial_id) / name
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_text("x" * 10)
    master.clock.now += 1
    master.checkpoints.report(
        Checkpoint(
            uuid=name,
            state=CheckpointState.COMPLETED,
            trial_id=None,
            experiment_id=None,
            task_id=run.task_id,
            allocation_id=run.id,
            reported=0.0,
            metadata={"steps_completed": steps},
            resources=dict.fromkeys(files, 10),
        )
    )
    return name


def base(master: Sandbox, trial_id: int) -> Path:
    return Path(master.run_of(trial_id).config["checkpoint_storage"]["host_path"])


def test_a_reported_checkpoint_is_the_trials_newest(master: Sandbox) -> None:
    master.create()
    first, second = save(master, 1, 1), save(master, 1, 2)
    found = master.checkpoints.get(second)
    assert (found.trial_id, found.experiment_id, found.steps_completed, found.size) == (1, 1, 2, 20)
    assert found.hparams == {"a": 1} and found.experiment_config["name"] == "test"
    assert master.trials.get(1).latest_checkpoint == second
    assert [item.uuid for item in master.trials.checkpoints(1)] == [first, second]
    assert master.checkpoints.directory(second) == base(master, 1) / second


def test_the_validation_at_its_step_is_shown_with_it(master: Sandbox) -> None:
    master.create()
    name = save(master, 1, 4)
    master.validate(1, 0.25, batches=4)
    found = master.checkpoints.get(name)
    assert found.searcher_metric == 0.25 and found.validation_metrics["batches"] == 4


def test_one_of_another_trial_is_not_overwritten(master: Sandbox) -> None:
    master.create()
    master.create()
    name = save(master, 1, 1)
    run = master.run_of(2).allocation
    with pytest.raises(Conflict):
        master.checkpoints.report(
            Checkpoint(name, CheckpointState.COMPLETED, None, None, run.task_id, run.id, 0.0, {}, {})
        )


def test_the_one_that_a_living_trial_goes_on_from_is_not_deleted(master: Sandbox) -> None:
    master.create()
    old, new = save(master, 1, 1), save(master, 1, 2)
    with pytest.raises(Conflict):
        master.checkpoints.delete([new])
    master.checkpoints.delete([old])
    master.garbage_collector.work()
    assert master.checkpoints.get(old).state is CheckpointState.DELETED
    assert not (base(master, 1) / old).exists() and (base(master, 1) / new).exists()


def test_an_unknown_one_deletes_nothing_of_the_others(master: Sandbox) -> None:
    master.create()
    name = save(master, 1, 1)
    save(master, 1, 2)
    with pytest.raises(NotFound):
        master.checkpoints.delete([name, str(uuid.uuid4())])
    master.garbage_collector.work()
    assert (base(master, 1) / name).exists()


def test_files_that_match_are_removed(master: Sandbox) -> None:
    master.create()
    name = save(master, 1, 1, files=("weights", "optimizer.bin", "metadata.json"))
    save(master, 1, 2)
    master.checkpoints.remove_files([name], ["*.bin"])
    found = master.checkpoints.get(name)
    assert found.state is CheckpointState.PARTIALLY_DELETED and set(found.resources) == {"weights", "metadata.json"}
    assert not (base(master, 1) / name / "optimizer.bin").exists()


def test_what_the_harness_deleted_is_noted(master: Sandbox) -> None:
    master.create()
    name = save(master, 1, 1)
    master.checkpoints.patch_resources(name, {"weights": 10})
    assert master.checkpoints.get(name).state is CheckpointState.PARTIALLY_DELETED
    master.checkpoints.patch_resources(name, {})
    assert master.checkpoints.get(name).state is CheckpointState.DELETED


def test_storage_elsewhere_has_no_folder(master: Sandbox) -> None:
    master.create(checkpoint_storage={"type": "s3", "bucket": "b"})
    run = master.run_of(1).allocation
    name = str(uuid.uuid4())
    master.checkpoints.report(Checkpoint(name, CheckpointState.COMPLETED, None, None, run.task_id, run.id, 0.0, {}, {}))
    with pytest.raises(Unsupported):
        master.checkpoints.directory(name)


@pytest.mark.parametrize(
    ("steps", "size"), [("many", 1), ([3], 1), (1e400, 1), (-1, 1), (10**30, 1), (1, 1 << 63), (1, -1)]
)
def test_numbers_that_cannot_be_are_refused(master: Sandbox, steps: object, size: int) -> None:
    master.create()
    run = master.run_of(1).allocation
    told = Checkpoint(
        uuid=str(uuid.uuid4()),
        state=CheckpointState.COMPLETED,
        trial_id=None,
        experiment_id=None,
        task_id=run.task_id,
        allocation_id=run.id,
        reported=0.0,
        metadata={"steps_completed": steps},
        resources={"weights": size},
    )
    with pytest.raises(Invalid, match="whole number"):
        master.checkpoints.report(told)
    assert master.trials.get(1).latest_checkpoint is None


def test_no_file_goes_of_what_a_living_trial_resumes_from(master: Sandbox) -> None:
    master.create()
    old, new = save(master, 1, 1), save(master, 1, 2)
    for globs in (["weights"], ["**/*"], []):
        with pytest.raises(Conflict):
            master.checkpoints.remove_files([old, new], globs)
    assert all((base(master, 1) / name / "weights").exists() for name in (old, new))
    assert master.checkpoints.get(old).state is CheckpointState.COMPLETED
    master.checkpoints.remove_files([old], ["weights"])
    assert not (base(master, 1) / old / "weights").exists()


def test_a_checkpoint_is_no_source_any_more_before_its_first_file_goes(
    master: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    master.create()
    name = save(master, 1, 1)
    save(master, 1, 2)
    seen: list[CheckpointState] = []

    def watched(*_: object) -> dict[str, int]:
        seen.append(master.checkpoints.get(name).state)
        return {}

    monkeypatch.setattr("zero_trial.master.agent.storage.delete_matching", watched)
    master.checkpoints.remove_files([name], ["weights"])
    assert seen == [CheckpointState.PARTIALLY_DELETED]


@pytest.mark.parametrize("name", ["", "x", "../" * 20, "weights\x1b[2J", "12345678123456781234567812345678", " " * 36])
def test_a_name_that_is_no_uuid_is_refused(master: Sandbox, name: str) -> None:
    master.create()
    run = master.run_of(1).allocation
    told = Checkpoint(name, CheckpointState.COMPLETED, None, None, run.task_id, run.id, 0.0, {}, {})
    with pytest.raises(Invalid, match="not a UUID"):
        master.checkpoints.report(told)
    assert master.trials.get(1).latest_checkpoint is None
