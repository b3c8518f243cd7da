"""Trials written for Determined's DeepSpeedTrial: the names, and whole trials of unchanged files
with ``zero-trial run`` and under the embedded master."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.master.det import running
from zero_trial.compat.determined_table import TABLE
from zero_trial.errors import ConfigError
from zero_trial.experiment.entrypoint import parse_entrypoint
from zero_trial.trial.trial import import_trial_class

# As public examples are written: nothing in these files names zero_trial.
MODEL_DEF = """
from typing import Any, Dict

import deepspeed
import torch
from attrdict import AttrDict

from determined.pytorch import DataLoader
from determined.pytorch.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext, overwrite_deepspeed_config


class LineTrial(DeepSpeedTrial):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.args = AttrDict(self.context.get_hparams())
        model = torch.nn.Linear(1, 1)
        config = overwrite_deepspeed_config(
            self.args.deepspeed_config, self.args.get("overwrite_deepspeed_args", {})
        )
        engine, _, _, _ = deepspeed.initialize(args=self.args, model=model, model_parameters=model.parameters(), config=config)
        self.model_engine = self.context.wrap_model_engine(engine)
        self.reducer = self.context.wrap_reducer(lambda parts: sum(parts) / len(parts), "error", for_training=False)

    def train_batch(self, iter_dataloader: Any, epoch_idx: int, batch_idx: int) -> Dict[str, torch.Tensor]:
        x, y = self.context.to_device(next(iter_dataloader))
        loss = ((self.model_engine(x) - y) ** 2).mean()
        self.model_engine.backward(loss)
        self.model_engine.step()
        return {"loss": loss.item()}

    def evaluate_batch(self, iter_dataloader: Any, batch_idx: int) -> Dict[str, Any]:
        x, y = self.context.to_device(next(iter_dataloader))
        self.reducer.update(((self.model_engine(x) - y) ** 2).mean().item())
        return {}

    def points(self) -> Any:
        x = torch.linspace(0, 1, 32)[:, None]
        return torch.utils.data.TensorDataset(x, 3 * x + 1)

    def build_training_data_loader(self) -> Any:
        return DataLoader(self.points(), batch_size=self.context.train_micro_batch_size_per_gpu, shuffle=True)

    def build_validation_data_loader(self) -> Any:
        return DataLoader(self.points(), batch_size=4)
"""
TRAINER = """
import logging

import determined as det
from determined import pytorch
from determined.pytorch import deepspeed as det_ds

from model_def import LineTrial


def main() -> None:
    info = det.get_cluster_info()
    assert info is None or info.trial.hparams["deepspeed_config"] == "ds_config.json"
    hparams = {"deepspeed_config": "ds_config.json"} if info is None else info.trial.hparams
    latest = None if info is None else info.latest_checkpoint
    with det_ds.init(hparams=hparams) as context:
        trainer = det_ds.Trainer(LineTrial(context), context)
        trainer.fit(
            max_length=pytorch.Batch(4), checkpoint_policy="none", reporting_period=pytorch.Batch(1),
            latest_checkpoint=latest,
        )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    main()
"""
DS_CONFIG = {"train_batch_size": 16, "optimizer": {"type": "Adam", "params": {"lr": 0.05}}}
MICRO = {"train_micro_batch_size_per_gpu": 4}
NAMES = """
import zero_trial.as_determined, sys
assert "torch" not in sys.modules and "determined" not in sys.modules
import deepspeed, determined, zero_trial
from determined.pytorch import DataLoader, DeepSpeedMPU, DeepSpeedTrial, DeepSpeedTrialContext
from determined.pytorch import deepspeed as det_ds
assert DataLoader.__module__ == "determined.pytorch._data" and determined.get_cluster_info() is None
assert DeepSpeedTrial is det_ds.DeepSpeedTrial is zero_trial.ZeroTrial
assert DeepSpeedTrialContext is zero_trial.ZeroTrialContext and DeepSpeedMPU is det_ds.make_deepspeed_mpu
assert deepspeed.initialize is zero_trial.initialize
for name in sys.argv[1:]:
    assert getattr(det_ds, name) is not None
try:
    from determined.pytorch.deepspeed import DeepSpeedTrialController
except ImportError as error:
    assert "Trainer" in str(error)
try:
    det_ds.DeepSpeedTrail
except AttributeError as error:
    assert "DeepSpeedTrial?" in str(error)
"""


def write_files(folder: Path, entrypoint: str, slots: int = 2) -> Path:
    """Write the model's folder; return the experiment's file."""
    (folder / "model").mkdir(parents=True)
    for name, text in (("model_def.py", MODEL_DEF), ("trainer.py", TRAINER), ("ds_config.json", json.dumps(DS_CONFIG))):
        (folder / "model" / name).write_text(text)
    config = {
        "name": "line",
        "entrypoint": entrypoint.split(),
        "hyperparameters": {"deepspeed_config": "ds_config.json", "overwrite_deepspeed_args": MICRO},
        "resources": {"slots_per_trial": slots},
        "searcher": {"name": "single", "metric": "error", "smaller_is_better": True, "max_length": {"batches": 4}},
        "max_restarts": 0,
    }
    file = folder / "const.yaml"
    file.write_text(json.dumps(config))
    return file


def python(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.smoke
def test_the_names_and_the_genuine_package_beside_them() -> None:
    names = [name for name, target in TABLE["determined.pytorch.deepspeed"].items() if isinstance(target, str)]  # type: ignore[union-attr]
    done = python("-c", NAMES, *names)
    assert done.returncode == 0, done.stderr


def test_an_entrypoint_says_that_a_trial_is_a_deepspeedtrial() -> None:
    for command in ("determined.launch.deepspeed --trial", "zero_trial.as_determined"):
        assert parse_entrypoint(f"python3 -m {command} model_def:LineTrial").as_determined
    assert not parse_entrypoint("python3 -m zero_trial.run model_def:LineTrial").as_determined


def test_a_trial_that_finds_no_deepspeed_is_told_what_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "imports_deepspeed.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'deepspeed'\", name='deepspeed')"
    )
    with pytest.raises(ConfigError, match=r"zero_trial\.as_determined imports_deepspeed:Mine"):
        import_trial_class("imports_deepspeed", "Mine", tmp_path)


@pytest.mark.smoke
def test_unchanged_files_of_a_cluster_train_with_run(tmp_path: Path) -> None:
    file = write_files(tmp_path, "python3 -m determined.launch.deepspeed --trial model_def:LineTrial")
    done = python("-m", "zero_trial.cli.main", "run", str(file), str(tmp_path / "model"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in (tmp_path / "runs/0001/events.jsonl").read_text().splitlines()]
    assert "error" in next(event for event in events if event["kind"] == "validation")["metrics"]


@pytest.mark.slow
def test_a_class_and_a_script_under_the_embedded_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("determined")
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"))
    launch = "python3 -m determined.launch.torch_distributed python3 -m zero_trial.as_determined"
    (tmp_path / "master").mkdir()
    with running(tmp_path / "master") as det:
        numbers = []  # both at a time, on three slots
        for program, slots in (("model_def:LineTrial", 2), ("trainer.py", 1)):
            file = write_files(tmp_path / f"on {slots}", f"{launch} {program}", slots)
            numbers.append(det.submit(file, file.parent / "model"))
        for number in numbers:
            assert det.wait(number) == "COMPLETED", det.logs(number)
            found = det.json("trial", "describe", str(number), "--metrics")["workloads"]
            trained = [w["training"]["metrics"]["avgMetrics"] for w in found if w.get("training")]
            assert trained and all(metrics["loss"] > 0 for metrics in trained)
