"""The records that pages are drawn from."""

from __future__ import annotations

from dataclasses import replace

from tests.report.samples import sweep_report


def test_trials_are_ranked_by_the_searchers_own_direction() -> None:
    report = sweep_report()
    values = [trial.best for trial in report.ranked()]
    assert None not in values
    assert values == sorted(values)  # type: ignore[type-var]
    larger = replace(report, smaller_is_better=False).ranked()
    assert [trial.best for trial in larger] == values[::-1]


def test_trials_without_a_metric_have_no_rank() -> None:
    assert len(sweep_report(8).ranked()) == 8
    assert len(sweep_report(8).trials) == 10
