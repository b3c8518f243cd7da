"""Memory as pictures."""

from __future__ import annotations

import pytest

from tests.report.reading import read
from tests.report.samples import run_report
from zero_trial.report.data import Memory
from zero_trial.report.page import join
from zero_trial.report.plot import bar, memory_view


def widths(html: str) -> list[float]:
    styles = [
        e.attributes.get("style") or "" for e in read(html).of("i") if "stack" not in (e.attributes.get("class") or "")
    ]
    return [float(style.split("--w:")[1].split(";")[0]) for style in styles if "--w:" in style]


def test_plan_and_measurement_stand_on_one_scale() -> None:
    view = memory_view(run_report().memory)
    assert view is not None
    *parts, measured = widths(view)
    assert sum(parts) == pytest.approx(1.0, abs=1e-3)
    assert measured == pytest.approx(23_000_000 / 23_562_252, abs=1e-3)
    text = read(view).text
    assert "22.5 MiB" in text and "off by +2.4 %" in text and "379.4 MiB, 369.9 MiB" in text


def test_a_plan_that_came_true_and_one_without_a_measurement() -> None:
    assert "came true" in read(memory_view(Memory(planned=100, measured=100)) or "").text
    assert "off by" not in read(memory_view(Memory(planned=100)) or "").text


def test_nothing_known_is_nothing_shown() -> None:
    assert memory_view(Memory()) is None


def test_a_bar_in_a_table() -> None:
    assert "--w:0.5" in join(bar(10, 20, "10 B"))
    assert join(bar(None, 20, "–")) == "–"
