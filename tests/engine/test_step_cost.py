"""Behaviour of a step's cost: what an engine does for each parameter, counted. Times depend on the
machine, counts do not."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zero_trial

BLOCK = 10  # layers of two parameters each
PACKAGE = f"{Path(zero_trial.__file__).parent}/"


class Blocks(nn.Module):
    """Small linear layers in blocks of ten."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(*[nn.Linear(4, 4) for _ in range(BLOCK)]) for _ in range(layers // BLOCK)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Ops(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def ops_of(step: Callable[[], None]) -> int:
    with Ops() as ops:
        step()
    return ops.count


def calls_of(step: Callable[[], None]) -> int:
    """Calls of functions of this package."""
    seen: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            seen[frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(before)
    return seen.total()


def bare(layers: int) -> Callable[[], None]:
    model, x = Blocks(layers), torch.ones(2, 4)

    def step() -> None:
        model.zero_grad()
        model(x).backward()

    return step


def trained(layers: int, stage: int) -> Callable[[], None]:
    """A whole step, clipping included, of an engine that has found its order."""
    zero = {"stage": stage, "reduce_bucket_size": 10**6, "stage3_param_persistence_threshold": 0}
    config = {
        "train_batch_size": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    engine, *_ = zero_trial.initialize(model=Blocks(layers), config=config)
    x = torch.ones(2, 4)

    def step() -> None:
        engine.backward(engine(x))
        engine.step()

    for _ in range(3):
        step()
    return step


def per_parameter(count: Callable[[Callable[[], None]], int], build: Callable[[int], Callable[[], None]]) -> float:
    """How much of it grows with the model, by parameter: two sizes, so that what a step costs
    anyway falls out."""
    small, large = count(build(20)), count(build(60))
    return (large - small) / 80


@pytest.mark.parametrize(("stage", "most"), [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.4)])
def test_what_a_step_costs(stage: int, most: float) -> None:
    """Gradients below 16 Ki elements land together, and norm, update and publication work on whole
    units: torch is asked for nothing per parameter, and for little per unit (at stage 3 all blocks
    are in one group). A parameter costs the call of its hook; at stage 3 a block of twenty has
    hooks of its own."""
    assert per_parameter(ops_of, lambda layers: trained(layers, stage)) == per_parameter(ops_of, bare)
    assert ops_of(trained(20, stage)) - ops_of(bare(20)) <= 30
    assert per_parameter(calls_of, lambda layers: trained(layers, stage)) <= most
