"""A trial's events as lines of a log or a terminal, for fronts that have nobody else to show them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from zero_trial.launch.screen import Screen
from zero_trial.launch.summary import done_line
from zero_trial.trial.outcome import End, Outcome


class EventLog:
    """Shows every event that it is called with. ``live``: one moving line for the steps, where there is a terminal."""

    def __init__(self, stream: TextIO | None = None, live: bool | None = False) -> None:
        self._screen = Screen(stream if stream is not None else sys.stdout, live=live)

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event.get("kind") == "done":
            self._screen.close()  # the last step before the last line
            for line in done_lines(event):
                self._screen.say(line)
        self._screen.show(event)
        self._screen.tick()

    def close(self) -> None:
        self._screen.close()


def done_event(outcome: Outcome, figures: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The last event of a trial that ran to an end, with its figures where it is the only place for them."""
    told = {"step": outcome.step, "total_steps": outcome.total_steps, "end": outcome.end.value}
    return {"kind": "done", **told, "checkpoint": outcome.checkpoint, **({"figures": dict(figures)} if figures else {})}


def done_lines(event: Mapping[str, Any]) -> list[str]:
    """``done    step 200/200  checkpoint <uuid>``, or how else it ended; before it the figures as a run's last line has them, if the
    event has them.
    """
    word = {End.STOPPED.value: "stopped", End.PREEMPTED.value: "paused"}.get(event["end"], "done")
    where = f"step {event['step']}/{event['total_steps']}  checkpoint {event['checkpoint']}"
    if not event.get("figures"):
        return [f"{word:8}{where}"]
    return [done_line(event["figures"], word), f"kept    {where}"]
