"""The words for a run's events: one line of text for each kind. Pure; a number that an event does not hold is not shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Event = Mapping[str, Any]

COUNTERS = ("batches", "epochs")
"""Among validation metrics for the searcher's sake; the step says it already."""


def short_number(value: float) -> str:
    """A number in about three digits: 9.8k, 12.3M, 4.2, 0.013."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{letter}"
    return f"{value:.3g}"


def clock(seconds: float) -> str:
    """Seconds as 00:12 or 1:02:03."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes:02d}:{whole % 60:02d}"


def size(count: float) -> str:
    """Bytes in binary units: 14.1 MiB."""
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count:.0f} B"


def metric(value: object) -> str:
    """A metric's value in four significant digits, or as it is when it is no number."""
    return f"{value:.4g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def training_facts(event: Event) -> str:
    """``loss 2.113  9.8k tok/s  lr 2.7e-04  eta 00:12``, whatever of it the event tells."""
    facts = []
    if event.get("loss") is not None:
        facts.append(f"loss {metric(event['loss'])}")
    if event.get("tokens_per_second"):
        facts.append(f"{short_number(event['tokens_per_second'])} tok/s")
    elif event.get("samples_per_second"):
        facts.append(f"{short_number(event['samples_per_second'])} samples/s")
    if event.get("lr") is not None:
        facts.append(f"lr {event['lr']:.1e}")
    if event.get("eta_seconds") is not None:
        facts.append(f"eta {clock(event['eta_seconds'])}")
    return "  ".join(facts)


def training_line(event: Event) -> str:
    """The plain line of a training step: ``train   step 140/200  loss 2.113 …``."""
    total = f"/{event['total_steps']}" if event.get("total_steps") else ""
    return f"train   step {event.get('step', '?')}{total}  {training_facts(event)}".rstrip()


def event_line(event: Event) -> str | None:
    """The line of any other event; None for one that is not shown."""
    kind = event.get("kind")
    if kind == "validation":
        metrics = [f"{name} {metric(v)}" for name, v in (event.get("metrics") or {}).items() if name not in COUNTERS]
        return f"eval    step {event.get('step', '?')}  {'  '.join(metrics)}"
    if kind == "checkpoint":
        parts = [f"saved   {event.get('path') or event.get('storage_id') or ''}".rstrip()]
        parts += [size(event["bytes"])] if event.get("bytes") else []
        return "  ".join(parts)
    if kind == "note" and event.get("message"):
        # A long note, a table say, stands whole in events.jsonl.
        return f"note    {str(event['message']).splitlines()[0]}"
    if kind == "plan" and event.get("message"):
        return f"plan    {event['message']}"
    if kind == "start":
        return start_line(event)
    return None


def start_line(event: Event) -> str | None:
    """``start   params 1.2 M  train_batch_size 32 …`` from the facts of a start event."""
    facts = []
    if event.get("parameters"):
        facts.append(f"params {short_number(event['parameters'])}")
    if event.get("resumed_from_step"):
        facts.append(f"resumed at step {event['resumed_from_step']}")
    return "start   " + "  ".join(facts) if facts else None
