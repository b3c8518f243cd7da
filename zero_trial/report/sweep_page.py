"""The page of a sweep: the best configuration as a file, all learning curves, the search's
decisions, and every trial. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from zero_trial.report import page
from zero_trial.report.data import RungDecision, SweepReport, TrialReport
from zero_trial.report.page import Child, Html, PageSection, bar, el, join
from zero_trial.report.run_page import download
from zero_trial.report.sweep_charts import brackets_view, parallel_view, trial_curves
from zero_trial.util.text import format_bytes, format_count, format_duration, format_number, format_value, shorten

Cell = Callable[[TrialReport], Html]
Name = Callable[[str], Child]
"""What stands for a trial in tables: its id, or a link to its page."""


def render_sweep(report: SweepReport) -> str:
    """Return the whole document. Every name and value is escaped: they may come from a stranger."""
    head = page.heading(report.title, report.status, report.subtitle)
    return page.document(f"{report.title} · zero-trial", head, sweep_sections(report), report.created)


def sweep_sections(report: SweepReport, name: Name = str) -> list[PageSection]:
    """Return the parts of the page; those of which nothing is known are empty."""
    report = replace(report, metric=shorten(report.metric), drawn=shorten(report.drawn))
    return [
        PageSection("summary", "", _summary(report)),
        PageSection("best", "Best configuration", _best(report)),
        PageSection("curves", "Learning curves", _curves(report)),
        PageSection("space", "Search space", _space(report)),
        PageSection("decisions", "Decisions of the search", _decisions(report, name)),
        PageSection("trials", "Trials", _trials(report, name)),
    ]


def _summary(report: SweepReport) -> Child:
    ranked = report.ranked()
    launched = [trial for trial in report.trials if not trial.pruned]
    best = ranked[0] if ranked else None
    items = [
        (
            f"best {report.metric}",
            format_number(best.best if best else None),
            f"trial {best.id}" if best else "no trial was measured",
        )
    ]
    items.append(("trials launched", str(len(launched)), _by_state(launched)))
    if report.pruned:
        items.append(("points pruned", str(sum(times for _, times in report.pruned)), "never launched"))
    trained = sum(trial.steps for trial in launched)
    items.append((f"{report.unit} trained", format_count(trained), _spared(report, launched, trained)))
    return [page.figures(items), page.facts(report.facts)]


def _by_state(trials: Sequence[TrialReport]) -> str:
    words: dict[str, int] = {}
    for trial in trials:
        words[trial.status.word] = words.get(trial.status.word, 0) + 1
    return ", ".join(f"{times} {word}" for word, times in words.items())


def _spared(report: SweepReport, launched: Sequence[TrialReport], trained: int) -> str:
    """Return how much of training every trial to its end this was."""
    longest = max((ladder.units[-1] for ladder in report.ladders), default=0)
    whole = longest * len(launched)
    return f"{100 * trained / whole:.0f} % of training every trial to its end" if whole > 0 else ""


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
        page.command(best.command),
        el("p", download(best.filename, best.text)),
        el("details", el("summary", "Show the file"), el("pre", best.text, tabindex=0)),
    ]


def _curves(report: SweepReport) -> Child:
    found = trial_curves(report)
    if found is None:
        return None
    chart, cut = found
    return [chart, el("p", f"{cut} far off the others are drawn at the edge.", class_="note") if cut else None]


def _space(report: SweepReport) -> Child:
    drawn = parallel_view(report)
    if drawn is None:
        return None
    hint = el(
        "p",
        "Drag the ends of an axis, or use the arrow keys on them, to keep only the trials within. The better ",
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
        head = el(
            "tr", el("th", "points", class_="num", scope="col"), el("th", "pruned before launch, because", scope="col")
        )
        parts.append(el("table", el("thead", head), el("tbody", rows), class_="narrow", style="margin-top:1.25rem"))
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
    head = el("tr", [el("th", name, scope="col", class_=kind) for name, kind in names])
    return el("table", el("thead", head), el("tbody", rows), class_="cards", aria_label="Decisions")


def _trials(report: SweepReport, name: Name) -> Child:
    if not report.trials:
        return None
    shown = [trial for trial in report.trials if not trial.pruned] or list(report.trials)
    ranked = [trial.id for trial in report.ranked()]
    order = sorted(shown, key=lambda trial: ranked.index(trial.id) if trial.id in ranked else len(ranked))
    columns = _columns(report, shown, name)
    head = el(
        "tr", [el("th", el("button", title, type="button"), scope="col", class_=kind) for title, kind, _ in columns]
    )
    rows = []
    for trial in order:
        cells = [cell(trial) for _, _, cell in columns]
        winner = ranked[:1] == [trial.id]
        said = f"trial {trial.id}: {report.metric} {format_number(trial.best)}, {trial.status.word}"
        rows.append(
            el("tr", cells, data_trial=trial.id, data_said=said, tabindex=0, class_="winner" if winner else None)
        )
    table = el("table", el("thead", head), el("tbody", rows), class_="sortable")
    return page.scrolling(table, "Trials")


def _columns(report: SweepReport, trials: Sequence[TrialReport], name: Name) -> list[tuple[str, str | None, Cell]]:
    """Return name, class and content of each column that some trial fills."""
    fastest = max((trial.throughput or 0.0 for trial in trials), default=0.0)
    widest = float(max((max(trial.memory.planned or 0, trial.memory.measured or 0) for trial in trials), default=0))
    found: list[tuple[str, str | None, Cell]] = [
        ("trial", None, lambda t: _cell(name(t.id), t.id)),
        (report.metric, "num", lambda t: _cell(format_number(t.best), t.best, "num")),
        (
            "state",
            None,
            lambda t: _cell(
                join([page.state(t.status), el("div", t.why, class_="note") if t.why else None]), t.status.word
            ),
        ),
        (report.unit, "num", lambda t: _cell(str(t.steps), t.steps, "num")),
    ]
    for axis in report.axes:
        found.append((axis.name.rpartition(".")[2], "num", _value_cell(axis.name)))
    if any(trial.throughput for trial in trials):
        found.append(
            (
                report.throughput_unit,
                "num",
                lambda t: _cell(
                    bar(t.throughput, fastest, format_count(t.throughput) if t.throughput else "–"), t.throughput, "num"
                ),
            )
        )
    if any(trial.memory.planned for trial in trials):
        found.append(
            (
                "memory planned",
                "num",
                lambda t: _cell(bar(t.memory.planned, widest, format_bytes(t.memory.planned)), t.memory.planned, "num"),
            )
        )
    if any(trial.memory.measured for trial in trials):
        found.append(
            (
                "measured",
                "num",
                lambda t: _cell(
                    bar(t.memory.measured, widest, format_bytes(t.memory.measured)), t.memory.measured, "num"
                ),
            )
        )
    if any(trial.seconds for trial in trials):
        found.append(("time", "num", lambda t: _cell(format_duration(t.seconds), t.seconds, "num")))
    if any(trial.restarts for trial in trials):
        found.append(("restarts", "num", lambda t: _cell(str(t.restarts), t.restarts, "num")))
    return found


def _value_cell(name: str) -> Cell:
    return lambda trial: _cell(_short(trial.point[name]) if name in trial.point else "–", trial.point.get(name), "num")


def _short(value: object) -> str:
    """Return a float in four digits, which is enough to compare; the file holds all of them."""
    return format_number(value) if isinstance(value, float) else format_value(value)


def _cell(content: Child, key: object, kind: str | None = None) -> Html:
    return el("td", content, class_=kind, data_sort="" if key is None else format_value(key))
