"""One transaction, all of it or nothing; restarts of the master, the clock, the end."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.master.fakes import Sandbox
from zero_trial.master.agent.resources import Exit
from zero_trial.master.core import lifecycle
from zero_trial.master.core.accounts import digest
from zero_trial.master.core.transaction import transaction
from zero_trial.master.logs import LogQuery
from zero_trial.master.records import Unavailable
from zero_trial.master.store import trial_rows


def test_a_change_that_fails_changes_nothing(master: Sandbox) -> None:
    made = master.create()
    with pytest.raises(RuntimeError), transaction(master.state) as tx:
        trial_rows.change(tx.connection, 1, reason="half")
        raise RuntimeError("in the middle")
    assert master.trials.get(1).reason == ""
    assert master.states(made.id) == ("ACTIVE", ["ACTIVE"])


def test_a_change_that_cannot_be_committed_is_not_in_the_log(master: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    space = {"a": {"type": "categorical", "vals": [1, 2]}}
    master.create(searcher={"name": "grid", "metric": "val"}, hyperparameters=space)
    name, database = master.run_of(1).allocation.id, master.state.database
    plain = database.transaction

    @contextmanager
    def full() -> Iterator[sqlite3.Connection]:
        with plain() as connection:
            yield connection
            raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched, pytest.raises(Unavailable, match=r"master's disk is full.* Free space"):
        patched.setattr(database, "transaction", full)
        master.on_exited(name, Exit(0, master.clock.now))
    assert master.state_of(1) == "ACTIVE" and not list(master.trials.logs(1, LogQuery()))
    assert 1 not in master.state.searches  # the search has moved on: it is restored from the store
    master.exit(1)
    assert "ended with exit code 0" in next(iter(master.trials.logs(1, LogQuery()))).message  # type: ignore[union-attr]


def test_the_lines_of_an_end_are_written_before_a_follower_sees_it(
    master: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    master.create()
    followed: list[str] = []
    write = master.state.log_to_trial

    def follow() -> None:
        followed.extend(line.message for line in master.trials.logs(1, LogQuery(follow=True)) if line is not None)

    follower = threading.Thread(target=follow)

    def late(trial_id: int, line: str, level: str = "INFO") -> None:
        follower.start()  # the change can be seen by now
        follower.join(timeout=0.3)
        write(trial_id, line, level)

    monkeypatch.setattr(master.state, "log_to_trial", late)
    master.exit(1)
    follower.join(timeout=30)
    assert followed == ["run 1 ended with exit code 0"]


def test_an_order_that_fails_does_not_keep_the_others(master: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    master.create()
    master.create()
    first, second = (master.run_of(number).allocation.id for number in (1, 2))
    kill = master.agent.kill

    def refuse(name: str) -> None:
        if name == first:
            raise OSError("Input/output error")
        kill(name)

    monkeypatch.setattr(master.agent, "kill", refuse)
    with transaction(master.state) as tx:
        for number in (1, 2):
            tx.apply_to_trial(number, lifecycle.TrialSignal.KILL)
        tx.garbage = True
    assert master.agent.killed == [second] and master.state.has_garbage.is_set()


# -- runs


def test_a_run_starts_from_the_newest_checkpoint_and_what_came_after_it_is_archived(master: Sandbox) -> None:
    from tests.master.core.test_checkpoints import save

    master.create()
    trials_ = master.trials
    for step in (1, 2, 3):
        trials_.report_metrics(1, run_id=1, group="training", steps_completed=step, metrics={"loss": step})
    save(master, 1, steps=2)
    master.exit(1, code=1)
    order = master.run_of(1)
    assert order.steps_completed == 2 and order.latest_checkpoint is not None and order.allocation.run_id == 2
    assert [report.steps_completed for report in trials_.metrics(1)] == [1, 2]


def test_a_new_master_adopts_what_runs_and_starts_what_never_was(master: Sandbox) -> None:
    master.create()
    before = master.run_of(1)
    master.restart()
    assert master.runs() == [before] and master.agent.started == [before.allocation.id]
    assert master.accounts.token_owner(digest(before.token)) is not None
    master.agent.running.clear()  # the master before died between the commit and the start
    master.restart()
    order = master.run_of(1)
    assert order.allocation.id == before.allocation.id
    assert master.accounts.token_owner(digest(order.token)) is not None


def test_an_order_to_kill_is_given_again(master: Sandbox) -> None:
    made = master.create()
    master.experiments.kill(made.id)
    master.restart()
    assert master.agent.killed == [master.run_of(1).allocation.id] * 2


def test_a_pause_that_is_ignored_ends_by_force_also_by_the_next_master(master: Sandbox) -> None:
    made = master.create(preemption_timeout=60)
    master.experiments.pause(made.id)
    master.clock.now += 59
    master.tick()
    assert master.agent.killed == []
    master.restart()
    master.clock.now += 2
    master.tick()
    master.tick()
    assert master.agent.killed == [master.run_of(1).allocation.id]
    master.exit(1, code=137)
    assert master.states(made.id) == ("PAUSED", ["PAUSED"]) and master.trials.get(1).restarts == 0


@pytest.mark.parametrize("asked_first", [False, True])
def test_a_run_in_the_queue_of_its_engine_ends_when_it_is_asked_to_stop(master: Sandbox, asked_first: bool) -> None:
    made = master.create()
    name = master.run_of(1).allocation.id
    for ask in (asked_first, not asked_first):
        if ask:
            master.experiments.pause(made.id)
        else:
            master.on_waiting(name, "Resources")
    assert master.agent.killed == [name]
    master.on_exited(name, Exit(137, 0.0, killed=True))
    assert master.state_of(1) == "PAUSED" and master.state.submitted == set()


def test_a_run_that_has_begun_is_asked_and_its_time_counts_from_there(master: Sandbox) -> None:
    made = master.create()
    name = master.run_of(1).allocation.id
    master.on_waiting(name, "Resources")
    master.clock.now += 3600
    master.on_started(name)
    master.clock.now += 5
    master.experiments.pause(made.id)
    assert master.agent.killed == []
    master.ack(1)
    master.exit(1)
    assert master.state_of(1) == "PAUSED"
    assert [trial.wall_clock for trial in master.experiments.trials(made.id)] == [5]


def test_an_exit_that_is_reported_twice_counts_once(master: Sandbox) -> None:
    master.create(max_restarts=1)
    name = master.run_of(1).allocation.id
    for _ in range(3):
        master.on_exited(name, Exit(1, 0.0))
    assert master.trials.get(1).restarts == 1
    master.on_exited("no one", Exit(1, 0.0))
    master.on_started("no one")


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
