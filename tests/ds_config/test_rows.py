"""Rows in aligned columns."""

from __future__ import annotations

from zero_trial.ds_config.config_report import Row, render_rows


def test_columns_are_aligned():
    rows = [Row("stage", 2, "ds.json:3"), Row("gradient_clipping", 1.0, "default", "was 0.0")]
    assert render_rows(rows) == "stage              2    ds.json:3\ngradient_clipping  1.0  default    was 0.0"
    assert render_rows([]) == ""
