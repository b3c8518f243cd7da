"""Rows of schedules on ranks that are threads: the same gradients as the whole model, whatever the
schedule."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.memory_axis import axes
from tests.support.thread_ranks import on_threads
from zero_trial.comm import MeshShape, build_mesh
from zero_trial.errors import TrialError
from zero_trial.pipeline.channel import PeerFailed
from zero_trial.pipeline.executor import (
    Executor,
    LastStageResult,
    StepInput,
    StepOptions,
    layer_fault,
    read_step,
    sample_count,
)
from zero_trial.pipeline.lowering import forwards_of, lower
from zero_trial.pipeline.schedule import RECIPES, ChunkPlacement, ParameterLifetime, ReductionTiming, Schedule, build
from zero_trial.pipeline.simulator import validate
from zero_trial.pipeline.stage import Stage

CPU = torch.device("cpu")


class Log:
    """Shards that only write down what they are told."""

    def __init__(self) -> None:
        self.reported: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda number: self.reported.append(f"{name}{number}")


class Model:
    """``chunks`` layers; ``fails`` is the (chunk, micro-batch) whose forward raises."""

    def __init__(self, chunks: int, fails: tuple[int, int] | None = None) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(chunks)])
        self.fails = fails

    def run(self, chunk: int, micro_batch: int, value: Any) -> Any:
        if (chunk, micro_batch) == self.fails:
            raise RuntimeError("cannot")
        return torch.tanh(self.layers[chunk](value))

    def gradients(self) -> list[torch.Tensor]:
        return [param.grad for param in self.layers.parameters()]


def data(micro_batches: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2, micro_batches, 3, 5, generator=generator)
    return [row.clone() for row in rows[0]], [row.clone() for row in rows[1]]


def whole(chunks: int, micro_batches: int) -> tuple[Model, list[float]]:
    model, losses = Model(chunks), []
    for x, label in zip(*data(micro_batches), strict=True):
        for chunk in range(chunks):
            x = model.run(chunk, 0, x)
        loss = F.mse_loss(x, label)
        (loss * 0.5).backward()
        losses.append(loss.item())
    return model, losses


def perform(
    schedule: Schedule, model: Model, *, options: StepOptions, labels_travel: bool = True
) -> tuple[list[Any], list[Log], list[Executor]]:
    inputs, labels = data(schedule.micro_batches)
    place, logs = schedule.placement, [Log() for _ in range(schedule.stages)]
    executors = [
        Executor(
            axis, Stage(model.run, lambda chunk: True), logs[axis.index], CPU, lambda phase: nullcontext(), channel=1
        )
        for axis in axes(schedule.stages)
    ]
    first, last = place.ranks[0], place.ranks[-1]
    # each micro-batch's loss counts by half
    scaled = replace(options, scale=0.5 * schedule.micro_batches)
    travel = labels_travel and first != last

    def run(rank: int) -> LastStageResult:
        here = StepInput(
            inputs if rank == first else (),
            labels if rank == (first if travel else last) else (),
            [3] * len(inputs),
            travel,
            micro_batches=len(inputs),
        )
        outcome = executors[rank].run(schedule, here, scaled)
        executors[rank].finish()
        return outcome

    return on_threads(schedule.stages, run), logs, executors


SCHEDULES = [(name, stages, count) for name in RECIPES for stages in (1, 2, 3) for count in (1, 3, 7)]


@pytest.mark.parametrize(("name", "stages", "micro_batches"), SCHEDULES)
def test_every_schedule_gives_the_whole_model_s_gradients(name: str, stages: int, micro_batches: int):
    schedule = lower(
        build(name, stages, micro_batches), parameters=ParameterLifetime.FREE, reduction=ReductionTiming.MICRO
    )
    report = validate(schedule)
    model = Model(schedule.placement.chunks)
    outcomes, logs, executors = perform(schedule, model, options=StepOptions(loss=F.mse_loss))
    reference, losses = whole(schedule.placement.chunks, micro_batches)
    last = outcomes[schedule.placement.ranks[-1]]
    assert [last.losses[number].item() for number in range(micro_batches)] == losses
    assert last.samples == dict.fromkeys(range(micro_batches), 3)
    for mine, theirs in zip(model.gradients(), reference.gradients(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    for rank, log, executor in zip(report.ranks, logs, executors, strict=True):
        assert executor.stage.peak == rank.peak_activations
        assert executor.comm.counters.get("header", "pipe").calls == rank.messages
        assert sum(reported.startswith("unshard") for reported in log.reported) == rank.gathers
        assert sum(reported.startswith("reduce") for reported in log.reported) == rank.reductions


class Structured(Model):
    """``Model`` with ``wrap`` around each activation, except the last one, and ``unwrap`` before
    each layer."""

    def __init__(self, chunks: int, wrap: Callable[[torch.Tensor, Any], Any], unwrap: Callable[[Any], Any]) -> None:
        super().__init__(chunks)
        self.wrap, self.unwrap = wrap, unwrap

    def run(self, chunk: int, micro_batch: int, value: Any) -> Any:
        x = super().run(chunk, micro_batch, value if chunk == 0 else self.unwrap(value))
        return x if chunk == len(self.layers) - 1 else self.wrap(x, value)


Pair = namedtuple("Pair", "x scale")
SENT = {
    "nested": (lambda x, _: ([x, None, 3], {"mask": x > 0, "k": ({"t": "x"},)}), lambda value: value[0][0]),
    "the same tensor twice": (lambda x, _: (x, [x]), lambda value: 0.25 * value[0] + 0.75 * value[1][0]),
    "its own input": (lambda x, before: {"x": x, "before": before}, lambda value: value["x"]),
    "an OrderedDict": (lambda x, _: OrderedDict(x=x, n=1), lambda value: value["x"]),
}
REFUSED = {
    "SimpleNamespace": (lambda x, _: SimpleNamespace(x=x), lambda value: value.x),
    "Pair": (lambda x, _: [Pair(x, 1.0)], lambda value: value[0].x),
    "Size": (lambda x, _: (x, x.shape), lambda value: value[0]),
}
ONE_RANK_AND_TWO = [(name, stages) for name in RECIPES for stages in (1, 2)]


@pytest.mark.parametrize("kind", SENT)
@pytest.mark.parametrize(("name", "stages"), ONE_RANK_AND_TWO)
def test_values_reach_the_next_chunk_in_every_schedule(name: str, stages: int, kind: str):
    schedule = lower(build(name, stages, 3))
    chunks, last = schedule.placement.chunks, schedule.placement.ranks[-1]
    model = Structured(chunks, *SENT[kind])
    outcomes, _, _ = perform(schedule, model, options=StepOptions(loss=F.mse_loss))
    reference, losses = whole(chunks, 3)
    assert [outcomes[last].losses[number].item() for number in range(3)] == pytest.approx(losses)
    for mine, theirs in zip(model.gradients(), reference.gradients(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize(
    ("name", "stages"), [("1f1b", 2), ("interleaved", 1), ("interleaved", 2), ("zb_v", 1), ("zb_v", 2)]
)
def test_a_value_that_cannot_be_sent_is_refused_between_all_chunks(name: str, stages: int, kind: str, training: bool):
    computed = build(name, stages, 2)
    schedule = lower(computed if training else forwards_of(computed))
    model = Structured(schedule.placement.chunks, *REFUSED[kind])
    found, _, _ = perform(schedule, model, options=StepOptions(training, F.mse_loss))
    for error in found:
        assert isinstance(error, TrialError | PeerFailed)
        assert f"this value cannot be sent between pipeline stages: got {kind}" in str(error)


def test_evaluation_keeps_all_outputs():
    schedule = lower(forwards_of(build("1f1b", 3, 4)))
    outcomes, _, executors = perform(schedule, Model(3), options=StepOptions(training=False, keep_outputs=True))
    assert [len(outcome.outputs) for outcome in outcomes] == [0, 0, 4] and outcomes[2].losses == {}
    assert all(executor.stage.peak == 0 for executor in executors)


def test_sharding_gets_what_the_row_says():
    schedule = lower(build("gpipe", 2, 2), parameters=ParameterLifetime.HOLD, ties=[(0, 1)])
    _, logs, _ = perform(schedule, Model(2), options=StepOptions(loss=F.mse_loss))
    assert logs[0].reported == [
        "unshard0",
        "need0",
        "need0",
        "need0",
        "backward_done0",
        "need0",
        "backward_done0",
        "reshard0",
        "reduce0",
        "tied_reduce0",
    ]


@pytest.mark.parametrize(("name", "stages"), [("1f1b", 4), ("zb_v", 3), ("interleaved", 3)])
@pytest.mark.parametrize("place", [(0, 0), (1, 2)])
def test_a_failure_ends_every_rank(name: str, stages: int, place: tuple[int, int]):
    schedule = lower(build(name, stages, 4))
    rank = schedule.placement.ranks[place[0]]
    model = Model(schedule.placement.chunks, fails=place)
    found, _, _ = perform(schedule, model, options=StepOptions(loss=F.mse_loss))
    where = f"rank {rank}, pipeline stage {rank} of {stages}, micro-batch {place[1]}, action {place[0]}F{place[1]}"
    for index, error in enumerate(found):
        assert isinstance(error, TrialError if index == rank else PeerFailed), error
        assert str(error).startswith(f"{where}: a pipeline stage failed: got RuntimeError: cannot.")


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda output, label: output, "the loss is not a scalar: got a tensor of shape"),
        (lambda output, label: output.mean().item(), "the loss is not a scalar: got float"),
        (lambda output, label: output.detach().mean(), "the loss does not require grad"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused(loss: Any, text: str):
    (error,), _, _ = perform(lower(build("1f1b", 1, 1)), Model(1), options=StepOptions(loss=loss))
    assert text in str(error)


def raised(call: object, *args: object) -> Exception:
    try:
        call(*args)  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_a_users_folder_may_be_called_zero_trial():
    found: dict[str, Any] = {}
    exec(compile("def layer(x):\n    raise ValueError('mine')", "/mine/zero_trial/model.py", "exec"), found)
    text = str(layer_fault(raised(found["layer"], None), 0, 0, 1, None))
    assert "/mine/zero_trial/model.py, line 2" in text


def split(batch: Any) -> tuple[Any, Any]:
    return batch


def test_as_many_as_wanted_are_read():
    rest = iter([(torch.ones(2, 2), torch.zeros(2))] * 3)
    meal = read_step(rest, 2, build_mesh(MeshShape()), ChunkPlacement.loop(1), split)
    assert (meal.micro_batches, list(meal.samples), meal.total, meal.labels_travel) == (2, [2, 2], 4, False)
    assert len(list(rest)) == 1


def test_samples_of_a_value():
    assert sample_count({"x": torch.ones(3, 2), "y": torch.ones(5)}) == 3 and sample_count((None, torch.tensor(1))) == 1
    assert sample_count([]) == 1
