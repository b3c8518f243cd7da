"""The page of one run: curves, memory, configuration, checkpoints, its command. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from zero_trial.report import page
from zero_trial.report.page import Child, Html, PageSection, el, join, memory_view
from zero_trial.report.plot import Line, line_chart
from zero_trial.report.report_data import CheckpointRow, RunReport, Setting
from zero_trial.util.text import format_bytes, format_number, format_value


def render_run(report: RunReport) -> str:
    """Return the whole document. Escapes every name and value, because they are untrusted."""
    head = page.heading(report.title, report.status, report.subtitle)
    return page.document(f"{report.title} · zero-trial", head, run_sections(report), report.created)


def run_sections(report: RunReport) -> list[PageSection]:
    """Return the sections of the page; sections without data are empty."""
    return [
        PageSection("summary", "", _summary(report)),
        PageSection("curves", "Curves", _curves(report)),
        PageSection("memory", "Memory", memory_view(report.memory)),
        PageSection("configuration", "Configuration", _configuration(report)),
        PageSection("checkpoints", "Checkpoints", _checkpoints(report)),
        PageSection("repeat", "Repeat", _repeat(report)),
    ]


def _summary(report: RunReport) -> Child:
    fault = el("p", report.message, class_="fault") if report.message else None
    shown = []
    for change in report.changes:
        said = [f"first {format_number(change.before)}"] if change.before is not None else []
        said += [f"best {format_number(change.best)}"] if change.best is not None else []
        said += [f"{name} {format_number(value)}" for name, value in change.baselines]
        shown.append((f"last {change.name}", format_number(change.after), " · ".join(said)))
    return [
        fault,
        [el("p", f"Not on this page: {part}.", class_="fault") for part in report.left_out],
        page.figures([*shown, *((name, value, "") for name, value in report.facts[:3])]),
        page.facts(report.facts[3:]),
    ]


def _curves(report: RunReport) -> Child:
    validation = {series.name: series for series in report.validation}
    parts: list[Child] = []
    training = report.training
    if training is not None:
        main = [Line(training, "train", f"training {training.name}", smooth=True)]
        # The validation metric of the same quantity is drawn with the training loss.
        own = (f"{prefix}{training.name}" for prefix in ("", "val_", "validation_"))
        same = next((name for name in own if name in validation), None)
        if same is not None:
            main.append(Line(validation.pop(same), "validation", same, dots=True))
        parts.append(line_chart(training.name, main))
    small = [line_chart(one.name, [Line(one, "validation", one.name, dots=True)]) for one in validation.values()]
    small += [line_chart(one.name, [Line(one, "other", one.name)]) for one in report.progress]
    if small:
        parts.append(el("div", small, class_="charts"))
    return parts


def _configuration(report: RunReport) -> Child:
    given = [setting for setting in report.settings if setting.given]
    defaults = [setting for setting in report.settings if not setting.given]
    parts: list[Child] = [el("p", warning, class_="note") for warning in report.warnings]
    if given:
        parts.append(_settings(given, "Values that were set or filled in"))
    if report.batch:
        parts.append(_folded("How the batch sizes were reconciled", _settings(report.batch, "Batch sizes")))
    if defaults:
        parts.append(_folded(f"{len(defaults)} values by default", _settings(defaults, "Defaults")))
    return parts


def _settings(settings: Sequence[Setting], label: str) -> Html:
    remarks = any(setting.remark for setting in settings)
    rows = [
        el(
            "tr",
            el("th", el("code", page.breakable(setting.key)), scope="row"),
            el("td", el("code", format_value(setting.value)), class_="key-value"),
            el("td", setting.source, data_label="from"),
            el("td", setting.remark, class_="soft") if remarks else None,
        )
        for setting in settings
    ]
    columns = ("key", "value", "comes from", *(("remark",) if remarks else ()))
    return page.table([(name, None) for name in columns], rows, class_="cards", aria_label=label)


def _folded(summary: str, content: Child) -> Html:
    return el("details", el("summary", summary), content)


def _checkpoints(report: RunReport) -> Child:
    """Return the existing checkpoints; removed ones are collapsed if they are many."""
    kept = [saved for saved in report.checkpoints if saved.kept]
    gone = [saved for saved in report.checkpoints if not saved.kept]
    if not gone or len(report.checkpoints) <= 6:
        return _saved(report.checkpoints) if report.checkpoints else None
    return [_saved(kept) if kept else None, _folded(f"{len(gone)} were removed", _saved(gone))]


def _saved(checkpoints: Sequence[CheckpointRow]) -> Html:
    rows = [
        el(
            "tr",
            el("th", el("code", saved.name), scope="row"),
            el("td", f"{saved.step}", class_="num", data_label="step"),
            el("td", format_bytes(saved.bytes), class_="num", data_label="size"),
            el("td", "kept" if saved.kept else "removed: a better or newer checkpoint was kept", class_="soft"),
            data_key=saved.name,
        )
        for saved in checkpoints
    ]
    names = (("checkpoint", None), ("step", "num"), ("size", "num"), ("now", None))
    return page.table(names, rows, class_="cards narrow")


def _repeat(report: RunReport) -> Child:
    if not report.repeat:
        return None
    parts: list[Child] = [page.command(report.repeat)]
    if report.lock:
        parts.append(download("config.lock.yaml", report.lock))
        parts.append(_folded("Show the file", el("pre", report.lock, tabindex=0)))
    return parts


def download(name: str, text: str) -> Html:
    """Return a link that saves ``text`` as a file."""
    return el(
        "a", f"Save {name}", href=join(f"data:text/plain;charset=utf-8,{quote(text)}"), download=name, class_="button"
    )
