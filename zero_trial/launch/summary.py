"""Lines of text for a run's events and for its summary; a number that is missing is not shown.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_trial.runs.records import COUNTERS, baselines
from zero_trial.util.text import format_bytes, format_clock, format_count, format_metric

Event = Mapping[str, Any]


def training_facts(event: Event) -> str:
    """Return ``loss 2.113  9.8k tok/s  lr 2.7e-04  eta 00:12``, as far as the event has them. Every
    other metric of ``train_batch`` follows the loss."""
    names = dict.fromkeys(["loss", *(event.get("each") or ())])
    facts = [f"{name} {format_metric(event[name])}" for name in names if event.get(name) is not None]
    facts += _speed(event)
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
    """Return the line of any other event; None for one that is not shown."""
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
        # events.jsonl has the whole of a long note, such as a table.
        return f"note    {str(event['message']).splitlines()[0]}"
    if kind == "plan" and event.get("message"):
        return f"plan    {event['message']}"
    if kind == "start":
        return _start_line(event)
    return None


def _start_line(event: Event) -> str | None:
    """Return ``start   params 1.2 M  train_batch_size 32 …`` from the facts of a start event."""
    facts = []
    if event.get("parameters"):
        facts.append(f"params {format_count(event['parameters'])}")
    if event.get("resumed_from_step"):
        facts.append(f"resumed at step {event['resumed_from_step']}")
    return "start   " + "  ".join(facts) if facts else None


def summary_lines(summary: Mapping[str, Any], repeat: str) -> list[str]:
    """Return ``done`` with time, metrics before and after, baselines, throughput and memory, then
    ``repeat`` with the command.
    """
    return [done_line(summary), f"repeat  {repeat}"]


def done_line(summary: Mapping[str, Any], word: str = "done") -> str:
    """Return the first of these lines. ``word``: how the run ended."""
    return " · ".join([f"{word:8}{_duration(summary)}", *_metrics(summary), *_figures(summary)])


def _duration(summary: Mapping[str, Any]) -> str:
    seconds = summary.get("train_seconds")
    if seconds is None:
        return "finished"
    return f"{seconds:.0f} s" if seconds < 120 else format_clock(seconds)


def _metrics(summary: Mapping[str, Any]) -> list[str]:
    """Return each validation metric as ``before -> after``, with its baselines in brackets where
    the summary has any."""
    before, after = summary.get("initial_validation") or {}, summary.get("final_validation") or {}
    shown = []
    for name, value in after.items():
        moved = name in before and before[name] != value  # one validation is the first and the last
        change = f"{format_metric(before[name])} -> {format_metric(value)}" if moved else format_metric(value)
        beside = ", ".join(f"{label} {format_metric(figure)}" for label, figure in baselines(name, summary).items())
        shown.append(f"{name} {change}{f' ({beside})' if beside else ''}")
    return shown


def _figures(summary: Mapping[str, Any]) -> list[str]:
    figures = _speed(summary)
    peak = summary.get("peak_memory_bytes")
    if peak:
        figures.append(f"peak {format_bytes(max(peak) if isinstance(peak, list) else peak)}/rank")
    figures += _tensors(summary)
    if summary.get("ranks"):
        figures.append(f"{summary['ranks']} rank" + ("s" if summary["ranks"] != 1 else ""))
    if summary.get("zero_stage") is not None:
        figures.append(f"ZeRO-{summary['zero_stage']}")
    if summary.get("seed") is not None:
        figures.append(f"seed {summary['seed']}")
    return figures


def _tensors(summary: Mapping[str, Any]) -> list[str]:
    """Return the measured peak of live tensors beside the planned one; the process's own peak also
    holds the libraries."""
    measured, planned = summary.get("memory_measured_peak_bytes"), summary.get("memory_planned_bytes")
    if not measured:
        return []
    error = summary.get("memory_plan_error_percent")
    beside = f" (planned {format_bytes(planned)}, error {error:+.1f} %)" if planned and error is not None else ""
    return [f"tensors {format_bytes(measured)}/rank{beside}"]
