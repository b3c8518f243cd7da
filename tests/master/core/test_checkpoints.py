"""Checkpoints: reports, deletion, the garbage collector and its policy, and what trials start
from."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.master.fakes import Sandbox
from zero_trial.errors import ZeroTrialError
from zero_trial.master.agent import storage
from zero_trial.master.core import checkpoints as checkpoint_service
from zero_trial.master.core.checkpoints import superfluous
from zero_trial.master.records import Checkpoint, CheckpointState, Conflict, GcPolicy, Invalid, NotFound
from zero_trial.master.store import checkpoint_rows


def save(master: Sandbox, trial_id: int, steps: int, files: tuple[str, ...] = ("weights", "metadata.json")) -> str:
    """What the harness does: files on disk, then a report."""
    name = str(uuid.uuid4())
    folder = base(master, trial_id) / name
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_text("x" * 10)
    master.clock.now += 1
    master.checkpoints.report(sent(master, trial_id, name, steps, dict.fromkeys(files, 10)))
    return name


def sent(
    master: Sandbox, trial_id: int, name: str, steps: object = 1, resources: Mapping[str, int] | None = None
) -> Checkpoint:
    """The report of a checkpoint of the trial's run."""
    run, metadata = master.run_of(trial_id).allocation, {"steps_completed": steps}
    state = CheckpointState.COMPLETED
    return Checkpoint(name, state, None, None, run.task_id, run.id, 0.0, metadata, dict(resources or {}))


def base(master: Sandbox, trial_id: int) -> Path:
    return Path(master.run_of(trial_id).config["checkpoint_storage"]["host_path"])


def test_a_reported_checkpoint_is_the_trials_newest(master: Sandbox) -> None:
    master.create()
    first, second = save(master, 1, 1), save(master, 1, 2)
    found = master.checkpoints.get(second)
    assert (found.trial_id, found.experiment_id, found.steps_completed, found.size) == (1, 1, 2, 20)
    assert found.hparams == {"a": 1} and found.experiment_config["name"] == "test"
    assert master.trials.get(1).latest_checkpoint == second
    assert [item.uuid for item in master.state.read(checkpoint_rows.of_trial, 1)] == [first, second]
    assert master.checkpoints.directory(second) == base(master, 1) / second
    failed = replace(sent(master, 1, str(uuid.uuid4()), 3), state=CheckpointState.ERROR)
    master.checkpoints.report(failed)
    assert master.trials.get(1).latest_checkpoint == second


def test_one_of_another_trial_is_not_overwritten_and_an_unknown_one_deletes_nothing(master: Sandbox) -> None:
    master.create()
    master.create()
    name = save(master, 1, 1)
    save(master, 1, 2)
    with pytest.raises(Conflict):
        master.checkpoints.report(sent(master, 2, name))
    with pytest.raises(NotFound):
        master.checkpoints.delete([name, str(uuid.uuid4())])
    master.garbage_collector.collect()
    assert (base(master, 1) / name).exists()


def test_the_one_that_a_living_trial_goes_on_from_is_not_deleted(master: Sandbox) -> None:
    """Nor does any of its files go, and no pattern leaves the checkpoint."""
    master.create()
    old, new = save(master, 1, 1), save(master, 1, 2)
    folder = base(master, 1)
    for act in (
        lambda: master.checkpoints.delete([new]),
        lambda: master.checkpoints.remove_files([old, new], ["weights"]),
        lambda: master.checkpoints.remove_files([old, new], ["**/*"]),
    ):
        with pytest.raises(Conflict):
            act()
    for glob in ("", " ", "../*", "a/../b"):
        with pytest.raises(Invalid, match="checkpointGlobs"):
            master.checkpoints.remove_files([old], ["weights", glob])
    assert all((folder / name / "weights").exists() for name in (old, new))
    assert master.checkpoints.get(old).state is CheckpointState.COMPLETED
    master.checkpoints.remove_files([old], ["weights"])
    assert not (folder / old / "weights").exists()
    for found in (master.experiments.get(1), master.trials.get(1)):  # what is partly deleted counts with what is left
        assert (found.checkpoint_count, found.checkpoint_size) == (2, 30)
    master.checkpoints.delete([old])
    master.garbage_collector.collect()
    assert master.checkpoints.get(old).state is CheckpointState.DELETED
    assert not (folder / old).exists() and (folder / new).exists()


def test_without_a_pattern_only_the_sizes_are_read_again(master: Sandbox) -> None:
    """Also of the checkpoint that a living trial goes on from."""
    master.create()
    name = save(master, 1, 1)
    before = master.checkpoints.get(name)
    master.checkpoints.remove_files([name], [])
    master.garbage_collector.collect()
    assert master.checkpoints.get(name) == before and (base(master, 1) / name / "weights").exists()
    (base(master, 1) / name / "weights").write_bytes(b"12345")
    master.checkpoints.remove_files([name], [])
    found = master.checkpoints.get(name)
    assert (found.state, found.resources["weights"]) == (CheckpointState.PARTIALLY_DELETED, 5)


@pytest.mark.parametrize(
    ("globs", "state", "left"),
    [
        (["*.onnx"], "COMPLETED", {"weights", "deep/", "deep/state.bin"}),
        (["*.bin"], "COMPLETED", {"weights", "deep/", "deep/state.bin"}),
        (["deep"], "PARTIALLY_DELETED", {"weights"}),
        (["**/*.bin"], "PARTIALLY_DELETED", {"weights", "deep/"}),
        (["*"], "DELETED", {"weights", "deep/", "deep/state.bin"}),
        (["**/*", "x"], "DELETED", {"weights", "deep/", "deep/state.bin"}),
    ],
)
def test_a_checkpoint_says_what_a_glob_has_left(master: Sandbox, globs: list[str], state: str, left: set[str]) -> None:
    """Folders are listed as the harness lists them; a deleted checkpoint still shows its files."""
    master.create()
    name = str(uuid.uuid4())
    folder = base(master, 1) / name
    (folder / "deep").mkdir(parents=True)
    (folder / "weights").write_text("12345")
    (folder / "deep" / "state.bin").write_text("123")
    master.checkpoints.report(sent(master, 1, name, 1, storage.contents(folder)))
    save(master, 1, 2)
    master.checkpoints.remove_files([name], globs)
    master.garbage_collector.collect()
    found = master.checkpoints.get(name)
    assert (found.state.value, set(found.resources)) == (state, left)
    assert folder.exists() == (state != "DELETED")


@pytest.mark.parametrize("globs", [[], ["weights"]])
def test_files_that_cannot_be_read_are_not_taken_for_deleted(
    master: Sandbox, monkeypatch: pytest.MonkeyPatch, globs: list[str]
) -> None:
    master.create()
    name = save(master, 1, 1)
    save(master, 1, 2)

    def stale(*_: object) -> dict[str, int]:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(storage, "folder_of", stale)
        with pytest.raises(ZeroTrialError, match=f"files of checkpoint {name} cannot be read"):
            master.checkpoints.remove_files([name], globs)
    base(master, 1).rename(base(master, 1).with_name("elsewhere"))
    with pytest.raises(NotFound, match="storage of checkpoint"):
        master.checkpoints.remove_files([name], globs)
    assert master.checkpoints.get(name).state is CheckpointState.COMPLETED


def test_a_checkpoint_is_no_source_any_more_before_its_first_file_goes(
    master: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    master.create()
    name = save(master, 1, 1)
    save(master, 1, 2)
    seen: list[CheckpointState] = []

    def watched(*_: object) -> None:
        seen.append(master.checkpoints.get(name).state)

    monkeypatch.setattr("zero_trial.master.agent.storage.delete_matching", watched)
    master.checkpoints.remove_files([name], ["weights"])
    assert seen == [CheckpointState.PARTIALLY_DELETED]


def test_a_deletion_that_fails_leaves_the_later_checkpoints_as_they_were(
    master: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses the second of three: the first is done, the third untouched, and the command
    can be repeated."""
    master.create()
    first, second, third = (save(master, 1, steps, files=("a.bin", "b.bin", "weights")) for steps in (1, 2, 3))
    save(master, 1, 4)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == second and path.name == "b.bin":
            raise PermissionError("no")
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(ZeroTrialError, match=second):
            master.checkpoints.remove_files([first, second, third], ["*.bin"])
    gone, part, whole = (master.checkpoints.get(name) for name in (first, second, third))
    assert (gone.state, set(gone.resources)) == (CheckpointState.PARTIALLY_DELETED, {"weights"})
    left = {path.name for path in (base(master, 1) / second).iterdir()}
    assert (part.state, set(part.resources)) == (CheckpointState.PARTIALLY_DELETED, left)
    assert (whole.state, set(whole.resources)) == (CheckpointState.COMPLETED, {"a.bin", "b.bin", "weights"})
    master.checkpoints.remove_files([first, second, third], ["*.bin"])
    assert {tuple(master.checkpoints.get(name).resources) for name in (first, second, third)} == {("weights",)}


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
    master.garbage_collector.collect()
    with pytest.raises(NotFound):
        master.experiments.get(first.id)
    assert not (folder / mine).exists() and (folder / other).exists() and not board.exists()
    assert not master.directory.trial_logs(1).exists()


def test_a_deletion_that_was_begun_or_failed_is_finished_by_the_next_master(
    master: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        raise PermissionError("no room")

    made = master.create()
    folder, name = base(master, 1), save(master, 1, 1)
    master.exit(1)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "delete", refuse)
        master.experiments.delete(made.id)
        master.garbage_collector.collect()
    failed = master.experiments.get(made.id)
    assert failed.state.value == "DELETE_FAILED" and "no room" in failed.error
    master.experiments.delete(made.id)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(storage, "delete_tensorboard", crash)
        with pytest.raises(KeyboardInterrupt):
            master.garbage_collector.collect()
    master.restart()
    master.garbage_collector.collect()
    assert not (folder / name).exists() and not list(master.experiments.all())


def test_what_could_not_be_deleted_is_tried_again(master: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk refuses at first; nothing else happens in the master before the collector's next
    look."""
    master.create()
    name = save(master, 1, 1)
    save(master, 1, 2)
    folder, delete = base(master, 1) / name, storage.delete

    def refuse(base: Path, name: str) -> bool:
        (folder / "weights").unlink()
        raise PermissionError("no")

    monkeypatch.setattr(storage, "delete", refuse)
    master.checkpoints.delete([name])
    master.garbage_collector.collect()
    found = master.checkpoints.get(name)
    assert (found.state, found.resources, found.size) == (CheckpointState.PARTIALLY_DELETED, {"metadata.json": 10}, 10)
    monkeypatch.setattr(storage, "delete", delete)
    monkeypatch.setattr("zero_trial.master.core.checkpoints._RETRY_SECONDS", 0.01)
    master.state.has_garbage.clear()
    master.garbage_collector.start()
    for _ in range(200):
        if master.checkpoints.get(name).state is CheckpointState.DELETED:
            break
        master.state.closed.wait(0.01)
    master.garbage_collector.close()
    assert master.checkpoints.get(name).state is CheckpointState.DELETED and not folder.exists()


def test_storage_that_cannot_be_read_does_not_keep_other_deletions(
    master: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for number in (1, 2, 3):
        master.create()
        names.append(save(master, number, 1))
        master.exit(number)
    dead, fine, _ = names
    folder_of, policy_of = storage.folder_of, checkpoint_service.policy_of

    def stale(base: Path, name: str) -> Path | None:
        if name == dead:
            raise OSError(errno.ESTALE, "Stale file handle")
        return folder_of(base, name)

    def broken(config: Mapping[str, Any]) -> GcPolicy:
        monkeypatch.setattr(checkpoint_service, "policy_of", policy_of)  # once
        raise KeyError("a bug")

    monkeypatch.setattr(storage, "folder_of", stale)
    monkeypatch.setattr(checkpoint_service, "policy_of", broken)
    master.checkpoints.delete([dead])
    master.checkpoints.delete([fine])
    master.experiments.delete(3)
    master.garbage_collector.collect()
    found = master.checkpoints.get(dead)
    assert (found.state, set(found.resources)) == (CheckpointState.PARTIALLY_DELETED, {"weights", "metadata.json"})
    assert master.checkpoints.get(fine).state is CheckpointState.DELETED
    assert [path.name for path in master.directory.storage.iterdir()] == [dead]
    assert [item.id for item in master.experiments.all()] == [1, 2]
    monkeypatch.setattr(storage, "folder_of", folder_of)
    master.garbage_collector.collect()
    assert master.checkpoints.get(dead).state is CheckpointState.DELETED


def test_what_a_fork_starts_from_is_kept_until_the_fork_has_ended(master: Sandbox) -> None:
    none = {"save_trial_latest": 0, "save_trial_best": 0}
    master.create(checkpoint_storage={"type": "shared_fs", "host_path": str(master.directory.storage), **none})
    folder, name = base(master, 1), save(master, 1, 1)
    master.create(searcher={"name": "single", "metric": "val", "source_checkpoint_uuid": name})
    master.exit(1)
    master.garbage_collector.collect()
    assert (folder / name).exists()


def test_checkpoints_elsewhere_are_left_alone(master: Sandbox) -> None:
    master.create(checkpoint_storage={"type": "s3", "bucket": "b", "save_trial_latest": 0, "save_trial_best": 0})
    name = str(uuid.uuid4())
    master.checkpoints.report(sent(master, 1, name, 1, {"w": 1}))
    master.exit(1)
    master.garbage_collector.collect()
    assert master.checkpoints.get(name).state is CheckpointState.COMPLETED


def saved(
    name: str, trial: int, steps: int, metric: float | None, state: CheckpointState = CheckpointState.COMPLETED
) -> Checkpoint:
    return Checkpoint(
        name, state, trial, 1, "t", "t.1", float(steps), {}, {}, steps_completed=steps, searcher_metric=metric
    )


THERE = [
    saved("a1", 1, 1, 0.5),
    saved("a2", 1, 2, 0.3),
    saved("a3", 1, 3, 0.4),
    saved("b1", 2, 1, 0.1),
    saved("b2", 2, 2, 0.9),
    saved("b3", 2, 3, None),
]


@pytest.mark.parametrize(
    ("policy", "smaller", "kept"),
    [
        ((0, 0, 0), True, ""),
        ((1, 0, 0), True, "b1"),
        ((2, 0, 0), True, "a2 b1"),
        ((1, 0, 0), False, "b2"),
        ((0, 1, 0), True, "a2 b1"),
        ((0, 1, 0), False, "a1 b2"),
        ((0, 0, 1), True, "a3 b3"),
        ((0, 1, 1), True, "a2 a3 b1 b3"),
        ((0, 9, 0), True, "a1 a2 a3 b1 b2"),
        ((9, 0, 9), True, "a1 a2 a3 b1 b2 b3"),
    ],
)
def test_policies(policy: tuple[int, int, int], smaller: bool, kept: str) -> None:
    gone = {item.uuid for item in superfluous(THERE, GcPolicy(*policy), smaller_is_better=smaller)}
    assert sorted({item.uuid for item in THERE} - gone) == kept.split()


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
    master.garbage_collector.collect()
    assert [item.id for item in master.experiments.all()] == [fork.id]


def test_a_search_needs_its_source_for_the_trials_that_it_has_not_made(master: Sandbox) -> None:
    name = finished(master)
    space = {"a": {"type": "categorical", "vals": [1, 2]}}
    searcher = {"name": "grid", "metric": "val", "max_concurrent_trials": 1, "source_checkpoint_uuid": name}
    made = master.create(searcher=searcher, hyperparameters=space)
    with master.state.database.reading() as connection:
        assert checkpoint_rows.sources_in_use(connection) == {name: made.id}
    master.exit(2)  # the first of two
    with pytest.raises(Conflict):
        master.experiments.delete(1)
    master.exit(3)
    with master.state.database.reading() as connection:
        assert checkpoint_rows.sources_in_use(connection) == {}
    master.experiments.delete(1)


def test_a_source_that_is_gone_is_refused(master: Sandbox) -> None:
    name = finished(master)
    folder = master.directory.storage / name
    assert folder.exists()
    master.checkpoints.delete([name])
    master.garbage_collector.collect()
    assert not folder.exists()
    with pytest.raises(Invalid, match="DELETED"):
        master.create(searcher={**FORK, "source_checkpoint_uuid": name})
    with pytest.raises(Invalid, match="no checkpoint to start from"):
        master.create(searcher={**FORK, "source_trial_id": 1})


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
