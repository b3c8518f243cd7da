"""Trials of the models, from an experiment's YAML to summary.json: on one rank here, and as
pipelines of two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model_defs.folder import BARE_NAMES, MODEL_DEFS
from zero_trial.run import main

SENTENCES = "the quick brown fox jumps over the lazy dog and runs away from {} hounds\n"
DS_CONFIG = {
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 2},
}


def experiment(folder: Path, trial: str, steps: int) -> Path:
    text = folder / "text"
    text.mkdir()
    for number in range(12):
        (text / f"{number}.txt").write_text(SENTENCES.format(number) * 40)
    (folder / "ds_config.json").write_text(json.dumps(DS_CONFIG))
    sizes = {"sequence": 32, "layers": 1, "heads": 2, "width": 32}
    path = folder / "const.yaml"
    path.write_text(
        json.dumps(  # JSON is YAML
            {
                "name": "small",
                "entrypoint": trial,
                "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": steps}},
                "perform_initial_validation": True,
                "reproducibility": {"experiment_seed": 3},
                "data": {"ds_config": "ds_config.json", "source": str(text), "validation_windows": 16},
                "hyperparameters": {"global_batch_size": 8, "model": sizes},
            }
        )
    )
    return path


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run imports ``model_def`` of a model's folder; nothing of it stays."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in BARE_NAMES:
        sys.modules.pop(name, None)


def summary_of(folder: Path, model: str, trial: str, steps: int) -> dict[str, Any]:
    command = [f"model_def:{trial}", "--run-dir", str(folder / "run"), "--model-dir", str(MODEL_DEFS / model)]
    assert main([*command, "--experiment", str(experiment(folder, trial, steps))]) == 0
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return summary


@pytest.mark.usefixtures("in_this_process")
def test_gpt_beats_the_unigram_baseline_of_its_own_text(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, "gpt", "GPTTrial", steps=60)
    assert summary["initial_validation"]["val_bits_per_byte"] == pytest.approx(8.0, abs=0.3)
    assert summary["val_bits_per_byte"] < summary["unigram_bits_per_byte"] < 5.0
    assert summary["val_bits_per_byte"] == pytest.approx(summary["validation_loss"] / 0.6931471805599453, rel=1e-6)
    assert 0 < summary["xz_bits_per_byte"] < 1  # the same sentence again and again
    assert summary["data"]["files"] == 12
    assert summary["data"]["split"] == "by file"
    assert len(summary["data"]["sha256"]) == 64
    assert str(tmp_path) not in json.dumps(summary["data"])
    assert (summary["step"], summary["seed"], summary["zero_stage"]) == (60, 3, 2)
    assert summary["tokens_per_second"] == pytest.approx(32 * summary["samples_per_second"])


@pytest.mark.usefixtures("in_this_process")
def test_bert_reports_bits_per_masked_byte_beside_its_baseline(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, "bert_mlm", "BertTrial", steps=40)
    first, last = summary["initial_validation"], summary["final_validation"]
    assert last["val_bits_per_masked_byte"] < first["val_bits_per_masked_byte"] - 2.0
    assert 3.0 < summary["unigram_bits_per_masked_byte"] < 5.0
    assert summary["data"]["files"] == 12


def pipeline_run(folder: Path, model: str, trial: str, steps: int, data: dict[str, Any], sizes: dict[str, Any]) -> Any:
    """Two stages on two ranks, as ``zero-trial run`` starts them: the summary and the screen."""
    ds_config = DS_CONFIG | {"gradient_accumulation_steps": 4, "mesh": {"pipe": 2}, "pipeline": {"schedule": "zb_h1"}}
    (folder / "small.json").write_text(json.dumps(ds_config))
    experiment = {
        "name": "small",
        "entrypoint": trial,
        "resources": {"slots_per_trial": 2},
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": steps}},
        "perform_initial_validation": True,
        "reproducibility": {"experiment_seed": 3},
        "data": {"ds_config": "small.json", **data},
        "hyperparameters": {"global_batch_size": 32, "model": sizes},
    }
    (folder / "const.yaml").write_text(json.dumps(experiment))  # JSON is YAML
    command = [sys.executable, "-m", "zero_trial.cli.main", "run", str(folder / "const.yaml"), str(MODEL_DEFS / model)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--run-dir", str(folder / "run")], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "run" / "summary.json").read_text()), done.stdout


def test_a_pipeline_of_a_gpt_beats_the_unigram_baseline_too(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(12):
        (text / f"{number}.txt").write_text(SENTENCES.format(number) * 40)
    sizes = {"sequence": 32, "layers": 2, "heads": 2, "width": 32, "tied": True}
    data = {"source": str(text), "validation_windows": 32}
    summary, screen = pipeline_run(tmp_path, "gpt", "pipeline_def:GPTPipelineTrial", 40, data, sizes)
    assert summary["initial_validation"]["val_bits_per_byte"] == pytest.approx(8.0, abs=0.3)
    assert summary["val_bits_per_byte"] < summary["unigram_bits_per_byte"] < 5.0
    assert (summary["pipeline_stages"], summary["zero_stage"], summary["ranks"]) == (2, 2, 2)
    assert "2 pipeline stages" in screen and "pipeline: zb_h1, 2 stages x 1 chunk, 4 micro-batches" in screen


def test_a_pipeline_reads_letters_of_fonts_that_it_never_saw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="there are no fonts to draw with")
    data = {"characters": "ABCEX", "variants": 2, "validation_variants": 8}
    sizes = {"size": 16, "width": 8, "hidden": 32, "dropout": 0.0}
    summary, _ = pipeline_run(tmp_path, "image_pipeline", "model_def:LetterTrial", 60, data, sizes)
    assert summary["initial_validation"]["accuracy"] < 0.5
    assert summary["accuracy"] > 0.8 > summary["chance_accuracy"] == pytest.approx(0.2)
