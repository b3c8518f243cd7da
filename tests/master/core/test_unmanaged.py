"""Unmanaged experiments: trials that report by themselves, and end where they fall silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.master.world import BEGAN, UUID, World, checkpoint
from zero_trial.errors import ZeroTrialError
from zero_trial.master.core.lifecycle import unmanaged_state
from zero_trial.master.core.trials import LOST_SECONDS
from zero_trial.master.records import CheckpointState, Conflict, ExperimentState, Invalid, NotFound, TrialState


@pytest.fixture
def number(world: World) -> int:
    return world.add_unmanaged("mine", checkpoint_storage={"type": "directory", "container_path": "/elsewhere"})


def report(world: World, trial: int, steps: int, loss: float, group: str = "validation") -> None:
    run = world.trials.get(trial).run_id
    values = {"validation_loss": loss}
    world.trials.report_metrics(trial, run_id=run, group=group, steps_completed=steps, metrics=values)


@pytest.mark.parametrize(
    ("trials", "state"),
    [
        ("", "PAUSED"),
        ("CANCELED", "PAUSED"),
        ("PAUSED ERROR", "ERROR"),
        ("ERROR COMPLETED PAUSED", "COMPLETED"),
        ("COMPLETED ACTIVE ERROR", "ACTIVE"),
    ],
)
def test_the_state_of_an_experiment_follows_from_its_trials(trials: str, state: str) -> None:
    assert unmanaged_state([TrialState(name) for name in trials.split()]) is ExperimentState(state)


def test_a_trial_runs_reports_and_completes(world: World, number: int) -> None:
    trial = world.unmanaged.create(number, {"lr": 1})
    assert (trial.state, dict(trial.hparams)) == (TrialState.PAUSED, {"lr": 1})
    assert trial.task_id.startswith(f"{number}.")
    assert world.unmanaged.start(trial.id, resume=True).run_id == 1
    assert (world.trials.get(trial.id).shown_state, world.experiments.get(number).shown_state) == ("RUNNING",) * 2
    report(world, trial.id, 1, 0.5)
    world.trials.report_progress(trial.id, 0.25)
    assert (world.experiments.get(number).progress, world.experiments.get(number).best_metric) == (0.25, 0.5)
    world.clock.now += 10
    world.unmanaged.patch(trial.id, "COMPLETED")
    found = world.experiments.get(number)
    assert (found.state, found.progress, found.ended) == (ExperimentState.COMPLETED, 1.0, BEGAN + 10)
    assert [job.experiment_id for job in world.machine.jobs()] == [1, 2]
    assert world.machine.job(3) is None


def test_what_is_found_again_by_its_name_goes_on(world: World, number: int) -> None:
    trial = world.unmanaged.create(number, {"lr": 1}, "first")
    world.unmanaged.start(trial.id, resume=True)
    for steps in range(3):
        report(world, trial.id, steps, float(steps))
    world.checkpoints.report(
        checkpoint(UUID, 0, 0, allocation_id="", task_id=trial.task_id, metadata={"steps_completed": 1})
    )
    world.unmanaged.patch(trial.id, "ERROR")
    assert world.experiments.get(number).state is ExperimentState.ERROR

    assert world.add_unmanaged("mine", name="renamed") == number
    assert world.experiments.get(number).config["name"] == "renamed"
    assert world.unmanaged.create(number, {"lr": 2}, "first").id == trial.id
    again = world.unmanaged.start(trial.id, resume=True)
    assert (again.run_id, again.latest_checkpoint, again.steps_completed) == (2, UUID, 1)
    assert world.experiments.get(number).ended is None
    report(world, trial.id, 1, 10.0)
    reports = [(each.steps_completed, each.metrics["validation_loss"]) for each in world.trials.metrics(trial.id)]
    assert reports == [(0, 0.0), (1, 10.0)]
    with pytest.raises(Conflict):
        world.unmanaged.start(trial.id, resume=False)


def test_a_trial_that_falls_silent_ends_as_failed(world: World, number: int) -> None:
    lost, alive, waiting = (world.unmanaged.create(number, {}).id for _ in range(3))
    world.unmanaged.start(lost, resume=True)
    world.unmanaged.start(alive, resume=True)
    world.clock.now += LOST_SECONDS
    world.unmanaged.patch(alive)
    world.tick()
    assert world.state_of(lost) == "ACTIVE"
    world.clock.now += 1
    world.tick()
    assert [world.state_of(each) for each in (lost, alive, waiting)] == ["ERROR", "ACTIVE", "PAUSED"]
    assert world.trials.get(lost).ended == BEGAN
    world.unmanaged.patch(alive, "PAUSED")
    assert world.experiments.get(number).state is ExperimentState.ERROR


def test_no_trial_is_lost_while_there_was_no_master(world: World, number: int) -> None:
    trial = world.unmanaged.create(number, {}).id
    world.unmanaged.start(trial, resume=True)
    world.clock.now += 10 * LOST_SECONDS
    world.restart()
    world.tick()
    assert world.state_of(trial) == "ACTIVE"
    world.clock.now += LOST_SECONDS
    world.tick()
    assert world.state_of(trial) == "ERROR"


def test_nothing_here_steers_what_was_started_elsewhere(world: World, number: int) -> None:
    trial = world.unmanaged.create(number, {}).id
    world.unmanaged.start(trial, resume=True)
    found = world.experiments
    for refused in (
        *((lambda action=action: action(number)) for action in (found.pause, found.activate, found.kill, found.cancel)),
        lambda: world.trials.kill(trial),
        lambda: found.resume_ended(number, ""),
        lambda: world.unmanaged.create(1, {}),
        lambda: world.unmanaged.patch(1, "COMPLETED"),
    ):
        with pytest.raises(Conflict):
            refused()
    with pytest.raises(Invalid):
        world.unmanaged.patch(trial, "DELETED")
    assert world.states(1) == ("ACTIVE", ["ACTIVE"])


def test_one_that_nothing_reports_to_can_be_killed_and_deleted(world: World, number: int) -> None:
    world.unmanaged.create(number, {})
    world.experiments.kill(number)
    assert world.states(number) == ("CANCELED", ["CANCELED"])
    world.experiments.delete(number)
    world.garbage_collector.collect()
    with pytest.raises(NotFound):
        world.experiments.get(number)


def test_a_checkpoint_is_where_its_trial_has_saved_it(world: World, number: int, tmp_path: Path) -> None:
    trial = world.unmanaged.create(number, {})
    world.unmanaged.start(trial.id, resume=True)
    section = {"type": "directory", "container_path": str(tmp_path / "saved")}
    storage = world.checkpoints.storage_number(section)
    assert world.checkpoints.storage_number(dict(reversed(section.items()))) == storage
    saved = checkpoint(UUID, 0, 0, allocation_id="", task_id=trial.task_id, storage_id=storage)
    world.checkpoints.report(saved)
    (tmp_path / "saved" / UUID).mkdir(parents=True)
    (tmp_path / "saved" / UUID / "state.json").write_bytes(bytes(11))
    assert world.checkpoints.directory(UUID) == tmp_path / "saved" / UUID
    world.unmanaged.patch(trial.id, "COMPLETED")
    world.garbage_collector.collect()
    assert world.checkpoints.get(UUID).state is CheckpointState.COMPLETED  # no policy applies to what is unmanaged
    world.checkpoints.delete([UUID])
    world.garbage_collector.collect()
    assert not (tmp_path / "saved" / UUID).exists()


def test_a_storage_without_a_folder_and_a_faulty_configuration_are_refused(world: World) -> None:
    shared = {"type": "shared_fs"}
    for section in ({}, {"type": 1}, shared, {**shared, "host_path": "x"}, {"type": "directory", "container_path": 1}):
        with pytest.raises(Invalid):
            world.checkpoints.storage_number(section)
    with pytest.raises(Invalid):  # of a managed trial without its allocation
        world.checkpoints.report(checkpoint(UUID, 1, 1, allocation_id=""))
    for config in ({"searcher": {"name": "nothing"}}, {"workspace": "nowhere"}, {"name": "a\nb"}):
        with pytest.raises(ZeroTrialError):
            world.add_unmanaged(**config)
