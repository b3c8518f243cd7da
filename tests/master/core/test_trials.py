"""What trials report, and what their tasks and allocations ask for."""

from __future__ import annotations

import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.master.core.test_checkpoints import save
from tests.master.fakes import Sandbox
from zero_trial.master.agent.processes import Exit
from zero_trial.master.logs import LogQuery
from zero_trial.master.records import Conflict, Invalid, MetricReport, NotFound
from zero_trial.master.store import metric_rows
from zero_trial.master.store.database import LARGEST_WAL


def report(master: Sandbox, steps: int | None, group: str = "training", run_id: int = 1, **values: float) -> None:
    master.trials.report_metrics(
        1, run_id=run_id, group=group, steps_completed=steps, metrics=values, batch_metrics=[{"x": 1}]
    )


def test_reports_are_seen_at_once(master: Sandbox) -> None:
    master.create()
    report(master, 1, loss=0.5)
    report(master, None, "gpu", load=1.0)
    master.validate(1, 0.25, batches=1)
    found = master.trials.get(1)
    assert found.steps_completed == 1 and found.searcher_metric == 0.25
    assert found.latest_validation is not None and found.latest_validation.metrics["batches"] == 1
    assert found.summary_metrics["training"]["loss"]["mean"] == 0.5
    assert {item.group for item in master.trials.metrics(1)} == {"training", "gpu", "validation"}


def test_a_stale_run_reports_nothing(master: Sandbox) -> None:
    master.create()
    master.exit(1, code=1)
    with pytest.raises(Invalid, match="got 1, expected 2"):
        report(master, 1, run_id=1, loss=1.0)
    report(master, 1, run_id=2, loss=1.0)
    assert len(list(master.trials.metrics(1))) == 1


def test_a_report_that_is_sent_again_counts_once(master: Sandbox) -> None:
    """The answer to the first one was lost with the master before."""
    master.create()
    for _ in range(2):
        report(master, 1, loss=0.1)
        master.validate(1, 0.5)
    assert [each.group for each in master.trials.metrics(1)] == ["training", "validation"]


def test_workloads_are_the_trials_history(master: Sandbox) -> None:
    master.create()
    report(master, 2, loss=0.1)
    report(master, 1, loss=0.2)
    master.validate(1, 0.5, batches=2)
    save(master, 1, 2)
    kinds = []
    for item in master.trials.workloads(1)[1]:
        kinds.append((getattr(item, "group", type(item).__name__), item.steps_completed))
    assert kinds == [("training", 1), ("training", 2), ("validation", 2), ("Checkpoint", 2)]
    first = next(master.trials.workloads(1, ["training"], include_batch_metrics=True)[1])
    assert isinstance(first, MetricReport) and first.batch_metrics == [{"x": 1}]


def test_many_reports_are_read_in_pages(master: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    master.create()
    state = master.state
    with state.database.transaction() as connection:
        for at in range(8000):
            group, steps = ("gpu", None) if at % 4 == 0 else ("training", 8000 - at)
            metric_rows.add(connection, MetricReport(1, 1, group, steps, {"loss": at, "text": "x" * 100}))
    monkeypatch.setattr(metric_rows, "_SENT_BYTES", 5000)
    tracemalloc.start()
    places = [(report.steps_completed or 0, report.id) for report in master.trials.metrics(1)]
    assert tracemalloc.get_traced_memory()[1] < 4 << 20  # all at once take 10 MiB
    tracemalloc.stop()
    assert places == sorted(places) and len(set(places)) == 8000
    total, found = master.trials.workloads(1)
    assert total == 6000 and next(found).steps_completed == 1
    # a client that reads no further keeps no view open: the -wal file can be emptied
    with state.database.transaction() as connection:
        connection.execute("INSERT INTO contexts VALUES (99, zeroblob(?))", (2 * LARGEST_WAL,))
    assert Path(f"{state.directory.database}-wal").stat().st_size == 0
    assert next(found).steps_completed == 2


def test_a_long_read_delays_no_other_request(master: Sandbox) -> None:
    master.add_user("ada", "token")
    with ThreadPoolExecutor(1) as threads, master.state.database.reading():
        found = threads.submit(master.accounts.identify, "token", None).result(timeout=20)
    assert found is not None and found.name == "ada"


def test_progress_of_the_trial_and_of_the_search(master: Sandbox) -> None:
    master.create()
    master.trials.report_progress(1, 0.5)
    assert master.trials.get(1).progress == 0.5
    assert master.experiments.get(1).progress == pytest.approx(0.5)
    master.trials.report_progress(1, 7.0)
    assert master.trials.get(1).progress == 1.0


def test_one_trial_is_killed_and_the_search_goes_on(master: Sandbox) -> None:
    grid = {"name": "grid", "metric": "val", "max_concurrent_trials": 1}
    made = master.create(searcher=grid, hyperparameters={"a": {"type": "categorical", "vals": [1, 2]}})
    master.trials.kill(1)
    master.exit(1, code=137)
    master.exit(2)
    assert master.states(made.id) == ("COMPLETED", ["CANCELED", "COMPLETED"])


def test_metadata_and_runner_state(master: Sandbox) -> None:
    master.create()
    assert master.trials.metadata(1) == {}
    master.trials.set_metadata(1, {"a": [1]})
    master.trials.set_runner_state(1, "training")
    assert master.trials.metadata(1) == {"a": [1]} and master.trials.get(1).runner_state == "training"


def test_a_rank_starts_only_while_its_trial_lives(master: Sandbox) -> None:
    master.create()
    master.trials.start_run(1)
    master.exit(1)
    with pytest.raises(Conflict):
        master.trials.start_run(1)


def test_a_trial_that_said_that_it_ends_and_does_not_is_ended(master: Sandbox) -> None:
    master.create()
    master.trials.early_exit(1, "EXITED_REASON_INIT_INVALID_HP")
    master.clock.now += 9
    master.tick()
    assert not master.agent.killed
    master.clock.now += 2
    master.tick()
    assert len(master.agent.killed) == 1
    master.exit(1, code=137)
    assert master.state_of(1) == "CANCELED" and "INVALID_HP" in master.trials.get(1).reason


@pytest.mark.parametrize("by", ["the master", "a slot"])
def test_a_trial_that_said_that_it_ends_and_loses_its_slots_has_completed(master: Sandbox, by: str) -> None:
    master.create()
    master.trials.early_exit(1, "EXITED_REASON_INVALID_HP")
    if by == "the master":
        master.stop_runs(seconds=0)
        master.restart()
    else:
        master.machine.set_slot_enabled(0, False)
    master.clock.now += 11
    master.tick()
    master.exit(1, code=143)
    assert (master.state_of(1), master.trials.get(1).reason) == ("COMPLETED", "the trial ended itself: INVALID_HP")


def test_logs_hold_what_the_master_did(master: Sandbox) -> None:
    """A failure that says nothing by itself is told in a cluster's words."""
    master.create(max_restarts=2)
    master.exit(1, code=3, why="so it goes")
    master.exit(1, code=3)
    master.exit(1)
    lines = [line.message for line in master.trials.logs(1, LogQuery(follow=True)) if line is not None]
    assert lines == [
        "run 1 ended with exit code 3: so it goes",
        "run 2 ended with exit code 3: resources failed with non-zero exit code",
        "run 3 ended with exit code 0",
    ]


def test_a_run_that_was_killed_is_no_error(master: Sandbox) -> None:
    master.create()
    master.trials.kill(1)
    master.on_exited(master.run_of(1).allocation.id, Exit(137, 1.0, killed=True))
    lines = [line for line in master.trials.logs(1, LogQuery(follow=True)) if line is not None]
    assert ("INFO", "run 1 ended with exit code 137") in [(line.level, line.message) for line in lines]
    assert not any(line.level == "ERROR" for line in lines)


@pytest.mark.parametrize("operation", ["get", "kill", "workloads", "metrics", "checkpoints", "metadata", "start_run"])
def test_there_is_no_such_trial(master: Sandbox, operation: str) -> None:
    with pytest.raises(NotFound):
        getattr(master.trials, operation)(99)
    with pytest.raises(NotFound):
        master.trials.report_metrics(99, run_id=1, group="training", steps_completed=1, metrics={})


def test_a_task_and_its_runs(master: Sandbox) -> None:
    master.create()
    run = master.run_of(1).allocation
    task = master.tasks.task(run.task_id)
    assert (task.trial_id, task.experiment_id, task.owner, [item.id for item in task.allocations]) == (
        1,
        1,
        "someone",
        [run.id],
    )
    assert [item.id for item in master.tasks.tasks()] == [run.task_id]
    master.exit(1)
    assert master.tasks.tasks() == [] and master.tasks.task(run.task_id).ended is not None
    assert master.tasks.allocation(run.id).exit_code == 0


def test_a_wait_for_a_preemption_ends_with_it(master: Sandbox) -> None:
    made = master.create()
    name = master.run_of(1).allocation.id
    assert not master.tasks.preemption_signal(name, 0)
    heard: list[bool] = []
    waiter = threading.Thread(target=lambda: heard.append(master.tasks.preemption_signal(name, 60)))
    waiter.start()
    master.experiments.pause(made.id)
    waiter.join(timeout=30)
    assert heard == [True]


def test_a_wait_ends_when_the_run_ends(master: Sandbox) -> None:
    master.create()
    name = master.run_of(1).allocation.id
    heard: list[bool] = []
    waiter = threading.Thread(target=lambda: heard.append(master.tasks.preemption_signal(name, 60)))
    waiter.start()
    master.exit(1)
    waiter.join(timeout=30)
    assert heard == [False]


def test_an_ack_of_a_run_that_is_over_is_not_one_of_the_next(master: Sandbox) -> None:
    made = master.create()
    old = master.run_of(1).allocation.id
    master.exit(1, code=1)
    master.experiments.pause(made.id)
    master.tasks.ack_preemption(old)
    master.exit(1)
    assert master.state_of(1) == "COMPLETED"


def test_lines_sent_over_http(master: Sandbox) -> None:
    master.create()
    task = master.run_of(1).allocation.task_id
    lines = [
        {"log": "one\n", "level": "LOG_LEVEL_ERROR", "rankId": 2, "timestamp": "2026-01-01T00:00:00Z"},
        {"log": "two"},
    ]
    master.tasks.append_logs(task, lines)
    found = [line for line in master.tasks.logs(task, LogQuery()) if line is not None]
    by_text = {line.message: line for line in found}
    assert (by_text["one"].level, by_text["one"].rank) == ("ERROR", 2) and by_text["two"].time == master.clock.now
    with pytest.raises(Invalid):
        master.tasks.append_logs(task, [{"log": "x", "timestamp": "yesterday"}])
    for late in ("9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+12:00"):
        with pytest.raises(Invalid):
            master.tasks.append_logs(task, [{"log": "x", "timestamp": late}])
    with pytest.raises(Invalid, match="rankId"):
        master.tasks.append_logs(task, [{"log": "x", "rankId": "first"}])


def test_there_is_no_such_thing(master: Sandbox) -> None:
    tasks = master.tasks
    for operation in (tasks.allocation, tasks.ack_preemption, tasks.task, tasks.context):
        with pytest.raises(NotFound):
            operation("no one")
    with pytest.raises(NotFound):
        tasks.preemption_signal("no one", 0)
