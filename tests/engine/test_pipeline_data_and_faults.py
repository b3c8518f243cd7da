"""What a pipeline reads: shapes that vary, short batches, data that end, one reader or two, values
of any structure."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zero_trial
from tests.support.fresh_ranks import run_fresh
from tests.support.models import adamw
from tests.support.pipelines import batches, cross_entropy, layers, make_engine, micro_batch
from tests.support.pool import Pools
from tests.support.whole_optimizers import GlobalNorm
from zero_trial.errors import DataError, TrialError, ZeroTrialError
from zero_trial.pipeline import LayerSpec, PipelineModule

# (samples, length) of each micro-batch of a step, by line; each step is one row.
VARYING = [[(2, 9), (2, 5)], [(2, 12), (2, 3)]]
SHORT = [[(2, 9), (2, 9)], [(2, 9), (1, 9)]]


def batches_of(shapes: Any, line: int) -> Iterator[Any]:
    for step, row in enumerate(shapes):
        for number, (samples, length) in enumerate(row):
            yield micro_batch(step, number, line, samples, length)


def dense(shapes: Any, lines: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain torch: every micro-batch's mean counts by its samples."""
    model = PipelineModule(layers(), num_stages=1, seed_layers=True)
    optimizer = adamw(model.parameters())
    losses = []
    for step, row in enumerate(shapes):
        total, samples = 0.0, lines * sum(count for count, _ in row)
        for number, (count, length) in enumerate(row):
            for line in range(lines):
                inputs, labels = micro_batch(step, number, line, count, length)
                loss = cross_entropy(model(inputs), labels) * count / samples
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, dict(model.state_dict())


def train(shapes: Any, schedule: str, two_readers: bool) -> tuple[list[float], dict[str, torch.Tensor], dict[str, int]]:
    engine = make_engine(layers(), 2, {"stage": 2}, 2, pipeline={"schedule": schedule})
    reads = engine.is_first_stage() or (two_readers and engine.is_last_stage())
    data = batches_of(shapes, engine.mpu.get_data_parallel_rank()) if reads else None
    losses = [engine.train_batch(data).item() for _ in shapes]
    state = engine.module_state_dict()
    sent = vars(engine.mesh.counters.get("send", "pipe")).copy()
    engine.destroy()
    return losses, state, sent


@pytest.mark.parametrize(("shapes", "schedule"), [(VARYING, "1f1b"), (SHORT, "zb_v")])
def test_shapes_vary_and_a_short_batch_counts_by_its_samples(ranks: Pools, shapes: Any, schedule: str) -> None:
    expected, reference = dense(shapes, 2)
    for losses, state, _ in ranks(4).run(train, shapes, schedule, False):
        assert losses == pytest.approx(expected, abs=2e-6)
        assert max((state[name] - reference[name]).abs().max().item() for name in state) <= 2e-6


def test_labels_travel_only_where_the_last_stage_reads_none(ranks: Pools) -> None:
    one, two = ranks(2).run(train, SHORT, "1f1b", False), ranks(2).run(train, SHORT, "1f1b", True)
    assert one[0][0] == two[0][0]
    labels = sum(samples * (length - 1) * 8 for row in SHORT for samples, length in row)
    assert one[0][2]["bytes"] - two[0][2]["bytes"] == labels


def read_to_the_end(lengths: list[int]) -> list[str]:
    """What each call of train_batch gives until the data end; ``lengths``: micro-batches of each
    line."""
    engine = make_engine(layers(2), 2, {"stage": 1}, 4)
    line = engine.mpu.get_data_parallel_rank()
    data = iter([micro_batch(0, number, line) for number in range(lengths[line])]) if engine.is_first_stage() else None
    found = []
    for _ in range(3):
        try:
            engine.train_batch(data)
            found.append("step")
        except StopIteration:
            found.append("end")
        except DataError as error:
            found.append(str(error))
    engine.destroy()
    return found


def test_the_end_of_the_data_is_agreed(ranks: Pools) -> None:
    """Also in the middle of a batch: the last step is made of what there is."""
    assert ranks(4).run(read_to_the_end, [4, 4]) == [["step", "end", "end"]] * 4
    assert ranks(4).run(read_to_the_end, [6, 6]) == [["step", "step", "end"]] * 4


def test_data_that_end_early_on_one_rank_are_an_error_on_all(ranks: Pools) -> None:
    for first, second, _ in ranks(4).run(read_to_the_end, [8, 6]):
        assert first == "step"
        assert second.startswith(
            "rank 1: an iterator ended before those of the other ranks: got micro-batches: rank 0 4, rank 1 2"
        )


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
        text = text if "this pipeline failed in an earlier call" in str(error) else str(error)
    engine.destroy()
    again = make_engine(layers(8), 4, {"stage": 1}, 8)
    loss = again.train_batch(batches(0, 8, 1) if again.is_first_stage() else None).item()
    again.destroy()
    return text, seconds, "works" if 3 < loss < 5 else str(loss)


@pytest.mark.parametrize(("place", "backward", "schedule", "rank", "action"), [(7, True, "1f1b", 2, "2B2")])
def test_a_layer_that_fails_is_named_on_every_rank(
    ranks: Pools, place: int, backward: bool, schedule: str, rank: int, action: str
) -> None:
    for text, seconds, after in ranks(4).run(faulty, place, backward, schedule):
        assert (
            f"rank {rank}, pipeline stage {rank} of 4, micro-batch 2, action {action}: a pipeline stage failed" in text
        )
        assert "ValueError: no " in text and "test_pipeline_data_and_faults.py, line" in text
        assert seconds < 25  # a collective's limit is 30
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
    assert killed.code == -signal.SIGKILL and all("rank 1" in end.value for end in (first, last))


def built_inside_init() -> None:
    with zero_trial.zero.Init():
        PipelineModule(layers(2), num_stages=2)


def built_around_a_coupling_optimizer() -> None:
    module = PipelineModule(layers(2, tied=False), num_stages=2, loss_fn=cross_entropy)
    config = {"train_batch_size": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 0}}
    zero_trial.initialize(model=module, config=config, optimizer=GlobalNorm)


def refused() -> list[str]:
    """The error of each of these."""
    engine = make_engine(layers(2), 2, {"stage": 1}, 2)
    verbs = [lambda: engine(torch.zeros(1)), lambda: engine.backward(torch.zeros(1)), engine.step, engine.scale]
    found = []
    for call in (*verbs, lambda: engine.train_batch(None), built_inside_init, built_around_a_coupling_optimizer):
        with pytest.raises(ZeroTrialError) as raised:
            call()
        found.append(str(raised.value))
    engine.destroy()
    return found


def test_what_a_pipeline_refuses(ranks: Pools) -> None:
    for *verbs, no_data, inside_init, coupled in ranks(2).run(refused):
        assert all("only train_batch() and eval_batch() are accessible in pipeline mode" in text for text in verbs)
        assert no_data.startswith("rank 0: the rank of the first layer has no data iterator")
        assert "a pipeline cannot be built inside zero.Init" in inside_init
        assert "GlobalNorm" in coupled and "no rank has all tensors" in coupled
