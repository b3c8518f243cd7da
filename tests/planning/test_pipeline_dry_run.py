"""A row of a schedule, played through with one rank's layers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.planning.pipelines import LENGTH, ROWS, WIDTH, batch, pipeline, settings
from zero_trial.engine.pipeline_build import pipeline_settings, training_schedule
from zero_trial.pipeline.lowering import Sharding, choose
from zero_trial.pipeline.schedule import ParameterLifetime
from zero_trial.planning.pipeline_dry_run import Copies, HeldBytes, Parts, dry_run_rank, parts_of
from zero_trial.sharding.plan import plan_for_stage

NOTHING = Copies()


@cache
def parts(schedule: str, **options: Any) -> Parts:
    return parts_of(pipeline(), pipeline_settings(settings(schedule=schedule)))


def held(
    schedule: str = "1f1b", rank: int = 0, micro_batches: int = 4, copies: Copies = NOTHING, **more: Any
) -> HeldBytes:
    one = pipeline_settings(settings(schedule=schedule))
    policy = choose(Sharding(*plan_for_stage(3).cuts), more.pop("parameters", None))
    return dry_run_rank(parts(schedule), training_schedule(one, policy, micro_batches), rank, batch(), copies, **more)


def test_activations_are_those_of_the_micro_batches_in_flight():
    """1F1B holds two on the first of two ranks and one on the last; GPipe holds them all."""
    first, last = held(rank=0).activations, held(rank=1).activations
    assert held("1f1b", micro_batches=8).activations == first
    assert held("gpipe", micro_batches=2).activations == first
    assert held("gpipe", micro_batches=4).activations == 2 * first
    assert held("gpipe", rank=1, micro_batches=4).activations == pytest.approx(4 * last, rel=0.05)


def test_two_halves_of_a_backward_hold_on_until_the_second():
    assert held("zb_h1").activations >= held("1f1b").activations
    assert held("zb_h1", rank=1).peak > held("1f1b", rank=1).peak


def test_what_is_whole_is_counted_while_it_is():
    plain = held("looped_bfs").peak
    size = sum(param.numel() for param in parts("looped_bfs").stages[0]._given["model"].parameters())
    whole = Copies(parameter=4)
    assert held("looped_bfs", copies=whole, parameters=ParameterLifetime.HOLD).peak == plain + 4 * size
    assert plain < held("looped_bfs", copies=whole, parameters=ParameterLifetime.CHUNK).peak < plain + 4 * size
    assert held("looped_bfs", copies=Copies(gradient=4)).peak > plain
    assert held("looped_bfs", copies=Copies(4, 0, 10**9)).peak == plain, "too small to be freed"


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_fake_and_real_tensors_agree(schedule: str):
    for rank in (0, 1):
        fake, traced = (held(schedule, rank, fake=way) for way in (True, False))
        assert fake.activations == traced.activations
        # Two halves of a backward visit the weights in no fixed order.
        assert fake.peak == pytest.approx(traced.peak, rel=0.1 if schedule == "1f1b" else 0.25)


def test_recomputed_layers_hold_their_inputs_only():
    one = pipeline_settings(settings(pipeline={"activation_checkpoint_interval": 1}))
    schedule = training_schedule(one, choose(Sharding(*plan_for_stage(0).cuts)), 4)
    found = dry_run_rank(parts_of(pipeline(), one), schedule, 0, batch(), Copies())
    assert found.activations < held().activations / 3
    assert found.activations >= 2 * ROWS * LENGTH * WIDTH * 4
