"""The folder of a small trial for whole runs: a linear model on numbers made from a seed, with a
fault where one is asked for."""

from __future__ import annotations

from typing import Any

# The hyperparameter `fault` chooses what goes wrong, on rank 1, in step `at`; `mark`: once, until
# this file is there. `wait_at`: rank 0 goes on only once it was asked to stop, or the file
# `wait_for` is there. `settle_at`: the engine has written its checkpoint before this step.
MODEL_DEF = """
import pathlib
import threading
import torch
from torch.utils.data import TensorDataset
from zero_trial import ZeroTrial
from zero_trial.errors import InvalidHP
from zero_trial.trial import DataLoader


class MyTrial(ZeroTrial):
    def __init__(self, context):
        self.context = context
        self.rank = context.distributed.rank
        self.hparams = context.get_hparams()
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        self.data = TensorDataset(x, x.sum(dim=1, keepdim=True))
        self.engine = context.initialize(model=torch.nn.Linear(4, 1))

    def build_training_data_loader(self):
        return DataLoader(self.data, self.context.get_train_micro_batch_size_per_gpu(), shuffle=True)

    def build_validation_data_loader(self):
        return DataLoader(self.data, 4)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        if batch_idx == self.hparams.get("wait_at", -1) and self.rank == 0:
            print("waits at its gate", flush=True)
            gate = pathlib.Path(self.hparams.get("wait_for", "/no such file"))
            while not self.context.platform.core.preempt._watcher._should_preempt and not gate.exists():
                threading.Event().wait(0.02)
        if batch_idx == self.hparams.get("at", -1) and self.rank == 1:
            if self.hparams.get("fault") == "invalid":
                raise InvalidHP("too small")
            mark = pathlib.Path(self.hparams.get("mark", "/no such file"))
            if self.hparams.get("fault") == "crash" and not mark.exists():
                if "mark" in self.hparams:
                    mark.touch()
                raise KeyError("no such thing")
        if batch_idx == self.hparams.get("settle_at", -1):
            self.engine.wait_for_checkpoint()
        x, y = next(dataloader_iter)
        x = x + 0.01 * torch.randn(x.shape)
        loss = torch.nn.functional.mse_loss(self.engine(x), y)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter, batch_idx):
        x, y = next(dataloader_iter)
        return {"validation_loss": torch.nn.functional.mse_loss(self.engine(x), y)}
"""

TRAIN = """
import zero_trial
from model_def import MyTrial

with zero_trial.init() as context:
    zero_trial.Trainer(MyTrial(context), context).fit(max_length=zero_trial.Batch(8), validation_period=zero_trial.Batch(4))
print("the script goes on")
"""

FILES = {"model_def.py": MODEL_DEF, "train.py": TRAIN}

LAUNCH = "python3 -m determined.launch.torch_distributed "

# The three ways in, as an experiment's entrypoint.
FRONTS = {
    "module": LAUNCH + "python3 -m zero_trial.run model_def:MyTrial",
    "class": "model_def:MyTrial",
    "script": LAUNCH + "python3 train.py",
}

DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
    "zero_optimization": {"stage": 2},
}


def experiment(front: str, **hyperparameters: Any) -> dict[str, Any]:
    """Eight steps of two micro-batches on two ranks, reported each, validated twice."""
    return {
        "name": "line",
        "entrypoint": FRONTS[front],
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 8}},
        "scheduling_unit": 1,
        "min_validation_period": {"batches": 4},
        "hyperparameters": {"global_batch_size": 8, **hyperparameters},
        "data": {"ds_config": DS_CONFIG},
    }
