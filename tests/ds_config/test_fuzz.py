"""Configurations changed at random: a small part of what ``python -m tests.ds_config.fuzz 10000``
does."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.ds_config import fuzz


def test_some_hundred_changed_configurations():
    accepted, failures = fuzz.run(600)
    assert failures == []
    assert 30 < accepted < 500, "both answers occur"


def test_the_same_number_is_the_same_configuration():
    assert all(fuzz.one(seed)[1] == fuzz.one(seed)[1] for seed in range(20) if "nan" not in str(fuzz.one(seed)[1]))
    assert len({str(fuzz.one(seed)[1]) for seed in range(50)}) > 45


def test_it_can_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A traceback, a fault without a place and a hang are found."""

    def broken(source: Any) -> bool:
        raise KeyError(source)

    monkeypatch.setattr(fuzz, "one", lambda seed: (broken, {"seed": seed}))
    accepted, failures = fuzz.run(3, first=7)
    assert accepted == 0 and len(failures) == 3
    assert failures[0].startswith("seed 7: {'seed': 7}") and "KeyError" in failures[0]
    assert fuzz.main(["2"]) == 1 and "2 failures" in capsys.readouterr().out
    monkeypatch.setattr(fuzz, "SECONDS", -1.0)
    monkeypatch.setattr(fuzz, "one", lambda seed: (lambda source: True, {}))
    assert len(fuzz.run(1)[1]) == 1


def test_changes_change():
    rng = random.Random(3)
    for change in (fuzz.mutate, fuzz.touch):
        config: dict[str, Any] = {"a": {"b": 1}}
        for _ in range(5):
            change(config, rng)
        assert config != {"a": {"b": 1}}
    assert fuzz.damage("name: x\nmore: y\n", rng) != "name: x\nmore: y\n"
