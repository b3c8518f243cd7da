"""A small real trial (a line fitted through points) and one call that runs it on fake engines:
shared by the tests of this folder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.in_memory import InMemoryPlatform, ReportedRecord
from tests.support.thread_ranks import run_ranks
from tests.trial.fake_engine import fake_factory
from zero_trial.trial import Batch, Controller, DataLoader, TrainSettings, ZeroTrial, ZeroTrialContext
from zero_trial.trial.reporting import Outcome
from zero_trial.trial.runtime.protocols import Distributed
from zero_trial.trial.trial import seed_everything

DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
}

# ranks that are threads share the random state: one at a time draws its first weights
BUILDING = threading.Lock()


class Points(torch.utils.data.Dataset[Any]):
    """(index, x, y) on a line; notes which indices were read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        x = torch.tensor([index / self.length])
        return index, x, 3 * x + 1


class LineTrial(ZeroTrial):
    """Fits y = 3x + 1. ``seen``: the indices of every micro-batch; ``calls``: (epoch_idx,
    batch_idx)."""

    samples = 24
    shuffle = False
    noise = 0.0

    def __init__(self, context: ZeroTrialContext) -> None:
        super().__init__(context)
        self.engine = context.initialize(model=torch.nn.Linear(1, 1))
        self.data = Points(self.samples)
        self.seen: list[list[int]] = []
        self.calls: list[tuple[int, int]] = []
        self.losses: list[float] = []

    def build_training_data_loader(self) -> Any:
        return DataLoader(self.data, batch_size=self.context.get_train_micro_batch_size_per_gpu(), shuffle=self.shuffle)

    def build_validation_data_loader(self) -> Any:
        return DataLoader(Points(8), batch_size=2)

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> Any:
        assert dataloader_iter is not None
        index, x, y = next(dataloader_iter)
        self.seen.append(index.tolist())
        self.calls.append((epoch_idx, batch_idx))
        x = x + self.noise * torch.randn(x.shape)
        loss = ((self.engine(x) - y) ** 2).mean()
        self.engine.backward(loss)
        self.engine.step()
        self.losses.append(loss.item())
        return loss

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        assert dataloader_iter is not None
        _, x, y = next(dataloader_iter)
        return {"validation_loss": ((self.engine(x) - y) ** 2).mean()}


class Run:
    """What one rank's run left behind."""

    def __init__(self, trial: Any, outcome: Outcome, record: ReportedRecord) -> None:
        self.trial, self.outcome, self.record = trial, outcome, record


def run_rank(
    kind: Callable[[ZeroTrialContext], ZeroTrial],
    settings: TrainSettings,
    ranks: Distributed | None = None,
    ds_config: Mapping[str, Any] | None = None,
    skip_steps: tuple[int, ...] = (),
    clock: Callable[[], float] | None = None,
    **platform: Any,
) -> Run:
    """One rank in this thread, on an in-memory platform; what is wrong is raised."""
    if ranks is not None:
        platform["distributed"] = ranks
    platform.setdefault("experiment", {"data": {"ds_config": {**DS_CONFIG, **(ds_config or {})}}})
    surroundings = InMemoryPlatform(**platform)
    with BUILDING:
        seed_everything(surroundings.seed)
        trial = kind(ZeroTrialContext(surroundings, fake_factory(ranks, skip_steps)))
    options = {"clock": clock} if clock is not None else {}
    outcome = Controller(trial, trial.context, settings, **options).run()
    return Run(trial, outcome, surroundings.record)


def run_world(size: int, kind: Any, settings: TrainSettings, storage: Path, **options: Any) -> list[Any]:
    """``size`` ranks as threads; each a Run, or what it raised."""
    record = options.pop("record", None) or ReportedRecord()
    return run_ranks(size, lambda ranks: run_rank(kind, settings, ranks, record=record, storage=storage, **options))


def steps(count: int, **options: Any) -> TrainSettings:
    return TrainSettings(max_length=Batch(count), **options)
