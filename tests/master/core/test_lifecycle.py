"""What an event makes of a trial or an experiment, and which queued run gets which slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_trial.master.core.lifecycle import (
    EarlyExit,
    Exited,
    Fail,
    Machine,
    QueuedRun,
    RunStage,
    TrialEffect,
    TrialEvent,
    TrialLife,
    assign_slots,
    end_of_search,
    exit_reason,
    queue_order,
    step_experiment,
    step_trial,
)
from zero_trial.master.core.lifecycle import ExperimentEvent as E
from zero_trial.master.core.lifecycle import TrialSignal as T
from zero_trial.master.records import ExperimentState, TrialState
from zero_trial.master.records import ExperimentState as S
from zero_trial.master.search.searcher import ExitReason

OK, BAD = Exited(0), Exited(1)
UP = (T.START, T.PLACED)  # a trial that runs


def live(*events: TrialEvent, max_restarts: int = 1) -> tuple[TrialLife, list[str]]:
    """A life after these events, and all effects that there were."""
    life, done = TrialLife(max_restarts=max_restarts), []
    for event in events:
        life, effects = step_trial(life, event)
        done += [effect.value for effect in effects]
    return life, done


STORIES: list[tuple[str, tuple[TrialEvent, ...], str, RunStage, str]] = [
    ("created", (), "ACTIVE", RunStage.NONE, ""),
    ("queued", (T.START,), "ACTIVE", RunStage.QUEUED, "request"),
    ("runs", UP, "ACTIVE", RunStage.RUNNING, "request"),
    ("completes", (*UP, OK), "COMPLETED", RunStage.NONE, "request end"),
    ("restarts", (*UP, BAD), "ACTIVE", RunStage.QUEUED, "request request"),
    ("restarts, then completes", (*UP, BAD, T.PLACED, OK), "COMPLETED", RunStage.NONE, "request request end"),
    ("no restarts left", (*UP, BAD, T.PLACED, BAD), "ERROR", RunStage.NONE, "request request end"),
    # pause and activate
    ("paused before it began", (T.START, T.PAUSE), "PAUSED", RunStage.NONE, "request withdraw"),
    ("asked to pause", (*UP, T.PAUSE), "PAUSED", RunStage.RUNNING, "request preempt"),
    ("asked twice", (*UP, T.PAUSE, T.PAUSE), "PAUSED", RunStage.RUNNING, "request preempt"),
    ("paused", (*UP, T.PAUSE, T.ACKED, OK), "PAUSED", RunStage.NONE, "request preempt"),
    ("finished before it heard of the pause", (*UP, T.PAUSE, OK), "COMPLETED", RunStage.NONE, "request preempt end"),
    ("crashed while it paused", (*UP, T.PAUSE, BAD), "PAUSED", RunStage.NONE, "request preempt"),
    ("crashed while it paused, once too often", (*UP, BAD, T.PLACED, T.PAUSE, BAD), "ERROR", RunStage.NONE, "request request preempt end"),
    ("goes on", (*UP, T.PAUSE, T.ACKED, OK, T.START), "ACTIVE", RunStage.QUEUED, "request preempt request"),
    ("active again before it had paused", (*UP, T.PAUSE, T.START, T.ACKED, OK), "ACTIVE", RunStage.QUEUED, "request preempt request"),
    ("ignores the pause", (*UP, T.PAUSE, T.OVERDUE), "PAUSED", RunStage.RUNNING, "request preempt kill"),
    ("killed because it ignored the pause", (*UP, T.PAUSE, T.OVERDUE, Exited(137)), "PAUSED", RunStage.NONE, "request preempt kill"),
    ("the same, and active again", (*UP, T.PAUSE, T.OVERDUE, T.START, Exited(137)), "ACTIVE", RunStage.QUEUED, "request preempt kill request"),
    ("an ack that no one asked for", (*UP, T.ACKED, OK), "COMPLETED", RunStage.NONE, "request end"),
    # the master goes down
    ("ended with the master", (*UP, T.EVICTED, Exited(143)), "ACTIVE", RunStage.QUEUED, "request kill request"),
    ("ended by another process", (*UP, Exited(143, killed=True)), "ACTIVE", RunStage.QUEUED, "request request"),
    # cancel
    ("canceled before it began", (T.CANCEL,), "CANCELED", RunStage.NONE, "end"),
    ("canceled in the queue", (T.START, T.CANCEL), "CANCELED", RunStage.NONE, "request withdraw end"),
    ("canceled", (*UP, T.CANCEL), "STOPPING_CANCELED", RunStage.RUNNING, "request preempt"),
    ("canceled, gone", (*UP, T.CANCEL, T.ACKED, OK), "CANCELED", RunStage.NONE, "request preempt end"),
    ("canceled, gone with an error", (*UP, T.CANCEL, BAD), "CANCELED", RunStage.NONE, "request preempt end"),
    ("canceled while it pauses", (*UP, T.PAUSE, T.CANCEL, OK), "CANCELED", RunStage.NONE, "request preempt end"),
    ("canceled while paused", (*UP, T.PAUSE, T.ACKED, OK, T.CANCEL), "CANCELED", RunStage.NONE, "request preempt end"),
    ("ignores the cancel", (*UP, T.CANCEL, T.OVERDUE, Exited(137)), "CANCELED", RunStage.NONE, "request preempt kill end"),
    # kill
    ("killed", (*UP, T.KILL), "STOPPING_KILLED", RunStage.RUNNING, "request kill"),
    ("killed, gone", (*UP, T.KILL, Exited(137)), "CANCELED", RunStage.NONE, "request kill end"),
    ("canceled, then killed", (*UP, T.CANCEL, T.KILL, Exited(137)), "CANCELED", RunStage.NONE, "request preempt kill end"),
    ("killed, then canceled", (*UP, T.KILL, T.CANCEL, Exited(137)), "CANCELED", RunStage.NONE, "request kill end"),
    ("killed twice", (*UP, T.KILL, T.KILL), "STOPPING_KILLED", RunStage.RUNNING, "request kill"),
    ("killed in the queue", (T.START, T.KILL), "CANCELED", RunStage.NONE, "request withdraw end"),
    # the search
    ("stopped by the search", (*UP, T.STOP), "STOPPING_COMPLETED", RunStage.RUNNING, "request preempt"),
    ("trained to its end", (*UP, T.FINISH), "STOPPING_COMPLETED", RunStage.RUNNING, "request preempt"),
    ("stopped, gone", (*UP, T.STOP, T.ACKED, OK), "COMPLETED", RunStage.NONE, "request preempt end"),
    ("stopped, crashes while it saves", (*UP, T.STOP, BAD), "COMPLETED", RunStage.NONE, "request preempt end"),
    ("stopped while paused", (*UP, T.PAUSE, T.ACKED, OK, T.STOP), "COMPLETED", RunStage.NONE, "request preempt end"),
    ("stopped, then paused", (*UP, T.STOP, T.PAUSE), "STOPPING_COMPLETED", RunStage.RUNNING, "request preempt"),
    ("stopped, then started", (*UP, T.STOP, T.START, T.ACKED, OK), "COMPLETED", RunStage.NONE, "request preempt end"),
    ("killed, then its metric is missing", (*UP, T.KILL, Fail("no metric"), Exited(137)), "CANCELED", RunStage.NONE, "request kill end"),
    ("its metric is missing", (*UP, Fail("no metric"), Exited(137)), "ERROR", RunStage.NONE, "request kill end"),
    # what it says itself
    ("invalid hyperparameters", (*UP, EarlyExit("INVALID_HP"), OK), "COMPLETED", RunStage.NONE, "request watch end"),
    ("says so and crashes", (*UP, EarlyExit("INVALID_HP"), BAD), "ACTIVE", RunStage.QUEUED, "request watch request"),
    ("says so and stays", (*UP, EarlyExit("INVALID_HP"), T.OVERDUE, Exited(137)), "CANCELED", RunStage.NONE, "request watch kill end"),
    ("so, with the master", (*UP, EarlyExit("INVALID_HP"), T.EVICTED, Exited(143)), "COMPLETED", RunStage.NONE, "request watch kill end"),
    ("so, and late", (*UP, EarlyExit("INVALID_HP"), T.EVICTED, T.OVERDUE, Exited(137)), "COMPLETED", RunStage.NONE, "request watch kill end"),
    # log policies
    ("not to be retried", (*UP, Exited(7, no_retry="x")), "ERROR", RunStage.NONE, "request end"),
    ("not to be retried, completes", (*UP, Exited(0, no_retry="x")), "COMPLETED", RunStage.NONE, "request end"),
    ("not to be retried, ended with the master", (*UP, T.EVICTED, Exited(143, no_retry="x")), "ACTIVE", RunStage.QUEUED, "request kill request"),
    ("excluded", (*UP, Exited(7, excluded="x")), "ERROR", RunStage.NONE, "request end"),
    # what means nothing
    ("an exit without a run", (OK,), "ACTIVE", RunStage.NONE, ""),
    ("events after the end", (*UP, OK, T.START, T.KILL, BAD, T.PAUSE), "COMPLETED", RunStage.NONE, "request end"),
    ("placed twice", (*UP, T.PLACED), "ACTIVE", RunStage.RUNNING, "request"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("events", "state", "run", "effects"), [story[1:] for story in STORIES], ids=[story[0] for story in STORIES]
)
def test_story(events: tuple[TrialEvent, ...], state: str, run: RunStage, effects: str) -> None:
    life, done = live(*events)
    assert (life.state.value, life.run, " ".join(done)) == (state, run, effects)


@pytest.mark.parametrize(
    ("events", "state", "run", "effects"),
    [
        ((T.PAUSE,), "PAUSED", RunStage.RUNNING, "kill"),
        ((T.PAUSE, Exited(137, killed=True)), "PAUSED", RunStage.NONE, "kill"),
        ((T.PAUSE, T.START, Exited(137, killed=True)), "ACTIVE", RunStage.QUEUED, "kill request"),
        ((T.CANCEL, Exited(137, killed=True)), "CANCELED", RunStage.NONE, "kill end"),
        ((T.STOP, Exited(137, killed=True)), "COMPLETED", RunStage.NONE, "kill end"),
        ((T.KILL, Exited(137, killed=True)), "CANCELED", RunStage.NONE, "kill end"),
    ],
)
def test_a_run_in_the_queue_of_its_engine_has_nothing_to_save(
    events: tuple[TrialEvent, ...], state: str, run: RunStage, effects: str
) -> None:
    life, done = TrialLife(run=RunStage.RUNNING, waiting=True), []
    for event in events:
        life, more = step_trial(life, event)
        done += [effect.value for effect in more]
    assert (life.state.value, life.run, " ".join(done)) == (state, run, effects)


def test_only_crashes_count_as_restarts() -> None:
    paused, overdue = (T.START, T.PLACED, T.PAUSE, T.ACKED, OK), (T.PLACED, T.PAUSE, T.OVERDUE, Exited(137))
    assert live(*UP, BAD, *overdue, *paused, max_restarts=3)[0].restarts == 1
    life, _ = live(*UP, Exited(9, "its supervisor is gone"), max_restarts=0)
    assert life.state is TrialState.ERROR and "its supervisor is gone" in life.reason and life.restarts == 0


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ((*UP, OK), ExitReason.COMPLETED),
        ((*UP, T.STOP, OK), ExitReason.COMPLETED),
        ((*UP, BAD, T.PLACED, BAD), ExitReason.ERRORED),
        ((*UP, Fail("x"), BAD), ExitReason.ERRORED),
        ((*UP, T.KILL, BAD), ExitReason.CANCELED),
        ((*UP, EarlyExit("INVALID_HP"), OK), ExitReason.COMPLETED),
        ((*UP, EarlyExit("ERRORED"), OK), ExitReason.ERRORED),
    ],
)
def test_events_that_reach_the_search(events: tuple[TrialEvent, ...], reason: ExitReason) -> None:
    assert exit_reason(live(*events)[0]) is reason


def test_every_event_in_every_state_is_answered() -> None:
    """No state is a dead end: a run that is there can always be ended, and its exit always leads
    on."""
    signals = (T.START, T.PAUSE, T.CANCEL, T.KILL, T.STOP, T.PLACED, T.ACKED, T.OVERDUE, T.EVICTED)
    events: list[TrialEvent] = [*signals, Fail("x"), EarlyExit("X"), OK, BAD]
    seen, todo = set(), [TrialLife()]
    while todo:
        life = todo.pop()
        if life in seen:
            continue
        seen.add(life)
        for event in events:
            after, effects = step_trial(life, event)
            assert (after.state.final and not life.state.final) == (TrialEffect.END in effects)
            assert not (after.state.final and after.run is not RunStage.NONE)
            todo.append(replace(after, reason="", restarts=min(after.restarts, 1)))
        if life.run is RunStage.RUNNING:
            assert step_trial(step_trial(life, T.KILL)[0], Exited(137))[0].state.final
    assert len(seen) > 30


EXPERIMENT_STORIES: list[tuple[S, E, S, str]] = [
    (S.ACTIVE, E.PAUSE, S.PAUSED, "pause"),
    (S.PAUSED, E.ACTIVATE, S.ACTIVE, "start"),
    (S.ACTIVE, E.ACTIVATE, S.ACTIVE, ""),
    (S.PAUSED, E.PAUSE, S.PAUSED, ""),
    (S.ACTIVE, E.CANCEL, S.STOPPING_CANCELED, "cancel"),
    (S.PAUSED, E.CANCEL, S.STOPPING_CANCELED, "cancel"),
    (S.ACTIVE, E.KILL, S.STOPPING_KILLED, "kill"),
    (S.STOPPING_CANCELED, E.KILL, S.STOPPING_KILLED, "kill"),
    (S.STOPPING_KILLED, E.CANCEL, S.STOPPING_KILLED, ""),
    (S.ACTIVE, E.SEARCH_COMPLETED, S.STOPPING_COMPLETED, ""),
    (S.ACTIVE, E.SEARCH_FAILED, S.STOPPING_ERROR, ""),
    (S.ACTIVE, E.SEARCH_CANCELED, S.STOPPING_CANCELED, ""),
    (S.PAUSED, E.SEARCH_CANCELED, S.STOPPING_CANCELED, ""),
    (S.STOPPING_CANCELED, E.SEARCH_COMPLETED, S.STOPPING_CANCELED, ""),
    (S.STOPPING_COMPLETED, E.CANCEL, S.STOPPING_CANCELED, "cancel"),
    (S.STOPPING_COMPLETED, E.PAUSE, S.STOPPING_COMPLETED, ""),
    (S.STOPPING_COMPLETED, E.TRIALS_ENDED, S.COMPLETED, ""),
    (S.STOPPING_ERROR, E.TRIALS_ENDED, S.ERROR, ""),
    (S.STOPPING_CANCELED, E.TRIALS_ENDED, S.CANCELED, ""),
    (S.STOPPING_KILLED, E.TRIALS_ENDED, S.CANCELED, ""),
    (S.ACTIVE, E.TRIALS_ENDED, S.ACTIVE, ""),
    (S.PAUSED, E.TRIALS_ENDED, S.PAUSED, ""),
    (S.COMPLETED, E.KILL, S.COMPLETED, ""),
    (S.ERROR, E.ACTIVATE, S.ERROR, ""),
    (S.DELETING, E.CANCEL, S.DELETING, ""),
]


@pytest.mark.parametrize(("before", "event", "after", "effects"), EXPERIMENT_STORIES, ids=str)
def test_experiment_story(before: S, event: E, after: S, effects: str) -> None:
    state, signal = step_experiment(before, event)
    assert (state, "" if signal is None else signal.value) == (after, effects)


@pytest.mark.parametrize(
    ("states", "end"),
    [
        ("COMPLETED", E.SEARCH_COMPLETED),
        ("ERROR ERROR", E.SEARCH_FAILED),
        ("CANCELED CANCELED", E.SEARCH_CANCELED),
        ("CANCELED ERROR", E.SEARCH_COMPLETED),
        ("CANCELED COMPLETED", E.SEARCH_COMPLETED),
        ("", E.SEARCH_COMPLETED),
    ],
)
def test_the_end_of_a_search_follows_from_its_trials(states: str, end: E) -> None:
    assert end_of_search([TrialState(word) for word in states.split()]) is end


def wait(name: str, experiment: int = 1, slots: int = 1, priority: int = 42, max_slots: int | None = None) -> QueuedRun:
    return QueuedRun(name, experiment, slots, priority, (experiment, int(name[1:] or 0)), max_slots)


def one(free: list[int], enabled: int = 8) -> list[Machine]:
    """One machine."""
    return [Machine("m", enabled, tuple(free))]


BOUND = [wait("t1", 1, max_slots=1), wait("t2", 1, max_slots=1), wait("t3", 2)]
BIG = wait("t1", slots=2, priority=1)


@pytest.mark.parametrize(
    ("queue", "free", "placed"),
    [
        ([wait("t1", slots=2), wait("t2")], [3, 0, 1], {"t1": (0, 1), "t2": (3,)}),  # in order, the lowest slots
        ([wait("t1", 1, priority=42), wait("t2", 2, priority=1)], [0], {"t2": (0,)}),  # lower numbers go first
        ([wait("t1", slots=3)], [0, 1], {}),  # all slots or none
        ([wait("t1", slots=2), wait("t2")], [0], {"t2": (0,)}),  # others of its priority go past it
        ([BIG, wait("t2")], [0], {}),  # it is more urgent, and not starved by small ones
        ([BIG, wait("t2", priority=1), wait("t3")], [0], {"t2": (0,)}),
        ([wait("t1", slots=2), wait("t2", slots=0)], [], {"t2": ()}),  # without slots it always runs
        (BOUND, [0, 1], {"t1": (0,), "t3": (1,)}),  # max_slots bounds an experiment and no other
    ],
)
def test_slots_that_are_assigned(queue: list[QueuedRun], free: list[int], placed: dict[str, tuple[int, ...]]) -> None:
    assert assign_slots(queue, one(free), {})[0] == placed


def test_slots_with_others_in_use_and_on_machines_that_are_too_small() -> None:
    assert assign_slots(BOUND, one([0, 1]), {1: 1})[0] == {"t3": (0,)}
    made, waiting = assign_slots([BIG, wait("t2")], one([0], 1), {})  # it fits no empty machine and holds back none
    assert made == {"t2": (0,)} and list(waiting) == ["t1"]
    assert assign_slots([wait("t3", slots=0)], one([], 0), {})[0] == {}


def in_pool(name: str, pool: str, slots: int, priority: int) -> QueuedRun:
    return replace(wait(name, slots=slots, priority=priority), pool=pool)


@pytest.mark.parametrize(
    ("queue", "placed_now"),
    [
        # a large run waits for all of m1 and m2; what shares a machine with it waits behind it
        ([("t1", "all", 4, 1), ("t2", "small", 1, 42)], []),
        ([("t1", "all", 4, 1), ("t2", "small", 1, 1)], ["t2"]),
        ([("t1", "all", 4, 1), ("t2", "other", 1, 42)], ["t2"]),
        ([("t1", "small", 2, 1), ("t2", "all", 1, 42)], ["t2"]),  # on the machine that is not held back
        ([("t1", "small", 2, 1), ("t2", "all", 2, 42)], []),
    ],
)
def test_pools_may_share_machines(queue: list[tuple[str, str, int, int]], placed_now: list[str]) -> None:
    machines = [
        Machine("m1", 2, (0,), ("all",)),
        Machine("m2", 2, (2,), ("all", "small")),
        Machine("m3", 2, (4,), ("other",)),
    ]
    made, waiting = assign_slots([in_pool(*item) for item in queue], machines, {})
    assert list(made) == placed_now and made.get("t2", (0,)) in ((0,), (2,), (4,))
    if "t2" in waiting:
        assert "priority 1" in waiting["t2"]


def test_each_run_that_waits_has_its_reason() -> None:
    queue = [wait("t1", 1, slots=2), wait("t2", 2, max_slots=0), wait("t3", 3, slots=9), wait("t4", 4, priority=50)]
    made, waiting = assign_slots(queue, one([0]), {})
    words = {
        name: next(word for word in ("free", "max_slots", "enabled", "priority") if word in why)
        for name, why in waiting.items()
    }
    assert made == {} and words == {"t1": "free", "t2": "max_slots", "t3": "enabled", "t4": "priority"}


def test_the_order_is_priority_then_submission() -> None:
    queue = [wait("t3", 3), wait("t2", 2, priority=50), wait("t1", 1)]
    assert [item.allocation_id for item in queue_order(queue)] == ["t1", "t3", "t2"]


QUEUES = st.lists(
    st.builds(
        lambda number, experiment, slots, priority, limit: wait(f"t{number}", experiment, slots, priority, limit),
        st.integers(0, 99),
        st.integers(1, 4),
        st.integers(0, 4),
        st.integers(1, 3),
        st.none() | st.integers(0, 4),
    ),
    max_size=8,
    unique_by=lambda item: item.allocation_id,
)


@given(queue=QUEUES, free=st.sets(st.integers(0, 7)))
def test_nothing_is_given_out_twice_and_no_limit_is_passed(queue: list[QueuedRun], free: set[int]) -> None:
    made, waiting = assign_slots(queue, one(sorted(free)), {})
    assert made.keys() | waiting.keys() == {item.allocation_id for item in queue} and not made.keys() & waiting.keys()
    given_out = [slot for slots in made.values() for slot in slots]
    assert len(given_out) == len(set(given_out)) and set(given_out) <= free
    by_name: dict[str, Any] = {item.allocation_id: item for item in queue}
    for name, slots in made.items():
        assert len(slots) == by_name[name].slots
    for experiment in {item.experiment_id for item in queue}:
        own = [by_name[name] for name in made if by_name[name].experiment_id == experiment]
        limits = [item.max_slots for item in own if item.max_slots is not None and item.slots]
        assert (
            not limits or sum(item.slots for item in own) <= max(limits) or any(item.max_slots is None for item in own)
        )


def test_states() -> None:
    final = {"COMPLETED", "CANCELED", "ERROR", "DELETING", "DELETE_FAILED"}
    assert {state.value for state in ExperimentState if state.final} == final
    stopping = {state.value for state in ExperimentState if state.stopping}
    assert stopping == {"STOPPING_COMPLETED", "STOPPING_CANCELED", "STOPPING_KILLED", "STOPPING_ERROR"}
