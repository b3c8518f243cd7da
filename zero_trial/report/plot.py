"""Scales, the shared frame of all charts, and the line chart.

A chart is a function that computes shapes and labels and returns ``frame(...)``. Drawings are SVG
stretched to the box (without strokes). Labels are HTML positioned in percent, so their size is the
same at any width and they need no script. To add a chart, write such a function, call it in the
page and, if needed, add a rule to page.css.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zero_trial.report.page import Child, Html, el, json_data
from zero_trial.report.report_data import Axis, Series, thinned
from zero_trial.util.text import format_count, format_number, format_value, shorten

# a larger ratio of values gets a logarithmic scale
_LOG_RATIO = 50.0


@dataclass(frozen=True)
class Tick:
    """A label at a position."""

    at: float
    label: str


@dataclass(frozen=True)
class Scale:
    """``low`` is at 0 and ``high`` at 1; ``choices`` are evenly spaced."""

    low: float = 0.0
    high: float = 1.0
    log: bool = False
    choices: tuple[str, ...] = ()

    def place(self, value: Any) -> float | None:
        """Return the position of a value, clamped to [0, 1]; None if it is not on the scale."""
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
        # short: 20k, 0.5, 1e−5
        labels = [format_count(v) if 10_000 <= abs(v) < 1e12 else format_number(v, 6) for v in values]
        return tuple(Tick(self.place(value) or 0.0, label) for value, label in zip(values, labels, strict=True))

    def _of_choice(self, name: str) -> float | None:
        if name not in self.choices:
            return None
        if len(self.choices) == 1:
            return 0.5
        # Keep away from the ends, where handles and other labels are.
        return 0.06 + 0.88 * self.choices.index(name) / (len(self.choices) - 1)


def fit(values: Iterable[float], *, log: bool | None = None, margin: float = 0.04) -> Scale:
    """Return a scale that shows all values with a small margin.

    ``log`` None: logarithmic if the values are positive and far apart.
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
    """Return the scale of a swept leaf for its values."""
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if axis.choices or len(numbers) < len(values):
        extra = sorted({format_value(value) for value in values} - set(axis.choices))
        return Scale(choices=(*axis.choices, *extra))
    return fit(numbers, log=axis.log or None)


def _linear_values(low: float, high: float, most: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _log_values(low: float, high: float, most: int) -> list[float]:
    """Return powers of ten, with 2 and 5 between them if there is room, thinned if not."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        values = [f * 10.0**e for e in range(first, last + 1) for f in factors if low <= f * 10.0**e <= high]
        if len(values) <= most + 1:
            return values if len(values) >= 2 else _linear_values(low, high, most)
    every = math.ceil(len(values) / most)
    return values[::every]


BOX = 1000  # the drawing's own coordinates
_SMOOTHING = 0.4


@dataclass(frozen=True)
class Line:
    """A series and its style: ``role`` is a class of the style sheet; ``smooth`` adds a running
    mean over the raw values; ``dots`` marks each value."""

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
        shapes: SVG paths in the drawing's own coordinates (0 to BOX), stretched to the figure.
        labels: tick labels, placed in percent of the drawing (``x_labels``, ``y_labels``).
        caption: content of the figcaption; None for no caption.
        overlay: HTML over the drawing, such as buttons.
        said: a text description for screen readers; empty hides the drawing from them.
        keys: description of the arrow keys' effect; empty removes the chart from the tab order.
        size: ``tall``, or nothing.
        data: data for the page's script.
        kind: classes of the figure in addition to ``chart``; page.js finds charts by class.
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
    """Return labels below the drawing, and the name of the axis."""
    below = [el("span", tick.label, class_="x", style=f"left:{100 * tick.at:.4g}%") for tick in ticks]
    return [*below, el("span", name, class_="x-label")]


def y_labels(ticks: Iterable[Tick]) -> list[Html]:
    """Return labels left of the drawing; a tick at 1 is at the top."""
    return [el("span", tick.label, class_="y", style=f"top:{100 * (1 - tick.at):.4g}%") for tick in ticks]


def grid_lines(ticks: Iterable[Tick]) -> list[Html]:
    """Return a line across the drawing for each tick of the y axis."""
    return [el("path", d=f"M0 {BOX * (1 - tick.at):.5g}H{BOX}", class_="grid") for tick in ticks]


def line_chart(title: str, lines: Sequence[Line]) -> Html:
    """Return a chart of lines over steps. Speeds start at 0; a chart with a smoothed line is tall,
    with a slider for the smoothing."""
    title = shorten(title)
    shown = [replace(line, series=thinned(line.series), label=shorten(line.label)) for line in lines]
    zero = [0.0] if title.endswith("per second") else []
    x = fit([step for line in shown for step in line.series.steps], log=False, margin=0.0)
    y = fit([v for line in shown for v in (*line.series.values, *line.series.low, *line.series.high)] + zero)
    knob = el("input", type="range", min=0, max=0.98, step=0.02, value=_SMOOTHING, class_="smoothing")
    smooth = any(line.smooth for line in shown)
    return frame(
        [grid_lines(y.ticks()), [_draw(line, x, y, index) for index, line in enumerate(shown)]],
        labels=[y_labels(y.ticks()), x_labels(x.ticks(6), "step")],
        caption=[
            el("h3", title, log_word(y)),
            _legend(shown) if any(line.label != title for line in shown) else None,
            el("label", "smoothing ", knob, class_="needs-script") if smooth else None,
        ],
        said=_spoken(title, shown),
        keys=f"{title}: values by arrow keys",
        size="tall" if smooth else "",
        data=_behind(shown, x, y),
    )


def log_word(scale: Scale) -> Child:
    """Return the note next to a title that the scale is logarithmic; None if it is linear."""
    return el("small", "logarithmic") if scale.log else None


def smoothed(values: Sequence[float], weight: float = _SMOOTHING) -> list[float]:
    """Return the exponential running mean without start bias (Kingma & Ba 2015, section 3)."""
    mean, share, found = 0.0, 0.0, []
    for value in values:
        mean = weight * mean + (1 - weight) * value
        share = weight * share + (1 - weight)
        found.append(mean / share)
    return found


def _draw(line: Line, x: Scale, y: Scale, index: int) -> list[Html]:
    steps, values = line.series.steps, line.series.values
    raw = placed(steps, values, x, y)
    drawn = placed(steps, smoothed(values), x, y) if line.smooth else raw
    # the area between the lowest and the highest values
    edge = (
        [*placed(steps, line.series.high, x, y), *reversed(placed(steps, line.series.low, x, y))]
        if line.series.low
        else []
    )
    parts = [el("path", d=f"{line_path(edge)}Z", class_=f"band {line.role}")] if line.series.low else []
    parts += [el("path", d=line_path(raw), class_=f"raw {line.role}")] if line.smooth else []
    parts.append(
        el("path", d=line_path(drawn), class_=f"line {line.role}{' guide' if line.dots else ''}", data_line=index)
    )
    if line.dots or len(line.series) == 1:
        parts.append(el("path", d=dots_path(raw), class_=f"dots {line.role}"))
    return parts


Place = tuple[str, str]
"""A point in the drawing's coordinates: distance from the left, distance from the top."""


def placed(steps: Sequence[float], values: Sequence[float], x: Scale, y: Scale) -> list[Place]:
    """Return the positions of the values; skip values that are not on the scales."""
    return [
        (f"{BOX * across:.5g}", f"{BOX * (1 - up):.5g}")
        for step, value in zip(steps, values, strict=True)
        if (across := x.place(step)) is not None and (up := y.place(value)) is not None
    ]


def line_path(places: Sequence[Place]) -> str:
    """Return the path data of a line through the places."""
    return "M" + "L".join(f"{a} {b}" for a, b in places) if places else "M0 0"


def dots_path(places: Sequence[Place]) -> str:
    """Return the path data of a dot at each place."""
    return "".join(f"M{a} {b}h0" for a, b in places)


def _legend(lines: Sequence[Line]) -> Html:
    """Return the name of each line with its last reported value. A smoothed series has two lines:
    the mean and the values."""
    items = []
    for line in lines:
        series = line.series
        last = series.last if series.last is not None or not len(series) else series.values[-1]
        value = [", last", el("b", format_number(last))] if last is not None else None
        kind = " dotted" if line.dots else " thin" if line.smooth else ""
        items.append(el("li", el("i", class_=f"key {line.role}{kind}"), line.label, value))
        if line.smooth:
            items.append(el("li", el("i", class_=f"key {line.role}"), "smoothed"))
    return el("ul", items, class_="legend")


def _behind(lines: Sequence[Line], x: Scale, y: Scale) -> dict[str, object]:
    """Return the data that the script needs to react to the pointer."""
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
    """Return a text description of the chart for screen readers."""
    said = [
        f"{line.label} from {format_number(line.series.values[0])} to {format_number(line.series.values[-1])} in {len(line.series)} points"
        for line in lines
        if len(line.series)
    ]
    return f"{title}: {'; '.join(said)}" if said else title
