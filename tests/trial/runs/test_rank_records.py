"""What ranks leave behind: written whole, read back, the first error kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zero_trial.trial.runs.rank_records import ErrorRecord, join_memory, read_errors, write_error


def test_the_first_error_of_a_rank_stays(tmp_path: Path):
    first = ErrorRecord(1, "DataError", "the loader yields nothing", 2, 5.0, step=3)
    write_error(tmp_path, first)
    write_error(tmp_path, ErrorRecord(1, "RuntimeError", "later", 1, 6.0))
    assert read_errors(tmp_path) == [first]


def test_what_a_trial_writes_is_understood(tmp_path: Path):
    """A record may hold fewer fields."""
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "rank-0.json").write_text(
        json.dumps({"rank": 0, "message": "m", "expected": True, "step": None})
    )
    assert read_errors(tmp_path) == [ErrorRecord(0, "Error", "m", 1, 0.0, expected=True)]


def test_half_written_files_are_not_seen(tmp_path: Path):
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / ".rank-0.json.123").write_text('{"ra')
    assert read_errors(tmp_path) == []


PEAK, STATES, ERROR = "memory_measured_peak_bytes", "memory_measured_states_bytes", "memory_plan_error_percent"


@pytest.mark.parametrize(
    ("figures", "earlier", "joined"),
    [
        ({"step": 3}, [], {"step": 3}),
        ({PEAK: 10}, [{PEAK: 30}, {PEAK: 20}], {PEAK: 30}),
        ({PEAK: 40, STATES: 1}, [{PEAK: 30, STATES: 2}], {PEAK: 40, STATES: 2}),
        ({}, [{PEAK: 30}], {PEAK: 30}),
        ({PEAK: 10, "memory_planned_bytes": 18, ERROR: 80.0}, [{PEAK: 20}], {PEAK: 20, "memory_planned_bytes": 18, ERROR: -10.0}),
        ({"peak_memory_bytes": [5, 5]}, [{"peak_memory_bytes": [4, 9, 1]}], {"peak_memory_bytes": [5, 9, 1]}),
        ({PEAK: 10}, [{PEAK: "NaN"}, {}], {PEAK: 10}),
    ],
)  # fmt: skip
def test_memory_is_that_of_all_parts_of_a_run(figures: dict[str, Any], earlier: list[Any], joined: dict[str, Any]):
    assert join_memory(figures, earlier) == joined
