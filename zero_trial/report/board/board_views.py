"""What the board shows as markup: a view is asked for by an address and becomes sections. Pure but
for the source that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from zero_trial.errors import ConfigError
from zero_trial.report import page
from zero_trial.report.board.board_source import BoardSource, Comparison, Overview, OverviewRow
from zero_trial.report.page import Child, Html, PageSection, el, join
from zero_trial.report.plot import Line, line_chart
from zero_trial.report.report_data import RunReport, Series, format_time
from zero_trial.report.run_page import run_sections
from zero_trial.report.sweep_page import sweep_sections
from zero_trial.util.text import format_bytes, format_number, format_value, shorten

_LONGEST_NAME = 2000  # characters of a metric that can be asked for: an address has its limit


@dataclass(frozen=True)
class View:
    """What one page of the board asks for.

    Args:
        kind: ``all``, ``experiment``, ``trial`` or ``run``, which is the same without a master, or
            ``compare``.
        drawn: group and name of the metric that an experiment's curves show.
    """

    kind: str = "all"
    names: tuple[str, ...] = ()
    drawn: tuple[str, str] | None = None


def parse_view(query: Mapping[str, Sequence[str]]) -> View:
    """Return the view of a query string. Raises ConfigError for one that there is not."""
    kind = (query.get("view") or ["all"])[0]
    names = tuple(dict.fromkeys(query.get("name") or ()))
    one = kind in ("experiment", "trial", "run")
    if (not one and kind not in ("all", "compare")) or (one and len(names) != 1):
        raise ConfigError("there is no such view", where="view", got=kind[:80])
    group, _, metric = (query.get("metric") or [""])[0].partition(" ")
    return View(kind, names, (group, metric) if metric else None)


def render_view(source: BoardSource, view: View) -> list[PageSection]:
    """Return the sections of a view, its heading first; those without content are left out.

    Raises ConfigError where the source does not have what is asked for.
    """
    if view.kind == "all":
        found = _overview(source.overview())
    elif view.kind == "experiment":
        report, names = source.sweep(view.names[0], view.drawn)
        head = page.heading(report.title, report.status, report.subtitle)
        sections = sweep_sections(report, lambda name: _choosable(source.unit, name))
        found = [
            PageSection("head", "", head),
            *_with_metric_choice(sections, names, view.drawn or ("validation", report.metric)),
        ]
    elif view.kind in ("trial", "run"):
        run, above = source.run(view.names[0]), source.experiment_of(view.names[0])
        back = el("a", f"experiment {above}", href=address("experiment", above), class_="above") if above else None
        head = join([page.heading(run.title, run.status, run.subtitle), back])
        found = [PageSection("head", "", head), *run_sections(run), _LOG]
    else:
        found = _comparison(source.compare(view.names), source.unit)
    shown = [section for section in found if section.content]
    titled = [section for section in shown if section.title]
    if len(titled) > 2:
        jumps = [el("button", section.title, type="button", data_to=section.anchor) for section in titled]
        shown[0] = PageSection("head", "", [shown[0].content, el("nav", jumps, class_="jumps", aria_label="Sections")])
    return shown


def address(kind: str, name: str) -> str:
    """Return where the browser finds a view."""
    return f"#/{kind}/{quote(name, safe='')}"


def _choosable(unit: str, name: str) -> Child:
    """Return a trial's link, after the box that chooses it for a comparison."""
    return [_box(name, f"choose {unit} {name}"), el("a", name, href=address(unit, name))]


def _box(name: str, said: str) -> Html:
    return el("input", type="checkbox", class_="pick", data_name=name, aria_label=said)


def _with_metric_choice(
    sections: Sequence[PageSection], names: Sequence[tuple[str, str]], drawn: tuple[str, str]
) -> list[PageSection]:
    """Put a choice of the metric before the curves of all trials."""
    if len(names) < 2:
        return list(sections)
    options = [
        el("option", f"{shorten(name)} ({group})", value=f"{group} {name}", selected=(group, name) == drawn)
        for group, name in names
        if len(name) <= _LONGEST_NAME
    ]
    choice = el("p", el("label", "Metric ", el("select", options, class_="metric")), class_="choice")
    return [
        PageSection(one.anchor, one.title, [choice, one.content or el("p", "No values yet.", class_="soft")])
        if one.anchor == "curves"
        else one
        for one in sections
    ]


# All experiments, or all runs.


def _overview(found: Overview) -> list[PageSection]:
    noun = found.noun
    busy = sum(row.status.tone.value == "busy" for row in found.rows)
    counted = f"{len(found.rows)} {noun}{'s' if len(found.rows) != 1 else ''}"
    head = el("header", el("h1", found.title), el("p", f"{counted}, {busy} under way · {found.subtitle}"))
    if not found.rows:
        empty: Child = [
            el("h2", f"No {noun} yet"),
            el("p", "Start one, and it appears here by itself:"),
            [page.command(command) for command in found.begin],
        ]
        return [PageSection("head", "", head), PageSection("empty", "", empty)]
    return [PageSection("head", "", head), PageSection("list", "", _table(found))]


def _table(found: Overview) -> Html:
    columns = [found.noun, "state", "progress", "best" if found.noun == "experiment" else "last"]
    trials = any(row.trials for row in found.rows)
    steps = any(row.steps for row in found.rows)
    columns += [*(["trials"] if trials else []), *(["steps"] if steps else []), "started"]
    numeric = ("trials", "steps", "started")
    head = el("tr", [el("th", name, scope="col", class_="num" if name in numeric else None) for name in columns])
    rows = [_overview_row(found.noun, row, trials, steps) for row in found.rows]
    return el("table", el("thead", head), el("tbody", rows), class_="cards list", aria_label=found.title)


def _overview_row(noun: str, row: OverviewRow, trials: bool, steps: bool) -> Html:
    best = (
        [el("b", format_number(row.best)), " ", el("span", row.metric, class_="soft")] if row.best is not None else None
    )
    return el(
        "tr",
        el(
            "th",
            _box(row.name, f"choose run {row.name}") if noun == "run" else None,
            el("a", row.name, el("span", row.title, class_="title"), href=address(noun, row.name)),
            scope="row",
        ),
        el("td", page.state(row.status)),
        el("td", _progress(row.done)),
        el("td", best, data_label="best" if noun == "experiment" else "last"),
        el("td", row.trials, class_="num", data_label="trials") if trials else None,
        el("td", row.steps, class_="num", data_label="steps") if steps else None,
        el("td", format_time(row.started) if row.started is not None else "", class_="num soft"),
        data_key=row.name,
    )


def _progress(done: float | None) -> Child:
    if done is None:
        return None
    share = min(max(done, 0.0), 1.0)
    percent = f"{100 * share:.0f} %"
    return [
        el("span", el("i", style=f"--w:{share:.4g}"), class_="meter", role="img", aria_label=percent),
        el("span", percent, class_="percent"),
    ]


# The log: its lines come by themselves, as text.

_LOG = PageSection(
    "log",
    "Log",
    [
        el(
            "p",
            el("label", "Only lines with ", el("input", type="search", class_="filter", autocomplete="off")),
            el("label", el("input", type="checkbox", class_="follow", checked=True), " follow"),
            class_="choice",
        ),
        el("pre", class_="lines", tabindex=0, role="log", aria_label="Log", aria_live="off"),
        el("p", "Nothing was written yet.", class_="soft silent"),
    ],
)

# Chosen trials or runs, over each other.


def _comparison(found: Comparison, unit: str) -> list[PageSection]:
    names = list(found.reports)
    head = el(
        "header",
        el("h1", f"{len(names)} compared"),
        el("p", [[" · " if at else None, el("a", name, href=address(unit, name))] for at, name in enumerate(names)]),
    )
    return [
        PageSection("head", "", head),
        PageSection("differences", "Differences", _differences(found, unit)),
        PageSection("curves", "Curves", _overlays(found)),
    ]


def _overlays(found: Comparison) -> Child:
    """Return a chart for each metric that some run has, with a line for each run."""
    curves = {name: _curves(report) for name, report in found.reports.items()}
    metrics = dict.fromkeys(metric for own in curves.values() for metric in own)
    roles = {name: f"c{at}" for at, name in enumerate(curves)}
    charts = []
    for metric in metrics:
        lines = [Line(own[metric], roles[name], name) for name, own in curves.items() if metric in own]
        charts.append(line_chart(metric, lines, zero=metric.endswith("per second")))
    return [charts[:1], el("div", charts[1:], class_="charts overlays") if charts[1:] else None] if charts else None


def _curves(report: RunReport) -> dict[str, Series]:
    training = {f"training {report.training.name}": report.training} if report.training is not None else {}
    return {**training, **{one.name: one for one in (*report.validation, *report.progress) if len(one)}}


def _differences(found: Comparison, unit: str) -> Child:
    """Return a row for each run: state, metrics, memory and the values in which they differ."""
    metrics = dict.fromkeys(change.name for report in found.reports.values() for change in report.changes)
    names = [
        "",
        "state",
        *(f"last {shorten(metric)}" for metric in metrics),
        "planned",
        "measured",
        *(axis.name.rpartition(".")[2] for axis in found.axes),
    ]
    head = [
        el("th", page.breakable(name), scope="col", class_="num" if at > 1 else None) for at, name in enumerate(names)
    ]
    rows = []
    for at, (name, report) in enumerate(found.reports.items()):
        after = {change.name: change.after for change in report.changes}
        key = el("i", class_=f"key c{at}", aria_hidden="true")
        values = [found.points[name].get(axis.name) for axis in found.axes]
        rows.append(
            el(
                "tr",
                el("th", key, el("a", name, href=address(unit, name)), scope="row"),
                el("td", page.state(report.status)),
                [el("td", format_number(after.get(metric)), class_="num") for metric in metrics],
                [
                    el("td", format_bytes(bytes_), class_="num")
                    for bytes_ in (report.memory.planned, report.memory.measured)
                ],
                [
                    el("td", format_number(value) if isinstance(value, float) else format_value(value), class_="num")
                    for value in values
                ],
                data_key=name,
            )
        )
    table = el("table", el("thead", el("tr", head)), el("tbody", rows), class_="compared")
    return page.scrolling(table, "Differences")
