"""Tests for experiments/quickstart/run.py: what `make run` does, on a smaller experiment."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "experiments" / "quickstart" / "run.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_run", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("[2026-11-21T05:30:01.642000Z] 6a1f02c9 [rank=0] || eval    step 0\n", "05:30:01  eval    step 0\n"),
        (
            "[2026-11-21T05:30:01.642000Z]          || INFO: run 1 ended with exit code 0\n",
            "05:30:01  INFO: run 1 ended with exit code 0\n",
        ),
        ("[2026-11-21T05:30:01.642000Z] 6a1f02c9 [rank=1] || Traceback\n", "05:30:01  [rank=1] Traceback\n"),
        ("Created experiment 3\n", "Created experiment 3\n"),
    ],
)
def test_log_lines_lose_date_and_rank(script: ModuleType, line: str, shown: str) -> None:
    assert script._plain(line) == shown


@pytest.mark.parametrize(
    ("line", "chatter"),
    [
        ("[2026-11-21T05:25:39.118000Z] 6a1f02c9 || INFO: [20738] determined: rocm-smi not found\n", True),
        ("Preparing files to send to master... 8.9KB and 4 files\n", True),
        ("\n", True),
        ("[2026-11-21T05:30:01.642000Z] 6a1f02c9 [rank=0] || ConfigError: train_batch_size 6\n", False),
        ("Failed to create experiment: invalid experiment configuration\n", False),
    ],
)
def test_the_harness_own_lines_are_left_out(script: ModuleType, line: str, chatter: bool) -> None:
    assert script._is_chatter(line) is chatter


def test_it_runs_to_the_end_and_leaves_nothing_running(tmp_path: Path) -> None:
    text = (SCRIPT.parent / "const.yaml").read_text(encoding="utf-8")
    for before, after in [("slots_per_trial: 2", "slots_per_trial: 1"), ("batches: 700", "batches: 4"), ("350", "2")]:
        assert before in text
        text = text.replace(before, after)
    text = text.replace("width: 128", "width: 16").replace("validation_windows: 512", "validation_windows: 8")
    config = tmp_path / "const.yaml"
    config.write_text(text.replace("source: stdlib", "source: stdlib\n  max_bytes: 200000"), encoding="utf-8")
    root = tmp_path / "master"
    done = subprocess.run(
        [sys.executable, SCRIPT, config, ROOT / "model_defs" / "gpt", "--root", root],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "experiment 1 completed" in done.stdout
    assert "step 4/4" in done.stdout
    following = done.stdout.partition("\nnext:\n")[2]
    assert ("/activate " in following) == (str(Path(sys.executable).parent) not in os.environ["PATH"].split(os.pathsep))
    assert (ROOT / "docs" / "guide" / "first_sweep.md").is_file() and "docs/guide/first_sweep.md" in following
    status = subprocess.run(
        [Path(sys.executable).parent / "zero-trial", "master", "status", "--root", root],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "the master is down" in status.stdout
