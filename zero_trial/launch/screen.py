"""The screen: one live progress line on a terminal, a plain line every ten seconds anywhere
else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from zero_trial.launch.summary import Event, event_line, training_facts, training_line
from zero_trial.runs.events import Tail, json_lines
from zero_trial.runs.layout import RunFolder
from zero_trial.util.text import strip_control

_PLAIN_SECONDS = 10.0


class Screen:
    """Shows events in ``stream``. Lines that stay (validation, checkpoint, notes) are printed above
    the live one."""

    def __init__(
        self,
        stream: TextIO,
        *,
        live: bool | None = None,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._quiet = quiet
        self._live = is_terminal(stream) if live is None else live
        self._clock = clock
        self._bar: Any = None
        self._last_plain = clock()
        self._waiting: Event | None = None

    def say(self, line: str) -> None:
        """Print a line that stays, without what could control the terminal; a quiet screen shows
        nothing at all."""
        if self._quiet:
            return
        line = strip_control(line)
        if self._bar is not None:
            self._bar.clear()
        self._stream.write(line + "\n")
        self._stream.flush()
        if self._bar is not None:
            self._bar.refresh()

    def show(self, event: Event) -> None:
        """Show one event."""
        if event.get("kind") == "train":
            if self._live and not self._quiet:
                self._move_bar(event)
            else:
                self._waiting = event
            return
        line = event_line(event)
        if line is not None:
            self.say(line)

    def tick(self) -> None:
        """Print the plain line when its time has come."""
        if self._waiting is not None and self._clock() - self._last_plain >= _PLAIN_SECONDS:
            self._flush()

    def close(self) -> None:
        """Print the last step if it was not printed yet; leave the live line as it is."""
        if self._waiting is not None:
            self._flush()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _flush(self) -> None:
        if self._waiting is not None:
            self.say(training_line(self._waiting))
        self._waiting = None
        self._last_plain = self._clock()

    def _move_bar(self, event: Event) -> None:
        if self._bar is None:
            self._bar = self._new_bar(event)
        self._bar.n = event.get("step", self._bar.n)
        self._bar.set_description_str(strip_control(training_facts(event)), refresh=False)
        self._bar.refresh()

    def _new_bar(self, event: Event) -> Any:
        from tqdm import tqdm

        form = "train   step {n_fmt}/{total_fmt} |{bar:16}| {desc}"
        if not event.get("total_steps"):
            form = "train   step {n_fmt}  {desc}"
        return tqdm(
            total=event.get("total_steps"),
            file=self._stream,
            bar_format=form,
            dynamic_ncols=True,
            leave=True,
            ascii=".#",
        )


def is_terminal(stream: TextIO) -> bool:
    """Return whether the stream is a terminal with room for a line; pseudo-terminals of build
    systems may have none."""
    if not stream.isatty():
        return False
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return False
    return size.columns > 0 and size.lines > 0


def with_size(event: Event, run_dir: Path) -> Event:
    """Return a checkpoint event with its folder's path, as it would be typed here, and the bytes in
    it."""
    folder = RunFolder(run_dir).checkpoints / str(event.get("storage_id") or "")
    count = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {**event, "path": os.path.relpath(folder), "bytes": count}


class EventWatcher:
    """Follows a run's ``events.jsonl`` onto a screen."""

    def __init__(self, events: Path, screen: Screen, *, skip_existing: bool = False) -> None:
        self._tail = Tail(events, skip_existing=skip_existing)
        self._screen = screen

    def tick(self) -> None:
        for event in json_lines(self._tail.lines()):
            self._screen.show(with_size(event, self._tail.path.parent) if event.get("kind") == "checkpoint" else event)
        self._screen.tick()

    def close(self) -> None:
        self.tick()
        self._screen.close()


class LogWatcher:
    """Copies the log of one rank to the screen as it grows, for scripts that print for themselves;
    its traceback stays in the log."""

    def __init__(self, log: Path, stream: TextIO, *, stop_at: str) -> None:
        self._tail = Tail(log)
        self._stream = stream
        self._stop_at = stop_at
        self._stopped = False

    def tick(self) -> None:
        self._write(self._tail.lines())

    def close(self) -> None:
        self._write(self._tail.lines())
        self._write(self._tail.rest().decode("utf-8", errors="replace").splitlines())

    def _write(self, lines: list[str]) -> None:
        for line in lines:
            self._stopped = self._stopped or line == self._stop_at
            if not self._stopped:
                self._stream.write(strip_control(line) + "\n")
        if lines:
            self._stream.flush()


class NoWatcher:
    """Watches nothing: on hosts that do not hold rank 0."""

    def tick(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
