"""The engine with the native kernels and with torch's: the same loss trace, and checkpoints that go from one to the other.

Tolerance 2e-6, as in the oracle: both round each step of size lr = 1e-3 to about 1e-7.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.models import TinyLM, make_engine, train_engine
from tests.support.pool import Pools
from zero_trial.ops import backend

STEPS, BATCH, TOLERANCE = 8, 16, 2e-6
pytestmark = pytest.mark.skipif(backend().native is None, reason=f"no native kernels: {backend().why}")


def config(stage: int, torch_adam: bool, **more: Any) -> dict[str, Any]:
    params = {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": torch_adam}
    return {
        "train_batch_size": BATCH,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": stage},
        **more,
    }


def trace(stage: int, torch_adam: bool) -> tuple[str, list[float]]:
    engine = make_engine(TinyLM, config(stage, torch_adam))
    assert engine.optimizer is not None
    return type(engine.optimizer.base).__name__, train_engine(engine, range(STEPS), BATCH)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_loss_trace_is_that_of_torch(ranks: Pools, stage: int) -> None:
    for (ours, a), (theirs, b) in zip(ranks(2).run(trace, stage, False), ranks(2).run(trace, stage, True), strict=True):
        assert (ours, theirs) == ("FusedAdam", "AdamW")
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) <= TOLERANCE


def interrupted(folder: str, first_torch: bool, then_torch: bool) -> list[float]:
    engine = make_engine(TinyLM, config(2, first_torch))
    losses = train_engine(engine, range(STEPS // 2), BATCH)
    engine.save_checkpoint(folder, "half")
    engine = make_engine(TinyLM, config(2, then_torch))
    engine.load_checkpoint(folder, "half")
    return losses + train_engine(engine, range(STEPS // 2, STEPS), BATCH)


def test_a_resumed_run_has_the_same_bits(ranks: Pools, tmp_path: Path) -> None:
    whole = [losses for _, losses in ranks(2).run(trace, 2, False)]
    assert ranks(2).run(interrupted, str(tmp_path), False, False) == whole


@pytest.mark.parametrize("first_torch", [False, True])
def test_a_checkpoint_goes_from_one_to_the_other(ranks: Pools, tmp_path: Path, first_torch: bool) -> None:
    whole = [losses for _, losses in ranks(2).run(trace, 2, False)]
    for a, b in zip(ranks(2).run(interrupted, str(tmp_path), first_torch, not first_torch), whole, strict=True):
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) <= TOLERANCE
