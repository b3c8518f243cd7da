"""The output of a run: one live progress line on a terminal, a plain line every ten seconds
elsewhere, and lines for events and the summary. Missing numbers are not shown."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from zero_trial.trial.runs.events import COUNTERS, Tail, baselines, json_lines
from zero_trial.trial.runs.run_layout import RunFolder
from zero_trial.util.text import format_bytes, format_clock, format_count, format_metric, strip_control

_PLAIN_SECONDS = 10.0

Event = Mapping[str, Any]


class Screen:
    """Shows events in ``stream``. Permanent lines are printed above the live line."""

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
        """Print a permanent line without control characters, unless the screen is quiet."""
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
                if self._bar is None:
                    self._bar = self._new_bar(event)
                self._bar.n = event.get("step", self._bar.n)
                self._bar.set_description_str(strip_control(training_facts(event)), refresh=False)
                self._bar.refresh()
            else:
                self._waiting = event
            return
        line = event_line(event)
        if line is not None:
            self.say(line)

    def tick(self) -> None:
        """Print the plain line if it is due."""
        if self._waiting is not None and self._clock() - self._last_plain >= _PLAIN_SECONDS:
            self._flush()

    def close(self) -> None:
        """Print the last step if it is not printed yet; do not erase the live line."""
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
    """Return whether the stream is a terminal that is wide enough for a line."""
    if not stream.isatty():
        return False
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return False
    return size.columns > 0 and size.lines > 0


def with_size(event: Event, run_dir: Path) -> Event:
    """Return a checkpoint event with its folder's (relative) path and its size in bytes."""
    folder = RunFolder(run_dir).checkpoints / str(event.get("storage_id") or "")
    count = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {**event, "path": os.path.relpath(folder), "bytes": count}


class EventWatcher:
    """Shows a run's ``events.jsonl`` on a screen as the file grows."""

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
    """Copies the growing log of rank 0 to the screen, for scripts that print their own output, but
    without its traceback. For other ranks it shows the notes in ``events``."""

    def __init__(self, log: Path, stream: TextIO, *, stop_at: str, events: Path) -> None:
        self._tail = Tail(log)
        self._events = Tail(events, skip_existing=True)
        self._stream = stream
        self._stop_at = stop_at
        self._stopped = False

    def tick(self) -> None:
        self._write(self._tail.lines())
        self._write([event["message"] for event in json_lines(self._events.lines()) if event.get("rank")])

    def close(self) -> None:
        self._write(self._tail.lines())
        self._write(self._tail.rest().splitlines())

    def _write(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._stopped = self._stopped or line == self._stop_at
            if not self._stopped:
                self._stream.write(strip_control(line) + "\n")
        self._stream.flush()


class NoWatcher:
    """Watches nothing: on hosts that do not hold rank 0."""

    def tick(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def training_facts(event: Event) -> str:
    """Return ``loss 2.113  9.8k tok/s  mfu 41.2%  lr 2.7e-04``, as far as the event has these. All
    other metrics of ``train_batch`` follow the loss."""
    names = dict.fromkeys(["loss", *(event.get("each") or ())])
    facts = [f"{name} {format_metric(event[name])}" for name in names if event.get(name) is not None]
    facts += _speed(event)
    if event.get("mfu"):
        facts.append(f"mfu {event['mfu']:.1%}")
    if event.get("lr") is not None:
        facts.append(f"lr {event['lr']:.1e}")
    if event.get("eta_seconds") is not None:
        facts.append(f"eta {format_clock(event['eta_seconds'])}")
    return "  ".join(facts)


def _speed(facts: Mapping[str, Any]) -> list[str]:
    """Return the throughput in tokens if it is known, else in samples."""
    for name, unit in (("tokens_per_second", "tok/s"), ("samples_per_second", "samples/s")):
        if facts.get(name):
            return [f"{format_count(facts[name])} {unit}"]
    return []


def training_line(event: Event) -> str:
    """Return the plain line of a training step: ``train   step 140/200  loss 2.113 …``."""
    total = f"/{event['total_steps']}" if event.get("total_steps") else ""
    return f"train   step {event.get('step', '?')}{total}  {training_facts(event)}".rstrip()


def event_line(event: Event) -> str | None:
    """Return the line of any other event; None if the event is not shown."""
    kind = event.get("kind")
    if kind == "validation":
        metrics = [
            f"{name} {format_metric(v)}" for name, v in (event.get("metrics") or {}).items() if name not in COUNTERS
        ]
        return f"eval    step {event.get('step', '?')}  {'  '.join(metrics)}"
    if kind == "checkpoint":
        parts = [f"saved   {event.get('path') or event.get('storage_id') or ''}".rstrip()]
        parts += [format_bytes(event["bytes"])] if event.get("bytes") else []
        return "  ".join(parts)
    if kind == "note" and event.get("message"):
        # events.jsonl contains the full text of a long note, such as a table.
        return f"note    {str(event['message']).splitlines()[0]}"
    if kind == "plan" and event.get("message"):
        return f"plan    {event['message']}"
    if kind == "start":
        facts = [f"params {format_count(event['parameters'])}"] if event.get("parameters") else []
        facts += [f"resumed at step {event['resumed_from_step']}"] if event.get("resumed_from_step") else []
        return "start   " + "  ".join(facts) if facts else None
    return None


def done_line(summary: Mapping[str, Any], word: str = "done") -> str:
    """Return ``done`` (or ``word``) with time, metrics, baselines, throughput and memory."""
    seconds = summary.get("train_seconds")
    took = "finished" if seconds is None else f"{seconds:.0f} s" if seconds < 120 else format_clock(seconds)
    return " · ".join([f"{word:8}{took}", *_metrics(summary), *_figures(summary)])


def _metrics(summary: Mapping[str, Any]) -> list[str]:
    """Return each validation metric as ``before -> after``, with its baselines in brackets."""
    before, after = summary.get("initial_validation") or {}, summary.get("final_validation") or {}
    shown = []
    for name, value in after.items():
        moved = name in before and before[name] != value  # with a single validation, the first is also the last
        change = f"{format_metric(before[name])} -> {format_metric(value)}" if moved else format_metric(value)
        against = ", ".join(f"{label} {format_metric(figure)}" for label, figure in baselines(name, summary).items())
        shown.append(f"{name} {change}{f' ({against})' if against else ''}")
    return shown


def _figures(summary: Mapping[str, Any]) -> list[str]:
    figures = _speed(summary)
    peak = summary.get("peak_memory_bytes")
    if peak:
        figures.append(f"peak {format_bytes(max(peak) if isinstance(peak, list) else peak)}/rank")
    # live tensors only: the peak of the process also includes libraries
    measured, planned = summary.get("memory_measured_peak_bytes"), summary.get("memory_planned_bytes")
    if measured:
        error = summary.get("memory_plan_error_percent")
        known = planned and error is not None
        against = f" (planned {format_bytes(planned)}, error {error:+.1f} %)" if known else ""
        figures.append(f"tensors {format_bytes(measured)}/rank{against}")
    if summary.get("ranks"):
        figures.append(f"{summary['ranks']} rank" + ("s" if summary["ranks"] != 1 else ""))
    if summary.get("zero_stage") is not None:
        figures.append(f"ZeRO-{summary['zero_stage']}")
    if summary.get("seed") is not None:
        figures.append(f"seed {summary['seed']}")
    return figures
