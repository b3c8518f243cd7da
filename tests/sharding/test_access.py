"""Tests for zero_trial/sharding/access.py: values against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import TinyLM, make_engine, tokens, train_dense, train_engine
from tests.support.pool import Pools
from zero_trial.errors import TrialError
from zero_trial.zero import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

STAGES: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2-micro": {"stage": 2, "reduce_every": "micro"},
    "zero3": {"stage": 3, "param_persistence_threshold": 100},
}


def reading(zero: dict[str, Any], accumulation: int) -> float:
    """The largest difference to dense training, over weights, gradients and moments, after two steps and one backward."""
    engine = make_engine(TinyLM, {"zero_optimization": zero, "gradient_accumulation_steps": accumulation})
    train_engine(engine, range(2))
    dense, _ = train_dense(TinyLM, 2, 8, 0.0)
    reference = dict(dense.named_parameters())
    worst = max(
        (safe_get_full_fp32_param(p) - reference[n]).abs().max().item() for n, p in engine.module.named_parameters()
    )
    param = engine.module.blocks[0].up.weight
    assert safe_get_full_grad(param) is None, "no gradient of this step yet"
    assert safe_get_full_optimizer_state(param, "nothing") is None
    dense(tokens(2, 8)).backward()
    micro, size, rank = engine.train_micro_batch_size_per_gpu(), engine.dp_world_size, engine.global_rank
    for turn in range(accumulation):
        start = (turn * size + rank) * micro
        engine.backward(engine(tokens(2, 8)[start : start + micro]))
        if turn < accumulation - 1:
            engine.step()
    for name, own in engine.module.named_parameters():
        grad = safe_get_full_grad(own)
        assert grad is not None
        worst = max(worst, (grad - reference[name].grad).abs().max().item())  # type: ignore[operator]
        moment = safe_get_full_optimizer_state(own, "exp_avg")
        assert moment is not None
        assert moment.shape == own.shape
    return worst


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_full_values_are_those_of_dense_training(ranks: Pools, stage: str, accumulation: int) -> None:
    for worst in ranks(2).run(reading, STAGES[stage], accumulation):
        assert worst < 2e-6


def writing(zero: dict[str, Any], bf16: bool) -> list[bool]:
    engine = make_engine(TinyLM, {"zero_optimization": zero, "bf16": {"enabled": bf16}})
    train_engine(engine, range(1))
    param, other = engine.module.blocks[0].up.weight, engine.module.blocks[0].down.weight
    before = safe_get_full_fp32_param(other)
    value = torch.arange(param.numel(), dtype=torch.float32).view(param.shape) / param.numel() + 1e-4
    safe_set_full_fp32_param(param, value)
    out = [torch.equal(safe_get_full_fp32_param(param), value), torch.equal(safe_get_full_fp32_param(other), before)]
    out.append(torch.equal(engine.module_state_dict()["blocks.0.up.weight"], value.to(param.dtype)))
    safe_set_full_optimizer_state(param, value * 1e-9, "exp_avg")
    moment, rest = safe_get_full_optimizer_state(param, "exp_avg"), safe_get_full_optimizer_state(other, "exp_avg")
    out.append(torch.equal(moment, value * 1e-9))  # type: ignore[arg-type]
    out.append(rest is not None and not torch.equal(rest, torch.zeros_like(rest)))
    train_engine(engine, range(1, 2))
    out.append((safe_get_full_fp32_param(param) - value).abs().max().item() < 0.02)
    return out


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_setting_full_values(ranks: Pools, stage: str, bf16: bool) -> None:
    assert ranks(2).run(writing, STAGES[stage], bf16) == [[True] * 6] * 2


def faults() -> list[str]:
    engine = make_engine(TinyLM, {"zero_optimization": {"stage": 1}})
    param = engine.module.blocks[0].up.weight
    found = []
    for call in (
        lambda: safe_set_full_fp32_param(param, torch.zeros(3)),
        lambda: safe_set_full_optimizer_state(param, torch.zeros_like(param), "exp_avg"),
        lambda: safe_get_full_fp32_param(nn.Parameter(torch.zeros(2, 2))),
    ):
        try:
            call()
            found.append("accepted")
        except TrialError as error:
            found.append(str(error))
    return found


def test_mistakes_are_told(ranks: Pools) -> None:
    for shape, state, stranger in ranks(2).run(faults):
        assert (
            "blocks.0.up.weight: the value does not have the parameter's shape: got (3,), expected (192, 48)" in shape
        )
        assert "exp_avg: the optimizer has no such state yet" in state
        assert "belongs to no engine" in stranger


def local_parts() -> tuple[int, int, bool]:
    """Elements that this rank holds, elements in all, and that the parts in rank order are the whole."""
    import torch

    from tests.support.models import TinyLM, make_engine, train_engine
    from zero_trial import zero

    engine = make_engine(TinyLM, {"zero_optimization": {"stage": 2}})
    train_engine(engine, range(2))
    same, sizes = True, []
    for param in dict.fromkeys(engine.module.parameters()):
        for local, full in (
            (zero.safe_get_local_fp32_param(param), zero.safe_get_full_fp32_param(param)),
            (
                zero.safe_get_local_optimizer_state(param, "exp_avg"),
                zero.safe_get_full_optimizer_state(param, "exp_avg"),
            ),
        ):
            assert local is not None and full is not None
            parts = engine.mesh.shard.gather_json(local.tolist(), "parts")
            same = same and torch.equal(torch.tensor([value for part in parts for value in part]), full.flatten())
        sizes.append(local.numel())
        assert zero.safe_get_local_grad(param) is None
    return sum(sizes), sum(p.numel() for p in engine.module.parameters()), same


def test_local_parts_make_the_whole(ranks) -> None:  # type: ignore[no-untyped-def]
    results = ranks(2).run(local_parts)
    assert all(same for _, _, same in results)
    assert sum(held for held, _, _ in results) == results[0][1]
