"""A run's folder: where a trial starts, how it is asked to stop, what it leaves."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.thread_ranks import run_ranks
from zero_trial.comm.rendezvous import RankEnv
from zero_trial.ds_config.config_report import report_json
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import CheckpointError, ConfigError, Preempted
from zero_trial.trial.reporting import End, Outcome
from zero_trial.trial.runs.events import read_lines
from zero_trial.trial.runs.run_checkpoints import named_checkpoint, resumed_from, starting_point
from zero_trial.trial.runs.run_layout import RunFolder
from zero_trial.trial.runtime.protocols import Distributed
from zero_trial.trial.runtime.rank import RankState, print_error
from zero_trial.trial.runtime.run_folder import (
    StopRequest,
    _print_config_report,
    forget_errors,
    lock_run_together,
    raise_if_preempted,
    rank_of_folder,
    record_error,
)


def test_sigterm_asks_however_often_it_comes() -> None:
    stop, before = StopRequest(), signal.getsignal(signal.SIGTERM)
    with stop.listening():
        assert not stop() and signal.getsignal(signal.SIGTERM) is not before
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_ends_a_rank_that_is_left_over(tmp_path: Path) -> None:
    """A launcher sends it to the others when one rank has failed: those cannot save any more."""
    assert not RunFolder(tmp_path).has_failed_ranks()
    record_error(ValueError("mine"), tmp_path, RankState(RankEnv(rank=1, world_size=2)))
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    try:
        with StopRequest(lambda: RunFolder(tmp_path).has_failed_ranks()).listening():
            os.kill(os.getpid(), signal.SIGTERM)
        assert ended == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ranks_that_have_saved_and_left_have_not_failed(tmp_path: Path) -> None:
    record_error(Preempted("saved"), tmp_path, RankState())
    assert not RunFolder(tmp_path).has_failed_ranks()
    record_error(ValueError("mine"), tmp_path, RankState(RankEnv(rank=1, world_size=2)))
    assert RunFolder(tmp_path).has_failed_ranks()


def test_errors_of_an_earlier_start_are_removed_by_their_own_rank(tmp_path: Path) -> None:
    for rank in range(4):
        record_error(ValueError("mine"), tmp_path, RankState(RankEnv(rank=rank, world_size=4)))
    names = lambda: sorted(path.stem for path in (tmp_path / "errors").iterdir())  # noqa: E731
    forget_errors(RankState(RankEnv(rank=1, world_size=2), tmp_path))
    assert names() == ["rank-0", "rank-2", "rank-3"]
    forget_errors(RankState(RankEnv(rank=0, world_size=2), tmp_path))
    assert names() == []
    forget_errors(RankState(folder=tmp_path / "nothing"))


def write_checkpoint(run: Path, step: int, trial_id: str = "t") -> Path:
    folder = run / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps({"steps_completed": step, "trial_id": trial_id}))
    return folder


def test_the_runs_own_checkpoint_comes_before_one_that_is_named(tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", 9, "o")
    assert starting_point(tmp_path / "run")["checkpoint"] is None
    found = {"checkpoint": str(other), "step": 9, "trial_id": "o"}
    assert starting_point(tmp_path / "run", resume=tmp_path / "other") == found
    write_checkpoint(tmp_path / "run", 3)
    own = write_checkpoint(tmp_path / "run", 6)
    for named in ({}, {"resume": tmp_path / "other"}, {"warm_start": tmp_path / "other"}):
        assert starting_point(tmp_path / "run", **named) == {"checkpoint": str(own), "step": 6, "trial_id": "t"}


def test_a_checkpoint_by_its_path_or_its_runs(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 3)
    newest = write_checkpoint(tmp_path, 6)
    assert named_checkpoint(tmp_path) == newest and named_checkpoint(newest) == newest
    assert resumed_from(newest)["step"] == 6
    with pytest.raises(ConfigError, match="no finished checkpoint"):
        named_checkpoint(tmp_path / "checkpoints")


def test_what_was_not_written_is_said_in_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _print_config_report(RunFolder(tmp_path))
    assert capsys.readouterr().out == ""
    RunFolder(tmp_path).resolved_config.write_text(report_json(read_ds_config({"train_batch_size": 2})))
    _print_config_report(RunFolder(tmp_path))
    assert "gradient_clipping 1.0" in capsys.readouterr().out


def test_the_first_error_of_a_rank_stays(tmp_path: Path) -> None:
    state = RankState(RankEnv(rank=1, world_size=2))
    record_error(ConfigError("the cause"), tmp_path, state)
    record_error(ValueError("what follows"), tmp_path, state)
    record = json.loads(RunFolder(tmp_path).error(1).read_text())
    assert (record["message"], record["exit_code"]) == ("the cause.", 2)
    assert not (tmp_path / "events.jsonl").exists()  # rank 0 tells events
    record_error(ValueError("mine"), tmp_path, RankState())
    assert read_lines(tmp_path / "events.jsonl")[0]["message"] == "ValueError: mine"


def test_a_log_and_a_folder_on_a_full_disk_change_no_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stderr", Full())
    print_error(ConfigError("wrong", where="here"))
    print_error(ValueError("mine"))
    (tmp_path / "errors").touch()  # a file, so that no record fits in
    for error, code in ((CheckpointError("not saved"), 5), (ValueError("mine"), 1)):
        with pytest.raises(SystemExit) as ended, rank_of_folder(RankState(folder=tmp_path)):
            raise error
        assert ended.value.code == code


def test_a_preempted_run_is_known_as_resumable() -> None:
    def ended(end: End) -> Outcome:
        return Outcome(end, 3, 8, 1.0, 24, "step-000003")

    raise_if_preempted(ended(End.COMPLETED))
    raise_if_preempted(ended(End.STOPPED))
    with pytest.raises(Preempted, match="stopped at step 3 of 8 and saved step-000003"):
        raise_if_preempted(ended(End.PREEMPTED))


def test_the_second_run_ends_on_every_rank(tmp_path: Path) -> None:
    def second(ranks: Distributed) -> None:
        with lock_run_together(tmp_path, ranks):
            raise AssertionError("two writers")

    with lock_run_together(tmp_path, Distributed()):
        outcomes = run_ranks(2, second)
    for outcome in outcomes:
        assert isinstance(outcome, ConfigError)
        assert "another process is running in this folder" in str(outcome)
