"""Every experiment in experiments/: its YAML and ds_config are read, and its hyperparameters build
its model."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from tests.model_defs.folder import ROOT, forgotten, import_from
from tests.support.in_memory import InMemoryPlatform
from zero_trial.cli.main import main
from zero_trial.ds_config.batch import reconcile, solve_batch
from zero_trial.ds_config.config_report import resolved_ds_config
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.experiment.experiment import read_experiment
from zero_trial.trial.ds_config import trial_ds_config
from zero_trial.trial.runtime.protocols import Distributed

EVERY = sorted((ROOT / "experiments").glob("*/const.yaml"))
PIPELINES = [path for path in EVERY if "_pipeline" in path.parent.name]
# dcgan has two ds_configs; in hf_trainer's Trainer fills in what is auto; qlora needs libraries
OTHERS = ("dcgan", "hf_trainer", "qlora")
EXPERIMENTS = [path for path in EVERY if path not in PIPELINES and path.parent.name not in OTHERS]
RANKS = 2


def build(folder: str, sizes: dict[str, Any]) -> nn.Module:
    """Build the model of a folder of model_defs/."""
    if folder == "translation":
        return import_from(folder, "model_def").build_model(**{**sizes, "implementation": "own"})
    model = import_from(folder, "model")
    if folder == "gpt":
        return model.GPT(model.GPTConfig(**sizes))
    return model.MaskedLanguageModel(model.EncoderConfig(**sizes))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.parent.name)
def test_an_experiment_is_what_its_folder_says(path: Path) -> None:
    folder = model_folder(path).name
    experiment = read_experiment(path)
    settings = read_ds_config(experiment.ds_config(ROOT / "model_defs" / folder))
    _, staged, stage = path.parent.name.partition("_zero")
    assert settings.zero_optimization.stage == (int(stage[0]) if staged else 2)
    assert settings.bf16.enabled == path.parent.name.endswith("bf16")
    assert experiment.name == path.parent.name

    built = build(folder, experiment.hyperparameters["model"])
    assert 100_000 < sum(parameter.numel() for parameter in built.parameters()) < 2_000_000

    accumulation = settings.gradient_accumulation_steps
    batch = solve_batch(experiment.hyperparameters["global_batch_size"], None, accumulation, RANKS)
    # all batches equal
    data = experiment.raw["data"]
    assert data.get("validation_windows", data.get("validation_pairs")) % (batch.micro_batch_size * RANKS) == 0


def model_folder(path: Path) -> Path:
    """The folder that the experiment's own comment names: ``zero-trial run const.yaml FOLDER``."""
    found = re.search(r"(model_defs/\w+)", path.read_text())
    assert found is not None
    return ROOT / found[1]


@pytest.mark.parametrize("path", EXPERIMENTS + PIPELINES, ids=lambda path: path.parent.name)
def test_a_cluster_resolves_the_same_ds_config(path: Path, tmp_path: Path) -> None:
    """`zero-trial run` reads the project's folders; a cluster gets a copy of the model's alone."""
    experiment, folder = read_experiment(path), tmp_path / "context"
    shutil.copytree(model_folder(path), folder)
    ranks = Distributed(0, experiment.slots_per_trial)
    platform = InMemoryPlatform(
        distributed=ranks,
        storage=tmp_path,
        model_dir=folder,
        experiment=yaml.safe_load(path.read_text()),
        hparams=experiment.hyperparameters,
    )
    here = read_ds_config(
        experiment.ds_config(model_folder(path)), hints=experiment.hints, hyperparameters=experiment.hyperparameters
    )
    there = read_ds_config(
        trial_ds_config(None, platform), hints=experiment.hints, hyperparameters=experiment.hyperparameters
    )
    assert resolved_ds_config(here) == resolved_ds_config(there)
    assert here.warnings == there.warnings == ()


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.parent.name)
def test_a_pipeline_is_what_its_folder_says(path: Path) -> None:
    stage = path.parent.name.partition("_zero")[2]
    experiment = read_experiment(path)
    values = experiment.hyperparameters
    settings = read_ds_config(experiment.ds_config(model_folder(path)), hyperparameters=values)
    assert settings.zero_optimization.stage == int(stage or 0)
    assert experiment.name == path.parent.name
    assert settings.mesh.pipe == 2
    batch = reconcile(settings, experiment.slots_per_trial, values).batch
    assert batch.accumulation == 4  # micro-batches that fill the pipeline
    # letters x variants x fonts
    windows = experiment.raw["data"].get("validation_windows", 36 * 4 * 4)
    assert windows % (batch.train_batch_size) == 0  # all batches equal


# two engines, a pipeline, and batches of unequal lengths; the others in test-extended
OFTEN = {"dcgan", "gpt_pipeline_zero3", "translation"}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        pytest.param(path, words, id=name, marks=pytest.mark.slow if name in OFTEN else pytest.mark.extended)
        for number, path in enumerate(EVERY)
        for name, words in [(path.parent.name, ("--gpu-memory", "80GiB") if number % 2 else ())]
        if name not in ("hf_trainer", "qlora")  # an entrypoint that is a script; libraries that take seconds
    ],
)
def test_every_experiment_is_planned(path: Path, words: tuple[str, ...]) -> None:
    with forgotten():
        assert main(["plan", str(path), str(model_folder(path)), *words]) == 0
