"""The report of what is available: something is there, or a reason stands in its place."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

from zero_trial.cli.env import Fact, as_text, collect, versions
from zero_trial.cli.main import main


def test_everything_is_there_or_says_why():
    facts = collect({"OMP_NUM_THREADS": "3"})
    assert all(bool(fact.value) != bool(fact.why) for fact in facts)
    known = {fact.name: fact for fact in facts}
    assert known["torch"].value == metadata.version("torch")
    assert known["gloo"].value == "available"
    assert known["OMP_NUM_THREADS"].value == "3"
    assert {"cpu", "cuda", "nccl", "g++", "cores", "memory"} <= set(known)


def test_a_package_that_is_missing_says_what_it_is_for(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    known = {fact.name: fact for fact in versions()}
    assert "Determined cluster" in known["determined"].why and "zero_trial[determined]" in known["determined"].why


def test_text():
    facts = [Fact("a", "one", "1"), Fact("a", "three", "", "not here"), Fact("b", "two", "2")]
    assert as_text(facts) == "a\n  one    1\n  three  no: not here\nb\n  two    2"


def test_json(capsys: pytest.CaptureFixture[str]):
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert {"section", "name", "value", "why"} == set(facts[0])
