"""The controller over the real engine of a pipeline: who reads, who reports, what is averaged, and
that a resumed run is the unbroken one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.in_memory import InMemoryPlatform, ReportedRecord
from tests.support.pool import Pools
from tests.trial.harness import Points
from zero_trial.comm import build_mesh, read_rank_env
from zero_trial.comm.mesh import MeshShape
from zero_trial.engine import initialize
from zero_trial.pipeline.module import PipelineModule
from zero_trial.trial import Batch, Controller, DataLoader, TrainSettings, ZeroTrial, ZeroTrialContext
from zero_trial.trial.runtime.protocols import Distributed
from zero_trial.trial.trial import seed_everything


def ds_config(stages: int, zero: int = 0, accumulation: int = 4, micro: int = 2, **pipeline: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero_optimization": {"stage": zero},
        "comm_timeout_seconds": 30.0,
        "mesh": {"pipe": stages},
        "pipeline": pipeline,
    }


class Pairs(Points):
    """(x, y) of the line; in the middle a second x, so that a mistaken order shows."""

    def __getitem__(self, index: int) -> Any:
        _, x, y = super().__getitem__(index)
        return x, y


class LineOfLayers(ZeroTrial):
    """A small network in six layers."""

    dropout = 0.0

    def __init__(self, context: ZeroTrialContext) -> None:
        super().__init__(context)
        layers = [nn.Linear(1, 8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)]
        model = PipelineModule(layers, loss_fn=nn.functional.mse_loss, partition_method="uniform")
        self.engine = context.initialize(model=model)
        self.losses: list[float] = []
        self.loaders: list[str] = []

    def build_training_data_loader(self) -> DataLoader:
        self.loaders.append("training")
        return DataLoader(Pairs(50), self.context.get_train_micro_batch_size_per_gpu(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        self.loaders.append("validation")
        return DataLoader(Pairs(32), self.context.get_train_micro_batch_size_per_gpu())

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.engine.train_batch(dataloader_iter)
        self.losses.append(loss.item())
        return loss

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        loss, outputs = self.engine.eval_batch(dataloader_iter, return_logits=True)
        if outputs is None:
            return {}
        return {"validation_loss": loss, "first_output": outputs[0].flatten()[0]}


class Dropping(LineOfLayers):
    dropout = 0.3


def run_here(config: dict[str, Any], length: int, kind: type[LineOfLayers] = LineOfLayers, **options: Any) -> Any:
    """The whole run of one rank of the pool: its losses, what was reported, the loaders it
    built."""
    env = read_rank_env()
    comm = build_mesh(MeshShape(replica=env.world_size)).world
    ranks = Distributed(env.rank, env.world_size, env.rank, lambda value: comm.gather_json(value, "trial"))
    record = ReportedRecord()
    platform = InMemoryPlatform(
        experiment={"data": {"ds_config": config}}, seed=5, distributed=ranks, record=record, **options
    )
    seed_everything(5)
    trial = kind(ZeroTrialContext(platform, initialize))
    settings = TrainSettings(
        Batch(length),
        reporting_period=Batch(4),
        validation_period=Batch(6),
        checkpoint_period=Batch(6),
        checkpoint_policy="none",
    )
    outcome = Controller(trial, trial.context, settings).run()
    trial.engine.destroy()
    return {
        "losses": trial.losses,
        "training": record.training,
        "validation": record.validation,
        "loaders": trial.loaders,
        "reports": trial.context.mpu.should_report_metrics,
        "final": outcome.final_metrics,
        "notes": [event["message"] for event in record.events if event.get("kind") == "note"],
    }


@pytest.fixture(scope="module")
def alone(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One stage on one rank."""
    return ranks(1).run(run_here, ds_config(1), 12, storage=tmp_path_factory.mktemp("alone"))[0]


def close(found: Any, expected: Any) -> bool:
    return bool(torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=1e-6))


@pytest.mark.parametrize(
    ("stages", "config", "reading", "reporting"),
    [
        (2, ds_config(2), [0, 1], [1]),
        (4, ds_config(4, zero=1), [0, 3], [3]),
        (2, ds_config(2, schedule="zb_v"), [0], [0]),
    ],
)
def test_a_pipeline_trains_and_reports_what_one_rank_does(
    ranks: Pools,
    alone: Any,
    tmp_path: Path,
    stages: int,
    config: dict[str, Any],
    reading: list[int],
    reporting: list[int],
) -> None:
    every = ranks(stages).run(run_here, config, 12, storage=tmp_path)
    assert [rank for rank, run in enumerate(every) if run["loaders"]] == reading
    assert [rank for rank, run in enumerate(every) if run["reports"]] == reporting
    assert all(run["loaders"] in ([], ["training", "validation"]) for run in every)
    assert not any("different numbers" in note for run in every for note in run["notes"])
    assert all(close(rank["losses"], alone["losses"]) for rank in every)
    first = every[0]
    assert [step for step, _ in first["training"]] == [step for step, _ in alone["training"]] == [4, 8, 12]
    assert close([part["loss"] for _, part in first["training"]], [part["loss"] for _, part in alone["training"]])
    for name in ("validation_loss", "first_output"):
        assert close([part[name] for _, part in first["validation"]], [part[name] for _, part in alone["validation"]])
    assert all(rank["final"] == first["final"] for rank in every)
    assert any(note.startswith(f"pipeline: {config['pipeline'].get('schedule', '1f1b')}, ") for note in first["notes"])


def test_metrics_are_the_mean_over_the_data_parallel_ranks(ranks: Pools, alone: Any, tmp_path: Path) -> None:
    """Two pipelines side by side with half of the micro-batches each see the batches that one sees
    alone."""
    every = ranks(4).run(run_here, ds_config(2, zero=2, accumulation=2), 12, storage=tmp_path)
    assert every[0]["final"]["validation_loss"] == pytest.approx(alone["final"]["validation_loss"], rel=1e-4)
    assert [step for step, _ in every[0]["training"]] == [4, 8, 12]
    for (_, mine), (_, other) in zip(every[0]["training"], alone["training"], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_a_resumed_run_is_bit_equal_to_the_unbroken_one(ranks: Pools, tmp_path: Path) -> None:
    config, world = ds_config(2, zero=3, schedule="looped_bfs", zero_policy="chunk"), 4
    whole = ranks(world).run(run_here, config, 10, Dropping, storage=tmp_path)
    rest = ranks(world).run(run_here, config, 10, Dropping, storage=tmp_path, latest_checkpoint="step-000006")
    for before, after in zip(whole, rest, strict=True):
        assert after["losses"] == before["losses"][6:]
        assert after["final"] == before["final"]
