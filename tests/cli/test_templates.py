"""The templates, made into folders and trained on one rank with a few of their settings changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from zero_trial.cli.cmd_start import plant, template
from zero_trial.cli.templates.text.model_def import BYTES, LanguageModel


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


def test_an_image_network_learns(tmp_path: Path) -> None:
    summary = train_made(tmp_path, "image", 30, {"characters": "oxl", "variants": 4}, {"width": 8})
    assert summary["accuracy"] > 0.6
    assert (summary["step"], summary["data"]["classes"]) == (30, 3)


SENTENCES = "the quick brown fox jumps over the lazy dog and runs away from {} hounds\n"


def test_a_language_model_learns(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(12):
        (text / f"{number}.txt").write_text(SENTENCES.format(number) * 40)
    summary = train_made(tmp_path, "text", 40, {"source": str(text)}, {"sequence": 32, "layers": 1, "width": 32})
    assert summary["val_bits_per_byte"] < summary["unigram_bits_per_byte"] < 5.0
    assert (summary["step"], summary["data"]["files"]) == (40, 12)


def test_no_byte_sees_what_comes_after_it() -> None:
    torch.manual_seed(0)
    model = LanguageModel(sequence=8, layers=2, heads=2, width=16)
    inputs = torch.randint(BYTES, (1, 8))
    other = inputs.clone()
    other[0, 5:] += 1
    losses = [model(x % BYTES, torch.where(torch.arange(8) < 5, inputs, -100)) for x in (inputs, other)]
    assert torch.equal(losses[0], losses[1])
