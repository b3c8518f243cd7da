"""Events as lines of a log."""

from __future__ import annotations

import io

from zero_trial.runtime.rank import EventLog, done_event
from zero_trial.trial.reporting import End, Outcome


def outcome(end: End) -> Outcome:
    return Outcome(end, step=3, total_steps=8, train_seconds=1.0, samples=24, checkpoint="abc")


def test_the_last_step_stands_before_the_last_line() -> None:
    stream = io.StringIO()
    log = EventLog(stream)
    log({"kind": "note", "message": "hello"})
    log({"kind": "train", "step": 3, "total_steps": 8, "loss": 1.5})
    log(done_event(outcome(End.PREEMPTED)))
    log.close()
    assert stream.getvalue().splitlines() == [
        "note    hello",
        "train   step 3/8  loss 1.5",
        "paused  step 3/8  checkpoint abc",
    ]


def test_the_figures_of_a_run_stand_where_it_has_no_other_place_for_them() -> None:
    for end, word in ((End.COMPLETED, "done   "), (End.STOPPED, "stopped")):
        stream = io.StringIO()
        EventLog(stream)(done_event(outcome(end), {"train_seconds": 1.0, "ranks": 2, "seed": 7}))
        assert stream.getvalue().splitlines() == [f"{word} 1 s · 2 ranks · seed 7", "kept    step 3/8  checkpoint abc"]


def test_how_else_it_ended() -> None:
    for end, word in ((End.COMPLETED, "done"), (End.STOPPED, "stopped")):
        stream = io.StringIO()
        EventLog(stream)(done_event(outcome(end)))
        assert stream.getvalue().split() == [word, "step", "3/8", "checkpoint", "abc"]
