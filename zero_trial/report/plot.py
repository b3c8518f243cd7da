"""Scales: from a value to a place between 0 and 1 along an axis, and the round values that get a label."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_trial.report.data import (
    Axis,
    BracketHistory,
    Memory,
    RungDecision,
    RungOutcome,
    Series,
    SweepReport,
    TrialReport,
)
from zero_trial.report.page import Child, Html, el, join, json_data
from zero_trial.util.text import format_bytes, format_count, format_number, format_value

LOG_RATIO = 50.0  # values that lie further apart than this are told apart on a logarithmic scale only


@dataclass(frozen=True)
class Tick:
    """A label at a place."""

    at: float
    label: str


@dataclass(frozen=True)
class Scale:
    """``low`` is at 0 and ``high`` at 1; ``choices`` instead of numbers stand at equal distances."""

    low: float = 0.0
    high: float = 1.0
    log: bool = False
    choices: tuple[str, ...] = ()

    def place(self, value: Any) -> float | None:
        """Where a value is, cut to [0, 1]; None for one that is not on the scale."""
        if self.choices:
            return self._of_choice(format_value(value))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        if self.log and value <= 0:
            return None
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return min(max((at - low) / (high - low), 0.0), 1.0)

    def ticks(self, most: int = 5) -> tuple[Tick, ...]:
        """Round values within the scale, about ``most`` of them, evenly to the eye."""
        if self.choices:
            return tuple(Tick(self._of_choice(choice) or 0.0, choice) for choice in self.choices)
        values = _log_values(self.low, self.high, most) if self.log else _linear_values(self.low, self.high, most)
        return tuple(Tick(self.place(value) or 0.0, tick_label(value)) for value in values)

    def _of_choice(self, name: str) -> float | None:
        if name not in self.choices:
            return None
        if len(self.choices) == 1:
            return 0.5
        # Not at the very ends, where handles and other labels stand.
        return 0.06 + 0.88 * self.choices.index(name) / (len(self.choices) - 1)


def fit(values: Iterable[float], *, log: bool | None = None, margin: float = 0.04) -> Scale:
    """The scale that shows all values with a little air. ``log`` None: logarithmic where they are positive and far apart."""
    found = [value for value in values if math.isfinite(value)]
    if not found:
        return Scale()
    low, high = min(found), max(found)
    if log is None:
        log = low > 0 and high / low >= LOG_RATIO
    if log and low > 0:
        air = (high / low) ** margin if high > low else 2.0
        return Scale(low / air, high * air, log=True)
    air = (high - low) * margin if high > low else abs(high) * 0.5 or 0.5
    return Scale(low - air, high + air)


def fit_axis(axis: Axis, values: Sequence[Any]) -> Scale:
    """The scale of a swept leaf over the values that it took."""
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if axis.choices or len(numbers) < len(values):
        extra = sorted({format_value(value) for value in values} - set(axis.choices))
        return Scale(choices=(*axis.choices, *extra))
    return fit(numbers, log=axis.log or None)


def tick_label(value: float) -> str:
    """A round value, short: 20k, 0.5, 1e−5."""
    return format_count(value) if 10_000 <= abs(value) < 1e12 else format_number(value, 6)


def _linear_values(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _log_values(low: float, high: float, most: int) -> list[float]:
    """Powers of ten, with 2 and 5 between them where there is room, thinned where there is not."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        values = [f * 10.0**e for e in range(first, last + 1) for f in factors if low <= f * 10.0**e <= high]
        if len(values) <= most + 1:
            return values if len(values) >= 2 else _linear_values(low, high, most)
    every = math.ceil(len(values) / most)
    return values[::every]


# Line charts as SVG whose labels are HTML, so that they fit any width with letters of one size and need no script to be seen.
#
# The drawing is stretched to its box (strokes are not), labels stand at percentages of it.


BOX = 1000  # the drawing's own coordinates


MOST_POINTS = 600


SMOOTHING = 0.4


@dataclass(frozen=True)
class Line:
    """A series with its look: ``role`` is a class of the style sheet; ``smooth`` draws a running mean over the raw values; ``dots`` marks each."""

    series: Series
    role: str
    label: str
    smooth: bool = False
    dots: bool = False


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    y_label: str = "",
    x_label: str = "step",
    size: str = "",
    slider: bool = False,
    zero: bool = False,
    legend: bool = True,
) -> Html:
    """A figure with its caption, axes, lines and, for a pointer, the data behind them.

    ``size``: "tall" or nothing. ``zero``: the axis begins at 0.
    """
    shown = [Line(thinned(line.series), line.role, line.label, line.smooth, line.dots) for line in lines]
    x = fit([step for line in shown for step in line.series.steps], log=False, margin=0.0)
    y = fit([value for line in shown for value in line.series.values] + ([0.0] if zero else []))
    drawing = el(
        "svg",
        _grid(x, y),
        [_draw(line, x, y, index) for index, line in enumerate(shown)],
        viewBox=f"0 0 {BOX} {BOX}",
        preserveAspectRatio="none",
        role="img",
        aria_label=_spoken(title, shown),
    )
    plot = el(
        "div",
        drawing,
        _labels(x, y, x_label),
        class_=f"plot {size}".strip(),
        tabindex=0,
        aria_label=f"{title}: values by arrow keys",
    )
    caption = el(
        "figcaption",
        el("h3", title, el("small", y_label) if y_label else None),
        _legend(shown) if legend else None,
        _slider() if slider else None,
    )
    return el("figure", caption, plot, json_data(_behind(shown, x, y)), class_="chart")


def thinned(series: Series) -> Series:
    """At most MOST_POINTS points, each the mean of its neighbours' share."""
    if len(series) <= MOST_POINTS:
        return series
    edges = [round(index * len(series) / MOST_POINTS) for index in range(MOST_POINTS + 1)]
    spans = [slice(start, end) for start, end in itertools.pairwise(edges)]
    steps, values = (
        tuple(sum(column[span]) / len(column[span]) for span in spans) for column in (series.steps, series.values)
    )
    return Series(series.name, steps, values)


def smoothed(values: Sequence[float], weight: float = SMOOTHING) -> list[float]:
    """The exponential running mean without its pull to zero at the start (Kingma & Ba 2015, section 3, with beta = ``weight``)."""
    mean, share, found = 0.0, 0.0, []
    for value in values:
        mean = weight * mean + (1 - weight) * value
        share = weight * share + (1 - weight)
        found.append(mean / share)
    return found


def _draw(line: Line, x: Scale, y: Scale, index: int) -> list[Html]:
    raw = _path(line.series.steps, line.series.values, x, y)
    parts = []
    if line.smooth:
        parts.append(el("path", d=raw, class_=f"raw {line.role}"))
        raw = _path(line.series.steps, smoothed(line.series.values), x, y)
    parts.append(el("path", d=raw, class_=f"line {line.role}{' guide' if line.dots else ''}", data_line=index))
    if line.dots or len(line.series) == 1:
        places = _places(line.series.steps, line.series.values, x, y)
        parts.append(el("path", d="".join(f"M{a} {b}h0" for a, b in places), class_=f"dots {line.role}"))
    return parts


def _path(steps: Sequence[float], values: Sequence[float], x: Scale, y: Scale) -> str:
    places = _places(steps, values, x, y)
    return "M" + "L".join(f"{a} {b}" for a, b in places) if places else "M0 0"


def _places(steps: Sequence[float], values: Sequence[float], x: Scale, y: Scale) -> list[tuple[str, str]]:
    found = []
    for step, value in zip(steps, values, strict=True):
        across, up = x.place(step), y.place(value)
        if across is not None and up is not None:
            found.append((f"{BOX * across:.5g}", f"{BOX * (1 - up):.5g}"))
    return found


def _grid(x: Scale, y: Scale) -> list[Html]:
    levels = [BOX * (1 - tick.at) for tick in y.ticks()]
    return [el("path", d=f"M0 {level:.5g}H{BOX}", class_="grid") for level in levels]


def _labels(x: Scale, y: Scale, x_label: str) -> list[Html]:
    across = x.ticks(6)
    right = [el("span", tick.label, class_="y", style=f"top:{100 * (1 - tick.at):.4g}%") for tick in y.ticks()]
    below = [el("span", tick.label, class_="x", style=f"left:{100 * tick.at:.4g}%") for tick in across]
    return [*right, *below, el("span", x_label, class_="x-label")]


def _legend(lines: Sequence[Line]) -> Html:
    return el(
        "ul",
        [
            el(
                "li",
                el("i", class_=f"key {line.role}{' dotted' if line.dots else ''}"),
                line.label,
                el("b", _last(line)),
            )
            for line in lines
        ],
        class_="legend",
    )


def _last(line: Line) -> str:
    return format_number(line.series.values[-1]) if len(line.series) else ""


def _slider() -> Html:
    return el(
        "label",
        "smoothing ",
        el("input", type="range", min=0, max=0.98, step=0.02, value=SMOOTHING, class_="smoothing"),
        class_="needs-script",
    )


def _behind(lines: Sequence[Line], x: Scale, y: Scale) -> dict[str, object]:
    """What the script needs to answer a pointer."""
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
    """The chart in words, for those who do not see it."""
    said = [
        f"{line.label} from {format_number(line.series.values[0])} to {format_number(line.series.values[-1])} in {len(line.series)} points"
        for line in lines
        if len(line.series)
    ]
    return f"{title}: {'; '.join(said)}" if said else title


# Memory as pictures: the parts of a plan beside what was measured, and small bars for tables.


# Darkest first: what outlives a step, then what comes and goes.
PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")


def memory_view(memory: Memory) -> Html | None:
    """Planned parts, the planned and the measured peak as bars of one scale, and a line on each; None if nothing is known."""
    if memory.planned is None and memory.measured is None and not memory.processes:
        return None
    widest = max(memory.planned or 0, memory.measured or 0, sum(_parts(memory).values()), 1)
    rows = []
    if memory.planned is not None:
        rows.append(
            _row("planned", _stack(_parts(memory) or {"peak": memory.planned}, memory.planned, widest), memory.planned)
        )
    if memory.measured is not None:
        rows.append(_row("measured", _stack({"measured": memory.measured}, memory.measured, widest), memory.measured))
    return join([rows, _key(_parts(memory)), _remarks(memory)])


def bar(value: float | None, widest: float, text: str) -> Child:
    """A number with a bar under it; the text alone where there is no number."""
    if value is None or widest <= 0:
        return text
    return [text, el("span", el("i", style=f"--w:{min(value / widest, 1):.4g}"), class_="bar", aria_hidden="true")]


def _parts(memory: Memory) -> Mapping[str, int]:
    return {name: memory.parts[name] for name in PARTS if memory.parts.get(name)}


def _stack(parts: Mapping[str, int], peak: int, widest: int) -> Html:
    """Parts that together pass the peak do not all live at once: they are drawn in proportion within it."""
    total = max(sum(parts.values()), peak)
    cells = [
        el(
            "i",
            title=f"{name}: {format_bytes(value)}",
            style=f"--w:{value / total * peak / widest:.4g};--m:{_shade(name)}",
        )
        for name, value in parts.items()
    ]
    return el("div", cells, class_="stack", aria_hidden="true")


def _shade(name: str) -> str:
    return f"{1.0 - 0.19 * PARTS.index(name):.2f}" if name in PARTS else "1"


def _row(name: str, stack: Html, value: int) -> Html:
    return el("div", el("span", name), stack, el("b", format_bytes(value)), class_="stack-row")


def _key(parts: Mapping[str, int]) -> Html | None:
    if not parts:
        return None
    items = [
        el("li", el("i", class_="swatch", style=f"--m:{_shade(name)}"), name, el("b", format_bytes(value)))
        for name, value in parts.items()
    ]
    return el("ul", items, class_="legend")


def _verdict(percent: float) -> str:
    if abs(percent) < 0.05:
        return "The plan, made before the first step, came true to a tenth of a percent."
    return f"The plan, made before the first step, is off by {percent:+.1f} %."


def _remarks(memory: Memory) -> Html:
    said = ["Bytes of live tensors on rank 0 at the peak of a step."] if memory.planned or memory.measured else []
    if memory.planned and memory.measured:
        said.append(_verdict(100 * (memory.planned / memory.measured - 1)))
    if memory.parts and memory.planned and sum(_parts(memory).values()) > memory.planned * 1.001:
        said.append(
            "The parts do not all live at the same moment, so they add up to more than the peak; they are drawn in proportion."
        )
    if memory.processes:
        kind = f" ({memory.processes_kind})" if memory.processes_kind else ""
        each = ", ".join(format_bytes(value) for value in memory.processes)
        said.append(f"Peak of each rank's process{kind}, libraries included: {each}.")
    if memory.limit_line:
        said.append(f"Limit: {memory.limit_line}.")
    return el("p", " ".join(said), class_="note", style="margin-top:.9rem")


# The search's decisions as a picture: brackets as ladders, each trial a mark at every rung that it reached.


_CLASS = {RungOutcome.WENT_ON: "", RungOutcome.STOPPED: "stopped", RungOutcome.FINISHED: "finished"}


def brackets_view(report: SweepReport) -> Html | None:
    """All brackets beside each other; None where the search takes no decisions."""
    drawn = [ladder for ladder in report.ladders if ladder.decisions]
    if not drawn:
        return None
    key = el(
        "p",
        el(
            "span",
            [
                el("span", el("i", class_=f"mark {kind}".strip()), word)
                for kind, word in (("", "goes on"), ("stopped", "is stopped here"), ("finished", "reached the top"))
            ],
            class_="marks",
        ),
        class_="note",
    )
    return join([key, el("div", [_ladder(ladder, report) for ladder in drawn], class_="ladders")])


def _ladder(ladder: BracketHistory, report: SweepReport) -> Html:
    """A column for each rung, the better metric the higher. Metrics that are not finite stand at the worse end."""
    finite = [decision.metric for decision in ladder.decisions if math.isfinite(decision.metric)]
    scale = fit(finite, margin=0.08)
    across = {rung: (rung + 0.5) / len(ladder.units) for rung in range(len(ladder.units))}
    columns = [el("path", d=f"M{BOX * x:.5g} 0V{BOX}", class_="column") for x in across.values()]
    climbs = [el("path", d=path, class_="climb") for path in _climbs(ladder, scale, across, report)]
    marks = [_mark(decision, across, scale, report) for decision in ladder.decisions]
    labels = [
        el("span", f"{units}", class_="x", style=f"left:{100 * across[rung]:.4g}%")
        for rung, units in enumerate(ladder.units)
    ]
    ticks = [
        el("span", tick.label, class_="y", style=f"top:{100 * _down(tick.at, report):.4g}%") for tick in scale.ticks(5)
    ]
    drawing = el("svg", columns, climbs, viewBox=f"0 0 {BOX} {BOX}", preserveAspectRatio="none", aria_hidden="true")
    plot = el("div", drawing, ticks, labels, el("span", report.unit, class_="x-label"), marks, class_="plot")
    title = f"Bracket {ladder.number}" if len(report.ladders) > 1 else "Rungs"
    trials = len({decision.trial for decision in ladder.decisions})
    caption = el("figcaption", el("h3", title, el("small", f"{trials} trials measured, {report.metric}")))
    return el("figure", caption, plot, class_="chart ladder")


def _down(at: float, report: SweepReport) -> float:
    """From a place on the scale to one from the top: the better end is up."""
    return at if report.smaller_is_better else 1 - at


def _top(decision: RungDecision, scale: Scale, report: SweepReport) -> float:
    at = scale.place(decision.metric)
    return 1.0 if at is None else _down(at, report)


def _climbs(ladder: BracketHistory, scale: Scale, across: Mapping[int, float], report: SweepReport) -> list[str]:
    """The way of each trial from rung to rung."""
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


# Parallel coordinates: one axis for each swept value and one for the metric, one line for each trial, ranges to choose on every axis.


MIDDLE = 0.5  # where a trial without a value passes an axis


def parallel_view(report: SweepReport) -> Html | None:
    """The picture; None without two measured trials or without a swept value."""
    ranked = report.ranked()
    if len(ranked) < 2 or not report.axes:
        return None
    scales = [
        fit_axis(axis, [trial.point[axis.name] for trial in ranked if axis.name in trial.point]) for axis in report.axes
    ]
    goal = fit([trial.best for trial in ranked if trial.best is not None])
    places = {trial.id: _places_parallel(trial, report, scales, goal) for trial in ranked}
    drawing = el(
        "svg",
        # The best trial is drawn last, over the others.
        [
            _line(trial, places[trial.id], 1 - at / max(len(ranked) - 1, 1))
            for at, trial in reversed(list(enumerate(ranked)))
        ],
        viewBox=f"0 0 {BOX} {BOX}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{len(ranked)} trials over {', '.join(axis.name for axis in report.axes)} and {report.metric}",
    )
    columns = [*report.axes, Axis(report.metric)]
    drawn = [
        _axis(axis, scale, index, len(columns), report)
        for index, (axis, scale) in enumerate(zip(columns, [*scales, goal], strict=True))
    ]
    plot = el(
        "div",
        drawing,
        drawn,
        class_="plot",
        tabindex=0,
        aria_label="Parallel coordinates: arrow keys go from trial to trial",
    )
    data = json_data({"axes": [axis.name for axis in columns], "trials": places})
    return el("figure", plot, data, class_="chart parallel trials", style=f"--axes:{len(columns)}")


def _places_parallel(
    trial: TrialReport, report: SweepReport, scales: Sequence[Scale], goal: Scale
) -> list[float | None]:
    """Heights from 0 to 1; the better metric is always the higher one."""
    found = [scale.place(trial.point.get(axis.name)) for axis, scale in zip(report.axes, scales, strict=True)]
    at = goal.place(trial.best)
    return [_rounded(place) for place in (*found, 1 - at if report.smaller_is_better and at is not None else at)]


def _rounded(place: float | None) -> float | None:
    return None if place is None else round(place, 5)


def _line(trial: TrialReport, places: Sequence[float | None], quality: float) -> Html:
    points = [
        (f"{BOX * index / (len(places) - 1):.5g}", f"{BOX * (1 - (MIDDLE if place is None else place)):.5g}")
        for index, place in enumerate(places)
    ]
    return el(
        "path",
        d="M" + "L".join(f"{x} {y}" for x, y in points),
        data_points=" ".join(f"{x},{y}" for x, y in points),
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
