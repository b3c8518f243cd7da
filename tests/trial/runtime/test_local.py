"""A run in a folder: checkpoints that exist completely or not at all, metrics, preemption, one
early exit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.storing import storing
from tests.support.thread_ranks import run_ranks
from zero_trial.errors import CheckpointError
from zero_trial.trial.runs.events import read_lines
from zero_trial.trial.runs.run_checkpoints import checkpoint_step, find_fault, latest_checkpoint, sweep
from zero_trial.trial.runs.run_layout import RunFolder, RunStatus
from zero_trial.trial.runtime.local import LocalPlatform
from zero_trial.trial.runtime.protocols import Distributed, Platform


def store(platform: Platform, step: int, text: str = "x") -> str:
    with storing(platform.checkpoints, {"steps_completed": step}) as opened:
        (opened.path / f"rank{platform.distributed.rank}").write_text(text)
    return opened.storage_id


def test_a_checkpoint_has_its_name_once_it_is_complete(tmp_path: Path) -> None:
    platform: Platform = LocalPlatform(tmp_path)
    assert store(platform, 200) == "step-000200"
    with platform.checkpoints.restore_path("step-000200") as path:
        assert (path / "rank0").read_text() == "x"
        assert json.loads((path / "metadata.json").read_text())["steps_completed"] == 200
        assert find_fault(path) is None
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step-000200"]


def test_a_block_that_fails_makes_no_checkpoint(tmp_path: Path) -> None:
    platform = LocalPlatform(tmp_path)
    store(platform, 1)
    with pytest.raises(ValueError), storing(platform.checkpoints, {"steps_completed": 2}):
        raise ValueError
    latest = latest_checkpoint(tmp_path / "checkpoints")
    assert latest is not None and latest.name == "step-000001"
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    (tmp_path / "checkpoints/step-000002.tmp-1").mkdir()  # of a run that was killed
    sweep(tmp_path / "checkpoints")
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def no_room(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["pathlib.Path.mkdir", "zero_trial.trial.runtime.local.publish", "os.fsync"])
def test_what_rank_0_cannot_do_is_raised_by_all_and_leaves_nothing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank is left in the exchange that follows."""
    store(LocalPlatform(tmp_path), 1)
    monkeypatch.setattr(where, no_room)
    outcomes = run_ranks(3, lambda ranks: store(LocalPlatform(tmp_path, distributed=ranks), 2))
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointError)
        assert "No space left" in str(outcome)
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    platform = LocalPlatform(tmp_path)
    store(platform, 5, "old")
    store(platform, 5, "new")
    assert (tmp_path / "checkpoints/step-000005/rank0").read_text() == "new"
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step-000005").mkdir(parents=True)
    (tmp_path / "checkpoints/step-000005/mine").touch()
    with pytest.raises(CheckpointError, match="has the checkpoint's name"):
        store(LocalPlatform(tmp_path), 5)
    assert (tmp_path / "checkpoints/step-000005/mine").exists()


@pytest.mark.parametrize("left", ["trial_state.json", "model0/manifest.json"])
def test_a_checkpoint_that_lost_its_description_is_replaced(tmp_path: Path, left: str) -> None:
    """A run that goes on from an older one comes to its step again."""
    damaged = tmp_path / "checkpoints/step-000005"
    (damaged / left).parent.mkdir(parents=True)
    (damaged / left).write_text('{"sha256": "00"}')
    platform = LocalPlatform(tmp_path)
    store(platform, 5)
    assert find_fault(damaged) is None and not (damaged / left).exists()


def test_a_kill_while_checkpoints_are_deleted_or_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = LocalPlatform(tmp_path)
    for step in (1, 2):
        store(platform, step)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", killed)
        platform.checkpoints.retain(["step-000002"])
    names = {entry.name.partition(".")[0] for entry in (tmp_path / "checkpoints").iterdir() if "." not in entry.name}
    assert names == {"step-000002"}, "what is half deleted does not have a checkpoint's name"
    (tmp_path / "checkpoints/step-000002").rename(tmp_path / "checkpoints/step-000002.old-0123abcd")
    sweep(tmp_path / "checkpoints")
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


def test_latest_is_the_highest_finished_step(tmp_path: Path) -> None:
    platform = LocalPlatform(tmp_path)
    for step in (5, 1000000, 30):
        store(platform, step)
    (tmp_path / "checkpoints" / "step-2000000.tmp-1").mkdir()
    latest = latest_checkpoint(tmp_path / "checkpoints")
    assert latest is not None and checkpoint_step(latest) == 1000000
    assert latest_checkpoint(tmp_path / "checkpoints", [str(latest.resolve())]) == tmp_path / "checkpoints/step-000030"
    # it has lost its files: no reason to pass it over in silence
    (tmp_path / "checkpoints" / "step-2000000").mkdir()
    latest = latest_checkpoint(tmp_path / "checkpoints")
    assert latest is not None and latest.name == "step-2000000" and checkpoint_step(latest) is None
    assert latest_checkpoint(tmp_path / "none") is None


def test_ranks_write_into_one_folder_and_a_file_preempts_all(tmp_path: Path) -> None:
    def work(ranks: Distributed) -> list[bool]:
        assert store(LocalPlatform(tmp_path, distributed=ranks), 7) == "step-000007"
        platform = LocalPlatform(tmp_path, distributed=ranks)
        before = platform.should_preempt()
        if ranks.rank == 1:
            (tmp_path / "preempt").touch()
        ranks.barrier()
        return [before, platform.should_preempt()]

    assert run_ranks(3, work) == [[False, True]] * 3
    names = sorted(entry.name for entry in (tmp_path / "checkpoints/step-000007").iterdir())
    assert names == ["metadata.json", "rank0", "rank1", "rank2"]


def test_metrics_and_the_best_validation(tmp_path: Path) -> None:
    experiment = {"searcher": {"metric": "accuracy", "smaller_is_better": False}}
    platform = LocalPlatform(tmp_path, experiment)
    assert platform.best_validation() is None
    platform.report_training_metrics(1, {"loss": 1.0, "accuracy": 9.0})
    for step, accuracy in ((1, 0.25), (2, 0.5), (3, 0.125)):
        platform.report_validation_metrics(step, {"accuracy": accuracy})
    assert platform.best_validation() == 0.5
    lines = read_lines(tmp_path / "metrics.jsonl")
    found = [(line["group"], line["step"]) for line in lines]
    assert found == [("training", 1), *(("validation", step) for step in (1, 2, 3))]


def test_validations_that_say_nothing_do_not_hide_the_best(tmp_path: Path) -> None:
    platform = LocalPlatform(tmp_path, {"searcher": {"metric": "loss"}})
    for step, value in enumerate((float("nan"), 0.5, [1.0], 0.25, float("nan"))):
        platform.report_validation_metrics(step, {"loss": value})
    assert platform.best_validation() == 0.25
    for line in ('{"group": "validation", "step": "x", "time": "now"}', "[" * 5000):  # damage ends no resume
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(line + "\n")
    again = LocalPlatform(tmp_path, {"searcher": {"metric": "loss"}}, steps_completed=3)
    again.tidy()
    assert again.best_validation() == 0.25
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]


def test_exactly_one_early_exit_is_posted(tmp_path: Path) -> None:
    def work(ranks: Distributed) -> None:
        LocalPlatform(tmp_path / "new", distributed=ranks).report_early_exit("INVALID_HP")

    run_ranks(4, work)
    assert json.loads((tmp_path / "new" / "early_exit.json").read_text())["reason"] == "INVALID_HP"


def test_what_lies_beyond_the_step_to_go_on_from_is_taken_away(tmp_path: Path) -> None:
    """A run that was killed after it had reported steps which no checkpoint holds reports them
    again."""
    killed = LocalPlatform(tmp_path, {"searcher": {"metric": "validation_loss"}})
    for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0)):
        killed.report_validation_metrics(step, {"validation_loss": loss})
    (tmp_path / "checkpoints" / "step-000003.tmp-1").mkdir(parents=True)
    (tmp_path / "summary.json").write_text("{}")
    again = LocalPlatform(tmp_path, killed.experiment, steps_completed=2)
    again.tidy()
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert again.best_validation() == 2.0
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert RunFolder(tmp_path).status() is RunStatus.UNFINISHED
