"""What a report is made from: dotted names and swept axes."""

from __future__ import annotations

from dataclasses import replace

from tests.report.samples import sweep_report
from zero_trial.report.report_data import Axis, differing_axes, leaves, reach, swept_axes


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


def test_leaves_by_dotted_name() -> None:
    assert leaves({"a": {"b": 1, "c": [1, 2]}, "d": None}) == {"a.b": 1, "a.c": [1, 2], "d": None}


def test_reaching_a_leaf() -> None:
    assert reach({"a": {"b": 1}}, "a.b") == 1
    assert reach({"a": {"b": 1}}, "a.b.c") is None
    assert reach({}, "a") is None


def test_the_ranges_of_an_experiment() -> None:
    space = {
        "ds_config": {"optimizer": {"params": {"lr": {"type": "log", "minval": -4, "maxval": -1}}}},
        "stage": {"type": "categorical", "vals": [0, True, "x"]},
        "width": {"type": "int", "minval": 1, "maxval": 4},
        "batch": 16,
    }
    assert swept_axes(space) == (
        Axis("ds_config.optimizer.params.lr", log=True),
        Axis("stage", choices=("0", "true", "x")),
        Axis("width"),
    )


def test_what_differs_between_runs() -> None:
    points = [{"lr": 0.1 * n, "stage": n % 2, "same": 1, "name": "b" if n else "a"} for n in range(5)]
    assert differing_axes(points) == (Axis("lr"), Axis("stage", choices=("0", "1")), Axis("name", choices=("a", "b")))


def test_few_numbers_are_choices_in_their_own_order() -> None:
    assert differing_axes([{"n": 10}, {"n": 9}, {}]) == (Axis("n", choices=("9", "10", "null")),)
