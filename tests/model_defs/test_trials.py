"""Trials of the models, from an experiment's YAML to summary.json: on one rank here, and as
pipelines of two ranks; and the tutorial's two scripts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.model_defs.folder import MODEL_DEFS, forgotten, import_from
from tests.support.pool import Pools
from zero_trial.run import main

SENTENCES = "the quick brown fox jumps over the lazy dog and runs away from {} hounds\n"
DS_CONFIG: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 2},
}
PIPELINE = DS_CONFIG | {"gradient_accumulation_steps": 4, "mesh": {"pipe": 2}, "pipeline": {"schedule": "zb_h1"}}
SIZES = {"sequence": 32, "layers": 1, "heads": 2, "width": 32}


def written(
    folder: Path, trial: str, steps: int, sizes: dict[str, Any], data: dict[str, Any] | None = None, ranks: int = 1
) -> Path:
    """Write an experiment, with a text of its own unless ``data`` names other data."""
    (folder / "text").mkdir()
    for number in range(12):
        (folder / "text" / f"{number}.txt").write_text(SENTENCES.format(number) * 40)
    data = data or {"source": str(folder / "text"), "validation_windows": 16 * ranks}
    experiment = {
        "name": "small",
        "entrypoint": trial,
        "resources": {"slots_per_trial": ranks},
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": steps}},
        "perform_initial_validation": True,
        "reproducibility": {"experiment_seed": 3},
        "data": {"ds_config": "small.json", **data},
        "hyperparameters": {"global_batch_size": 8 if ranks == 1 else 32, "model": sizes},
    }
    (folder / "small.json").write_text(json.dumps(DS_CONFIG if ranks == 1 else PIPELINE))
    (folder / "const.yaml").write_text(json.dumps(experiment))  # JSON is YAML
    return folder / "const.yaml"


def on_this_rank(file: Path, model: str) -> dict[str, Any]:
    """Train as one rank of a launcher; return the summary."""
    words = ["--run-dir", str(file.parent / "run"), "--model-dir", str(MODEL_DEFS / model), "--experiment", str(file)]
    assert main(words) == 0
    return dict(json.loads((file.parent / "run" / "summary.json").read_text()))


def by_a_command(folder: Path, file: Path, model: str, *words: str) -> tuple[dict[str, Any], str]:
    """Train as ``zero-trial run`` does; return the summary and what was printed."""
    command = [sys.executable, "-m", "zero_trial.cli.main", "run", str(file), str(MODEL_DEFS / model), *words]
    command += ["--run-dir", str(folder / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "run" / "summary.json").read_text()), done.stdout


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run imports ``model_def`` of a model's folder; nothing of it stays."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with forgotten():
        yield


@pytest.mark.usefixtures("in_this_process")
def test_gpt_beats_the_unigram_baseline_of_its_own_text(tmp_path: Path) -> None:
    summary = on_this_rank(written(tmp_path, "model_def:GPTTrial", 60, SIZES), "gpt")
    assert summary["initial_validation"]["val_bits_per_byte"] == pytest.approx(8.0, abs=0.3)
    assert summary["val_bits_per_byte"] < summary["unigram_bits_per_byte"] < 5.0
    assert summary["val_bits_per_byte"] == pytest.approx(summary["validation_loss"] / 0.6931471805599453, rel=1e-6)
    assert 0 < summary["xz_bits_per_byte"] < 1  # the same sentence again and again
    assert (summary["data"]["files"], summary["data"]["split"]) == (12, "by file")
    assert len(summary["data"]["sha256"]) == 64
    assert str(tmp_path) not in json.dumps(summary["data"])
    assert (summary["step"], summary["seed"], summary["zero_stage"]) == (60, 3, 2)
    assert summary["tokens_per_second"] == pytest.approx(32 * summary["samples_per_second"])


@pytest.mark.usefixtures("in_this_process")
def test_bert_reports_bits_per_masked_byte_beside_its_baseline(tmp_path: Path) -> None:
    summary = on_this_rank(written(tmp_path, "model_def:BertTrial", 40, SIZES), "bert_mlm")
    first, last = summary["initial_validation"], summary["final_validation"]
    assert last["val_bits_per_masked_byte"] < first["val_bits_per_masked_byte"] - 2.0
    assert 3.0 < summary["unigram_bits_per_masked_byte"] < 5.0


def test_a_pipeline_of_a_gpt_beats_the_unigram_baseline_too(tmp_path: Path) -> None:
    file = written(tmp_path, "pipeline_def:GPTPipelineTrial", 40, SIZES | {"layers": 2, "tied": True}, ranks=2)
    summary, output = by_a_command(tmp_path, file, "gpt")
    assert summary["initial_validation"]["val_bits_per_byte"] == pytest.approx(8.0, abs=0.3)
    assert summary["val_bits_per_byte"] < summary["unigram_bits_per_byte"] < 5.0
    assert (summary["pipeline_stages"], summary["zero_stage"], summary["ranks"]) == (2, 2, 2)
    assert "2 pipeline stages" in output and "pipeline: zb_h1, 2 stages x 1 chunk, 4 micro-batches" in output


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "accelerate", "peft", "bitsandbytes"))),
    reason="the libraries are in the extra 'libraries'",
)
def test_adapters_on_a_base_in_four_bits_learn(tmp_path: Path) -> None:
    """The experiment as it is, for 12 steps; the plan knows its peak."""
    file = MODEL_DEFS.parent / "experiments" / "qlora" / "const.yaml"
    words = ["searcher.max_length.batches=12", "min_validation_period.batches=12", "data.validation_windows=16"]
    summary, _ = by_a_command(tmp_path, file, "qlora", *words)
    first, last = (summary[name]["validation_loss"] for name in ("initial_validation", "final_validation"))
    assert last < first - 0.3 and summary["zero_stage"] == 3
    assert abs(summary["memory_plan_error_percent"]) < 5


def test_a_pipeline_reads_letters_of_fonts_that_it_never_saw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no fonts were found")
    data = {"characters": "ABCEX", "variants": 2, "validation_variants": 8}
    sizes = {"size": 16, "width": 8, "hidden": 32, "dropout": 0.0}
    file = written(tmp_path, "model_def:LetterTrial", 60, sizes, data, ranks=2)
    pools = Pools()  # of its own: a run leaves the process group
    try:
        summary, _ = pools(2).run(on_this_rank, file, "image_pipeline")
    finally:
        pools.close()
    assert summary["initial_validation"]["accuracy"] < 0.5
    assert summary["accuracy"] > 0.8 > summary["chance_accuracy"] == pytest.approx(0.2)


SMALLEST = "--sequence 32 --layers 1 --heads 2 --width 16 --lr 0.01"


def test_it_trains_logs_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    sizes = [*SMALLEST.split(), "--batch_size", "4", "--dropout", "0"]
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
    sizes = [*SMALLEST.split(), "--batch_size", "2"]
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


image_data = import_from("image_pipeline", "data")


def test_letters_of_fonts_that_training_never_sees_or_a_folder_of_images(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no fonts were found")
    pil = pytest.importorskip("PIL.Image")
    for kind in ("cat", "dog"):
        (tmp_path / kind).mkdir()
        for number in range(20):
            pil.new("L", (8, 8), 10 * number).save(tmp_path / kind / f"{number}.png")
    assert image_data.letters({"source": str(tmp_path)}, 8, "train").classes == ("cat", "dog")
    section = {"characters": "AB", "variants": 2, "validation_variants": 1}
    train, validation = (image_data.letters(section, 16, split) for split in ("train", "validation"))
    assert train.classes == validation.classes == ("A", "B")
    assert not set(train.sources) & set(validation.sources)
    image, label = image_data.samples(train)[0]
    assert image.shape == (1, 16, 16) and image.dtype == torch.float32 and label.dtype == torch.int64
    assert (image.min().item(), image.max().item()) == (-1.0, pytest.approx(1.0, abs=0.2))
