"""The engine's questions and values under DeepSpeed's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial


def engine(**config: Any) -> zero_trial.Engine:
    base = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "betas": [0.5, 0.75]}},
    }
    return zero_trial.initialize(model=nn.Linear(3, 2), config=base | config)[0]


def test_values_of_one_step():
    found = engine(train_batch_size=2)
    assert found.get_global_grad_norm() is None
    assert not found.was_step_applied()
    loss = found(torch.ones(1, 3)).sum()
    found.backward(loss)
    assert found.get_global_grad_norm() is None
    found.step()
    assert found.get_global_grad_norm() == pytest.approx(8**0.5)  # six weights with gradient 1, two biases
    assert (found.get_lr(), found.get_mom()) == ([0.25], [(0.5, 0.75)])
    assert ["Adam" in name for name in found.get_type()] == [True]
    assert (found.global_steps, found.global_samples, found.micro_steps, found.skipped_steps) == (1, 2, 1, 0)
    assert found.was_step_applied()


def test_the_batch_triangle():
    found = engine()
    assert (found.train_batch_size(), found.train_micro_batch_size_per_gpu(), found.gradient_accumulation_steps()) == (
        8,
        2,
        4,
    )
    boundaries = []
    for _ in range(8):
        boundaries.append(found.is_gradient_accumulation_boundary())
        returned = found.backward(found(torch.ones(1, 3)).sum() * 0 + 1)
        found.step()
        assert returned.item() == 0.25
    assert boundaries == [False, False, False, True] * 2
    assert (found.global_steps, found.global_samples) == (2, 16)
    found.set_train_batch_size(4)
    assert (found.gradient_accumulation_steps(), found.train_micro_batch_size_per_gpu()) == (2, 2)
    found.set_train_micro_batch_size(3)
    assert (found.train_batch_size(), found.gradient_accumulation_steps()) == (6, 2)


@pytest.mark.parametrize(
    ("config", "stage", "fp16", "bf16", "scale"),
    [
        ({}, 0, False, False, 1.0),
        ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, 2, False, True, 1.0),
        (
            {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True, "initial_scale_power": 4}},
            3,
            True,
            False,
            16.0,
        ),
    ],
)
def test_questions(config: dict[str, Any], stage: int, fp16: bool, bf16: bool, scale: float):
    found = engine(**config)
    assert (found.zero_optimization_stage(), found.fp16_enabled(), found.bfloat16_enabled()) == (stage, fp16, bf16)
    assert found.loss_scale == found.cur_scale == found.optimizer.loss_scale == found.optimizer.cur_scale == scale
    assert (found.global_rank, found.world_size, found.dp_world_size, found.mp_world_size) == (0, 1, 1, 1)


def test_without_an_optimizer_there_are_no_values():
    found = engine(optimizer=None)
    assert (found.get_lr(), found.get_mom(), found.get_type(), found.optimizer) == ([], [], [], None)
    assert found(torch.ones(1, 3)).shape == (1, 2)


def test_a_loader_over_this_ranks_part():
    found = engine()
    batches = list(found.deepspeed_io([torch.full((3,), float(i)) for i in range(5)]))
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert sorted(row[0].item() for rows in batches for row in rows) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [len(batch) for batch in found.deepspeed_io([torch.ones(3)] * 5, batch_size=4)] == [4, 1]


def test_a_checkpoint_there_and_back(tmp_path: Path):
    found = engine()
    assert found.load_checkpoint(tmp_path) == (None, None)
    assert found.save_checkpoint(str(tmp_path), client_state={"epoch": 2})
    path, client = found.load_checkpoint(str(tmp_path))
    assert (Path(path or "").name, client) == ("global_step0", {"epoch": 2})


def test_frozen_parameters_may_be_left_out():
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    found = zero_trial.initialize(
        model=model, config={"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    )[0]
    assert set(found.module_state_dict(exclude_frozen_parameters=True)) == {"1.weight", "1.bias"}
    assert len(found.module_state_dict()) == 4


def test_the_seconds_in_collectives_are_the_hosts(monkeypatch: pytest.MonkeyPatch):
    found = engine()
    found.mesh.heartbeat.waited = 1.5
    assert found.seconds_waited() == 1.5
    monkeypatch.setattr(found, "device", torch.device("cuda"))
    assert found.seconds_waited() is None


def test_deepspeeds_name_for_the_configuration_reads_as_a_ds_config():
    """``context.reconcile_ds_config(engine._config)``, as Determined's documentation writes it."""
    engine, *_ = zero_trial.initialize(
        model=nn.Linear(2, 2), config={"train_batch_size": 4, "gradient_accumulation_steps": 2}
    )
    found = engine._config
    assert (found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps) == (
        4,
        2,
        2,
    )
