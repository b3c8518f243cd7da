"""A schedule that a script's arguments choose, by DeepSpeed's names."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch import nn

from zero_trial.engine.lr_schedules import VALID_LR_SCHEDULES, build_scheduler
from zero_trial.stand_in import deepspeed_schedules
from zero_trial.stand_in.deepspeed_schedules import add_tuning_arguments, get_config_from_args, get_lr_from_config


def section(*words: str) -> tuple[dict[str, object] | None, str | None]:
    return get_config_from_args(add_tuning_arguments(argparse.ArgumentParser()).parse_args(list(words)))


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_arguments_make_a_schedule_that_can_be_built(name: str) -> None:
    words = ["--lr_schedule", name, "--warmup_num_steps", "7", "--cycle_min_lr", "0.5", "--lr_range_test_staircase"]
    found, why = section(*words)
    assert found is not None and why is None
    params = dict(found["params"])  # type: ignore[call-overload]
    if name in ("WarmupDecayLR", "WarmupCosineLR"):
        params["total_num_steps"] = 100  # as in DeepSpeed no argument gives it
    scheduler = build_scheduler(name, params, torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=1.0))
    assert type(scheduler).__name__ == name
    read = {"LRRangeTest": "staircase", "OneCycle": "min_lrs"}.get(name, "warmup_num_steps")
    assert getattr(scheduler, read) == {"staircase": True, "min_lrs": [0.5]}.get(read, 7)


def test_no_schedule_says_why() -> None:
    assert section() == (None, "--lr_schedule not specified on command line")
    assert section("--lr_schedule", "Linear")[0] is None


def test_the_rate_of_a_section() -> None:
    assert get_lr_from_config({"type": "OneCycle", "params": {"cycle_max_lr": 0.5}}) == (0.5, "")
    assert get_lr_from_config({"type": "WarmupLR", "params": {"warmup_max_lr": 0.25}}) == (0.25, "")
    for bad in ({"params": {}}, {"type": "Linear", "params": {}}, {"type": "WarmupCosineLR", "params": {}}):
        assert get_lr_from_config(bad)[0] is None


def test_constants_are_names_of_parameters_and_schedules() -> None:
    assert deepspeed_schedules.WARMUP_LR == "WarmupLR"
    assert deepspeed_schedules.CYCLE_MIN_LR == "cycle_min_lr"
    with pytest.raises(AttributeError):
        deepspeed_schedules.NO_SUCH_NAME  # noqa: B018
