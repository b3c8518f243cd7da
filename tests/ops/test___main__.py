"""The report as a command, in text and as JSON."""

from __future__ import annotations

import json

import pytest

from zero_trial.errors import ConfigError
from zero_trial.ops import OpReport, __main__
from zero_trial.ops.__main__ import main
from zero_trial.ops.spec import SCHEMAS


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {line["name"] for line in said["ops"]} >= set(SCHEMAS)
    assert all(line["cpu"] and line["cuda"] for line in said["ops"])


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("adam_ ") and "CPU: " in lines[0] and "CUDA: " in lines[0]


def test_what_cannot_be_had_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> list[OpReport]:
        raise ConfigError("no such choice of kernels", where="ZERO_TRIAL_OPS", got="'fast'")

    monkeypatch.setattr(__main__, "report", refuse)
    assert main([]) == 2
    assert capsys.readouterr() == ("", "error: ZERO_TRIAL_OPS: no such choice of kernels: got 'fast'.\n")
