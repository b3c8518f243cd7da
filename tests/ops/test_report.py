"""The report names every op and what it runs as, and every CUDA kernel that could not be had."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import pytest

from zero_trial.ops import cuda_runtime, report
from zero_trial.ops.cpu_library import backend
from zero_trial.ops.spec import SCHEMAS

module = importlib.import_module("zero_trial.ops.dispatch")


def test_every_op_with_its_backend() -> None:
    lines = report()
    assert [line.name for line in lines] == [*SCHEMAS]
    by_name = {line.name: line for line in lines}
    plain = {"step_control_", "copy_many_"}
    assert {by_name[name].cpu for name in SCHEMAS if name not in plain} == {backend().describe()}
    assert {by_name[name].cpu for name in plain} == {"torch's own kernels"}
    assert by_name["adam_many_"].cpu == by_name["adam_"].cpu
    assert all(line.cuda for line in lines)


def test_what_was_refused_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, kernel = report(), cuda_runtime.sums()
    opened = SimpleNamespace(refused={kernel: "error: bad"})
    monkeypatch.setattr(module, "cuda_backend", lambda: SimpleNamespace(cuda=opened))
    assert json.loads(module.as_json(lines))["refused"] == {kernel.name: "error: bad"}
    assert module.as_text(lines).endswith(f"{kernel.name}: error: bad")
