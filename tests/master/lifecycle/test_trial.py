"""The life of a trial, as tables of events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_trial.master.lifecycle.trial import (
    Acked,
    Cancel,
    EarlyExit,
    Effect,
    Event,
    Exited,
    Fail,
    Kill,
    Overdue,
    Pause,
    Placed,
    Run,
    Start,
    StopBySearch,
    TrialLife,
    exit_reason,
    step,
)
from zero_trial.master.records import TrialState
from zero_trial.master.searchers import ExitReason

OK, BAD = Exited(0), Exited(1)
UP = (Start(), Placed())  # a trial that runs


def live(*events: Event, max_restarts: int = 1) -> tuple[TrialLife, list[str]]:
    """A life after these events, and all effects that there were."""
    life, done = TrialLife(max_restarts=max_restarts), []
    for event in events:
        life, effects = step(life, event)
        done += [effect.value for effect in effects]
    return life, done


STORIES: list[tuple[str, tuple[Event, ...], str, Run, str]] = [
    ("created", (), "ACTIVE", Run.NONE, ""),
    ("queued", (Start(),), "ACTIVE", Run.QUEUED, "request"),
    ("runs", UP, "ACTIVE", Run.RUNNING, "request"),
    ("completes", (*UP, OK), "COMPLETED", Run.NONE, "request end"),
    ("restarts", (*UP, BAD), "ACTIVE", Run.QUEUED, "request request"),
    ("restarts, then completes", (*UP, BAD, Placed(), OK), "COMPLETED", Run.NONE, "request request end"),
    ("no restarts left", (*UP, BAD, Placed(), BAD), "ERROR", Run.NONE, "request request end"),
    # pause and activate
    ("paused before it began", (Start(), Pause()), "PAUSED", Run.NONE, "request withdraw"),
    ("asked to pause", (*UP, Pause()), "PAUSED", Run.RUNNING, "request preempt"),
    ("asked twice", (*UP, Pause(), Pause()), "PAUSED", Run.RUNNING, "request preempt"),
    ("paused", (*UP, Pause(), Acked(), OK), "PAUSED", Run.NONE, "request preempt"),
    ("finished before it heard of the pause", (*UP, Pause(), OK), "COMPLETED", Run.NONE, "request preempt end"),
    ("crashed while it paused", (*UP, Pause(), BAD), "PAUSED", Run.NONE, "request preempt"),
    ("crashed while it paused, once too often", (*UP, BAD, Placed(), Pause(), BAD), "ERROR", Run.NONE, "request request preempt end"),
    ("goes on", (*UP, Pause(), Acked(), OK, Start()), "ACTIVE", Run.QUEUED, "request preempt request"),
    ("active again before it had paused", (*UP, Pause(), Start(), Acked(), OK), "ACTIVE", Run.QUEUED, "request preempt request"),
    ("ignores the pause", (*UP, Pause(), Overdue()), "PAUSED", Run.RUNNING, "request preempt kill"),
    ("killed because it ignored the pause", (*UP, Pause(), Overdue(), Exited(137)), "PAUSED", Run.NONE, "request preempt kill"),
    ("the same, and active again", (*UP, Pause(), Overdue(), Start(), Exited(137)), "ACTIVE", Run.QUEUED, "request preempt kill request"),
    ("an ack that nobody asked for", (*UP, Acked(), OK), "COMPLETED", Run.NONE, "request end"),
    # the master goes down
    ("ended with the master", (*UP, Overdue(), Exited(143)), "ACTIVE", Run.QUEUED, "request kill request"),
    ("ended by somebody else", (*UP, Exited(143, killed=True)), "ACTIVE", Run.QUEUED, "request request"),
    # cancel
    ("canceled before it began", (Cancel(),), "CANCELED", Run.NONE, "end"),
    ("canceled in the queue", (Start(), Cancel()), "CANCELED", Run.NONE, "request withdraw end"),
    ("canceled", (*UP, Cancel()), "STOPPING_CANCELED", Run.RUNNING, "request preempt"),
    ("canceled, gone", (*UP, Cancel(), Acked(), OK), "CANCELED", Run.NONE, "request preempt end"),
    ("canceled, gone with an error", (*UP, Cancel(), BAD), "CANCELED", Run.NONE, "request preempt end"),
    ("canceled while it pauses", (*UP, Pause(), Cancel(), OK), "CANCELED", Run.NONE, "request preempt end"),
    ("canceled while paused", (*UP, Pause(), Acked(), OK, Cancel()), "CANCELED", Run.NONE, "request preempt end"),
    ("ignores the cancel", (*UP, Cancel(), Overdue(), Exited(137)), "CANCELED", Run.NONE, "request preempt kill end"),
    # kill
    ("killed", (*UP, Kill()), "STOPPING_KILLED", Run.RUNNING, "request kill"),
    ("killed, gone", (*UP, Kill(), Exited(137)), "CANCELED", Run.NONE, "request kill end"),
    ("canceled, then killed", (*UP, Cancel(), Kill(), Exited(137)), "CANCELED", Run.NONE, "request preempt kill end"),
    ("killed, then canceled", (*UP, Kill(), Cancel(), Exited(137)), "CANCELED", Run.NONE, "request kill end"),
    ("killed twice", (*UP, Kill(), Kill()), "STOPPING_KILLED", Run.RUNNING, "request kill"),
    ("killed in the queue", (Start(), Kill()), "CANCELED", Run.NONE, "request withdraw end"),
    # the search
    ("stopped by the search", (*UP, StopBySearch()), "STOPPING_COMPLETED", Run.RUNNING, "request preempt"),
    ("stopped, gone", (*UP, StopBySearch(), Acked(), OK), "COMPLETED", Run.NONE, "request preempt end"),
    ("stopped, crashes while it saves", (*UP, StopBySearch(), BAD), "COMPLETED", Run.NONE, "request preempt end"),
    ("stopped while paused", (*UP, Pause(), Acked(), OK, StopBySearch()), "COMPLETED", Run.NONE, "request preempt end"),
    ("stopped, then paused", (*UP, StopBySearch(), Pause()), "STOPPING_COMPLETED", Run.RUNNING, "request preempt"),
    ("stopped, then started", (*UP, StopBySearch(), Start(), Acked(), OK), "COMPLETED", Run.NONE, "request preempt end"),
    ("its metric is missing", (*UP, Fail("no metric"), Exited(137)), "ERROR", Run.NONE, "request kill end"),
    # what it says itself
    ("invalid hyperparameters", (*UP, EarlyExit("INVALID_HP"), OK), "ERROR", Run.NONE, "request watch end"),
    ("says so and crashes", (*UP, EarlyExit("INVALID_HP"), BAD), "ERROR", Run.NONE, "request watch end"),
    ("says so and stays", (*UP, EarlyExit("INVALID_HP"), Overdue(), Exited(137)), "ERROR", Run.NONE, "request watch kill end"),
    # what means nothing
    ("an exit without a run", (OK,), "ACTIVE", Run.NONE, ""),
    ("events after the end", (*UP, OK, Start(), Kill(), BAD, Pause()), "COMPLETED", Run.NONE, "request end"),
    ("placed twice", (*UP, Placed()), "ACTIVE", Run.RUNNING, "request"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("events", "state", "run", "effects"), [story[1:] for story in STORIES], ids=[story[0] for story in STORIES]
)
def test_story(events: tuple[Event, ...], state: str, run: Run, effects: str) -> None:
    life, done = live(*events)
    assert (life.state.value, life.run, " ".join(done)) == (state, run, effects)


def test_only_crashes_count_as_restarts() -> None:
    life, _ = live(
        *UP, BAD, Placed(), Pause(), Overdue(), Exited(137), Start(), Placed(), Pause(), Acked(), OK, max_restarts=3
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
        ((*UP, Kill(), BAD), ExitReason.CANCELED),
        ((*UP, EarlyExit("INVALID_HP"), OK), ExitReason.INVALID_HP),
        ((*UP, EarlyExit("ERRORED"), OK), ExitReason.ERRORED),
    ],
)
def test_what_the_search_is_told(events: tuple[Event, ...], reason: ExitReason) -> None:
    assert exit_reason(live(*events)[0]) is reason


def test_every_event_in_every_state_is_answered() -> None:
    """No state is a dead end: a run that is there can always be ended, and its exit always leads on."""
    events: list[Event] = [
        Start(),
        Pause(),
        Cancel(),
        Kill(),
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
            after, effects = step(life, event)
            assert (after.state.final and not life.state.final) == (Effect.END in effects)
            assert not (after.state.final and after.run is not Run.NONE)
            todo.append(replace(after, reason="", restarts=min(after.restarts, 1)))
        if life.run is Run.RUNNING:
            assert step(step(life, Kill())[0], Exited(137))[0].state.final
    assert len(seen) > 30
