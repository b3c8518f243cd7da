"""The picture of the search's decisions."""

from __future__ import annotations

from dataclasses import replace

from tests.report.reading import read
from tests.report.samples import sweep_report
from zero_trial.report.data import BracketHistory, RungDecision, RungOutcome
from zero_trial.report.plot import brackets_view


def test_a_mark_for_each_decision_the_better_the_higher() -> None:
    report = sweep_report(8)
    page = read(brackets_view(report) or "")
    assert page.faults == []
    marks = [e for e in page.having("mark") if e.tag == "button"]
    assert len(marks) == len(report.ladders[0].decisions) == 10
    assert len(page.having("climb")) == 2
    top = {
        e.attributes["data-trial"]: float((e.attributes["style"] or "").split("top:")[1].rstrip("%")) for e in marks[:8]
    }
    order = sorted(report.ladders[0].decisions[:8], key=lambda decision: decision.metric)
    assert [trial for trial, _ in sorted(top.items(), key=lambda item: item[1])] == [d.trial for d in order]
    assert "best 1 may go on" in (marks[2].attributes["aria-label"] or "")


def test_where_more_is_better_more_is_up() -> None:
    up = read(brackets_view(replace(sweep_report(4), smaller_is_better=False)) or "")
    down = read(brackets_view(sweep_report(4)) or "")
    tops = [
        [
            float((e.attributes["style"] or "").split("top:")[1].rstrip("%"))
            for e in p.having("mark")
            if e.tag == "button"
        ]
        for p in (up, down)
    ]
    assert all(abs(a + b - 100) < 0.1 for a, b in zip(*tops, strict=True))


def test_a_metric_that_is_not_a_number_stands_at_the_worse_end() -> None:
    decisions = (
        RungDecision("1", RungOutcome.WENT_ON, 1, 0, 5, 1.0, ""),
        RungDecision("2", RungOutcome.STOPPED, 1, 0, 5, float("nan"), ""),
    )
    page = read(brackets_view(replace(sweep_report(4), ladders=(BracketHistory(1, (5, 9), decisions),))) or "")
    (stopped,) = [e for e in page.having("stopped") if e.tag == "button"]
    assert "top:100%" in (stopped.attributes["style"] or "")


def test_a_search_without_decisions_has_no_picture() -> None:
    assert brackets_view(replace(sweep_report(4), ladders=())) is None
    assert brackets_view(replace(sweep_report(4), ladders=(BracketHistory(1, (5,), ()),))) is None
