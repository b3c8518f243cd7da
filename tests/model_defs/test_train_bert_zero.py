"""The tutorial script under zero_trial, on two ranks, as a person launches it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.model_defs.folder import MODEL_DEFS


def test_two_ranks_train_log_once_and_save_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    launcher = [sys.executable, "-m", "zero_trial.cli.main", "launch", "--num_gpus", "2", "train_bert_zero.py"]
    sizes = ["--sequence", "32", "--layers", "1", "--heads", "2", "--width", "16", "--batch_size", "2", "--lr", "0.01"]
    schedule = ["--num_iterations", "40", "--log_every", "20", "--stage", "3"]
    done = subprocess.run(
        [*launcher, "--checkpoint_dir", str(tmp_path / "out"), "--data", str(tmp_path / "text.txt"), *sizes, *schedule],
        cwd=MODEL_DEFS / "bert_mlm",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    log = [json.loads(line) for line in (tmp_path / "out" / "train_log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [20, 40]
    assert log[-1]["loss"] < log[0]["loss"]
    assert done.stdout.count("step 40/40") == 1
    manifest = json.loads((tmp_path / "out" / "global_step40" / "manifest.json").read_text())
    assert any(name.endswith("tokens.weight") for name in manifest["tensors"])
    assert len(list((tmp_path / "out" / "global_step40").glob("*.safetensors"))) == 2
