"""The ten most common mistakes, each made on purpose, and what is said about it: where, what, and
how to fix it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_trial
from tests.planning.project import DS_CONFIG, EXPERIMENT, MODEL, messages, project
from tests.trial.harness import LineTrial, run_rank, steps
from zero_trial.cli.main import main
from zero_trial.errors import CheckpointError, Diverged
from zero_trial.trial import Batch


def only(found: list[str]) -> str:
    (text,) = found
    return text


def test_1_a_misspelled_section(tmp_path: Path):
    """Also in a search, in whatever file the key stands."""
    experiment = EXPERIMENT + "  ds_config:\n    zero_optimisation: {stage: 2}\n"
    assert only(messages(project(tmp_path, experiment).check(build=False))) == (
        "error: const.yaml:14 hyperparameters.ds_config.zero_optimisation: unknown key. "
        'Did you mean "zero_optimization"? (DeepSpeed would ignore this and train without ZeRO.)'
    )


def test_2_batch_arithmetic(tmp_path: Path):
    config = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    report = project(tmp_path, ds_config=config).check()
    assert only(messages(report)) == (
        "error: train_batch_size 6 ≠ micro 4 × accumulation 1 × ranks 2 = 8. "
        "Set train_batch_size: 8, or remove it and it is derived. Values: train_batch_size 6 (ds_config.json:2), "
        "train_micro_batch_size_per_gpu 4 (ds_config.json:3), gradient_accumulation_steps 1 (ds_config.json:4). "
        "Nearest that fit (batch = micro x accumulation x ranks): 6 = 3 x 1 x 2; 8 = 4 x 1 x 2."
    )
    assert report.exit_code == 2


def test_3_auto_without_a_source(tmp_path: Path):
    report = project(tmp_path, ds_config={**DS_CONFIG, "gradient_clipping": "auto"}).check()
    assert only(messages(report)) == (
        'error: ds_config.json:9 gradient_clipping: "auto" has no source. '
        "Set a number, or the hyperparameter max_grad_norm in the trial, or args.max_grad_norm in a script."
    )


def test_4_a_number_that_yaml_reads_as_a_string(tmp_path: Path):
    """Accepted, with a warning."""
    experiment = EXPERIMENT + "  ds_config:\n    optimizer: {params: {lr: 1e-4}}\n"
    report = project(tmp_path, experiment).check()
    assert only(messages(report)) == (
        "warn: const.yaml:14 hyperparameters.ds_config.optimizer.params.lr: '1e-4' is a string in YAML 1.1. Write 1.0e-4."
    )
    assert report.exit_code == 0
    assert report.configs is not None
    optimizer = report.configs.legal[0].config.optimizer
    assert optimizer is not None and optimizer.params["lr"] == 1e-4


def test_5_a_wrong_entrypoint(tmp_path: Path):
    report = project(tmp_path, EXPERIMENT.replace("LineTrial", "LineTrail")).check()
    assert only(messages(report)) == (
        "error: const.yaml:2 entrypoint: model_def:LineTrail not found in ./model_def.py; it defines LineTrial(ZeroTrial). "
        "Use entrypoint: model_def:LineTrial."
    )


@pytest.fixture
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is imported from the project's folder is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "model_def":
            del sys.modules[name]


@pytest.mark.usefixtures("own_modules")
def test_6_too_large_for_the_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    large = "torch.nn.Sequential(torch.nn.Linear(4, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 1))"
    model = MODEL.replace('torch.nn.Linear(context.get_hparam("width"), 1)', large)
    made = project(tmp_path, ds_config={**DS_CONFIG, "train_batch_size": 512}, model=model.replace("* 40", "* 600"))
    assert main(["plan", str(made.experiment), str(tmp_path), "--limit", "6MiB"]) == 3
    assert re.fullmatch(
        r"error   rank 0 needs \d\.\d MiB, has 6\.0 MiB \(activations \d\.\d MiB\)\. "
        r"Smallest change that fits: micro batch 256→128 with accumulation 1→2 \(same global batch\)\."
        r"( Also: stage 0→\d saves \d+\.\d KiB\.)?\n",
        capsys.readouterr().err,
    )


def test_7_two_half_precisions(tmp_path: Path):
    half = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    assert only(messages(project(tmp_path, ds_config={**DS_CONFIG, **half}).check())) == (
        "error: ds_config.json:10 fp16.enabled: fp16 and bf16 are both enabled. Keep bf16: set fp16.enabled to false."
    )


def test_7_fp16_on_a_cpu(tmp_path: Path):
    report = project(tmp_path, ds_config={**DS_CONFIG, "fp16": {"enabled": True}}).check()
    assert only(messages(report)) == (
        "warn: ds_config.json:10 fp16.enabled: fp16 on a machine without a GPU: it is slow there, and its gradients need a loss scale. "
        'Use "bf16": {"enabled": true} in its place; the processor supports it.'
    )


class Net(torch.nn.Module):
    """``wte`` and as many layers as asked for."""

    def __init__(self, words: int, layers: int) -> None:
        super().__init__()
        self.wte = torch.nn.Embedding(words, 4)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(layers)])


def test_8_a_checkpoint_of_another_model(tmp_path: Path):
    config: dict[str, Any] = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    saved, *_ = zero_trial.initialize(model=Net(50, 1), config=config)
    saved.save_checkpoint(str(tmp_path), tag="a")
    other, *_ = zero_trial.initialize(model=Net(54, 2), config=config)
    with pytest.raises(CheckpointError) as caught:
        other.load_checkpoint(str(tmp_path), tag="a")
    assert "checkpoint has 3 tensors, model has 5. Missing: " in str(caught.value)
    assert "layers.1.bias, " in str(caught.value) and "layers.1.weight. " in str(caught.value)
    assert "Shape differs: " in str(caught.value) and "wte.weight (50, 4) vs (54, 4)" in str(caught.value)
    assert str(caught.value).endswith("Build the model as it was when the checkpoint was saved.")
    assert caught.value.exit_code == 5


def test_9_nan(tmp_path: Path):
    class Breaks(LineTrial):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
            return loss * float("nan") if batch_idx == 2 else loss

    with pytest.raises(Diverged) as caught:
        run_rank(Breaks, steps(5, checkpoint_period=Batch(1)), storage=tmp_path)
    assert str(caught.value) == (
        "rank 0, step 3: the loss became nan: expected a finite loss. Try half the learning rate, gradient_clipping: 1.0, "
        "or look at that step's batch. The last checkpoint is step-000002."
    )
    assert caught.value.exit_code == 4


def test_10_a_metric_that_is_never_reported(tmp_path: Path):
    made = project(tmp_path, EXPERIMENT.replace("metric: validation_loss", "metric: val_loss"))
    for options in ({}, {"dry_run": True}):
        report = made.check(**options)
        assert only(messages(report)) == (
            'error: const.yaml:7 searcher.metric: "val_loss" never reported; the trial reports ["validation_loss"]. '
            "Write metric: validation_loss."
        )
        assert report.exit_code == 2
