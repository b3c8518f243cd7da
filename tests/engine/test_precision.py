"""Dtypes from ds_config's values, the loss scale's state machine, casts of inputs, and the forward
under torch.autocast."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from zero_trial.errors import ConfigError, Diverged
from zero_trial.sharding.precision import (
    LARGEST_SCALE,
    DynamicScale,
    StaticScale,
    autocast_dtype,
    cast_floats,
    dtype_policy,
    forward_of,
)

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("precision", "accumulation", "grad_accum", "comm", "expected"),
    [
        ("bf16", 1, None, None, (BF16, BF16, BF16)),
        ("bf16", 4, None, None, (BF16, FP32, FP32)),
        ("fp16", 4, None, None, (FP16, FP32, FP32)),
        ("fp32", 4, None, None, (FP32, FP32, FP32)),
        ("bf16", 4, "bf16", None, (BF16, BF16, BF16)),
        ("bf16", 1, "fp32", None, (BF16, FP32, FP32)),
        ("bf16", 4, None, "bf16", (BF16, FP32, BF16)),
        ("bf16", 1, None, "fp32", (BF16, BF16, FP32)),
    ],
)
def test_rule(
    precision: str, accumulation: int, grad_accum: str | None, comm: str | None, expected: tuple[torch.dtype, ...]
) -> None:
    policy = dtype_policy(
        precision, accumulation_steps=accumulation, grad_accum_dtype=grad_accum, communication_data_type=comm
    )
    assert (policy.param, policy.grad, policy.comm) == expected
    assert policy.master == FP32


def test_unknown_dtype_names_its_key() -> None:
    with pytest.raises(ConfigError) as raised:
        dtype_policy("bf16", grad_accum_dtype="fp8")
    assert raised.value.where == "data_types.grad_accum_dtype"


def run(state: DynamicScale, pattern: str) -> list[tuple[float, int]]:
    """``x`` is an overflow, ``.`` a clean step; (scale, hysteresis left) after each."""
    trace = []
    for step in pattern:
        state = state.update(step == "x").state
        trace.append((state.scale, state.hysteresis_left))
    return trace


@pytest.mark.parametrize(
    ("settings_", "pattern", "expected"),
    [
        # window of 2: the clean step after two clean steps doubles; iteration 0 counts from
        # last_overflow = -1
        ({"window": 2, "hysteresis": 1}, ".....", [8, 8, 16, 16, 32]),
        ({"window": 2, "hysteresis": 1}, "x....x", [4, 4, 4, 8, 8, 4]),
        ({"window": 1, "hysteresis": 1}, "....", [8, 16, 32, 64]),
        ({"window": 100, "hysteresis": 3}, "xxxxx", [8, 8, 4, 2, 1]),
        # hysteresis is refilled by growth only ...
        ({"window": 2, "hysteresis": 2}, "x.x...x", [8, 8, 4, 4, 4, 8, 8]),
        ({"window": 100, "hysteresis": 2}, "x.x.x", [8, 8, 4, 4, 2]),
        # ... unless it is consecutive: then any clean step refills it
        ({"window": 100, "hysteresis": 2, "consecutive_hysteresis": True}, "x.x.xx", [8, 8, 8, 8, 8, 4]),
        ({"window": 100, "hysteresis": 1, "min_scale": 3.0}, "xx", [4, 3]),
    ],
)
def test_table(settings_: dict[str, object], pattern: str, expected: list[float]) -> None:
    state = DynamicScale(scale=8.0, **settings_)  # type: ignore[arg-type]
    assert [scale for scale, _ in run(state, pattern)] == expected


def test_at_minimum_hands_back_the_error_that_ends_the_run() -> None:
    update = DynamicScale(scale=1.0, hysteresis=1).update(True)
    assert isinstance(update.error, Diverged)
    assert update.error.exit_code == 4
    assert "min_loss_scale" in str(update.error)
    assert update.state.scale == 1.0


def test_growth_stops_below_infinity() -> None:
    state = DynamicScale(scale=LARGEST_SCALE, window=1, hysteresis=1, iteration=5)
    assert state.update(False).state.scale == LARGEST_SCALE


def test_resuming_in_the_middle_gives_the_same_scales() -> None:
    start = DynamicScale(scale=8.0, window=3, hysteresis=2)
    pattern = "..x....x.x......"
    whole = run(start, pattern)
    half = start
    for step in pattern[:7]:
        half = half.update(step == "x").state
    resumed = start.restored(json.loads(json.dumps(half.to_json())))
    assert resumed == half
    assert run(resumed, pattern[7:]) == whole[7:]


def test_settings_come_from_the_config_and_counters_from_the_checkpoint() -> None:
    saved = DynamicScale(scale=8.0, window=3, hysteresis=4).to_json()
    now = DynamicScale(scale=2.0, window=7, hysteresis=2).restored(saved)
    assert (now.scale, now.window, now.hysteresis_left) == (8.0, 7, 2)
    assert DynamicScale(scale=2.0).restored(StaticScale(64.0).to_json()).scale == 2.0
    assert StaticScale(128.0).restored(saved) == StaticScale(128.0)


def test_static_never_moves() -> None:
    state = StaticScale(128.0)
    assert state.update(True).state is state


def test_floats_are_cast_and_all_else_stays():
    tokens, mask, wide = torch.arange(3), torch.tensor([True]), torch.ones(2, dtype=torch.float64)
    args, kwargs = cast_floats(
        ((torch.ones(2), tokens, "text", None), {"mask": mask, "deep": [{"x": torch.ones(1)}], "wide": wide}),
        torch.bfloat16,
    )
    assert args[0].dtype == torch.bfloat16
    assert args[1] is tokens
    assert args[2:] == ("text", None)
    assert kwargs["mask"] is mask
    assert kwargs["wide"] is wide, "64-bit inputs are meant"
    assert kwargs["deep"][0]["x"].dtype == torch.bfloat16


def test_the_forward_under_autocast():
    """Off it is the module's own; on it computes in the dtype, whatever autocast is around it."""
    module = nn.Linear(4, 4)
    assert forward_of(module, None, "cpu") == module.__call__
    call = forward_of(module, torch.bfloat16, "cpu")
    assert call(torch.ones(2, 4)).dtype == torch.bfloat16
    assert module.weight.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        assert call(torch.ones(2, 4)).dtype == torch.bfloat16


def test_the_dtype():
    assert autocast_dtype(False, "fp16") is None
    assert autocast_dtype(True, None) is torch.bfloat16
    assert autocast_dtype(True, "fp16") is torch.float16
    with pytest.raises(ConfigError, match=r"torch_autocast\.dtype"):
        autocast_dtype(True, "int8")
