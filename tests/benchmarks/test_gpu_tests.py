"""The tests that only a GPU runs: all of them are imported here, and what in them needs no device
is tried, for the first GPU run is short."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from benchmarks.processes import ROOT
from tests.engine import test_behaviour_gpu as on_gpu

MARK = "mark." + "gpu"  # not to be found in this file
MARKED = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", MARKED, ids=lambda path: path.stem)
def test_each_can_be_imported_and_marks_what_it_must(path: Path) -> None:
    """A module that is not there, or a name that has gone, shows on this machine."""
    text = path.read_text(encoding="utf-8")
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    tests = [
        node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"
    ]
    assert tests and all(callable(getattr(module, name)) for name in tests)


def test_a_rank_trains_and_answers() -> None:
    """The process that a GPU's rank is, on the CPU: what it returns, and that an error in one case
    does not hide the others."""
    cases = [(2, "bf16"), (7, "fp32")]
    (found,) = on_gpu.on_ranks(1, cases, "gloo", True, "auto")
    losses, optimizer, device = found[cases[0]]
    assert len(losses) == on_gpu.STEPS and optimizer == "FusedAdam" and device == "cpu"
    assert "ConfigError" in found[cases[1]] and "stage" in found[cases[1]]
    assert on_gpu.close(losses, losses, "bf16") and not on_gpu.close(losses, [x + 1 for x in losses], "bf16")
