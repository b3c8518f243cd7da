"""From ds_config's words to a pipeline's schedule and policy."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.ds_config.keys_running import SCHEDULE_CHUNKS
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.engine.pipeline_build import (
    ROOM,
    PipelineSettings,
    choose_policy,
    pipeline_settings,
    price_line,
    sharding_of,
    training_schedule,
    weigh,
)
from zero_trial.errors import ConfigError
from zero_trial.pipeline.generators import RECIPES
from zero_trial.pipeline.lowering import ModelBytes, choose
from zero_trial.pipeline.schedule import ParameterLifetime, ReductionTiming
from zero_trial.precision import dtype_policy
from zero_trial.sharding.plan import plan_for_stage

FOUR = ModelBytes(parameters=400, gradients=400, optimizer=800, ranks=4)


def settings(stage: int = 3, zero: dict[str, Any] | None = None, **pipeline: Any) -> PipelineSettings:
    zero = {"stage": stage, **(zero or {})}
    return pipeline_settings(
        read_ds_config({"zero_optimization": zero, "pipeline": pipeline, "mesh": {"pipe": pipeline.pop("stages", 2)}})
    )


def test_nothing_said():
    assert settings() == PipelineSettings(stages=2)


KEYS: dict[str, tuple[Any, str, Any]] = {
    # key: value, what of the settings becomes what
    "pipeline.schedule": ("zero_bubble", "schedule", "zb_h1"),
    "pipeline.zero_policy": ("micro", "reduction", ReductionTiming.MICRO),
    "pipeline.partition_method": ("type:Block", "partition_method", "type:Block"),
    "pipeline.activation_checkpoint_interval": (3, "activation_checkpoint_interval", 3),
}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_changes_the_settings(key: str):
    value, name, becomes = KEYS[key]
    assert getattr(settings(**{key.partition(".")[2]: value}), name) == becomes != getattr(settings(), name)


def test_chunks_per_rank():
    assert settings(schedule="interleaved", chunks_per_rank=3).chunks_per_rank == 3
    assert [settings(schedule=name).chunks_per_rank for name in ("1f1b", "interleaved", "zb_v")] == [1, 2, 2]


@pytest.mark.parametrize(
    ("stage", "words", "expected"),
    [
        (3, {"zero_policy": "free"}, (ParameterLifetime.FREE, None)),
        (
            3,
            {"zero_policy": "hold", "zero": {"reduce_every": "micro"}},
            (ParameterLifetime.HOLD, ReductionTiming.MICRO),
        ),
        (3, {"zero": {"reshard_after": "forward"}}, (ParameterLifetime.FREE, None)),
        (
            3,
            {"zero": {"reshard_after": "step"}, "zero_policy": "boundary"},
            (ParameterLifetime.HOLD, ReductionTiming.BOUNDARY),
        ),
        (2, {"zero_policy": "hold"}, (None, None)),  # parameters stay all the same
        (2, {"zero": {"reduce_every": "micro"}}, (None, ReductionTiming.MICRO)),
    ],
)
def test_older_keys_say_the_same_of_a_pipeline(stage: int, words: dict[str, Any], expected: tuple[Any, Any]):
    found = settings(stage, **words)
    assert (found.parameters, found.reduction) == expected


def test_the_words_are_those_of_the_recipes():
    training = {name: recipe for name, recipe in RECIPES.items() if recipe.training}
    assert set(SCHEDULE_CHUNKS) == set(training)
    assert {name: (row.chunks if row.fixed else None) for name, row in training.items()} == dict(SCHEDULE_CHUNKS)


@pytest.mark.parametrize("name", SCHEDULE_CHUNKS)
def test_a_schedule_has_all_that_a_step_needs(name: str):
    schedule = training_schedule(settings(schedule=name), choose(sharding_of(plan_for_stage(3))), 4)
    assert (schedule.stages, schedule.micro_batches, schedule.steps, schedule.training) == (2, 4, True, True)
    assert schedule.parameters is ParameterLifetime.HOLD and schedule.reduction is ReductionTiming.BOUNDARY


def test_the_policy_follows_the_memory_of_the_rank_that_needs_most():
    """Looped breadth first holds one of two chunks at a time: 300 + 300 + 200 instead of 500 + 500 + 200."""
    open_one, plan = settings(schedule="looped_bfs"), plan_for_stage(3)
    small = ModelBytes(100, 100, 200, 4)

    def chosen(limit: int | None, one: PipelineSettings = open_one) -> Any:
        return choose_policy(one, plan, [small, FOUR], 4, limit)

    assert chosen(None).policy.parameters is ParameterLifetime.HOLD
    assert chosen(int(1000 / ROOM) + 1).policy.parameters is ParameterLifetime.HOLD
    tight = chosen(int(900 / ROOM))
    assert (tight.policy.parameters, tight.bytes, tight.volume, tight.fits) == (ParameterLifetime.CHUNK, 800, 2.5, True)
    none = chosen(int(100 / ROOM))
    assert (none.policy.parameters, none.fits) == (ParameterLifetime.CHUNK, False)
    asked = chosen(1, settings(schedule="looped_bfs", zero_policy="hold", zero={"reduce_every": "boundary"}))
    assert (asked.policy.parameters, asked.fits) == (ParameterLifetime.HOLD, False)


def test_bytes_by_dtype():
    assert weigh(10, dtype_policy("fp32"), 2) == ModelBytes(parameters=40, gradients=40, optimizer=80, ranks=2)
    assert weigh(10, dtype_policy("bf16"), 2) == ModelBytes(parameters=20, gradients=20, optimizer=120, ranks=2)
    several = dtype_policy("bf16", accumulation_steps=4)
    assert weigh(10, several, 1).gradients == 40


def test_each_stage_has_its_weight():
    with pytest.raises(ConfigError, match="one weight for each pipeline stage: got 1, expected 2"):
        choose_policy(settings(), plan_for_stage(0), [FOUR], 4, None)


def test_the_line_at_the_start():
    one = settings(2, schedule="1f1b")
    chosen = choose_policy(one, plan_for_stage(2), [FOUR, FOUR], 8, None)
    assert price_line(one, chosen, 8, 4, 2) == (
        "pipeline: 1f1b, 2 stages x 1 chunk, 8 micro-batches, bubble 11.1%; ZeRO-2, parameters stay, gradients reduced at the boundary: "
        "0.0 MiB before activations, 2 x (D-1)/D of a stage's parameters moved per step, D = 4"
    )
    assert "D =" not in price_line(one, chosen, 8, 1, 2)
