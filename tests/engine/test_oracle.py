"""Every ZeRO stage against dense single-process training from the same seed.

Tolerance 2e-6 on parameters after six AdamW steps in fp32: the only difference is the order of sums
of gradients, at most 2e-7 per step, which Adam with lr = eps = 1e-3 passes on at no more
than its own size (tests/support/models.py), with either sign.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch import nn

from tests.support.models import TinyLM, largest_difference, make_engine, train_dense, train_engine
from tests.support.pool import Pools

STEPS, BATCH = 6, 16
TOLERANCE = 2e-6

STAGES: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero2-micro": {"stage": 2, "reduce_every": "micro"},
    "zero2-none": {"stage": 2, "set_grads_to_none": True},
    "zero3": {"stage": 3, "param_persistence_threshold": 1000, "module_granularity_threshold": 1},
    "zero3-free": {
        "stage": 3,
        "param_persistence_threshold": 0,
        "reshard_after": "forward",
        "module_granularity_threshold": 1,
        "set_grads_to_none": True,
    },
}


@cache
def dense(clip: float) -> nn.Module:
    """Plain torch, once for all cases that a rank meets."""
    return train_dense(TinyLM, STEPS, BATCH, clip)[0]


def against_dense(zero: dict[str, Any], accumulation: int, clip: float, mesh: dict[str, int] | None) -> float:
    """Train on this rank; return the largest difference of a parameter to plain torch's."""
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": zero,
    }
    engine = make_engine(TinyLM, config | ({"mesh": mesh} if mesh else {}))
    train_engine(engine, range(STEPS), BATCH)
    return largest_difference(engine, dense(clip))


# Stages on one, two and four ranks, with one and four micro-batches, clipped and not; two
# ranks meet every pair of the latter. One rank sums nothing with others, so that the most that a
# step does is all that it can do wrong.
PAIRS = [(1, 0.5), (1, 0.0), (4, 0.0), (4, 0.5)]
Axes = dict[str, int]
CASES: list[tuple[int, str, int, float, Axes | None]] = [
    *((1, stage, 4, 0.5, None) for stage in ("zero0", "zero2", "zero3-free")),
    *((2, stage, *pair, None) for i, stage in enumerate(STAGES) for pair in PAIRS[i % 2 :: 2]),
    *((4, stage, *PAIRS[i % 4], None) for i, stage in enumerate(STAGES)),
    *((4, stage, 1, 0.5, {"shard": 2, "replica": 2}) for stage in ("zero1", "zero2", "zero3-free")),
]


@pytest.mark.parametrize(("world", "stage", "accumulation", "clip", "mesh"), CASES)
def test_equals_dense_training(
    ranks: Pools, world: int, stage: str, accumulation: int, clip: float, mesh: Axes | None
) -> None:
    assert max(ranks(world).run(against_dense, STAGES[stage], accumulation, clip, mesh)) <= TOLERANCE


def trace(zero: dict[str, Any], bf16: bool, accumulation: int) -> list[float]:
    config = {
        "train_batch_size": BATCH,
        "bf16": {"enabled": bf16},
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": zero,
    }
    return train_engine(make_engine(TinyLM, config), range(STEPS), BATCH)


@pytest.mark.parametrize(("bf16", "accumulation"), [(False, 2), (True, 1)])
def test_loss_traces_of_all_stages_are_bit_equal(ranks: Pools, bf16: bool, accumulation: int) -> None:
    """Clipping is on: the global norm must have the same bits at every stage too. Gradients are
    reduced at the boundary in all of them."""
    first = ranks(2).run(trace, {"stage": 0}, bf16, accumulation)
    for zero in STAGES.values():
        same_order = zero | {"reduce_every": "boundary"}
        assert ranks(2).run(trace, same_order, bf16, accumulation) == first
