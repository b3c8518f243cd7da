"""The one door to Determined: what is known off a cluster, and an original core.Context behind the
platform."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.storing import storing
from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.trial.runtime import determined as door
from zero_trial.trial.runtime.protocols import JsonDistributed

determined = pytest.importorskip("determined")

TRIAL = SimpleNamespace(
    trial_id=12, experiment_id=3, trial_seed=7, hparams={"lr": 0.1}, _config={"a": 1}, _steps_completed=4
)


def info(task_type: str = "TRIAL", slots: int = 1) -> Any:
    return SimpleNamespace(
        task_type=task_type, trial=TRIAL, latest_checkpoint="abc", container_addrs=["a"], slot_ids=list(range(slots))
    )


def on(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    monkeypatch.setattr(determined, "get_cluster_info", lambda: found)


def test_the_tasks_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, info())
    facts = door.require_facts()
    assert (facts.trial_id, facts.experiment_id, facts.seed, facts.steps_completed) == ("12", "3", 7, 4)
    assert (facts.hparams, facts.experiment, facts.latest_checkpoint) == ({"lr": 0.1}, {"a": 1}, "abc")


@pytest.mark.parametrize("found", [None, info("NOTEBOOK")])
def test_elsewhere_there_are_none(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    on(monkeypatch, found)
    assert door.trial_facts() is None
    with pytest.raises(ConfigError, match="cluster: this is not a trial task"):
        door.require_facts()


def test_without_determined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "installed", lambda: False)
    assert door.trial_facts() is None and door.invalid_hp_class() is None
    with pytest.raises(ConfigError, match=r"zero_trial\[determined\]"):
        door.require_facts()


def test_several_slots_and_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, info(slots=2))
    opened = door.open_platform(JsonDistributed(), lambda name: True, lambda event: None, launched=False)
    with pytest.raises(ConfigError, match=r"determined\.launch\.torch_distributed"), opened:
        pass


def test_a_genuine_context_behind_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """core's own, made for off a cluster: its checkpoints are real."""
    on(monkeypatch, None)
    events: list[Any] = []
    with determined.core.init(checkpoint_storage=str(tmp_path)) as core:
        monkeypatch.setattr(core.train, "get_tensorboard_path", lambda: tmp_path / "tensorboard")
        on(monkeypatch, info())
        opened = door.open_platform(
            JsonDistributed(), lambda name: True, events.append, launched=False, core_context=core
        )
        with opened as platform:
            platform.report_training_metrics(1, {"loss": 1.0})
            platform.report_validation_metrics(1, {"validation_loss": float("nan")})
            platform.report_progress(0.5)
            platform.emit({"kind": "note"})
            assert platform.should_preempt() is False
            assert platform.best_validation() is None
            assert platform.profile_system()
            with storing(platform.checkpoints, {"steps_completed": 1}) as opened:
                (opened.path / "state").write_text("here")
            with platform.checkpoints.restore_path(opened.storage_id) as path:
                assert (path / "state").read_text() == "here"
                assert (path / "metadata.json").is_file()
    assert events == [{"kind": "note"}]


@pytest.mark.parametrize("reports", [False, True])
def test_a_commit_that_fails_leaves_what_the_master_may_know(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reports: bool
) -> None:
    """A disk is full before core has written its last file, or the master does not answer after
    it."""
    on(monkeypatch, None)
    with determined.core.init(checkpoint_storage=str(tmp_path)) as core:

        def fail(*given: Any) -> None:
            if not reports:
                (opened.path / "metadata.json").write_text('{"steps_comp')
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(core.checkpoint, "_report_checkpoint" if reports else "_write_metadata_file", fail)
        opened = door.DeterminedCheckpoints(core, JsonDistributed()).begin({"steps_completed": 1})
        (opened.path / "state").touch()
        opened.begin_commit()
        with pytest.raises(CheckpointError, match="No space left"):
            opened.committed(wait=True)
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == ({"metadata.json", "state"} if reports else set())


def test_what_the_harness_asks_for() -> None:
    legacy_trial, controller = door.harness_bases()
    assert (legacy_trial, controller) == (determined.LegacyTrial, determined.TrialController)
    assert door.invalid_hp_class() is determined.InvalidHP and door.installed()
