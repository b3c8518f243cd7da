"""Line charts as SVG whose labels are HTML, so that they fit any width with letters of one size and need no script to be seen.

The drawing is stretched to its box (strokes are not), labels stand at percentages of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from zero_trial.report.data import Series
from zero_trial.report.markup import Html, el, json_data
from zero_trial.report.numbers import number
from zero_trial.report.scale import Scale, fit

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
    return number(line.series.values[-1]) if len(line.series) else ""


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
        f"{line.label} from {number(line.series.values[0])} to {number(line.series.values[-1])} in {len(line.series)} points"
        for line in lines
        if len(line.series)
    ]
    return f"{title}: {'; '.join(said)}" if said else title
