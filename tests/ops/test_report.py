"""The report names every op and what it runs as, and every CUDA kernel that could not be compiled;
as text and as JSON."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import pytest

from zero_trial.errors import ConfigError
from zero_trial.ops import OpReport, __main__, cuda_runtime, report
from zero_trial.ops.__main__ import main
from zero_trial.ops.cpu_library import backend
from zero_trial.ops.spec import SCHEMAS

module = importlib.import_module("zero_trial.ops.dispatch")


def test_every_op_with_its_backend() -> None:
    lines = report()
    assert [line.name for line in lines] == [*SCHEMAS]
    by_name = {line.name: line for line in lines}
    assert {by_name[name].cpu for name in SCHEMAS} == {backend().describe()}
    assert all(line.cuda for line in lines)


def test_what_was_refused_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, kernel = report(), cuda_runtime.sums()
    opened = SimpleNamespace(refused={kernel: "error: bad"})
    monkeypatch.setattr(module, "cuda_backend", lambda: SimpleNamespace(cuda=opened))
    assert module.as_dict(lines)["refused"] == {kernel.name: "error: bad"}
    assert module.as_text(lines).endswith(f"{kernel.name}: error: bad")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert {line["name"] for line in output["ops"]} >= set(SCHEMAS)
    assert all(line["cpu"] and line["cuda"] for line in output["ops"])


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
