"""The report names every op and what it runs as."""

from __future__ import annotations

from zero_trial.ops import report
from zero_trial.ops._native import backend
from zero_trial.ops.library import SCHEMAS


def test_every_op_with_its_backend() -> None:
    lines = report()
    assert [line.name for line in lines] == list(SCHEMAS)
    assert {line.cpu for line in lines} == {backend().describe()}
    assert all(line.cuda for line in lines)
