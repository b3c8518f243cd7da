"""The search's decisions as a picture: brackets as ladders, each trial a mark at every rung that it reached."""

from __future__ import annotations

import math
from collections.abc import Mapping

from zero_trial.report.chart import BOX
from zero_trial.report.data import Decision, Ladder, SweepReport, Verdict
from zero_trial.report.markup import Html, el, join
from zero_trial.report.numbers import number
from zero_trial.report.scale import Scale, fit

_CLASS = {Verdict.WENT_ON: "", Verdict.STOPPED: "stopped", Verdict.FINISHED: "finished"}


def ladders_view(report: SweepReport) -> Html | None:
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


def _ladder(ladder: Ladder, report: SweepReport) -> Html:
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


def _top(decision: Decision, scale: Scale, report: SweepReport) -> float:
    at = scale.place(decision.metric)
    return 1.0 if at is None else _down(at, report)


def _climbs(ladder: Ladder, scale: Scale, across: Mapping[int, float], report: SweepReport) -> list[str]:
    """The way of each trial from rung to rung."""
    ways: dict[str, list[Decision]] = {}
    for decision in ladder.decisions:
        ways.setdefault(decision.trial, []).append(decision)
    return [
        "M" + "L".join(f"{BOX * across[step.rung]:.5g} {BOX * _top(step, scale, report):.5g}" for step in way)
        for way in ways.values()
        if len(way) > 1
    ]


def _mark(decision: Decision, across: Mapping[int, float], scale: Scale, report: SweepReport) -> Html:
    said = f"trial {decision.trial} after {decision.units} {report.unit}: {number(decision.metric)}, {decision.verdict.value}. {decision.why}"
    return el(
        "button",
        type="button",
        title=said,
        aria_label=said,
        class_=f"mark {_CLASS[decision.verdict]}".strip(),
        data_trial=decision.trial,
        style=f"left:{100 * across[decision.rung]:.4g}%;top:{100 * _top(decision, scale, report):.4g}%",
    )
