"""The verbs of running allocations."""

from __future__ import annotations

import threading

import pytest

from tests.master.fakes import Sandbox
from zero_trial.master.errors import Invalid, NotFound
from zero_trial.master.records import LogQuery


def test_a_task_and_its_runs(master: Sandbox) -> None:
    master.create()
    run = master.run_of(1).allocation
    task = master.tasks.task(run.task_id)
    assert (task.trial_id, task.experiment_id, task.owner, [item.id for item in task.allocations]) == (
        1,
        1,
        "somebody",
        [run.id],
    )
    assert [item.id for item in master.tasks.tasks()] == [run.task_id]
    master.exit(1)
    assert master.tasks.tasks() == [] and master.tasks.task(run.task_id).ended is not None
    assert master.tasks.allocation(run.id).exit_code == 0


def test_who_waits_for_a_preemption_hears_of_it(master: Sandbox) -> None:
    made = master.create()
    name = master.run_of(1).allocation.id
    assert not master.tasks.preemption_signal(name, 0)
    heard: list[bool] = []
    waiter = threading.Thread(target=lambda: heard.append(master.tasks.preemption_signal(name, 60)))
    waiter.start()
    master.experiments.pause(made.id)
    waiter.join(timeout=30)
    assert heard == [True]


def test_who_waits_is_let_go_when_the_run_ends(master: Sandbox) -> None:
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


def test_where_ranks_meet(master: Sandbox) -> None:
    master.create(resources={"slots_per_trial": 2})
    run = master.run_of(1).allocation
    found = master.tasks.rendezvous(run.id, run.resources_id)
    assert (found.addresses, found.rank, found.slots) == (("127.0.0.1",), 0, (2,))
    with pytest.raises(NotFound):
        master.tasks.rendezvous(run.id, "other")


def test_what_it_says_of_itself(master: Sandbox) -> None:
    master.create()
    run = master.run_of(1).allocation
    master.tasks.set_ready(run.id)
    master.tasks.accelerator_data(run.id, {"acceleratorType": "cpu"})
    assert master.tasks.allocation(run.id).ready


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
    for verb in (tasks.allocation, tasks.ack_preemption, tasks.set_ready, tasks.task, tasks.context):
        with pytest.raises(NotFound):
            verb("nobody")
    with pytest.raises(NotFound):
        tasks.preemption_signal("nobody", 0)
