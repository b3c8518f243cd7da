"""Tests for zero_trial/sharding/unshard.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import TinyLM, make_engine, tokens, train_engine
from tests.support.pool import Pools
from zero_trial.sharding.unshard import ModuleHook
from zero_trial.zero import GatheredParameters

STAGES: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero2": {"stage": 2},
    "zero3": {
        "stage": 3,
        "param_persistence_threshold": 0,
        "reshard_after": "forward",
        "module_granularity_threshold": 1,
    },
}


def test_a_copy_of_a_hook_does_nothing() -> None:
    calls: list[Any] = []
    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(ModuleHook(lambda *args: calls.append(args)))
    twin = copy.deepcopy(layer)
    layer(torch.ones(2))
    assert len(calls) == 1
    twin(torch.ones(2))
    assert len(calls) == 1


def test_a_hook_returns_what_it_calls_returns() -> None:
    assert ModuleHook(lambda a, b=0: a + b)(1, b=2) == 3


def copies(zero: dict[str, Any]) -> list[bool]:
    """A deep copy of a sharded module: an ordinary module with values of its own, which trains without the engine."""
    engine = make_engine(TinyLM, {"zero_optimization": zero})
    train_engine(engine, range(2))
    with GatheredParameters(engine.module):
        twin = copy.deepcopy(engine.module)
        same = all(torch.equal(p, q) for p, q in zip(twin.parameters(), engine.module.parameters(), strict=True))
    batch = tokens(7, 2)
    traffic = engine.mesh.counters.table()
    loss = twin(batch)
    loss.backward()
    grads = all(p.grad is not None and not p.grad.isnan().any() for p in twin.parameters())
    keys = twin.state_dict().keys()
    twin.load_state_dict(twin.state_dict())
    silent = engine.mesh.counters.table() == traffic
    before = [p.detach().clone() for p in twin.parameters()]
    expected = engine(batch).item()
    train_engine(engine, range(2, 3))
    apart = all(torch.equal(p, q) for p, q in zip(twin.parameters(), before, strict=True))
    return [same, grads, silent, apart, loss.item() == expected, keys == engine.module_state_dict().keys()]


@pytest.mark.parametrize("stage", STAGES)
def test_a_deep_copy_is_an_ordinary_module(ranks: Pools, stage: str) -> None:
    assert ranks(2).run(copies, STAGES[stage]) == [[True] * 6] * 2
