"""``zero-trial ckpt show``: what is in a checkpoint, without reading a tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_trial
from tests.checkpoint.test_shelf import engine, trial
from zero_trial.checkpoint import Slice, save_checkpoint
from zero_trial.cli.main import main


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """By a real engine: bf16 with masters, a tied weight, a frozen parameter, a buffer."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    config = {"train_batch_size": 4, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    made, *_ = zero_trial.initialize(model=model, config=config)
    made.backward(made(torch.ones(4, 2, dtype=torch.bfloat16)).float().square().sum())
    made.step()
    made.save_checkpoint(tmp_path, tag="a", client_state={"epoch": 3})
    return tmp_path / "a"


def test_the_page(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "show", str(saved)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    heads = {words[0]: " ".join(words[1:]) for words in lines[1:6]}
    assert heads["step"].startswith("1 · 4 samples · 1 files, ")
    assert heads["world"].startswith("ZeRO-0 · written by 1 rank · mesh pipe=1 replica=1 shard=1 model=1;")
    assert heads["model"].startswith("5 parameters, 12 elements, bfloat16, float32 masters of bfloat16 weights")
    assert heads["update"].endswith("exp_avg, exp_avg_sq; 1 group, lr 0.01") and heads["client"] == "epoch"
    masters = ["float32", "(lives", "in", "bfloat16)", "exp_avg,", "exp_avg_sq"]
    assert ["param", "0.weight", "2x2", *masters] in lines
    assert ["param", "1.bias", "2", "bfloat16"] in lines
    assert ["buffer", "2.num_batches_tracked", "scalar", "int64"] in lines
    assert ["tied", "1.weight", "is", "0.weight"] in lines


def test_a_tensor_of_very_many_dimensions_takes_one_short_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path, "a", [Slice("param/w", (1,) * 200_000, 0, 1, torch.ones(1))], step=1)
    assert main(["ckpt", "show", str(tmp_path / "a")]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if " w " in line]
    assert "1x… (200000 dimensions)" in row and len(row) < 120


def test_as_json(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "show", str(saved), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (one,) = found["engines"]
    assert (found["step"], one["parts"], one["elements"], one["tied"]) == (1, 1, 12, {"1.weight": "0.weight"})
    assert one["parameters"][1] == {
        "name": "0.weight",
        "shape": [2, 2],
        "dtype": "float32",
        "lives": "bfloat16",
        "part": 0,
        "optimizer_state": {"exp_avg": "float32", "exp_avg_sq": "float32"},
    }
    assert one["state"]["counters"]["global_steps"] == 1 and "dtypes" not in one["state"]


def test_a_trial_with_two_models_has_two_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial(tmp_path / "checkpoints", 4, models=2)
    assert main(["ckpt", "show", str(tmp_path)]) == 0
    pages = capsys.readouterr().out.split("\n\n")
    assert [line.rsplit("/", 1)[-1] for line in (pages[0].splitlines()[0], pages[2].splitlines()[0])] == [
        "model0",
        "model1",
    ]


def test_a_checkpoint_of_another_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the manifest is needed; what no engine has noted is left out."""
    engine(tmp_path, "a", 4)
    assert main(["ckpt", "show", str(tmp_path)]) == 0
    assert "param  w     5      float32  exp_avg" in capsys.readouterr().out
