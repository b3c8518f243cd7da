"""Configurations changed at random: a small part of what ``python -m tests.ds_config.fuzz 10000``
does."""

from __future__ import annotations

from tests.ds_config import fuzz


def test_some_hundred_changed_configurations():
    accepted, failures = fuzz.run(600)
    assert failures == []
    assert 30 < accepted < 500, "both answers occur"
