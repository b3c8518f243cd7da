"""The tutorial's two scripts, plain and under zero_trial on two ranks, as a person runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from tests.model_defs.folder import MODEL_DEFS


def test_it_trains_logs_and_saves(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    sizes = [
        "--sequence",
        "32",
        "--layers",
        "1",
        "--heads",
        "2",
        "--width",
        "16",
        "--batch_size",
        "4",
        "--dropout",
        "0",
        "--lr",
        "0.01",
    ]
    schedule = ["--num_iterations", "50", "--log_every", "20", "--checkpoint_every", "25", "--local_rank", "0"]
    command = [sys.executable, "train_bert.py", "--checkpoint_dir", str(tmp_path / "out"), *sizes, *schedule]
    done = subprocess.run(
        [*command, "--data", str(tmp_path / "text.txt")],
        cwd=MODEL_DEFS / "bert_mlm",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    log = [json.loads(line) for line in (tmp_path / "out" / "train_log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [20, 40, 50]
    assert log[-1]["loss"] < 0.8 * log[0]["loss"]
    assert "step 50/50" in done.stdout
    assert "1 files, 8800 bytes" in done.stdout
    saved = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert saved == ["checkpoint.iter_25.safetensors", "checkpoint.iter_50.safetensors"]
    assert load_file(tmp_path / "out" / saved[0])["decoder.weight"].shape == (259, 16)


def test_two_ranks_train_log_once_and_save_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    launcher = [sys.executable, "-m", "zero_trial.cli.main", "launch", "--num_gpus", "2"]
    launcher += ["--run-dir", str(tmp_path / "run"), "train_bert_zero.py"]
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
