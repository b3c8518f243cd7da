"""Models that are not fp32: float64 trains in float64, 16-bit and mixed ones as they came, buffers
of every dtype stay what they are."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.dense import STAGES, Case, Turn, build_engine, train_dense, train_ranks
from tests.support.models import ADAMW
from tests.support.pool import Pools
from zero_trial import zero


class Wide(nn.Module):
    """float64, with running statistics and buffers that no precision is for."""

    def __init__(self) -> None:
        super().__init__()
        # a bias before a norm has a gradient of rounding errors alone
        self.first = nn.Linear(5, 12, bias=False)
        self.norm = nn.BatchNorm1d(12)
        self.blocks = nn.ModuleList([nn.Linear(12, 12) for _ in range(2)])
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("bytes", torch.arange(5, dtype=torch.uint8))
        self.double()
        self.register_buffer("phase", torch.tensor([1j, 2 - 1j]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def loss(model: Any, turn: Turn) -> torch.Tensor:
    return (model(turn.normal(4, 5).double()) - 1).square().mean()


def in_double(stage: str, accumulation: int, clip: float, folder: str) -> tuple[float, list[str], bool]:
    """(largest difference to plain torch's float64, dtypes of all that is kept, a checkpoint brings
    back every bit)."""
    case = Case(Wide, loss, accumulation=accumulation, clip=clip)
    engine = build_engine(case, STAGES[stage])
    *_, (dense, _) = zip(train_dense(case, 2), train_ranks(case, engine), strict=True)
    mine = {name: zero.safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    gap = max((mine[name] - value).abs().max().item() for name, value in dense.named_parameters())
    state = engine.module_state_dict()
    moments = [
        value
        for row in engine.optimizer.state.values()
        for value in row.values()
        if torch.is_tensor(value) and value.dim()
    ]
    dtypes = sorted({str(value.dtype) for value in (*state.values(), *moments)})
    engine.save_checkpoint(folder, tag=stage)
    other = build_engine(case, STAGES[stage])
    other.load_checkpoint(folder, tag=stage)
    again = other.module_state_dict()
    same = [torch.equal(again[name], value) and again[name].dtype == value.dtype for name, value in state.items()]
    return gap, dtypes, all(same)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("accumulation", "clip"), [(1, 0.0), (2, 0.1)])
def test_a_float64_model_trains_in_float64(
    ranks: Pools, tmp_path: Path, stage: str, accumulation: int, clip: float
) -> None:
    """Tolerance 1e-12, where fp32 anywhere on the way would leave 1e-8: gradients, messages, norm,
    moments and masters are float64.

    Plain torch adds up in another order, which changes a gradient by about 1e-16, and Adam with its
    eps of 1e-3 a weight by no more.
    """
    for gap, dtypes, same in ranks(2).run(in_double, stage, accumulation, clip, str(tmp_path)):
        assert gap <= 1e-12
        assert dtypes == ["torch.bool", "torch.complex64", "torch.float64", "torch.int64", "torch.uint8"]
        assert same


class Mixed(nn.Module):
    """bf16 matrices, fp32 norms, and a frozen 16-bit table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 12, dtype=torch.bfloat16).requires_grad_(False)
        self.norm = nn.LayerNorm(12)
        self.last = nn.Linear(12, 3, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.table(x).float()).bfloat16())


def mixed(stage: str, config: dict[str, Any]) -> tuple[dict[str, str], list[float]]:
    torch.manual_seed(1)
    engine, *_ = zero_trial.initialize(
        model=Mixed(),
        config={"train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW, "zero_optimization": STAGES[stage]} | config,
    )
    losses = []
    for _ in range(0 if config else 20):
        value = (engine(torch.arange(7)).float() - 1).square().mean()
        losses.append(value.item())
        engine.backward(value)
        engine.step()
    kept = {name: str(value.dtype).removeprefix("torch.") for name, value in engine.module_state_dict().items()}
    return kept, losses


@pytest.mark.parametrize("stage", ["zero0", "zero2", "zero3-free"])
def test_a_mixed_model_keeps_its_dtypes_where_nothing_is_asked_for(ranks: Pools, stage: str) -> None:
    for kept, losses in ranks(2).run(mixed, stage, {}):
        assert kept == {
            "table.weight": "bfloat16",
            "norm.weight": "float32",
            "norm.bias": "float32",
            "last.weight": "bfloat16",
            "last.bias": "bfloat16",
        }
        assert losses[-1] < losses[0]


def test_a_mixed_model_is_cast_where_sixteen_bits_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zero_trial"):
        kept, _ = mixed("zero0", {"bf16": {"enabled": True}})
    assert set(kept.values()) == {"bfloat16"}
    assert [line for line in caplog.messages if "cast" in line] == [
        "parameters given as 2 bfloat16, 2 float32 are cast to bfloat16, with fp32 masters; "
        "leave the section out of ds_config to keep them as they are"
    ]


def test_a_float64_checkpoint_in_an_fp32_model_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"train_batch_size": 4, "optimizer": ADAMW}
    wide, *_ = zero_trial.initialize(model=nn.Linear(3, 2).double(), config=config)
    wide.save_checkpoint(str(tmp_path), tag="a")
    narrow, *_ = zero_trial.initialize(model=nn.Linear(3, 2), config=config)
    with caplog.at_level(logging.WARNING, "zero_trial"):
        narrow.load_checkpoint(str(tmp_path), tag="a")
    assert any("float64" in line and "rounded to float32" in line for line in caplog.messages)
    assert torch.equal(narrow.module.weight, wide.module.weight.float())
