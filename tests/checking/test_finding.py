"""Findings, and the place that a message names."""

from __future__ import annotations

import pytest

from zero_trial.checking.finding import Area, Finding, Place, Severity, findings_of, remark, split_where
from zero_trial.errors import ConfigError


def test_a_finding_for_programs():
    error = ConfigError("wrong value", where="const.yaml:14 data.x", got=3, expected="a word", fix="Write a.")
    finding = Finding(Area.DS_CONFIG, Severity.FAULT, error, (3, 7), "at 2 of 9 points")
    assert finding.text == "const.yaml:14 data.x: wrong value: got 3, expected a word. Write a. (at 2 of 9 points)"
    assert finding.as_json() == {
        "severity": "error",
        "area": "ds_config",
        "file": "const.yaml",
        "line": 14,
        "key": "data.x",
        "what": "wrong value",
        "got": "3",
        "expected": "a word",
        "fix": "Write a.",
        "points": [3, 7],
        "text": finding.text,
    }


@pytest.mark.parametrize(
    ("where", "place"),
    [
        (None, Place()),
        ("const.yaml:14 searcher.metric", Place("const.yaml", 14, "searcher.metric")),
        ("const.yaml searcher.metric", Place("const.yaml", None, "searcher.metric")),
        ("a/model_def.py:3", Place("a/model_def.py", 3)),
        ("ds_config.json", Place("ds_config.json")),
        ("hyperparameters.lr", Place(key="hyperparameters.lr")),
        ("--slots", Place(key="--slots")),
        ("MODEL_DIR /a/b", Place(key="MODEL_DIR /a/b")),
    ],
)
def test_a_place_taken_apart(where: str | None, place: Place):
    assert split_where(where) == place


def test_an_error_of_many_faults_is_many_findings():
    many = ConfigError.many([ConfigError("a", where="x"), ConfigError("b")])
    assert [finding.text for finding in findings_of(Area.EXPERIMENT, many)] == ["x: a.", "b."]
    assert [finding.severity for finding in findings_of(Area.TRIAL, ConfigError("c"))] == [Severity.FAULT]
    assert remark(Area.SLOTS, Severity.NOTE, "so", where="here").text == "here: so."
