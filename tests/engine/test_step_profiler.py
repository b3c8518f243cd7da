"""The profile of one step of an engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_trial
from tests.support.models import TinyLM, make_engine, tokens
from tests.support.pool import Pools
from zero_trial.engine.profile import StepProfiler


def profiled(zero: dict[str, Any] | None = None, **section: Any) -> zero_trial.Engine:
    config = {"train_batch_size": 4, "flops_profiler": {"enabled": True} | section}
    return make_engine(TinyLM, config | ({"zero_optimization": zero} if zero else {}))


def train(engine: zero_trial.Engine, step: int) -> None:
    engine.backward(engine(tokens(step, 4 // engine.dp_world_size)))
    engine.step()


def of(engine: zero_trial.Engine) -> StepProfiler:
    assert engine.observer.profiler is not None
    return engine.observer.profiler


# (samples x 8 positions) x weights of all products: three blocks of 48 x 192 twice, and the head
WEIGHTS = 3 * 2 * 48 * 192 + 48 * 50
FORWARD = 2 * 4 * 8 * WEIGHTS


@pytest.mark.parametrize("stage", [0, 3])
def test_counted_in_one_step_and_timed_in_the_next(stage: int, caplog: pytest.LogCaptureFixture):
    engine = profiled({"stage": stage, "param_persistence_threshold": 0}, profile_step=2)
    train(engine, 0)
    train(engine, 1)
    assert of(engine).profile is None
    with caplog.at_level(logging.INFO, "zero_trial"):
        train(engine, 2)
        train(engine, 3)
    profile = of(engine).profile
    assert profile is not None
    assert profile.forward_flops == FORWARD
    # The embedding's output needs a gradient, so that every product has two in backward.
    assert profile.backward_flops == 2 * FORWARD
    assert profile.forward_ms > 0 and profile.backward_ms > 0
    assert profile.parameters == sum(param.numel() for param in engine.module.parameters())
    reports = [record.getMessage() for record in caplog.records if "FLOPs profile" in record.getMessage()]
    assert len(reports) == 1 and reports[0].startswith("FLOPs profile of rank 0, step 2, one micro-batch of 4 samples")
    assert "blocks: ModuleList" in reports[0]
    assert not any(module._forward_hooks for module in engine.module.blocks.modules() if stage == 0)


def test_what_the_section_says(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "a" / "profile.txt"
    options = {"detailed": False, "module_depth": 1, "top_modules": 2, "recompute_fwd_factor": 0.5}
    engine = profiled(output_file=str(path), **options)
    with caplog.at_level(logging.INFO, "zero_trial"):
        train(engine, 0)
        train(engine, 1)
    text = path.read_text()
    assert "FLOPs profile" not in caplog.text
    assert "blocks: ModuleList" not in text and "depth 2" not in text
    assert "depth 1: ModuleList" in text and "depth 1: Linear" in text
    assert "without recomputation (0.5 of forward)" in text


def test_evaluations_are_passed_by():
    engine = profiled()
    engine.eval()
    engine(tokens(5, 4))
    engine.train()
    loss = engine(tokens(0, 4))
    engine.eval()
    engine(tokens(6, 4))
    engine.train()
    engine.backward(loss)
    engine.step()
    train(engine, 1)
    profile = of(engine).profile
    assert profile is not None and profile.forward_flops == FORWARD


def test_training_is_not_changed():
    losses = []
    for enabled in (False, True):
        engine = profiled(enabled=enabled)
        run = []
        for step in range(3):
            loss = engine(tokens(step, 4))
            engine.backward(loss)
            engine.step()
            run.append(loss.item())
        losses.append(run)
    assert losses[0] == losses[1]


def two_ranks() -> tuple[bool, int]:
    engine = profiled({"stage": 3, "param_persistence_threshold": 0})
    for step in range(2):
        train(engine, step)
    profiler = engine.observer.profiler
    if profiler is None or profiler.profile is None:
        return profiler is not None, 0
    return True, profiler.profile.forward_flops


def test_rank_0_profiles_its_own_share(ranks: Pools):
    assert ranks(2).run(two_ranks) == [(True, FORWARD // 2), (False, 0)]


def test_off_is_the_null_object():
    assert profiled(enabled=False).observer.profiler is None
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
