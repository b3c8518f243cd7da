"""The charts of a report: scales, the one frame, and the charts in it.

A chart is a function that computes shapes and labels and returns ``frame(...)``. Drawings are SVG
that is stretched to its box (strokes are not); labels are HTML at percentages of it, so they keep
one size at any width and need no script. A new chart is such a function here, a line in the page
that shows it and, where it looks new, a rule in page.css.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_trial.report.data import Axis, BracketHistory, RungDecision, RungOutcome, Series, SweepReport, TrialReport
from zero_trial.report.page import Child, Html, el, join, json_data
from zero_trial.util.text import format_count, format_number, format_value

# values that are further apart than this get a logarithmic scale
_LOG_RATIO = 50.0


@dataclass(frozen=True)
class Tick:
    """A label at a place."""

    at: float
    label: str


@dataclass(frozen=True)
class Scale:
    """``low`` is at 0 and ``high`` at 1; ``choices`` instead of numbers are at equal
    distances."""

    low: float = 0.0
    high: float = 1.0
    log: bool = False
    choices: tuple[str, ...] = ()

    def place(self, value: Any) -> float | None:
        """Return where a value is, cut to [0, 1]; None for one that is not on the scale."""
        if self.choices:
            return self._of_choice(format_value(value))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        if self.log and value <= 0:
            return None
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return min(max((at - low) / (high - low), 0.0), 1.0)

    def ticks(self, most: int = 5) -> tuple[Tick, ...]:
        """Return about ``most`` round values within the scale."""
        if self.choices:
            return tuple(Tick(self._of_choice(choice) or 0.0, choice) for choice in self.choices)
        values = _log_values(self.low, self.high, most) if self.log else _linear_values(self.low, self.high, most)
        return tuple(Tick(self.place(value) or 0.0, _tick_label(value)) for value in values)

    def _of_choice(self, name: str) -> float | None:
        if name not in self.choices:
            return None
        if len(self.choices) == 1:
            return 0.5
        # Not at the very ends, where handles and other labels are.
        return 0.06 + 0.88 * self.choices.index(name) / (len(self.choices) - 1)


def fit(values: Iterable[float], *, log: bool | None = None, margin: float = 0.04) -> Scale:
    """Return the scale that shows all values with a little air.

    ``log`` None: logarithmic where they are positive and far apart.
    """
    found = [value for value in values if math.isfinite(value)]
    if not found:
        return Scale()
    low, high = min(found), max(found)
    if log is None:
        log = low > 0 and high / low >= _LOG_RATIO
    if log and low > 0:
        air = (high / low) ** margin if high > low else 2.0
        return Scale(low / air, high * air, log=True)
    air = (high - low) * margin if high > low else abs(high) * 0.5 or 0.5
    return Scale(low - air, high + air)


def fit_axis(axis: Axis, values: Sequence[Any]) -> Scale:
    """Return the scale of a swept leaf over the values that it took."""
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if axis.choices or len(numbers) < len(values):
        extra = sorted({format_value(value) for value in values} - set(axis.choices))
        return Scale(choices=(*axis.choices, *extra))
    return fit(numbers, log=axis.log or None)


def _tick_label(value: float) -> str:
    """Return a round value, short: 20k, 0.5, 1e−5."""
    return format_count(value) if 10_000 <= abs(value) < 1e12 else format_number(value, 6)


def _linear_values(low: float, high: float, most: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _log_values(low: float, high: float, most: int) -> list[float]:
    """Return powers of ten, with 2 and 5 between them where there is room, thinned where there is
    not.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        values = [f * 10.0**e for e in range(first, last + 1) for f in factors if low <= f * 10.0**e <= high]
        if len(values) <= most + 1:
            return values if len(values) >= 2 else _linear_values(low, high, most)
    every = math.ceil(len(values) / most)
    return values[::every]


BOX = 1000  # the drawing's own coordinates
MOST_POINTS = 600
_SMOOTHING = 0.4


@dataclass(frozen=True)
class Line:
    """A series with its look: ``role`` is a class of the style sheet; ``smooth`` draws a running
    mean over the raw values; ``dots`` marks each.
    """

    series: Series
    role: str
    label: str
    smooth: bool = False
    dots: bool = False


def frame(
    shapes: Child,
    *,
    labels: Child,
    caption: Child = None,
    overlay: Child = None,
    said: str = "",
    keys: str = "",
    size: str = "",
    data: Mapping[str, Any] | None = None,
    kind: str = "",
    style: str | None = None,
) -> Html:
    """Return the figure around a chart.

    Args:
        shapes: SVG paths in the drawing's own coordinates, 0 to BOX, which are stretched to the
            figure's width.
        labels: tick labels, placed in percent of the drawing (``x_labels``, ``y_labels``).
        caption: content of the figcaption; None leaves it out.
        overlay: HTML over the drawing, such as buttons.
        said: the chart in words, for readers who do not see it; empty hides the drawing from them.
        keys: what the arrow keys do in it; empty takes it out of the keyboard's order.
        size: ``tall``, or nothing.
        data: what the page's script needs.
        kind: classes of the figure beside ``chart``; page.js finds its charts by them.
        style: CSS properties of the figure.
    """
    spoken = {"role": "img", "aria_label": said} if said else {"aria_hidden": "true"}
    drawing = el("svg", shapes, viewBox=f"0 0 {BOX} {BOX}", preserveAspectRatio="none", **spoken)
    reach = {"tabindex": 0, "aria_label": keys} if keys else {}
    plot = el("div", drawing, labels, overlay, class_=f"plot {size}".strip(), **reach)
    behind = json_data(data) if data is not None else None
    head = el("figcaption", caption) if caption is not None else None
    return el("figure", head, plot, behind, class_=f"chart {kind}".strip(), style=style)


def x_labels(ticks: Iterable[Tick], name: str) -> list[Html]:
    """Return labels below the drawing, and what they count."""
    below = [el("span", tick.label, class_="x", style=f"left:{100 * tick.at:.4g}%") for tick in ticks]
    return [*below, el("span", name, class_="x-label")]


def y_labels(ticks: Iterable[Tick]) -> list[Html]:
    """Return labels beside the drawing; a tick at 1 is at the top."""
    return [el("span", tick.label, class_="y", style=f"top:{100 * (1 - tick.at):.4g}%") for tick in ticks]


def _grid_lines(ticks: Iterable[Tick]) -> list[Html]:
    """Return a line across the drawing for each tick of the y axis."""
    return [el("path", d=f"M0 {BOX * (1 - tick.at):.5g}H{BOX}", class_="grid") for tick in ticks]


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str = "step",
    size: str = "",
    slider: bool = False,
    zero: bool = False,
    legend: bool = True,
) -> Html:
    """Return a chart of lines over steps.

    ``size``: "tall" or nothing. ``zero``: the y axis begins at 0.
    """
    shown = [Line(thinned(line.series), line.role, line.label, line.smooth, line.dots) for line in lines]
    x = fit([step for line in shown for step in line.series.steps], log=False, margin=0.0)
    y = fit([value for line in shown for value in line.series.values] + ([0.0] if zero else []))
    knob = el("input", type="range", min=0, max=0.98, step=0.02, value=_SMOOTHING, class_="smoothing")
    return frame(
        [_grid_lines(y.ticks()), [_draw(line, x, y, index) for index, line in enumerate(shown)]],
        labels=[y_labels(y.ticks()), x_labels(x.ticks(6), x_label)],
        caption=[
            el("h3", title),
            _legend(shown) if legend else None,
            el("label", "smoothing ", knob, class_="needs-script") if slider else None,
        ],
        said=_spoken(title, shown),
        keys=f"{title}: values by arrow keys",
        size=size,
        data=_behind(shown, x, y),
    )


def thinned(series: Series) -> Series:
    """Return at most MOST_POINTS points, each the mean of its neighbours' share."""
    if len(series) <= MOST_POINTS:
        return series
    edges = [round(index * len(series) / MOST_POINTS) for index in range(MOST_POINTS + 1)]
    spans = [slice(start, end) for start, end in itertools.pairwise(edges)]
    steps, values = (
        tuple(sum(column[span]) / len(column[span]) for span in spans) for column in (series.steps, series.values)
    )
    return Series(series.name, steps, values)


def smoothed(values: Sequence[float], weight: float = _SMOOTHING) -> list[float]:
    """Return the exponential running mean without its pull to zero at the start (Kingma & Ba 2015,
    section 3, with beta = ``weight``).
    """
    mean, share, found = 0.0, 0.0, []
    for value in values:
        mean = weight * mean + (1 - weight) * value
        share = weight * share + (1 - weight)
        found.append(mean / share)
    return found


def _draw(line: Line, x: Scale, y: Scale, index: int) -> list[Html]:
    steps, values = line.series.steps, line.series.values
    raw = _places(steps, values, x, y)
    drawn = _places(steps, smoothed(values), x, y) if line.smooth else raw
    parts = [el("path", d=_path(raw), class_=f"raw {line.role}")] if line.smooth else []
    parts.append(el("path", d=_path(drawn), class_=f"line {line.role}{' guide' if line.dots else ''}", data_line=index))
    if line.dots or len(line.series) == 1:
        parts.append(el("path", d=_dots(raw), class_=f"dots {line.role}"))
    return parts


_Place = tuple[str, str]
"""Where a point is in the drawing's coordinates: from the left, from the top."""


def _places(steps: Sequence[float], values: Sequence[float], x: Scale, y: Scale) -> list[_Place]:
    return [
        (f"{BOX * across:.5g}", f"{BOX * (1 - up):.5g}")
        for step, value in zip(steps, values, strict=True)
        if (across := x.place(step)) is not None and (up := y.place(value)) is not None
    ]


def _path(places: Sequence[_Place]) -> str:
    return "M" + "L".join(f"{a} {b}" for a, b in places) if places else "M0 0"


def _dots(places: Sequence[_Place]) -> str:
    return "".join(f"M{a} {b}h0" for a, b in places)


def _points(places: Sequence[_Place]) -> str:
    """Return the places as the script reads them."""
    return " ".join(f"{a},{b}" for a, b in places)


def _legend(lines: Sequence[Line]) -> Html:
    items = []
    for line in lines:
        last = format_number(line.series.values[-1]) if len(line.series) else ""
        key = el("i", class_=f"key {line.role}{' dotted' if line.dots else ''}")
        items.append(el("li", key, line.label, el("b", last)))
    return el("ul", items, class_="legend")


def _behind(lines: Sequence[Line], x: Scale, y: Scale) -> dict[str, object]:
    """Return what the script needs to answer a pointer."""
    return {
        "x": [x.low, x.high],
        "y": [y.low, y.high],
        "log": y.log,
        "lines": [
            {
                "name": line.label,
                "role": line.role,
                "smooth": line.smooth,
                "steps": list(line.series.steps),
                "values": [float(f"{value:.6g}") for value in line.series.values],
            }
            for line in lines
        ],
    }


def _spoken(title: str, lines: Sequence[Line]) -> str:
    """Return the chart in words, for screen readers."""
    said = [
        f"{line.label} from {format_number(line.series.values[0])} to {format_number(line.series.values[-1])} in {len(line.series)} points"
        for line in lines
        if len(line.series)
    ]
    return f"{title}: {'; '.join(said)}" if said else title


# The learning curves of a sweep: one line for each trial, the better the darker.

# times the spread of the better half: a worse value than that would press all other curves flat
_CLOSE_UP = 20.0


def trial_curves(report: SweepReport) -> tuple[Html, str] | None:
    """Return the chart of all learning curves, and how many values are outside of it; None if there
    are no curves.
    """
    drawn = [trial for trial in report.trials if len(trial.curve)]
    if not drawn:
        return None
    ranked = {trial.id: at for at, trial in enumerate(report.ranked())}
    x = fit([0.0, *(step for trial in drawn for step in trial.curve.steps)], log=False, margin=0.0)
    y, cut = _close_up(drawn, report)
    worst_first = sorted(drawn, key=lambda trial: -ranked.get(trial.id, len(ranked)))
    key = el("span", "worst", el("i", class_="ramp"), "best", class_="scale-key")
    chart = frame(
        [_grid_lines(y.ticks()), [_curve(trial, ranked.get(trial.id), len(ranked), x, y) for trial in worst_first]],
        labels=[y_labels(y.ticks()), x_labels(x.ticks(6), report.unit)],
        caption=[el("h3", report.metric), key, el("span", class_="lit-name soft", role="status")],
        said=f"{report.metric} of {len(drawn)} trials over {report.unit}",
        keys="Learning curves: arrow keys go from trial to trial",
        size="tall",
        kind="trials",
    )
    return chart, cut


def _quality(rank: int, of: int) -> float:
    """Return 1 for the best of ``of`` trials, 0 for the worst."""
    return 1 - rank / max(of - 1, 1)


def _close_up(drawn: Sequence[TrialReport], report: SweepReport) -> tuple[Scale, str]:
    """Return the scale of the curves, without what would press all others flat, and how many values
    are so left out.
    """
    values = sorted(value for trial in drawn for value in trial.curve.values)
    if not report.smaller_is_better:
        values = [-value for value in reversed(values)]
    half = values[len(values) // 2] - values[0]
    limit = values[0] + _CLOSE_UP * max(half, 1e-12)
    inside = [value for value in values if value <= limit] if len(values) > 4 else values
    sign = 1 if report.smaller_is_better else -1
    left = len(values) - len(inside)
    return fit([sign * value for value in inside]), (f"{left} value{'s' if left != 1 else ''}" if left else "")


def _curve(trial: TrialReport, rank: int | None, of: int, x: Scale, y: Scale) -> list[Html]:
    curve = thinned(trial.curve)
    places = _places(curve.steps, curve.values, x, y)
    look = {"data_trial": trial.id, "style": f"--q:{0.0 if rank is None else _quality(rank, of):.3g}"}
    best = " best" if rank == 0 else ""
    line = el("path", d=_path(places), data_points=_points(places), class_=f"line{best}", **look)
    return [line, el("path", d=_dots(places), class_=f"dots{best}", **look)] if len(places) <= 12 else [line]


# Brackets of a search: a column for each rung, each trial a mark at every rung that it reached.

_CLASS = {RungOutcome.WENT_ON: "", RungOutcome.STOPPED: "stopped", RungOutcome.FINISHED: "finished"}


def brackets_view(report: SweepReport) -> Html | None:
    """Return all brackets beside each other; None where the search takes no decisions."""
    drawn = [ladder for ladder in report.ladders if ladder.decisions]
    if not drawn:
        return None
    words = (("", "goes on"), ("stopped", "is stopped here"), ("finished", "reached the top"))
    marks = [el("span", el("i", class_=f"mark {kind}".strip()), word) for kind, word in words]
    key = el("p", el("span", marks, class_="marks"), class_="note")
    return join([key, el("div", [_ladder(ladder, report) for ladder in drawn], class_="ladders")])


def _ladder(ladder: BracketHistory, report: SweepReport) -> Html:
    """Return a column for each rung, the better metric the higher.

    Metrics that are not finite are at the worse end.
    """
    finite = [decision.metric for decision in ladder.decisions if math.isfinite(decision.metric)]
    scale = fit(finite, margin=0.08)
    across = {rung: (rung + 0.5) / len(ladder.units) for rung in range(len(ladder.units))}
    columns = [el("path", d=f"M{BOX * x:.5g} 0V{BOX}", class_="column") for x in across.values()]
    climbs = [el("path", d=path, class_="climb") for path in _climbs(ladder, scale, across, report)]
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
    """Return the distance from the top for a place on the scale: the better end is up."""
    return at if report.smaller_is_better else 1 - at


def _top(decision: RungDecision, scale: Scale, report: SweepReport) -> float:
    at = scale.place(decision.metric)
    return 1.0 if at is None else _down(at, report)


def _climbs(ladder: BracketHistory, scale: Scale, across: Mapping[int, float], report: SweepReport) -> list[str]:
    """Return the way of each trial from rung to rung."""
    ways: dict[str, list[RungDecision]] = {}
    for decision in ladder.decisions:
        ways.setdefault(decision.trial, []).append(decision)
    return [
        "M" + "L".join(f"{BOX * across[step.rung]:.5g} {BOX * _top(step, scale, report):.5g}" for step in way)
        for way in ways.values()
        if len(way) > 1
    ]


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


# Parallel coordinates: an axis for each swept value and one for the metric, a line for each trial.

_MIDDLE = 0.5  # where a trial without a value passes an axis


def parallel_view(report: SweepReport) -> Html | None:
    """Return the picture; None without two measured trials or without a swept value."""
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
        # The best trial is drawn last, over the others.
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
    """Return heights from 0 to 1; the better metric is always the higher one."""
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
        d=_path(points),
        data_points=_points(points),
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
    stem, _, leaf = axis.name.removeprefix("ds_config.").rpartition(".")
    return el(
        "div",
        el("b", el("small", stem) if stem else None, leaf),
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
