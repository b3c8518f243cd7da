"""Parallel coordinates: one axis for each swept value and one for the metric, one line for each trial, ranges to choose on every axis."""

from __future__ import annotations

from collections.abc import Sequence

from zero_trial.report.chart import BOX
from zero_trial.report.data import Axis, SweepReport, TrialReport
from zero_trial.report.markup import Html, el, json_data
from zero_trial.report.scale import Scale, Tick, fit, fit_axis

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
    places = {trial.id: _places(trial, report, scales, goal) for trial in ranked}
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


def _places(trial: TrialReport, report: SweepReport, scales: Sequence[Scale], goal: Scale) -> list[float | None]:
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
