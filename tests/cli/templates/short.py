"""A template made into a folder and trained on one rank, with a few of its settings changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from zero_trial.cli.cmd_start import plant, template


def train_made(tmp_path: Path, name: str, steps: int, data: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """The run's summary."""
    folder = tmp_path / "made"
    plant(folder, template(name, "made"))
    experiment = yaml.safe_load((folder / "const.yaml").read_text())
    experiment["searcher"]["max_length"]["batches"] = experiment["min_validation_period"]["batches"] = steps
    experiment["data"].update(data)
    experiment["hyperparameters"]["model"].update(sizes)
    (folder / "short.yaml").write_text(yaml.safe_dump(experiment))
    command = [sys.executable, "-m", "zero_trial.run", "--run-dir", str(tmp_path / "run"), "--model-dir", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--experiment", str(folder / "short.yaml")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text())
    return summary
