"""Parallel coordinates: an axis for each swept leaf and the metric, a line for each trial."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.report.reading import read
from tests.report.samples import sweep_report
from zero_trial.report.plot import parallel_view


def test_axes_lines_and_the_best_trial_on_top() -> None:
    report = sweep_report(8)
    page = read(parallel_view(report) or "")
    assert page.faults == []
    assert len(page.having("axis")) == 4
    lines = page.having("line")
    assert len(lines) == 8
    best = report.ranked()[0].id
    assert (lines[-1].attributes["data-trial"], lines[-1].attributes["class"]) == (best, "line best")
    data = json.loads(page.of("script")[0].text)
    heights = {trial: places[-1] for trial, places in data["trials"].items()}
    assert max(heights, key=heights.__getitem__) == best
    assert len(page.having("handle")) == 8


def test_a_missing_value_has_no_place() -> None:
    report = sweep_report(4)
    bare = replace(report.trials[0], point={})
    page = read(parallel_view(replace(report, trials=(bare, *report.trials[1:]))) or "")
    data = json.loads(page.of("script")[0].text)
    assert data["trials"][bare.id][:3] == [None, None, None]


def test_one_trial_or_nothing_swept_is_no_picture() -> None:
    assert parallel_view(sweep_report(1)) is None
    assert parallel_view(replace(sweep_report(4), axes=())) is None
