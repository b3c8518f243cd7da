"""The book of a search's trials."""

from __future__ import annotations

import pytest

from zero_trial.errors import ZeroTrialError
from zero_trial.master.search.searcher import ExitReason, SearchTrials


def test_the_life_of_trials():
    trials = SearchTrials()
    for name in "abc":
        trials.create(name)
    trials.stop("b")
    assert (trials.is_running("a"), trials.is_running("b"), trials.is_open("b")) == (True, False, True)
    trials.close("b", ExitReason.COMPLETED)
    trials.close("c", ExitReason.ERRORED)
    assert not trials.is_open("b") and trials.any_open() and trials.created == 3
    assert trials.count(ExitReason.COMPLETED, ExitReason.ERRORED) == 2
    trials.close("a", ExitReason.CANCELED)
    assert not trials.any_open()


def test_a_stranger():
    with pytest.raises(ZeroTrialError, match="request id x: not a trial of this search"):
        SearchTrials().is_open("x")


def test_invalid_in_a_row():
    trials = SearchTrials()
    for name, reason in zip("abcd", ("COMPLETED", "INVALID_HP", "", "INVALID_HP"), strict=True):
        trials.create(name)
        if reason:
            trials.close(name, ExitReason[reason])
    assert trials.invalid_in_a_row() == 2  # the one that runs says nothing yet


def test_units_done():
    trials = SearchTrials({"a": "running", "b": "stopping", "c": "errored", "d": "invalid_hp"})
    fractions = {"a": 0.5, "b": 7.0, "c": 0.1}
    assert trials.units_done(fractions, without_invalid=True) == 2.5
    assert trials.units_done({}, without_invalid=False) == 2.0
