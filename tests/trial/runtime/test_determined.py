"""The one door to Determined: what is known off a cluster, an original core.Context behind the
platform, and the two processes: uploads to object storage during training, and the preparation of a
trial while its master is away."""

from __future__ import annotations

import errno
import json
import random
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.storing import ObjectStorage, storing
from zero_trial.errors import CheckpointError, ConfigError
from zero_trial.trial.runtime import determined as door
from zero_trial.trial.runtime.determined import DeterminedCheckpoints
from zero_trial.trial.runtime.protocols import Distributed, OpenCheckpoint

pytest.importorskip("determined")
import determined
from determined.common.api.errors import BadRequestException, MasterNotFoundException, UnauthenticatedException

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
    opened = door.open_platform(Distributed(), lambda name: True, lambda event: None, launched=False)
    with pytest.raises(ConfigError, match=r"determined\.launch\.torch_distributed"), opened:
        pass


def test_a_genuine_context_behind_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """core's own, made for off a cluster: its checkpoints are real."""
    on(monkeypatch, None)
    events: list[Any] = []
    with determined.core.init(checkpoint_storage=str(tmp_path)) as core:
        monkeypatch.setattr(core.train, "get_tensorboard_path", lambda: tmp_path / "tensorboard")
        on(monkeypatch, info())
        opened = door.open_platform(Distributed(), lambda name: True, events.append, launched=False, core_context=core)
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
        opened = door.DeterminedCheckpoints(core, Distributed()).begin({"steps_completed": 1})
        (opened.path / "state").touch()
        opened.begin_commit()
        with pytest.raises(CheckpointError, match="No space left"):
            opened.committed(wait=True)
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == ({"metadata.json", "state"} if reports else set())


@pytest.fixture
def bucket() -> Iterator[ObjectStorage]:
    storage = ObjectStorage()
    yield storage
    storage.close()


def begin_in(bucket: ObjectStorage, core: Any) -> OpenCheckpoint:
    """A checkpoint with one file, whose upload has begun."""
    opened = DeterminedCheckpoints(core, Distributed(), bucket.section).begin({"steps_completed": 1})
    (opened.path / "model0").mkdir()
    (opened.path / "model0" / "weights").write_bytes(b"w" * 3000)
    opened.begin_commit()
    assert bucket.asked.wait(60)
    return opened


def test_an_upload_leaves_the_random_numbers_of_training_alone(bucket: ObjectStorage) -> None:
    """The harness's storage managers put Python's random state back when they are done, and boto3
    draws from it: an upload in a thread would let training draw the same numbers twice."""
    with determined.core.init(checkpoint_storage=bucket.section) as core:
        random.seed(5)
        drawn = [random.random() for _ in range(6)]
        random.seed(5)
        opened = begin_in(bucket, core)
        assert not opened.committed(wait=False) and bucket.objects == {}
        found = [random.random() for _ in range(3)]
        bucket.open.set()
        assert opened.committed(wait=True)
        assert found + [random.random() for _ in range(3)] == drawn
        assert sorted(bucket.objects) == [
            f"{opened.storage_id}/{name}" for name in ("metadata.json", "model0/", "model0/weights")
        ]
        assert not opened.path.exists()
        store = DeterminedCheckpoints(core, Distributed(), bucket.section)
        with store.restore_path(opened.storage_id) as path:
            assert (path / "model0/weights").read_bytes() == b"w" * 3000


def test_an_upload_that_is_given_up_ends_at_once(bucket: ObjectStorage) -> None:
    with determined.core.init(checkpoint_storage=bucket.section) as core:
        opened = begin_in(bucket, core)
        opened.abandon()
        assert bucket.objects == {} and not opened.path.exists()


@pytest.mark.parametrize("begins", [True, False])
def test_no_temporary_copy_and_no_other_way_to_upload_stay(
    bucket: ObjectStorage, monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    """Where the commit fails before the upload, and where it never begins."""
    with determined.core.init(checkpoint_storage=bucket.section) as core:
        manager = core.checkpoint._storage_manager
        opened = DeterminedCheckpoints(core, Distributed(), bucket.section).begin({"steps_completed": 1})
        assert manager.upload.__self__ is not manager
        if begins:
            monkeypatch.setattr(core.checkpoint, "_write_metadata_file", lambda *given: 1 / 0)
            opened.begin_commit()
            with pytest.raises(CheckpointError, match="ZeroDivisionError"):
                opened.committed(wait=True)
        else:
            opened.abandon()
        assert not opened.path.exists() and manager.upload.__self__ is manager


def test_an_upload_ends_with_rank_0(bucket: ObjectStorage, tmp_path: Any) -> None:
    """Whose end closes the pipe."""
    (tmp_path / "weights").touch()
    request = {"storage": bucket.section, "src": str(tmp_path), "dst": "there", "paths": None}
    command = [sys.executable, "-m", door.__name__, "upload"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        assert bucket.asked.wait(60)
        process.stdin.close()
        assert process.wait(60) == 1
    assert bucket.objects == {}


def test_a_process_that_cannot_begin(bucket: ObjectStorage, tmp_path: Any) -> None:
    """Its last words are in the error, and no broken pipe."""
    given = door.UploadProcess({"type": "s3", "bucket": "x", "no such key": 1})
    with pytest.raises(CheckpointError, match="no such key"):
        given.upload(tmp_path, "there")
    given.give_up()
    with pytest.raises(CheckpointError, match="cancelled"):
        given.upload(tmp_path, "there")


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What the next preparations raise, in this order."""
    left: list[BaseException] = []

    def run_module(name: str, **_: object) -> None:
        assert name == "determined.exec.prep_container" and "--rendezvous" in sys.argv
        if left:
            raise left.pop(0)

    monkeypatch.setattr(sys, "argv", ["prepare", "--rendezvous"])
    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(door, "_PAUSE_SECONDS", 0.0)
    return left


def test_it_is_repeated_until_the_master_answers(
    outcomes: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes += [MasterNotFoundException("refused"), BadRequestException("broken"), MasterNotFoundException("refused")]
    door.prepare()
    assert not outcomes and capsys.readouterr().err.count("the master is not reachable") == 3


@pytest.mark.parametrize("error", [MasterNotFoundException("refused"), UnauthenticatedException()])
def test_it_gives_up_in_the_end_and_at_once_where_the_master_refuses(
    outcomes: list[BaseException], error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(error, MasterNotFoundException):
        monkeypatch.setattr(door, "_PREPARE_SECONDS", -1.0)
    outcomes += [error] * 2
    with pytest.raises(type(error)):
        door.prepare()
    assert len(outcomes) == 1
