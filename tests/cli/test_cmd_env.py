"""The report of what is available: something is there, or a reason stands in its place."""

from __future__ import annotations

import faulthandler
import io
import json
import os
import signal
import sys
from importlib import metadata

import pytest

from zero_trial.cli import cmd_env
from zero_trial.cli.cmd_env import Fact, as_text, collect, kernel_facts, versions
from zero_trial.cli.main import main
from zero_trial.errors import ConfigError
from zero_trial.ops import dispatch


def test_everything_is_there_or_says_why():
    facts = collect({"OMP_NUM_THREADS": "3"})
    assert all(bool(fact.value) != bool(fact.why) for fact in facts)
    known = {fact.name: fact for fact in facts}
    assert known["torch"].value == metadata.version("torch")
    assert known["gloo"].value == "available"
    assert known["OMP_NUM_THREADS"].value == "3"
    assert {"cpu", "cuda", "nccl", "g++", "cores", "memory", "shared memory"} <= set(known)
    assert {"cpu", "cuda"} <= {fact.name for fact in facts if fact.section == "kernels"}


def test_a_package_that_is_missing_says_what_it_is_for(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    known = {fact.name: fact for fact in versions()}
    assert "Determined cluster" in known["determined"].why and "zero_trial[determined]" in known["determined"].why


def test_text():
    facts = [Fact("a", "one", "1"), Fact("a", "three", "", "not here"), Fact("b", "two", "2")]
    assert as_text(facts) == "a\n  one    1\n  three  no: not here\nb\n  two    2"


def test_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cmd_env, "kernels", list)  # a process of its own: asked once, above
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert {"section", "name", "value", "why"} == set(facts[0])


def test_kernels_are_shown_by_device_and_backend():
    rows = {"cpu": "native (avx2)", "cuda": "plain torch (no CUDA device)", "zt_sum()": "plain torch (bad)"}
    assert kernel_facts(rows) == [
        Fact("kernels", "cpu", "native (avx2)"),
        Fact("kernels", "cuda", "", "plain torch (no CUDA device)"),
        Fact("kernels", "zt_sum()", "", "plain torch (bad)"),
    ]


def test_what_cannot_be_asked_is_said(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: str) -> int:
        raise OSError("no memory")

    def torn() -> object:
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(os, "memfd_create", broken)
    monkeypatch.setattr(dispatch, "report", torn)
    said = "the report could not be made: RuntimeError: CUDA driver initialization failed"
    assert [(fact.value, fact.why) for fact in cmd_env.kernels()] == [("", said)]
    assert [fact.why for fact in cmd_env.transport()] == ["CPU ranks exchange tensors through gloo: no memory"]


def test_a_probe_that_a_signal_ends_is_named_and_the_others_answer(monkeypatch: pytest.MonkeyPatch):
    def broken() -> None:
        faulthandler.disable()  # that of the tests
        os.kill(os.getpid(), signal.SIGILL)

    monkeypatch.setattr(cmd_env, "kernels", broken)
    facts = {(fact.section, fact.name): fact for fact in collect({})}
    assert facts["kernels", "ops"].value == ""
    assert facts["kernels", "ops"].why == "the process that looked for it died of SIGILL (Illegal instruction)"
    assert facts["backends", "gloo"].value == "available"
    assert facts["transport", "shared memory"].value and ("tools", "g++") in facts


def test_a_probe_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cmd_env, "_MOST_SECONDS", 1)
    there = Fact("b", "two", "2")
    found = cmd_env.ask(
        [cmd_env.Probe("a", "one", lambda: signal.pause() or []), cmd_env.Probe("b", "two", lambda: [there])]
    )
    assert found == [Fact("a", "one", "", "the process that looked for it did not answer in 1 s"), there]


def test_streams_that_are_not_there_or_closed(monkeypatch: pytest.MonkeyPatch):
    """Neither stops the fork from ending: it would go on in its parent's code."""
    there, closed = Fact("b", "two", "2"), io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", closed)
    parent = os.getpid()
    try:
        assert cmd_env.ask([cmd_env.Probe("b", "two", lambda: [there])]) == [there]
    finally:
        if os.getpid() != parent:
            os._exit(3)


def test_a_probe_that_fails_is_named_with_its_traceback(capfd: pytest.CaptureFixture[str]):
    def torn() -> list[Fact]:
        raise RuntimeError("not foreseen")

    there = Fact("b", "two", "2")
    found = cmd_env.ask([cmd_env.Probe("a", "one", torn), cmd_env.Probe("b", "two", lambda: [there])])
    assert found == [Fact("a", "one", "", "the process that looked for it ended with exit code 1"), there]
    assert "RuntimeError: not foreseen" in capfd.readouterr().err


def test_a_choice_of_kernels_that_cannot_be_had_is_quoted(monkeypatch: pytest.MonkeyPatch):
    def refused() -> object:
        raise ConfigError("no such choice", where="ZERO_TRIAL_OPS")

    monkeypatch.setattr(dispatch, "report", refused)
    assert cmd_env.kernels() == [Fact("kernels", "ops", "", "ZERO_TRIAL_OPS: no such choice.")]
