"""A trial on a cluster, without one: what reaches core, in which form, from which rank, and how
often."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_core import Claims, FakeCore
from tests.support.storing import storing
from tests.support.thread_ranks import run_ranks
from zero_trial.errors import CheckpointError
from zero_trial.trial.runtime.determined import DeterminedPlatform, TensorboardSync, TrialFacts
from zero_trial.trial.runtime.protocols import Distributed, Platform

FACTS = TrialFacts("12", "3", 7, {"lr": 0.1}, {"name": "x"}, latest_checkpoint="abc", steps_completed=40)


def platform_on(core: FakeCore, claim: Callable[[str], bool] | None = None, events: Any = None) -> DeterminedPlatform:
    ranks = core.ranks
    sync = TensorboardSync(core, ranks.rank, ranks.local_rank)
    show = events.append if events is not None else lambda event: None
    return DeterminedPlatform(
        **vars(FACTS), core=core, distributed=ranks, show=show, claim=claim or Claims(), tensorboard=sync
    )


def test_it_is_a_platform_with_the_tasks_facts(tmp_path: Path) -> None:
    platform: Platform = platform_on(FakeCore(tmp_path, Distributed()))
    assert (platform.trial_id, platform.experiment_id, platform.seed) == ("12", "3", 7)
    assert (platform.hparams, platform.experiment) == ({"lr": 0.1}, {"name": "x"})
    assert (platform.latest_checkpoint, platform.steps_completed) == ("abc", 40)
    assert platform.tensorboard_path == tmp_path / "tensorboard"


def test_metrics_and_progress_reach_the_master(tmp_path: Path) -> None:
    core, events = FakeCore(tmp_path, Distributed()), []  # type: ignore[var-annotated]
    platform = platform_on(core, events=events)
    platform.report_training_metrics(3, {"loss": 1.5})
    platform.report_validation_metrics(4, {"validation_loss": 2.0, "batches": 4, "epochs": 1})
    platform.report_progress(0.5)
    platform.report_progress(1.0000001)  # a rounding error must not end a trial
    platform.emit({"kind": "note", "message": "hello"})
    platform.emit({"kind": "checkpoint", "storage_id": "uuid", "path": "/of/the/task/uuid", "bytes": 3})
    platform.emit({"kind": "train", "step": 5, "loss": 0.5, "lr": 0.1, "grad_norm": 2.0, "each": {}})
    platform.report_training_metrics(5, {"loss": 1.0, "grad_norm": 3.0})
    events.pop()
    assert core.training == [(3, {"loss": 1.5}), (5, {"loss": 1.0, "grad_norm": 3.0})]
    assert core.engine == [(5, {"lr": 0.1, "grad_norm": 2.0})]
    assert core.validation == [(4, {"validation_loss": 2.0, "batches": 4, "epochs": 1})]
    assert core.progress == [0.5, 1.0]
    assert events == [
        {"kind": "note", "message": "hello"},
        {"kind": "checkpoint", "storage_id": "uuid", "bytes": 3},
    ]


def test_figures_are_kept_beside_the_users_own_metadata(tmp_path: Path) -> None:
    core, events = FakeCore(tmp_path, Distributed()), []  # type: ignore[var-annotated]
    core.metadata = {"mine": 1}
    platform_on(core, events=events).keep({"memory_planned_bytes": 5, "error": float("nan")})
    assert core.metadata == {"mine": 1, "zero_trial": {"memory_planned_bytes": 5, "error": "NaN"}}
    for measured in (20, 30, 10):  # three runs of one trial
        platform_on(core, events=events).keep({"memory_measured_peak_bytes": measured})
    assert core.metadata == {"mine": 1, "zero_trial": {"memory_measured_peak_bytes": 30}}
    assert events == []


def test_a_master_without_metadata_ends_no_trial(tmp_path: Path) -> None:
    core, events = FakeCore(tmp_path, Distributed()), []  # type: ignore[var-annotated]
    core.set_metadata = None  # type: ignore[method-assign, assignment]
    platform_on(core, events=events).keep({"memory_planned_bytes": 5})
    assert [event["kind"] for event in events] == ["note"]
    assert "did not store metadata (TypeError" in events[0]["message"]


@pytest.mark.parametrize("direct", [True, False])
def test_all_ranks_write_into_one_folder(tmp_path: Path, direct: bool) -> None:
    """Also where the storage is no file system and core gives a temporary folder."""

    def work(ranks: Distributed) -> tuple[str, list[dict[str, Any]]]:
        core = FakeCore(tmp_path, ranks, direct=direct)
        platform = platform_on(core)
        with storing(platform.checkpoints, {"steps_completed": 3}) as opened:
            (opened.path / f"rank-{ranks.rank}").touch()
        platform.checkpoints.retain([])
        return opened.storage_id, core.reported

    (first, reported), (second, others) = run_ranks(2, work)  # type: ignore[misc]
    assert first == second and others == []
    assert reported == [{"uuid": first, "metadata": {"steps_completed": 3}}]
    assert sorted(path.name for path in (tmp_path / first).iterdir()) == ["rank-0", "rank-1"]


def test_a_store_that_gives_no_folder_is_told_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "storage").write_text("no folder")

    def work(ranks: Distributed) -> None:
        platform_on(FakeCore(tmp_path / "storage", ranks)).checkpoints.begin({"steps_completed": 3})

    outcomes = run_ranks(2, work)
    assert [type(outcome) for outcome in outcomes] == [CheckpointError] * 2
    assert all("Not a directory" in str(outcome) for outcome in outcomes)


def test_a_checkpoint_is_restored_and_a_missing_one_is_named(tmp_path: Path) -> None:
    platform = platform_on(FakeCore(tmp_path, Distributed()))
    with storing(platform.checkpoints, {"steps_completed": 1}) as opened:
        (opened.path / "state").write_text("1")
    with platform.checkpoints.restore_path(opened.storage_id) as path:
        assert (path / "state").read_text() == "1"
    with pytest.raises(CheckpointError, match="nowhere"), platform.checkpoints.restore_path("nowhere"):
        pass


def test_what_a_block_raises_is_not_taken_for_a_missing_checkpoint(tmp_path: Path) -> None:
    platform = platform_on(FakeCore(tmp_path, Distributed()))
    (tmp_path / "there").mkdir()
    with pytest.raises(ZeroDivisionError), platform.checkpoints.restore_path("there"):
        raise ZeroDivisionError


def test_rank_0_asks_about_preemption_for_all() -> None:
    def work(ranks: Distributed) -> tuple[list[bool], int]:
        core = FakeCore(Path(), ranks)
        platform = platform_on(core)
        answers = [platform.should_preempt()]
        core.wants_stop = ranks.rank == 0
        answers.append(platform.should_preempt())
        return answers, core.asked

    assert run_ranks(2, work) == [([False, True], 2), ([False, True], 0)]


def test_an_early_exit_is_reported_once_by_the_first_rank() -> None:
    claim = Claims()

    def work(ranks: Distributed) -> list[str]:
        core = FakeCore(Path(), ranks)
        platform_on(core, claim).report_early_exit("INVALID_HP")
        platform_on(core, claim).report_early_exit("INVALID_HP")
        return core.early_exits

    exits = [reason for reasons in run_ranks(2, work) for reason in reasons]  # type: ignore[union-attr]
    assert exits == ["EXITED_REASON_INVALID_HP"]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def sync_with(core: FakeCore, rank: int = 0, local_rank: int = 0) -> tuple[TensorboardSync, Clock]:
    clock = Clock()
    return TensorboardSync(core, rank, local_rank, None, clock, clock.sleep), clock


def test_tensorboard_files_are_copied_at_most_once_a_second_and_the_last_for_certain(tmp_path: Path) -> None:
    core = FakeCore(tmp_path, Distributed())
    sync, clock = sync_with(core)
    sync()
    assert core.copied == []  # there is nothing
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "x.tfevents.1").touch()
    (tmp_path / "tensorboard" / "x.pt.trace.json").touch()
    sync()
    sync()
    assert core.copied == [["x.pt.trace.json", "x.tfevents.1"]]
    clock.now += 0.3
    sync.close()
    # core skips what comes within a second
    assert len(core.copied) == 2 and clock.slept == [pytest.approx(0.8)]


def test_other_hosts_copy_what_only_they_have_and_other_ranks_of_a_host_nothing(tmp_path: Path) -> None:
    core = FakeCore(tmp_path, Distributed())
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "x.tfevents.1").touch()
    (tmp_path / "tensorboard" / "x.pt.trace.json").touch()
    sync_with(core, rank=1, local_rank=1)[0]()
    sync_with(core, rank=1, local_rank=1)[0].close()
    assert core.copied == []
    sync_with(core, rank=2, local_rank=0)[0]()
    assert core.copied == [["x.pt.trace.json"]]
