"""The life of a trial, as tables of events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_trial.master.core.lifecycle import (
    Acked,
    CancelTrial,
    EarlyExit,
    Exited,
    Fail,
    KillTrial,
    Overdue,
    PauseTrial,
    Placed,
    RunStage,
    StartTrial,
    StopBySearch,
    TrialEffect,
    TrialEvent,
    TrialLife,
    exit_reason,
    step_trial,
)
from zero_trial.master.records import TrialState
from zero_trial.master.search import ExitReason

OK, BAD = Exited(0), Exited(1)
UP = (StartTrial(), Placed())  # a trial that runs


def live(*events: TrialEvent, max_restarts: int = 1) -> tuple[TrialLife, list[str]]:
    """A life after these events, and all effects that there were."""
    life, done = TrialLife(max_restarts=max_restarts), []
    for event in events:
        life, effects = step_trial(life, event)
        done += [effect.value for effect in effects]
    return life, done


STORIES: list[tuple[str, tuple[TrialEvent, ...], str, RunStage, str]] = [
    ("created", (), "ACTIVE", RunStage.NONE, ""),
    ("queued", (StartTrial(),), "ACTIVE", RunStage.QUEUED, "request"),
    ("runs", UP, "ACTIVE", RunStage.RUNNING, "request"),
    ("completes", (*UP, OK), "COMPLETED", RunStage.NONE, "request end"),
    ("restarts", (*UP, BAD), "ACTIVE", RunStage.QUEUED, "request request"),
    ("restarts, then completes", (*UP, BAD, Placed(), OK), "COMPLETED", RunStage.NONE, "request request end"),
    ("no restarts left", (*UP, BAD, Placed(), BAD), "ERROR", RunStage.NONE, "request request end"),
    # pause and activate
    ("paused before it began", (StartTrial(), PauseTrial()), "PAUSED", RunStage.NONE, "request withdraw"),
    ("asked to pause", (*UP, PauseTrial()), "PAUSED", RunStage.RUNNING, "request preempt"),
    ("asked twice", (*UP, PauseTrial(), PauseTrial()), "PAUSED", RunStage.RUNNING, "request preempt"),
    ("paused", (*UP, PauseTrial(), Acked(), OK), "PAUSED", RunStage.NONE, "request preempt"),
    ("finished before it heard of the pause", (*UP, PauseTrial(), OK), "COMPLETED", RunStage.NONE, "request preempt end"),
    ("crashed while it paused", (*UP, PauseTrial(), BAD), "PAUSED", RunStage.NONE, "request preempt"),
    ("crashed while it paused, once too often", (*UP, BAD, Placed(), PauseTrial(), BAD), "ERROR", RunStage.NONE, "request request preempt end"),
    ("goes on", (*UP, PauseTrial(), Acked(), OK, StartTrial()), "ACTIVE", RunStage.QUEUED, "request preempt request"),
    ("active again before it had paused", (*UP, PauseTrial(), StartTrial(), Acked(), OK), "ACTIVE", RunStage.QUEUED, "request preempt request"),
    ("ignores the pause", (*UP, PauseTrial(), Overdue()), "PAUSED", RunStage.RUNNING, "request preempt kill"),
    ("killed because it ignored the pause", (*UP, PauseTrial(), Overdue(), Exited(137)), "PAUSED", RunStage.NONE, "request preempt kill"),
    ("the same, and active again", (*UP, PauseTrial(), Overdue(), StartTrial(), Exited(137)), "ACTIVE", RunStage.QUEUED, "request preempt kill request"),  # noqa: E501
    ("an ack that nobody asked for", (*UP, Acked(), OK), "COMPLETED", RunStage.NONE, "request end"),
    # the master goes down
    ("ended with the master", (*UP, Overdue(), Exited(143)), "ACTIVE", RunStage.QUEUED, "request kill request"),
    ("ended by somebody else", (*UP, Exited(143, killed=True)), "ACTIVE", RunStage.QUEUED, "request request"),
    # cancel
    ("canceled before it began", (CancelTrial(),), "CANCELED", RunStage.NONE, "end"),
    ("canceled in the queue", (StartTrial(), CancelTrial()), "CANCELED", RunStage.NONE, "request withdraw end"),
    ("canceled", (*UP, CancelTrial()), "STOPPING_CANCELED", RunStage.RUNNING, "request preempt"),
    ("canceled, gone", (*UP, CancelTrial(), Acked(), OK), "CANCELED", RunStage.NONE, "request preempt end"),
    ("canceled, gone with an error", (*UP, CancelTrial(), BAD), "CANCELED", RunStage.NONE, "request preempt end"),
    ("canceled while it pauses", (*UP, PauseTrial(), CancelTrial(), OK), "CANCELED", RunStage.NONE, "request preempt end"),
    ("canceled while paused", (*UP, PauseTrial(), Acked(), OK, CancelTrial()), "CANCELED", RunStage.NONE, "request preempt end"),
    ("ignores the cancel", (*UP, CancelTrial(), Overdue(), Exited(137)), "CANCELED", RunStage.NONE, "request preempt kill end"),
    # kill
    ("killed", (*UP, KillTrial()), "STOPPING_KILLED", RunStage.RUNNING, "request kill"),
    ("killed, gone", (*UP, KillTrial(), Exited(137)), "CANCELED", RunStage.NONE, "request kill end"),
    ("canceled, then killed", (*UP, CancelTrial(), KillTrial(), Exited(137)), "CANCELED", RunStage.NONE, "request preempt kill end"),
    ("killed, then canceled", (*UP, KillTrial(), CancelTrial(), Exited(137)), "CANCELED", RunStage.NONE, "request kill end"),
    ("killed twice", (*UP, KillTrial(), KillTrial()), "STOPPING_KILLED", RunStage.RUNNING, "request kill"),
    ("killed in the queue", (StartTrial(), KillTrial()), "CANCELED", RunStage.NONE, "request withdraw end"),
    # the search
    ("stopped by the search", (*UP, StopBySearch()), "STOPPING_COMPLETED", RunStage.RUNNING, "request preempt"),
    ("stopped, gone", (*UP, StopBySearch(), Acked(), OK), "COMPLETED", RunStage.NONE, "request preempt end"),
    ("stopped, crashes while it saves", (*UP, StopBySearch(), BAD), "COMPLETED", RunStage.NONE, "request preempt end"),
    ("stopped while paused", (*UP, PauseTrial(), Acked(), OK, StopBySearch()), "COMPLETED", RunStage.NONE, "request preempt end"),
    ("stopped, then paused", (*UP, StopBySearch(), PauseTrial()), "STOPPING_COMPLETED", RunStage.RUNNING, "request preempt"),
    ("stopped, then started", (*UP, StopBySearch(), StartTrial(), Acked(), OK), "COMPLETED", RunStage.NONE, "request preempt end"),
    ("its metric is missing", (*UP, Fail("no metric"), Exited(137)), "ERROR", RunStage.NONE, "request kill end"),
    # what it says itself
    ("invalid hyperparameters", (*UP, EarlyExit("INVALID_HP"), OK), "ERROR", RunStage.NONE, "request watch end"),
    ("says so and crashes", (*UP, EarlyExit("INVALID_HP"), BAD), "ERROR", RunStage.NONE, "request watch end"),
    ("says so and stays", (*UP, EarlyExit("INVALID_HP"), Overdue(), Exited(137)), "ERROR", RunStage.NONE, "request watch kill end"),
    # what means nothing
    ("an exit without a run", (OK,), "ACTIVE", RunStage.NONE, ""),
    ("events after the end", (*UP, OK, StartTrial(), KillTrial(), BAD, PauseTrial()), "COMPLETED", RunStage.NONE, "request end"),
    ("placed twice", (*UP, Placed()), "ACTIVE", RunStage.RUNNING, "request"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("events", "state", "run", "effects"), [story[1:] for story in STORIES], ids=[story[0] for story in STORIES]
)
def test_story(events: tuple[TrialEvent, ...], state: str, run: RunStage, effects: str) -> None:
    life, done = live(*events)
    assert (life.state.value, life.run, " ".join(done)) == (state, run, effects)


def test_only_crashes_count_as_restarts() -> None:
    life, _ = live(
        *UP,
        BAD,
        Placed(),
        PauseTrial(),
        Overdue(),
        Exited(137),
        StartTrial(),
        Placed(),
        PauseTrial(),
        Acked(),
        OK,
        max_restarts=3,
    )
    assert life.restarts == 1


def test_without_restarts_the_first_crash_is_the_end() -> None:
    life, _ = live(*UP, Exited(9, "its shepherd is gone"), max_restarts=0)
    assert life.state is TrialState.ERROR and "its shepherd is gone" in life.reason and life.restarts == 0


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ((*UP, OK), ExitReason.COMPLETED),
        ((*UP, StopBySearch(), OK), ExitReason.COMPLETED),
        ((*UP, BAD, Placed(), BAD), ExitReason.ERRORED),
        ((*UP, Fail("x"), BAD), ExitReason.ERRORED),
        ((*UP, KillTrial(), BAD), ExitReason.CANCELED),
        ((*UP, EarlyExit("INVALID_HP"), OK), ExitReason.INVALID_HP),
        ((*UP, EarlyExit("ERRORED"), OK), ExitReason.ERRORED),
    ],
)
def test_what_the_search_is_told(events: tuple[TrialEvent, ...], reason: ExitReason) -> None:
    assert exit_reason(live(*events)[0]) is reason


def test_every_event_in_every_state_is_answered() -> None:
    """No state is a dead end: a run that is there can always be ended, and its exit always leads on."""
    events: list[TrialEvent] = [
        StartTrial(),
        PauseTrial(),
        CancelTrial(),
        KillTrial(),
        StopBySearch(),
        Fail("x"),
        Placed(),
        Acked(),
        EarlyExit("X"),
        Overdue(),
        OK,
        BAD,
    ]
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
            assert step_trial(step_trial(life, KillTrial())[0], Exited(137))[0].state.final
    assert len(seen) > 30
