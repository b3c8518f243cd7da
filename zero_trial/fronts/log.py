"""A trial's events as lines of a log or a terminal, for fronts that have nobody else to show them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from zero_trial.launch.screen import Screen
from zero_trial.trial.outcome import End, Outcome


class EventLog:
    """Shows every event that it is called with. ``live``: one moving line for the steps, where there is a terminal."""

    def __init__(self, stream: TextIO | None = None, live: bool | None = False) -> None:
        self._screen = Screen(stream if stream is not None else sys.stdout, live=live)

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event.get("kind") == "done":
            self._screen.close()  # the last step before the last line
            self._screen.say(done_line(event))
        self._screen.show(event)
        self._screen.tick()

    def close(self) -> None:
        self._screen.close()


def done_event(outcome: Outcome) -> dict[str, Any]:
    """The last event of a trial that ran to an end."""
    told = {"step": outcome.step, "total_steps": outcome.total_steps, "end": outcome.end.value}
    return {"kind": "done", **told, "checkpoint": outcome.checkpoint}


def done_line(event: Mapping[str, Any]) -> str:
    """``done    step 200/200  checkpoint <uuid>``, or how else it ended."""
    word = {End.STOPPED.value: "stopped", End.PREEMPTED.value: "paused"}.get(event["end"], "done")
    return f"{word:8}step {event['step']}/{event['total_steps']}  checkpoint {event['checkpoint']}"
