"""Every benchmark runs as its docstring says: the command with the comment "quick", in a copy of
the benchmarks."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = re.compile(r"^ *python (benchmarks/.*?) +# quick\b", re.MULTILINE)
SKIPPED = re.compile(
    r"no cuobjdump|no NVRTC|no native kernels|(determined|slurmctld|ray) is not installed|no control group"
)


def benchmarks() -> list[Path]:
    """Those that a person starts: with a main block, and not with a process of another one."""
    found = [path for folder in ("benchmarks", "benchmarks/ops") for path in sorted((ROOT / folder).glob("*.py"))]
    own = {"worker.py", "pipeline_worker.py", "faults_trial.py", "examples_worker.py"}
    return [path for path in found if '__name__ == "__main__"' in path.read_text() and path.name not in own]


def quick_commands(path: Path) -> list[str]:
    return QUICK.findall(ast.get_docstring(ast.parse(path.read_text()), clean=False) or "")


@pytest.mark.parametrize("path", benchmarks(), ids=lambda path: path.stem)
def test_every_benchmark_says_how_it_is_tried_quickly(path: Path) -> None:
    assert len(quick_commands(path)) == 1
    assert quick_commands(path)[0].startswith(str(path.relative_to(ROOT)))


@pytest.mark.extended
@pytest.mark.parametrize("path", benchmarks(), ids=lambda path: path.stem)
def test_the_quick_command_runs(path: Path, tmp_path: Path) -> None:
    for folder in ("benchmarks", "experiments", "model_defs", "tests"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "runs", "corpus")
        )
    for name in ("pyproject.toml", "README.md", "docs", "zero_trial"):
        (tmp_path / name).symlink_to(ROOT / name)
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTEST_CURRENT_TEST")}
    done = subprocess.run(
        [sys.executable, *shlex.split(quick_commands(path)[0])],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=540,
    )
    if done.returncode and SKIPPED.search(done.stderr):
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
