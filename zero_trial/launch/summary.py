"""The last lines of a run: what ``summary.json`` says, in words. Pure; a figure that is not there is not shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_trial.launch.progress import clock, metric, short_number, size


def summary_lines(summary: Mapping[str, Any], repeat: str) -> list[str]:
    """``done`` with time, metrics before and after, baselines, throughput and memory, then ``repeat`` with the command."""
    return [done_line(summary), f"repeat  {repeat}"]


def done_line(summary: Mapping[str, Any], word: str = "done") -> str:
    """The first of them. ``word``: how it ended."""
    return " · ".join([f"{word:8}{_duration(summary)}", *_metrics(summary), *_figures(summary)])


def _duration(summary: Mapping[str, Any]) -> str:
    seconds = summary.get("train_seconds")
    if seconds is None:
        return "finished"
    return f"{seconds:.0f} s" if seconds < 120 else clock(seconds)


def _metrics(summary: Mapping[str, Any]) -> list[str]:
    """Each validation metric as ``before -> after``; a metric of bits per byte with its baselines in brackets."""
    before, after = summary.get("initial_validation") or {}, summary.get("final_validation") or {}
    shown = []
    for name, value in after.items():
        moved = name in before and before[name] != value  # one validation is the first and the last
        change = f"{metric(before[name])} -> {metric(value)}" if moved else metric(value)
        shown.append(f"{name} {change}{_baselines(summary) if name.endswith('bits_per_byte') else ''}")
    return shown


def _baselines(summary: Mapping[str, Any]) -> str:
    ends = "_bits_per_byte"
    known = [
        f"{name[: -len(ends)]} {metric(summary[name])}"
        for name in ("unigram_bits_per_byte", "xz_bits_per_byte")
        if summary.get(name) is not None
    ]
    return f" ({', '.join(known)})" if known else ""


def _figures(summary: Mapping[str, Any]) -> list[str]:
    figures = []
    if summary.get("tokens_per_second"):
        figures.append(f"{short_number(summary['tokens_per_second'])} tok/s")
    elif summary.get("samples_per_second"):
        figures.append(f"{short_number(summary['samples_per_second'])} samples/s")
    peak = summary.get("peak_memory_bytes")
    if peak:
        figures.append(f"peak {size(max(peak) if isinstance(peak, list) else peak)}/rank")
    figures += _tensors(summary)
    if summary.get("ranks"):
        figures.append(f"{summary['ranks']} rank" + ("s" if summary["ranks"] != 1 else ""))
    if summary.get("zero_stage") is not None:
        figures.append(f"ZeRO-{summary['zero_stage']}")
    if summary.get("seed") is not None:
        figures.append(f"seed {summary['seed']}")
    return figures


def _tensors(summary: Mapping[str, Any]) -> list[str]:
    """The measured peak of live tensors beside the planned one: another thing than the process's peak, which holds the libraries too."""
    measured, planned = summary.get("memory_measured_peak_bytes"), summary.get("memory_planned_bytes")
    if not measured:
        return []
    error = summary.get("memory_plan_error_percent")
    beside = f" (planned {size(planned)}, error {error:+.1f} %)" if planned and error is not None else ""
    return [f"tensors {size(measured)}/rank{beside}"]
