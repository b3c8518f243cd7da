"""A trial's own state in a checkpoint, and which checkpoints stay."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_memory import ReportedRecord
from tests.trial.harness import LineTrial, run_rank, run_world, steps
from zero_trial.errors import CheckpointError, TrialError
from zero_trial.trial import Batch, Keep, TrialCallback
from zero_trial.trial.checkpointing import TrialSnapshot, read_state, retained, write_state
from zero_trial.trial.reporting import End
from zero_trial.trial.runtime.protocols import OpenCheckpoint


def test_the_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = TrialSnapshot(
        step=7, trial_id="x", window={"loss": [0.1 + 0.2, 3]}, history=[["step-000007", 7, None]], ranks=[{"a": 1}]
    )
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    path = tmp_path / "trial_state.json"
    path.write_text(path.read_text().replace('"step": 7', '"step": 8'))
    with pytest.raises(CheckpointError, match="checksum mismatch"):
        read_state(tmp_path)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"format": 2}', '{"format": 1, "unknown": 3}'])
def test_what_is_no_state_is_a_checkpoint_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "trial_state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"trial_state\.json"):
        read_state(tmp_path)


def test_a_state_that_rank_0_cannot_write_is_raised_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("zero_trial.trial.checkpointing.write_state", full)
    outcomes = run_world(2, LineTrial, steps(2), tmp_path)
    assert all(isinstance(outcome, CheckpointError) and "No space left" in str(outcome) for outcome in outcomes)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_did_not_exist_take_rank_0s_part() -> None:
    state = TrialSnapshot(samples=8, micro_batches=2, ranks=[{"loader": "a"}, {"loader": "b"}])
    assert [state.resume(rank).loader for rank in range(3)] == ["a", "b", "a"]
    assert TrialSnapshot().of_rank(0) == {}


HISTORY = [["a", 1, 3.0], ["b", 2, 1.0], ["c", 3, None], ["d", 4, 2.0], ["e", 5, 4.0]]


@pytest.mark.parametrize(
    ("keep", "smaller", "left"),
    [
        (Keep(), True, "abcde"),
        (Keep(best=1, latest=2), True, "bde"),
        (Keep(best=1, latest=2), False, "de"),
        (Keep(best=2, latest=1), True, "bde"),
        (Keep(best=0, latest=1), True, "e"),
        (Keep(best=1, latest=0), True, "b"),
    ],
)
def test_the_best_and_the_latest_stay(keep: Keep, smaller: bool, left: str) -> None:
    assert "".join(entry[0] for entry in retained(HISTORY, keep, smaller)) == left


class WithNotes(LineTrial):
    """Saves and loads something of its own."""

    def save(self, context: Any, path: Path) -> None:
        super().save(context, path)
        (path / f"notes{context.distributed.rank}").write_text(str(len(self.seen)))

    def load(self, context: Any, path: Path) -> None:
        super().load(context, path)
        self.loaded = (path / f"notes{context.distributed.rank}").read_text()


def test_the_users_hooks(tmp_path: Path) -> None:
    run_rank(WithNotes, steps(4), storage=tmp_path)
    assert run_rank(WithNotes, steps(5), storage=tmp_path, latest_checkpoint="step-000004").trial.loaded == "4"


def test_engines_that_find_nothing(tmp_path: Path) -> None:
    run_rank(LineTrial, steps(2), storage=tmp_path)
    (tmp_path / "step-000002/model0/rank0.json").unlink()
    with pytest.raises(CheckpointError, match="Failed to load deepspeed checkpoint"):
        run_rank(LineTrial, steps(3), storage=tmp_path, latest_checkpoint="step-000002")


def test_a_save_that_fails_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    class Full(LineTrial):
        def save(self, context: Any, path: Path) -> None:
            super().save(context, path)
            if context.current_train_batch() == 4:
                raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device"):
        run_rank(Full, steps(6, checkpoint_period=Batch(2)), storage=tmp_path)
    assert [path.name for path in tmp_path.iterdir() if (path / "metadata.json").exists()] == ["step-000002"]


def test_a_state_that_is_no_json_is_named(tmp_path: Path) -> None:
    class Keeps(TrialCallback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": {1, 2}}

    class WithKeeps(LineTrial):
        def build_callbacks(self) -> dict[str, TrialCallback]:
            return {"mine": Keeps()}

    with pytest.raises(TrialError, match="the state of callback mine cannot be saved"):
        run_rank(WithKeeps, steps(1), storage=tmp_path)


class InBackground(LineTrial):
    """Its engine writes for ``needs`` further steps; what is in the folder at each step."""

    needs = 3
    breaks_at = 0

    def save(self, context: Any, path: Path) -> None:
        super().save(context, path)
        self.engine.writing = self.needs
        self.engine.breaks = context.current_train_batch() == self.breaks_at
        self.folder, self.listed = path.parent, getattr(self, "listed", {})

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        if hasattr(self, "folder"):
            self.listed[batch_idx] = sorted(path.name[:11] + path.name[11:15] for path in self.folder.iterdir())
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class Heard(TrialCallback):
    """Notes what it hears of checkpoints."""

    def __init__(self, trial: LineTrial) -> None:
        self.trial = trial
        self.heard: list[tuple[int, str, Any]] = []

    def on_checkpoint_write_end(self, checkpoint_dir: Path) -> None:
        files = sorted(path.name for path in checkpoint_dir.iterdir())
        self.heard.append((self.trial.context.current_train_batch(), "written", files))

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self.heard.append((self.trial.context.current_train_batch(), "stored", uuid))


class HeardInBackground(InBackground):
    def build_callbacks(self) -> dict[str, TrialCallback]:
        self.heard = Heard(self)
        return {"heard": self.heard}


def test_a_checkpoint_in_the_background_is_one_when_its_engines_are_done(tmp_path: Path) -> None:
    """Nothing hears of it, and the last complete one is not deleted, before that."""
    settings = steps(11, checkpoint_period=Batch(4), keep=Keep(best=0, latest=1))
    runs = run_world(2, HeardInBackground, settings, tmp_path)
    for run in runs:
        assert run.record.checkpoints == ["step-000004", "step-000008", "step-000011"]
        listed = run.trial.listed
        assert [listed[step] for step in (4, 5, 6)] == [["step-000004.tmp"]] * 3
        assert listed[7] == ["step-000004"]
        assert [listed[step] for step in (8, 9, 10)] == [["step-000004", "step-000008.tmp"]] * 3
        files = ["model0", "trial_state.json"]
        told = [
            ((at, "written", files), (at, "stored", f"step-{step:06d}")) for at, step in ((7, 4), (11, 8), (11, 11))
        ]
        assert run.trial.heard.heard == [each for pair in told for each in pair]
        assert run.outcome.checkpoint == "step-000011"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000011"]
    events = [event for event in runs[0].record.events if event["kind"] == "checkpoint"]
    assert [event["step"] for event in events] == [4, 8, 11]
    assert read_state(tmp_path / "step-000011").step == 11


def test_a_fault_in_the_background_ends_the_trial_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    class Breaks(InBackground):
        needs, breaks_at = 2, 8

    found = run_world(2, Breaks, steps(12, checkpoint_period=Batch(4)), tmp_path)
    assert [type(error) for error in found] == [CheckpointError] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]


@pytest.mark.parametrize("when", ["training", "saving"])
def test_another_error_removes_what_is_under_way(tmp_path: Path, when: str) -> None:
    """After its engines have stopped to write."""
    given_up: list[bool] = []

    class Fails(InBackground):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            if when == "training" and batch_idx == 9:
                raise ValueError("of the user's")
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

        def save(self, context: Any, path: Path) -> None:
            super().save(context, path)

            def abandon() -> None:
                given_up.append(path.is_dir())
                self.engine.writing = 0

            self.engine.abandon_checkpoint = abandon
            if when == "saving" and context.current_train_batch() == 8:
                raise ValueError("of the user's")

    with pytest.raises(ValueError, match="of the user's"):
        run_rank(Fails, steps(12, checkpoint_period=Batch(4)), storage=tmp_path)
    assert given_up == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]


class SlowStore:
    """Commits a checkpoint when ``trial.let_go`` is set."""

    def __init__(self, store: Any, trial: Any) -> None:
        self.store, self.trial, self.retain = store, trial, store.retain

    def begin(self, metadata: Any) -> OpenCheckpoint:
        opened, trial = self.store.begin(metadata), self.trial

        def upload() -> None:
            trial.tried.append(opened.storage_id)
            assert trial.let_go.wait(30), "training waits for the storage"
            if trial.refuses:
                raise ConnectionError("the storage is gone")
            opened.commit()

        return replace(opened, commit=upload, interrupt=trial.give_up, uploads=True)


class Uploading(HeardInBackground):
    """Its storage takes nothing before the step ``goes_on_at``, or never where ``refuses``."""

    goes_on_at = 7
    needs = 1
    refuses = False

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.let_go = threading.Event()
        self.tried: list[str] = []
        context.platform.checkpoints = SlowStore(context.platform.checkpoints, self)

    def give_up(self) -> None:
        self.refuses = True
        self.let_go.set()

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == self.goes_on_at:
            self.let_go.set()
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


def test_a_preempted_trial_waits_for_its_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing lets the storage go on before it is waited for."""
    trials: list[Uploading] = []

    class Preempted(Uploading):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            trials.append(self)

    def committed(opened: OpenCheckpoint, *, wait: bool) -> bool:
        if wait:
            trials[0].let_go.set()
        return known(opened, wait=wait)

    known = OpenCheckpoint.committed
    monkeypatch.setattr(OpenCheckpoint, "committed", committed)
    record = ReportedRecord(preempt_from_poll=2)
    run = run_rank(Preempted, steps(9, checkpoint_period=Batch(2)), storage=tmp_path, record=record)
    assert run.outcome.end is End.PREEMPTED and run.outcome.checkpoint == record.checkpoints[-1]
    assert run.trial.tried == record.checkpoints


def test_an_error_gives_an_upload_up(tmp_path: Path) -> None:
    class Fails(Uploading):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 6:
                assert self.tried == ["step-000004"]
                raise ValueError("of the user's")
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    record = ReportedRecord()
    with pytest.raises(ValueError, match="of the user's"):
        run_rank(Fails, steps(9, checkpoint_period=Batch(4)), storage=tmp_path, record=record)
    assert record.checkpoints == []
