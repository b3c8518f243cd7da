"""Findings, and the place that a message names."""

from __future__ import annotations

import pytest

from zero_trial.errors import ConfigError
from zero_trial.planning.issues import Area, CheckIssue, Severity, issues_of, note, split_where


def test_an_issue_for_programs():
    error = ConfigError("wrong value", where="const.yaml:14 data.x", got=3, expected="a word", fix="Write a.")
    issue = CheckIssue(Area.DS_CONFIG, Severity.FAULT, error, (3, 7), "at 2 of 9 points")
    assert issue.text == "const.yaml:14 data.x: wrong value: got 3, expected a word. Write a. (at 2 of 9 points)"
    assert issue.as_json() == {
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
        "text": issue.text,
    }


@pytest.mark.parametrize(
    ("where", "place"),
    [
        (None, (None, None, None)),
        ("const.yaml:14 searcher.metric", ("const.yaml", 14, "searcher.metric")),
        ("const.yaml searcher.metric", ("const.yaml", None, "searcher.metric")),
        ("a/model_def.py:3", ("a/model_def.py", 3, None)),
        ("ds_config.json", ("ds_config.json", None, None)),
        ("hyperparameters.lr", (None, None, "hyperparameters.lr")),
        ("--slots", (None, None, "--slots")),
        ("MODEL_DIR /a/b", (None, None, "MODEL_DIR /a/b")),
    ],
)
def test_a_place_taken_apart(where: str | None, place: tuple[str | None, int | None, str | None]):
    assert split_where(where) == place


def test_an_error_of_many_faults_is_many_issues():
    many = ConfigError.many([ConfigError("a", where="x"), ConfigError("b")])
    assert [issue.text for issue in issues_of(Area.EXPERIMENT, many)] == ["x: a.", "b."]
    assert [issue.severity for issue in issues_of(Area.TRIAL, ConfigError("c"))] == [Severity.FAULT]
    assert note(Area.SLOTS, Severity.NOTE, "so", where="here").text == "here: so."
