"""A schedule that a script's arguments choose, by DeepSpeed's names."""

from __future__ import annotations

import argparse
from collections import deque

import pytest
import torch
from torch import nn

from zero_trial.compat.deepspeed import deepspeed_schedules
from zero_trial.compat.deepspeed.deepspeed_schedules import (
    BufferOpInstruction,
    DataParallelSchedule,
    InferenceSchedule,
    OptimizerStep,
    PipeSchedule,
    TrainSchedule,
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
)
from zero_trial.engine.lr_schedules import VALID_LR_SCHEDULES, build_scheduler


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


@pytest.mark.parametrize("kind", [TrainSchedule, InferenceSchedule])
@pytest.mark.parametrize(("micro_batches", "stages"), [(1, 1), (4, 1), (1, 3), (8, 3), (3, 4), (10, 2)])
def test_what_a_tick_sends_is_received_in_the_same_tick(
    kind: type[PipeSchedule], micro_batches: int, stages: int
) -> None:
    schedules = [kind(micro_batches, stages, stage) for stage in range(stages)]
    rows = [list(schedule) for schedule in schedules]
    passes = 2 if kind is TrainSchedule else 1
    assert {len(row) for row in rows} == {passes * (micro_batches + stages - 1)}
    for schedule, row in zip(schedules, rows, strict=True):
        found = [each for tick in row for each in tick]
        names = [each.name for each in found]
        assert (
            names.count("ForwardPass") == micro_batches and names.count("BackwardPass") == (passes - 1) * micro_batches
        )
        assert isinstance(row[-1][-1], OptimizerStep) if passes == 2 else True
        waiting: deque[int] = deque()  # forward passes whose backward pass is to come
        for each in found:
            if isinstance(each, BufferOpInstruction):
                assert 0 <= each.buffer_id < schedule.num_pipe_buffers()
            if each.name == "ForwardPass" and passes == 2:
                assert each.buffer_id not in waiting  # type: ignore[attr-defined]
                waiting.append(each.buffer_id)  # type: ignore[attr-defined]
            if each.name == "BackwardPass":
                assert each.buffer_id == waiting.popleft()  # type: ignore[attr-defined]
    for stage, tick in ((stage, tick) for stage in range(stages - 1) for tick in range(len(rows[0]))):
        here, there = ([each.name for each in rows[at][tick]] for at in (stage, stage + 1))
        for sent, received in (("SendActivation", "RecvActivation"), ("RecvGrad", "SendGrad")):
            assert here.count(sent) == there.count(received)


def test_one_stage_accumulates() -> None:
    rows = [[each.name for each in tick] for tick in DataParallelSchedule(2, 1, 0)]
    assert rows == [
        ["LoadMicroBatch", "ForwardPass", "BackwardPass"],
        ["LoadMicroBatch", "ForwardPass", "BackwardPass", "ReduceGrads", "OptimizerStep"],
    ]
    assert repr(BufferOpInstruction(3, of="x")) == "BufferOpInstruction(buffer_id=3, of='x')"
