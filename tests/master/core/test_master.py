"""Restarts of the master, the clock, the end."""

from __future__ import annotations

import threading

from tests.master.fakes import Sandbox
from zero_trial.master.agent.processes import Exit
from zero_trial.master.core.accounts import digest
from zero_trial.master.records import LogQuery


def test_a_new_master_adopts_what_runs(master: Sandbox) -> None:
    made = master.create()
    before = master.run_of(1)
    master.restart()
    assert master.runs() == [before] and master.agent.started == [before.allocation.id]
    assert master.accounts.token_owner(digest(before.token)) is not None
    master.exit(1)
    assert master.states(made.id) == ("COMPLETED", ["COMPLETED"])


def test_what_was_never_started_is_started(master: Sandbox) -> None:
    master.create()
    name = master.run_of(1).allocation.id
    master.agent.running.clear()  # the master before died between the commit and the start
    master.restart()
    order = master.run_of(1)
    assert order.allocation.id == name and master.accounts.token_owner(digest(order.token)) is not None


def test_what_vanished_counts_as_a_crash(master: Sandbox) -> None:
    master.create(max_restarts=0)
    master.restart()
    master.exit(1, code=137, why="its supervisor is gone")
    assert master.state_of(1) == "ERROR" and "supervisor" in master.trials.get(1).reason


def test_an_order_to_kill_is_given_again(master: Sandbox) -> None:
    made = master.create()
    master.experiments.kill(made.id)
    master.restart()
    assert master.agent.killed == [master.run_of(1).allocation.id] * 2


def test_a_deadline_outlives_the_master(master: Sandbox) -> None:
    made = master.create(preemption_timeout=60)
    master.experiments.pause(made.id)
    master.restart()
    master.clock.now += 61
    master.tick()
    assert len(master.agent.killed) == 1


def test_an_exit_that_is_told_twice_counts_once(master: Sandbox) -> None:
    master.create(max_restarts=1)
    name = master.run_of(1).allocation.id
    for _ in range(3):
        master.on_exited(name, Exit(1, 0.0))
    assert master.trials.get(1).restarts == 1
    master.on_exited("nobody", Exit(1, 0.0))
    master.on_started("nobody")


def test_the_states_that_are_shown(master: Sandbox) -> None:
    made = master.create()
    master.create(resources={"slots_per_trial": 2})
    assert [item.shown_state for item in master.experiments.all()] == ["STARTING", "QUEUED"]
    master.on_started(master.run_of(1).allocation.id)
    assert master.experiments.get(made.id).shown_state == "RUNNING"
    assert master.trials.get(1).shown_state == "RUNNING" and master.trials.get(2).shown_state == "QUEUED"


def test_runs_that_end_with_the_master_go_on_with_the_next(master: Sandbox) -> None:
    made = master.create()
    name = master.run_of(1).allocation.id
    ending = threading.Thread(target=lambda: master.stop_runs(seconds=30))
    ending.start()
    while name not in master.agent.killed:
        master.state.closed.wait(0.01)
    master.exit(1, code=143)
    ending.join(timeout=30)
    assert not ending.is_alive() and master.runs() == []
    assert master.states(made.id) == ("ACTIVE", ["ACTIVE"])
    master.restart()
    assert master.run_of(1).allocation.run_id == 2 and master.trials.get(1).restarts == 0


def test_lines_of_the_master_are_marked_as_its_own(master: Sandbox) -> None:
    master.create()
    master.state.log_to_trial(1, "hello", "WARNING")
    line = next(iter(master.trials.logs(1, LogQuery())))
    assert line is not None and (line.message, line.level, line.source) == ("hello", "WARNING", "master")
