"""The page of a sweep: best configuration, curves, decisions, every trial. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from zero_trial.report import page
from zero_trial.report.page import Child, Html, PageSection, bar, el, join
from zero_trial.report.plot import (
    BOX,
    Scale,
    Tick,
    dots_path,
    fit,
    fit_axis,
    frame,
    grid_lines,
    line_path,
    log_word,
    placed,
    x_labels,
    y_labels,
)
from zero_trial.report.report_data import (
    BEST_COMMAND,
    BEST_FILE,
    Axis,
    BracketHistory,
    RungDecision,
    RungOutcome,
    SweepReport,
    TrialReport,
    most_of_each,
    thinned,
)
from zero_trial.report.run_page import download
from zero_trial.util.text import format_bytes, format_count, format_duration, format_number, format_value, shorten

Cell = Callable[[TrialReport], Html]
Name = Callable[[str], Child]
"""Renders a trial in tables: its id, or a link to its page."""


def render_sweep(report: SweepReport) -> str:
    """Return the whole document. Escapes every name and value, because they are untrusted."""
    head = page.heading(report.title, report.status, report.subtitle)
    return page.document(f"{report.title} · zero-trial", head, sweep_sections(report), report.created)


def sweep_sections(report: SweepReport, name: Name = str) -> list[PageSection]:
    """Return the sections of the page; sections without data are empty."""
    report = replace(report, metric=shorten(report.metric), drawn=shorten(report.drawn))
    return [
        PageSection("summary", "", _summary(report)),
        PageSection("best", "Best configuration", _best(report)),
        PageSection("curves", "Learning curves", trial_curves(report)),
        PageSection("space", "Search space", _space(report)),
        PageSection("decisions", "Decisions of the search", _decisions(report, name)),
        PageSection("trials", "Trials", _trials(report, name)),
    ]


def _summary(report: SweepReport) -> Child:
    ranked = report.ranked()
    launched = [trial for trial in report.trials if not trial.pruned]
    best = ranked[0] if ranked else None
    said = f"trial {best.id}" if best else "no trial was measured"
    items = [(f"best {report.metric}", format_number(best.best if best else None), said)]
    states = Counter(trial.status.word for trial in launched)
    by_state = ", ".join(f"{times} {word}" for word, times in states.items())
    items.append(("trials launched", str(len(launched)), by_state))
    if report.pruned:
        items.append(("points pruned", str(sum(times for _, times in report.pruned)), "never launched"))
    trained = sum(trial.steps for trial in launched)
    whole = max((ladder.units[-1] for ladder in report.ladders), default=0) * len(launched)
    share = f"{100 * trained / whole:.0f} % of training every trial to its end" if whole > 0 else ""
    items.append((f"{report.unit} trained", format_count(trained), share))
    return [page.figures(items), page.facts(report.facts)]


def _best(report: SweepReport) -> Child:
    best = report.best
    if best is None:
        return None
    trial = next((trial for trial in report.trials if trial.id == best.trial), None)
    point = page.facts([(name, _short(value)) for name, value in trial.point.items()], "point") if trial else None
    return [
        el("p", "Trial ", el("b", best.trial), f" reached {report.metric} ", el("b", format_number(best.metric)), "."),
        point,
        *(el("p", note, class_="note") for note in report.notes),
        page.command(BEST_COMMAND),
        el("p", download(BEST_FILE, best.text)),
        el("details", el("summary", "Show the file"), el("pre", best.text, tabindex=0)),
    ]


def _space(report: SweepReport) -> Child:
    drawn = parallel_view(report)
    if drawn is None:
        return None
    hint = el(
        "p",
        "Drag the ends of an axis, or use the arrow keys on them, to keep only the trials between them. The better ",
        el("code", report.metric),
        " is up. ",
        el("button", "Clear", type="button", class_="clear needs-script"),
        " ",
        el("span", class_="heard", role="status"),
        class_="note needs-script",
    )
    return [page.scrolling(drawn, "Parallel coordinates"), hint]


def _decisions(report: SweepReport, name: Name) -> Child:
    parts: list[Child] = [brackets_view(report)]
    listed = [decision for ladder in report.ladders for decision in ladder.decisions]
    if listed:
        table = _decided(listed, report, name)
        parts.append(
            table if len(listed) <= 12 else el("details", el("summary", f"All {len(listed)} decisions"), table)
        )
    if report.pruned:
        rows = [el("tr", el("td", str(times), class_="num"), el("td", reason)) for reason, times in report.pruned]
        columns = (("points", "num"), ("pruned before launch, because", None))
        parts.append(page.table(columns, rows, class_="narrow", style="margin-top:1.25rem"))
    return parts if any(part is not None for part in parts) else None


def _decided(decisions: Sequence[RungDecision], report: SweepReport, name: Name) -> Html:
    rows = [
        el(
            "tr",
            el("th", "trial ", name(decision.trial), scope="row"),
            el("td", decision.verdict.value),
            el("td", f"{decision.units}", class_="num", data_label=f"after {report.unit}"),
            el("td", format_number(decision.metric), class_="num", data_label=report.metric),
            el("td", decision.why, class_="soft"),
            data_trial=decision.trial,
        )
        for decision in decisions
    ]
    names = (("trial", None), ("verdict", None), (f"after {report.unit}", "num"), (report.metric, "num"), ("why", None))
    columns = [(page.breakable(title), kind) for title, kind in names]
    return page.table(columns, rows, class_="cards", aria_label="Decisions")


def _trials(report: SweepReport, name: Name) -> Child:
    if not report.trials:
        return None
    shown = [trial for trial in report.trials if not trial.pruned] or list(report.trials)
    ranked = [trial.id for trial in report.ranked()]
    order = sorted(shown, key=lambda trial: ranked.index(trial.id) if trial.id in ranked else len(ranked))
    columns = _columns(report, shown, name)
    rows = []
    for trial in order:
        cells = [cell(trial) for _, _, cell in columns]
        winner = ranked[:1] == [trial.id]
        said = f"trial {trial.id}: best {report.metric} {format_number(trial.best)}, {trial.status.word}"
        rows.append(
            el("tr", cells, data_trial=trial.id, data_said=said, tabindex=0, class_="winner" if winner else None)
        )
    heads = [(el("button", page.breakable(title), type="button"), kind) for title, kind, _ in columns]
    return page.scrolling(page.table(heads, rows, class_="sortable"), "Trials")


def _columns(report: SweepReport, trials: Sequence[TrialReport], name: Name) -> list[tuple[str, str | None, Cell]]:
    """Return name, class and content of each column that is not empty."""
    fastest = max((trial.throughput or 0.0 for trial in trials), default=0.0)
    widest = float(max((max(trial.memory.planned or 0, trial.memory.measured or 0) for trial in trials), default=0))
    found: list[tuple[str, str | None, Cell]] = [
        ("trial", None, lambda t: _cell(name(t.id), t.id)),
        (f"best {report.metric}", "num", lambda t: _cell(format_number(t.best), t.best, "num")),
        (
            "state",
            None,
            lambda t: _cell(
                join([page.state(t.status), [el("div", line, class_="note") for line in (t.why, *t.left_out) if line]]),
                t.status.word,
            ),
        ),
        (report.unit, "num", lambda t: _cell(str(t.steps), t.steps, "num")),
    ]
    for axis in report.axes:
        found.append((axis.name.rpartition(".")[2], "num", partial(_point_cell, axis.name)))
    measured: tuple[tuple[str, Callable[[TrialReport], Any], Callable[[Any], str], float], ...] = (
        (report.throughput_unit, lambda t: t.throughput, lambda speed: format_count(speed) if speed else "–", fastest),
        ("memory planned", lambda t: t.memory.planned, format_bytes, widest),
        ("measured", lambda t: t.memory.measured, format_bytes, widest),
        ("time", lambda t: t.seconds, format_duration, 0.0),
        ("restarts", lambda t: t.restarts, str, 0.0),
    )
    for title, value, shown, longest in measured:
        if any(map(value, trials)):
            found.append((title, "num", partial(_bar_cell, value, shown, longest)))
    return found


def _point_cell(name: str, trial: TrialReport) -> Html:
    return _cell(_short(trial.point[name]) if name in trial.point else "–", trial.point.get(name), "num")


def _bar_cell(value: Callable[..., Any], shown: Callable[[Any], str], longest: float, trial: TrialReport) -> Html:
    """Return the cell of a number, with a bar under it unless ``longest`` is 0."""
    return _cell(bar(value(trial), longest, shown(value(trial))), value(trial), "num")


def _short(value: object) -> str:
    """Return a float with four digits, enough for a comparison; the file has all digits."""
    return format_number(value) if isinstance(value, float) else format_value(value)


def _cell(content: Child, key: object, kind: str | None = None) -> Html:
    return el("td", content, class_=kind, data_sort="" if key is None else format_value(key))


# The learning curves of a sweep: one line per trial; darker is better.

# times the spread of the better half: worse values would flatten all other curves
_CLOSE_UP = 20.0


def trial_curves(report: SweepReport) -> Child:
    """Return the chart of all learning curves and the number of values outside; None if empty."""
    drawn = [trial for trial in report.trials if len(trial.curve)]
    if not drawn:
        return None
    ranked = {trial.id: at for at, trial in enumerate(report.ranked())}
    name = report.drawn or report.metric
    x = fit([0.0, *(step for trial in drawn for step in trial.curve.steps)], log=False, margin=0.0)
    y, cut = _close_up(drawn, report)
    worst_first = sorted(drawn, key=lambda trial: -ranked.get(trial.id, len(ranked)))
    most = most_of_each(len(drawn))
    key = el("span", "worst", el("i", class_="ramp"), "best", class_="scale-key")
    chart = frame(
        [
            grid_lines(y.ticks()),
            [_curve(trial, ranked.get(trial.id), len(ranked), x, y, most) for trial in worst_first],
        ],
        labels=[y_labels(y.ticks()), x_labels(x.ticks(6), report.unit)],
        caption=[el("h3", name, log_word(y)), key, el("span", class_="lit-name soft", role="status")],
        said=f"{name} of {len(drawn)} trials over {report.unit}",
        keys="Learning curves: arrow keys go from trial to trial",
        size="tall",
        kind="trials",
    )
    return [chart, el("p", f"{cut} far from the others are drawn at the edge.", class_="note") if cut else None]


def _quality(rank: int, of: int) -> float:
    """Return 1 for the best of ``of`` trials, 0 for the worst."""
    return 1 - rank / max(of - 1, 1)


def _close_up(drawn: Sequence[TrialReport], report: SweepReport) -> tuple[Scale, str]:
    """Return the scale of the curves without outliers, and a note about omitted values."""
    values = sorted(value for trial in drawn for value in trial.curve.values)
    if not report.smaller_is_better:
        values = [-value for value in reversed(values)]
    half = values[len(values) // 2] - values[0]
    limit = values[0] + _CLOSE_UP * max(half, 1e-12)
    inside = [value for value in values if value <= limit] if len(values) > 4 else values
    sign = 1 if report.smaller_is_better else -1
    left = len(values) - len(inside)
    return fit([sign * value for value in inside]), (f"{left} value{'s' if left != 1 else ''}" if left else "")


def _curve(trial: TrialReport, rank: int | None, of: int, x: Scale, y: Scale, most: int) -> list[Html]:
    curve = thinned(trial.curve, most)
    places = placed(curve.steps, curve.values, x, y)
    look = {"data_trial": trial.id, "style": f"--q:{0.0 if rank is None else _quality(rank, of):.3g}"}
    best = " best" if rank == 0 else ""
    line = el("path", d=line_path(places), class_=f"line{best}", **look)
    return [line, el("path", d=dots_path(places), class_=f"dots{best}", **look)] if len(places) <= 12 else [line]


# Brackets of a search: a column per rung, with a mark for each trial that reached it.

_CLASS = {RungOutcome.WENT_ON: "", RungOutcome.STOPPED: "stopped", RungOutcome.FINISHED: "finished"}


def brackets_view(report: SweepReport) -> Html | None:
    """Return all brackets next to each other; None if the search makes no decisions."""
    drawn = [ladder for ladder in report.ladders if ladder.decisions]
    if not drawn:
        return None
    words = (("", "goes on"), ("stopped", "is stopped here"), ("finished", "reached the top"))
    marks = [el("span", el("i", class_=f"mark {kind}".strip()), word) for kind, word in words]
    key = el("p", el("span", marks, class_="marks"), class_="note")
    return join([key, el("div", [_ladder(ladder, report) for ladder in drawn], class_="ladders")])


def _ladder(ladder: BracketHistory, report: SweepReport) -> Html:
    """Return a column per rung; a better metric is higher.

    Nonfinite metrics are at the worse end.
    """
    finite = [decision.metric for decision in ladder.decisions if math.isfinite(decision.metric)]
    scale = fit(finite, margin=0.08)
    across = {rung: (rung + 0.5) / len(ladder.units) for rung in range(len(ladder.units))}
    columns = [el("path", d=f"M{BOX * x:.5g} 0V{BOX}", class_="column") for x in across.values()]
    ways: dict[str, list[RungDecision]] = {}
    for decision in ladder.decisions:
        ways.setdefault(decision.trial, []).append(decision)
    climbs = [
        el("path", class_="climb", d=line_path([_spot(step, across, scale, report) for step in way]))
        for way in ways.values()
        if len(way) > 1
    ]
    rungs = [Tick(across[rung], f"{units}") for rung, units in enumerate(ladder.units)]
    levels = [Tick(1 - _down(tick.at, report), tick.label) for tick in scale.ticks(5)]
    title = f"Bracket {ladder.number}" if len(report.ladders) > 1 else "Rungs"
    trials = len({decision.trial for decision in ladder.decisions})
    return frame(
        [columns, climbs],
        labels=[y_labels(levels), x_labels(rungs, report.unit)],
        caption=el("h3", title, el("small", f"{trials} trials measured, {report.metric}")),
        overlay=[_mark(decision, across, scale, report) for decision in ladder.decisions],
        kind="ladder",
    )


def _down(at: float, report: SweepReport) -> float:
    """Return the distance from the top for a position on the scale; the better end is up."""
    return at if report.smaller_is_better else 1 - at


def _top(decision: RungDecision, scale: Scale, report: SweepReport) -> float:
    at = scale.place(decision.metric)
    return 1.0 if at is None else _down(at, report)


def _spot(step: RungDecision, across: Mapping[int, float], scale: Scale, report: SweepReport) -> tuple[str, str]:
    return f"{BOX * across[step.rung]:.5g}", f"{BOX * _top(step, scale, report):.5g}"


def _mark(decision: RungDecision, across: Mapping[int, float], scale: Scale, report: SweepReport) -> Html:
    said = f"trial {decision.trial} after {decision.units} {report.unit}: {format_number(decision.metric)}, {decision.verdict.value}. {decision.why}"
    return el(
        "button",
        type="button",
        title=said,
        aria_label=said,
        class_=f"mark {_CLASS[decision.verdict]}".strip(),
        data_trial=decision.trial,
        style=f"left:{100 * across[decision.rung]:.4g}%;top:{100 * _top(decision, scale, report):.4g}%",
    )


# Parallel coordinates: an axis per swept value and for the metric, and a line per trial.

_MIDDLE = 0.5  # where a trial without a value passes an axis


def parallel_view(report: SweepReport) -> Html | None:
    """Return the chart; None with fewer than two measured trials or no swept value."""
    ranked = report.ranked()
    if len(ranked) < 2 or not report.axes:
        return None
    scales = [
        fit_axis(axis, [trial.point[axis.name] for trial in ranked if axis.name in trial.point]) for axis in report.axes
    ]
    goal = fit([trial.best for trial in ranked if trial.best is not None])
    places = {trial.id: _places_parallel(trial, report, scales, goal) for trial in ranked}
    columns = [*report.axes, Axis(report.metric)]
    return frame(
        # Draw the best trial last, over the others.
        [_line(trial, places[trial.id], _quality(at, len(ranked))) for at, trial in reversed(list(enumerate(ranked)))],
        labels=None,
        overlay=[
            _axis(axis, scale, index, len(columns), report)
            for index, (axis, scale) in enumerate(zip(columns, [*scales, goal], strict=True))
        ],
        said=f"{len(ranked)} trials over {', '.join(axis.name for axis in report.axes)} and {report.metric}",
        keys="Parallel coordinates: arrow keys go from trial to trial",
        data={"axes": [axis.name for axis in columns], "trials": places},
        kind="parallel trials",
        style=f"--axes:{len(columns)}",
    )


def _places_parallel(
    trial: TrialReport, report: SweepReport, scales: Sequence[Scale], goal: Scale
) -> list[float | None]:
    """Return heights from 0 to 1; a better metric is always higher."""
    found = [scale.place(trial.point.get(axis.name)) for axis, scale in zip(report.axes, scales, strict=True)]
    at = goal.place(trial.best)
    found.append(1 - at if report.smaller_is_better and at is not None else at)
    return [None if place is None else round(place, 5) for place in found]


def _line(trial: TrialReport, places: Sequence[float | None], quality: float) -> Html:
    points = [
        (f"{BOX * index / (len(places) - 1):.5g}", f"{BOX * (1 - (_MIDDLE if place is None else place)):.5g}")
        for index, place in enumerate(places)
    ]
    return el(
        "path",
        d=line_path(points),
        data_trial=trial.id,
        class_="line best" if quality == 1 else "line",
        style=f"--q:{quality:.3g}",
    )


def _axis(axis: Axis, scale: Scale, index: int, count: int, report: SweepReport) -> Html:
    goal = index == count - 1
    ticks = [Tick(1 - tick.at, tick.label) if goal and report.smaller_is_better else tick for tick in scale.ticks(6)]
    labels = [
        el("span", tick.label, class_="tick", style=f"top:{100 * (1 - tick.at):.4g}%", title=tick.label)
        for tick in ticks
    ]
    stem, _, leaf = re.sub(r"^(data\.|hyperparameters\.)?(ds_config\.)?", "", axis.name).rpartition(".")
    return el(
        "div",
        el("b", el("small", page.breakable(stem)) if stem else None, page.breakable(leaf), log_word(scale)),
        labels,
        el("div", class_="held needs-script", hidden=True),
        [_handle(axis.name, index, end) for end in ("high", "low")],
        class_="axis goal" if goal else "axis",
        style=f"left:{100 * index / (count - 1):.4g}%",
    )


def _handle(name: str, index: int, end: str) -> Html:
    word = "upper" if end == "high" else "lower"
    return el(
        "button",
        type="button",
        class_="handle needs-script",
        role="slider",
        aria_orientation="vertical",
        aria_label=f"{word} end of {name}",
        aria_valuemin=0,
        aria_valuemax=100,
        aria_valuenow=100 if end == "high" else 0,
        data_axis=index,
        data_end=end,
        style=f"top:{0 if end == 'high' else 100}%",
    )
