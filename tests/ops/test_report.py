"""The report names what runs the ops, and every CUDA kernel that could not be compiled."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from zero_trial.errors import ConfigError
from zero_trial.ops import __main__, cuda_runtime, dispatch, report
from zero_trial.ops.cpu_library import backend


def test_both_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert report()["cpu"] == backend().describe() and report()["cuda"]
    assert __main__.main() == 0
    assert json.loads(capsys.readouterr().out) == report()


def test_a_refused_kernel_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = SimpleNamespace(refused={cuda_runtime.sums(): "error: bad"})
    monkeypatch.setattr(dispatch, "cuda_backend", lambda: SimpleNamespace(cuda=opened, describe=lambda: "native"))
    assert report()[cuda_runtime.sums().name] == "plain torch (error: bad)"


def test_an_impossible_choice_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> dict[str, str]:
        raise ConfigError("no such choice of kernels", where="ZERO_TRIAL_OPS", got="'fast'")

    monkeypatch.setattr(__main__, "report", refuse)
    assert __main__.main() == 2
    assert capsys.readouterr() == ("", "error: ZERO_TRIAL_OPS: no such choice of kernels: got 'fast'.\n")
