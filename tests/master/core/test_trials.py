"""What trials report, and what their tasks and allocations ask for."""

from __future__ import annotations

import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.master.fakes import Sandbox
from zero_trial.master.agent.resources import Exit
from zero_trial.master.logs import LogQuery
from zero_trial.master.records import Conflict, MetricReport
from zero_trial.master.store import metric_rows
from zero_trial.master.store.database import LARGEST_WAL


def report(master: Sandbox, steps: int | None, group: str = "training", run_id: int = 1, **values: float) -> None:
    master.trials.report_metrics(
        1, run_id=run_id, group=group, steps_completed=steps, metrics=values, batch_metrics=[{"x": 1}]
    )


def test_a_report_that_is_sent_again_counts_once(master: Sandbox) -> None:
    """The answer to the first one was lost with the master before."""
    master.create()
    for _ in range(2):
        report(master, 1, loss=0.1)
        master.validate(1, 0.5)
    assert [each.group for each in master.trials.metrics(1)] == ["training", "validation"]


def test_many_reports_are_read_in_pages(master: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    master.create()
    state = master.state
    with state.database.transaction() as connection:
        for at in range(8000):
            group, steps = ("gpu", None) if at % 4 == 0 else ("training", at)
            metric_rows.add(connection, MetricReport(1, 1, group, steps, {"loss": at, "text": "x" * 100}))
    monkeypatch.setattr(metric_rows, "_SENT_BYTES", 5000)
    tracemalloc.start()
    places = [(report.steps_completed or 0, report.id) for report in master.trials.metrics(1)]
    assert tracemalloc.get_traced_memory()[1] < 4 << 20  # all at once take 10 MiB
    tracemalloc.stop()
    assert places == sorted(places) and len(set(places)) == 8000
    total, found = master.trials.workloads(1)
    assert total == 6000 and next(found).steps_completed == 1
    # a client that reads no further keeps no view open: the -wal file can be begun again
    for size in (2 * LARGEST_WAL, 1, 1):
        with state.database.transaction() as connection:
            connection.execute("REPLACE INTO contexts VALUES (99, zeroblob(?))", (size,))
    assert Path(f"{state.directory.database}-wal").stat().st_size <= LARGEST_WAL
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
    assert (master.state_of(1), master.trials.get(1).reason) == ("COMPLETED", "the trial exited early: INVALID_HP")


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
