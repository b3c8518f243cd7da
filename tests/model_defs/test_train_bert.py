"""The tutorial's two scripts, plain and under zero_trial on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.model_defs.folder import MODEL_DEFS, import_from

SIZES = "--sequence 32 --layers 1 --heads 2 --width 16 --lr 0.01"


def test_it_trains_logs_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    sizes = [*SIZES.split(), "--batch_size", "4", "--dropout", "0"]
    schedule = ["--num_iterations", "30", "--log_every", "12", "--checkpoint_every", "15", "--local_rank", "0"]
    places = ["--checkpoint_dir", str(tmp_path / "out"), "--data", str(tmp_path / "text.txt")]
    monkeypatch.setattr(sys, "argv", ["train_bert.py", *places, *sizes, *schedule])
    import_from("bert_mlm", "train_bert").main()
    log = [json.loads(line) for line in (tmp_path / "out" / "train_log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [12, 24, 30]
    assert log[-1]["loss"] < 0.9 * log[0]["loss"]
    said = capsys.readouterr().out
    assert "step 30/30" in said and "1 files, 8800 bytes" in said
    saved = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert saved == ["checkpoint.iter_15.safetensors", "checkpoint.iter_30.safetensors"]
    assert load_file(tmp_path / "out" / saved[0])["decoder.weight"].shape == (259, 16)


def test_two_ranks_train_log_once_and_save_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    launcher = [sys.executable, "-m", "zero_trial.cli.main", "launch", "--num_gpus", "2"]
    launcher += ["--run-dir", str(tmp_path / "run"), "train_bert_zero.py"]
    sizes = [*SIZES.split(), "--batch_size", "2"]
    schedule = ["--num_iterations", "20", "--log_every", "10", "--stage", "3"]
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
    assert [entry["step"] for entry in log] == [10, 20]
    assert log[-1]["loss"] < log[0]["loss"]
    assert done.stdout.count("step 20/20") == 1
    manifest = json.loads((tmp_path / "out" / "global_step20" / "manifest.json").read_text())
    assert any(name.endswith("tokens.weight") for name in manifest["tensors"])
    assert len(list((tmp_path / "out" / "global_step20").glob("*.safetensors"))) == 2
