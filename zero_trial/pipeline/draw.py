"""A simulated schedule drawn as text, a row per rank and a column per unit of time, and as a
picture.

    rank 0  F0 F1 .  .  B0 -  F2 B1 -  .  B2 -
    rank 1  .  F0 B0 -  F1 B1 -  F2 B2 -  .  .

``.`` is idle, ``-`` is the rest of an action that takes longer than one unit. With several chunks
per rank an action has its chunk before it: ``2F0``.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from zero_trial.errors import ConfigError
from zero_trial.pipeline.schedule import Action, ActionKind, Schedule
from zero_trial.pipeline.simulator import RankReport, SimulationReport

IDLE, GOES_ON = ".", "-"


def grid(report: SimulationReport) -> str:
    """Return the picture of a report whose costs were whole numbers; others raise ConfigError."""
    columns = _whole(report.makespan)
    chunks = any(len({span.action.chunk for span in rank.spans}) > 1 for rank in report.ranks)
    rows = [_cells(rank, columns, chunks) for rank in report.ranks]
    width = max((len(cell) for row in rows for cell in row), default=1)
    head = len(f"rank {len(rows) - 1}")
    return "\n".join(
        f"{f'rank {index}':<{head}}  {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for index, row in enumerate(rows)
    )


def rows_as_text(schedule: Schedule) -> str:
    """Return every action of every rank, messages and sharding as well, in the order of the row."""
    return "\n".join(f"rank {index}  {' '.join(map(str, row))}" for index, row in enumerate(schedule.rows))


def _cells(rank: RankReport, columns: int, chunks: bool) -> list[str]:
    cells = [IDLE] * columns
    for begin, end, action in rank.spans:
        first, after = _whole(begin), _whole(end)
        cells[first:after] = [_label(action, chunks), *[GOES_ON] * (after - first - 1)][: after - first]
    return cells


def _label(action: Action, chunks: bool) -> str:
    return str(action) if chunks else f"{action.kind.value}{action.micro_batch}"


def _whole(time: float) -> int:
    if time != int(time):
        raise ConfigError(
            "a grid needs times in whole numbers", where="schedule", got=time, fix="Give the costs as whole numbers."
        )
    return int(time)


# --- picture: computations over time on the left, the most activations at once on the right -------

# Blue forward, orange backward or input gradient, green weight gradient; later chunks of a rank are
# darker.
_COLOURS = {
    ActionKind.F: (0.62, 0.77, 0.94),
    ActionKind.B: (0.98, 0.78, 0.55),
    ActionKind.I: (0.98, 0.78, 0.55),
    ActionKind.W: (0.68, 0.87, 0.66),
}

_NAMES = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "input gradient",
    ActionKind.W: "weight gradient",
}

_INCHES_PER_ROW = 0.42


def save_picture(schedule: Schedule, report: SimulationReport, path: Path) -> None:
    """Write the picture in the format of the path's suffix. Raises ConfigError without matplotlib,
    or where nothing can be written."""
    try:
        figure = import_module("matplotlib.figure").Figure(figsize=_size(report), layout="constrained")
    except ImportError:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed",
            where=str(path),
            fix="pip install matplotlib, or leave --png out.",
        ) from None
    times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(8, 1))
    _draw_times(times, schedule, report)
    _draw_memory(memory, schedule, report)
    figure.suptitle(
        f"{schedule.name}, {schedule.stages} pipeline stages, {schedule.micro_batches} micro-batches: bubble {report.bubble:.1%}",
        fontsize=11,
    )
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError("the picture cannot be written", where=str(path), got=str(error).splitlines()[0]) from None


def _size(report: SimulationReport) -> tuple[float, float]:
    shortest = min((span.end - span.begin for rank in report.ranks for span in rank.spans), default=1) or 1
    return max(7.0, min(24.0, 2.5 + 0.24 * report.makespan / shortest)), 1.6 + _INCHES_PER_ROW * len(report.ranks)


def _draw_times(axes: Any, schedule: Schedule, report: SimulationReport) -> None:
    width = axes.figure.get_size_inches()[0] * 0.8
    seen: dict[ActionKind, Any] = {}
    for index, rank in enumerate(report.ranks):
        order = {chunk: place for place, chunk in enumerate(schedule.placement.of(index))}
        for begin, end, action in rank.spans:
            shade = 1 - 0.25 * order[action.chunk] / max(1, len(order) - 1)
            colour = tuple(part * shade for part in _COLOURS[action.kind])
            bars = axes.barh(
                index, end - begin, left=begin, height=0.86, color=colour, edgecolor="white", linewidth=0.8
            )
            if action.kind not in seen and order[action.chunk] == 0:
                seen[action.kind] = bars
            if (end - begin) / report.makespan * width > 0.04 + 0.065 * len(str(schedule.micro_batches - 1)):
                axes.text((begin + end) / 2, index, str(action.micro_batch), ha="center", va="center", fontsize=7)
    darker = any(len(schedule.placement.of(index)) > 1 for index in range(schedule.stages))
    label = "time (darker: a rank's later chunk)" if darker else "time"
    axes.set(xlim=(0, report.makespan), xlabel=label, yticks=range(len(report.ranks)))
    axes.set_yticklabels([f"rank {index}" for index in range(len(report.ranks))])
    axes.invert_yaxis()
    axes.set_facecolor("0.93")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    kinds = [kind for kind in _NAMES if kind in seen]
    axes.legend(
        [seen[kind] for kind in kinds],
        [_NAMES[kind] for kind in kinds],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(kinds),
        frameon=False,
        fontsize=8,
    )


def _draw_memory(axes: Any, schedule: Schedule, report: SimulationReport) -> None:
    """Draw activations in units of one micro-batch through all of a rank's layers."""
    share = len(schedule.placement.of(0))
    peaks = [rank.peak_activations / share for rank in report.ranks]
    bars = axes.barh(range(len(peaks)), peaks, height=0.86, color="0.6")
    axes.bar_label(bars, labels=[f"{peak:g}" for peak in peaks], padding=2, fontsize=7)
    axes.set(xlim=(0, max([1.0, *peaks]) * 1.35), xticks=[], xlabel="activations\n(most at once)")
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(axis="y", length=0, labelleft=False)
