"""What goes wrong in a pipeline is said on every rank, in time: which rank, stage, micro-batch and
action."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.fresh_ranks import run_fresh
from tests.support.pipelines import batches, layers, make_engine
from tests.support.pool import Pools
from zero_trial.errors import ConfigError, TrialError, ZeroTrialError
from zero_trial.pipeline import LayerSpec, PipelineModule


class Faulty(nn.Module):
    """Raises at its third forward, or in the backward of it."""

    def __init__(self, backward: bool = False) -> None:
        super().__init__()
        self.backward = backward
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3 and not self.backward:
            raise ValueError("no more\nof this")
        if self.calls == 3:
            x.register_hook(self.refuse)
        return x * 1

    def refuse(self, gradient: torch.Tensor) -> None:
        raise ValueError("no way back")


def faulty(place: int, backward: bool, schedule: str) -> tuple[str, float, str]:
    """The error of a step with a layer that fails, how long it took, and whether another engine
    works afterwards."""
    parts = layers(8)
    parts[place] = LayerSpec(Faulty, backward)
    engine = make_engine(parts, 4, {"stage": 1}, 8, pipeline={"schedule": schedule, "partition_method": "uniform"})
    data = batches(0, 8, 3) if engine.is_first_stage() else None
    begin, text = time.monotonic(), ""
    try:
        engine.train_batch(data)
    except ZeroTrialError as error:
        text = str(error)
    seconds = time.monotonic() - begin
    try:
        engine.eval_batch(data)
    except TrialError as error:
        text = text if "this pipeline has failed before" in str(error) else str(error)
    engine.destroy()
    again = make_engine(layers(8), 4, {"stage": 1}, 8)
    loss = again.train_batch(batches(0, 8, 1) if again.is_first_stage() else None).item()
    again.destroy()
    return text, seconds, "works" if 3 < loss < 5 else str(loss)


@pytest.mark.parametrize(
    ("place", "backward", "schedule", "rank", "action"),
    [(4, False, "1f1b", 1, "1F2"), (7, True, "1f1b", 2, "2B2"), (4, True, "zb_h1", 1, "1I2")],
)
def test_a_layer_that_fails_is_named_on_every_rank(
    ranks: Pools, place: int, backward: bool, schedule: str, rank: int, action: str
) -> None:
    for text, seconds, after in ranks(4).run(faulty, place, backward, schedule):
        assert (
            f"rank {rank}, pipeline stage {rank} of 4, micro-batch 2, action {action}: a pipeline stage failed" in text
        )
        assert "ValueError: no " in text
        assert "test_behaviour_pipeline_faults.py, line" in text
        assert seconds < 15
        assert after == "works"


def train_until_killed(victim: int) -> str:
    zero_trial.init_distributed(timeout=30)
    engine = make_engine(layers(4), 3, {"stage": 1}, 4)
    data = batches(0, 4, 50) if engine.is_first_stage() else None
    try:
        for step in range(50):
            if step == 3 and engine.global_rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            engine.train_batch(data)
    except ZeroTrialError as error:
        return str(error)
    return ""


def test_a_killed_middle_stage_ends_the_others() -> None:
    first, killed, last = run_fresh(3, train_until_killed, 1)
    assert killed.code == -signal.SIGKILL
    assert all("rank 1" in end.value for end in (first, last))


def refused() -> list[str]:
    engine = make_engine(layers(2), 2, {"stage": 1}, 2)
    found = []
    for call in (lambda: engine(torch.zeros(1)), lambda: engine.backward(torch.zeros(1)), engine.step):
        try:
            call()
        except TrialError as error:
            found.append(str(error))
    engine.destroy()
    return found


def test_verbs_of_other_engines_are_refused(ranks: Pools) -> None:
    for found in ranks(2).run(refused):
        assert len(found) == 3
        assert all("only train_batch() and eval_batch() are accessible in pipeline mode" in text for text in found)


def no_scalar() -> str:
    # no loss_fn: logits as the loss
    module = PipelineModule(layers(2), num_stages=2, seed_layers=True)
    engine = make_engine(module, 2, {"stage": 0}, 1)
    try:
        engine.train_batch(batches(0, 1, 1) if engine.is_first_stage() else None)
    except ZeroTrialError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_a_loss_that_is_no_scalar_is_refused_on_every_rank(ranks: Pools) -> None:
    assert all("the loss is not a scalar" in text for text in ranks(2).run(no_scalar))


def inside_init() -> str:
    try:
        with zero_trial.zero.Init():
            PipelineModule(layers(2), num_stages=2)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_pipeline_is_not_built_inside_zero_init(ranks: Pools) -> None:
    assert all("a pipeline cannot be built inside zero.Init" in text for text in ranks(2).run(inside_init))
