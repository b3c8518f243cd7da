"""A small project on disk for the tests of this folder: an experiment, a ds_config and a trial that
fits a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_trial.planning.check import CheckReport, CheckRequest, check_experiment

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

EXPERIMENT = """name: tiny
entrypoint: model_def:LineTrial
resources:
  slots_per_trial: 2
searcher:
  name: single
  metric: validation_loss
  max_length: {batches: 4}
data:
  ds_config: ds_config.json
hyperparameters:
  width: 4
"""

MODEL = '''"""Fits a line."""
import torch
from zero_trial import ZeroTrial
from zero_trial.trial import DataLoader


class LineTrial(ZeroTrial):
    def __init__(self, context):
        self.context = context
        self.engine = context.initialize(model=torch.nn.Linear(context.get_hparam("width"), 1))

    def build_training_data_loader(self):
        return DataLoader([torch.ones(4)] * 40, self.context.get_train_micro_batch_size_per_gpu())

    def build_validation_data_loader(self):
        return DataLoader([torch.ones(4)] * 12, self.context.get_train_micro_batch_size_per_gpu())

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        loss = self.engine(next(dataloader_iter)).mean()
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self.engine(next(dataloader_iter)).mean()}
'''

DS_CONFIG: Mapping[str, Any] = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@dataclass(frozen=True)
class Project:
    """A folder with ``const.yaml``, ``ds_config.json`` and ``model_def.py``."""

    folder: Path

    @property
    def experiment(self) -> Path:
        return self.folder / "const.yaml"

    def check(self, **options: Any) -> CheckReport:
        return check_experiment(CheckRequest(self.experiment, self.folder, **options), NO_GPU)


def project(
    folder: Path,
    experiment: str = EXPERIMENT,
    ds_config: Mapping[str, Any] | str = DS_CONFIG,
    model: str = MODEL,
) -> Project:
    """Write the files; what is not given is as it should be."""
    folder.mkdir(exist_ok=True)
    (folder / "const.yaml").write_text(experiment)
    text = ds_config if isinstance(ds_config, str) else json.dumps(ds_config, indent=1)
    (folder / "ds_config.json").write_text(text)
    (folder / "model_def.py").write_text(model)
    return Project(folder)


def messages(report: CheckReport) -> list[str]:
    """The texts of all issues, with the word for their severity."""
    return [f"{issue.severity.value}: {issue.text}" for issue in report.issues]
