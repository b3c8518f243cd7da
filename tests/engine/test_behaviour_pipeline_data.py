"""What a pipeline reads: shapes that vary, short batches, data that end, one reader or two, values
of any structure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import adamw
from tests.support.pipelines import cross_entropy, layers, make_engine, micro_batch
from tests.support.pool import Pools
from zero_trial.errors import DataError
from zero_trial.pipeline import LayerSpec, PipelineModule

# (samples, length) of each micro-batch of a step, by line; each step is one row.
VARYING = [[(2, 9), (2, 5)], [(2, 12), (2, 3)]]
SHORT = [[(2, 9), (2, 9)], [(2, 9), (1, 9)]]


def batches(shapes: Any, line: int) -> Iterator[Any]:
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
    data = batches(shapes, engine.mpu.get_data_parallel_rank()) if reads else None
    losses = [engine.train_batch(data).item() for _ in shapes]
    state = engine.module_state_dict()
    sent = vars(engine.mesh.counters.get("send", "pipe")).copy()
    engine.destroy()
    return losses, state, sent


@pytest.mark.parametrize(("shapes", "schedule"), [(VARYING, "1f1b"), (SHORT, "1f1b"), (SHORT, "zb_v")])
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
            "rank 1: an iterator has ended before the others': got micro-batches: rank 0 4, rank 1 2"
        )


def no_rank_reads() -> str:
    engine = make_engine(layers(2), 2, {"stage": 1}, 2)
    try:
        engine.train_batch(None)
    except DataError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_a_first_stage_without_data_is_named(ranks: Pools) -> None:
    assert all(
        text.startswith("rank 0: the rank of the first layer has nothing to read")
        for text in ranks(2).run(no_rank_reads)
    )


class Start(nn.Module):
    """From a dict with a mask to a tuple with all kinds of values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given: dict[str, Any]) -> tuple[Any, ...]:
        x = self.linear(given["x"])
        return x, {"mask": given["mask"], "index": given["index"], "factor": given["factor"]}, [x * 2, None, "text"]


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x, options, (twice, nothing, text) = given
        if nothing is not None or text != "text" or options["mask"].dtype != torch.bool:
            raise ValueError("the values have changed on their way")
        x = F.relu(x, inplace=True)
        return (self.linear(x) + twice) * options["factor"], options


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, given: tuple[Any, ...]) -> torch.Tensor:
        x, options = given
        x = x.masked_fill(options["mask"], 0.0)
        return self.linear(x.gather(1, options["index"]))


def odd_batch(number: int) -> Any:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(3, 6, generator=generator)
    index = torch.randint(0, 6, (3, 6), generator=generator)
    return {"x": x, "mask": x > 1, "index": index, "factor": 0.5 + number}, torch.randn(3, 3, generator=generator)


def odd_layers() -> list[Any]:
    return [LayerSpec(Start), LayerSpec(Middle), LayerSpec(End)]


def train_odd(stages: int, schedule: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    module = PipelineModule(
        odd_layers(), num_stages=stages, loss_fn=F.mse_loss, seed_layers=True, partition_method="uniform"
    )
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 1.0}
    engine = make_engine(module, stages, {"stage": 1}, 2, pipeline={"schedule": schedule}, **config)
    losses = [engine.train_batch(iter([odd_batch(2 * step), odd_batch(2 * step + 1)])).item() for step in range(3)]
    state = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return losses, state


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_values_of_any_structure_travel(ranks: Pools, schedule: str) -> None:
    """Dicts, masks, indices, numbers, one tensor twice in use, and a layer that works in place on
    what it received."""
    (whole, state), *_ = ranks(1).run(train_odd, 1, schedule)
    for losses, part in ranks(2).run(train_odd, 2, schedule):
        assert losses == pytest.approx(whole, rel=1e-6)
        assert all(torch.allclose(part[name], state[name], atol=1e-6) for name in part)
