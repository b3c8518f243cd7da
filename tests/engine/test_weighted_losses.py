"""Token-exact means: a step takes the sum of all losses over the sum of all weights, however the
batch is cut into ranks, micro-batches and pipeline stages."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zero_trial
from tests.support.dense import STAGES, TOLERANCE, Case, Turn, build_engine, difference
from tests.support.models import ADAMW, adamw
from tests.support.pool import Pools
from zero_trial.errors import TrialError
from zero_trial.pipeline import PipelineModule

STEPS, BATCH, LENGTH, WORDS, IGNORED = 3, 12, 7, 13, -100


def layers() -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Embedding(WORDS, 10), nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, WORDS)]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of 1 to LENGTH tokens, padded; (tokens, labels)"""
    generator = torch.Generator().manual_seed(90 + step)
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (BATCH, 1), generator=generator)
    return tokens, torch.where(torch.arange(LENGTH) < lengths, (tokens * 3 + 1) % WORDS, IGNORED)


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def count(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (labels != IGNORED).sum()


@cache
def train_dense() -> tuple[list[float], nn.Module]:
    model = nn.Sequential(*layers())
    optimizer, losses = adamw(model.parameters()), []
    for step in range(STEPS):
        tokens, labels = batch(step)
        loss = loss_sum(model(tokens), labels) / count(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def config(micro: int, accumulation: int, zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.1,
        "comm_timeout_seconds": 30.0,
        "optimizer": ADAMW,
        "zero_optimization": zero,
    } | more


def train_cut(
    micro: int, zero: dict[str, Any], more: dict[str, Any], weighted: bool = True
) -> tuple[list[float], float, dict[str, int]]:
    """This rank's part in micro-batches of ``micro``: (global mean losses, difference to dense,
    calls of each collective)"""
    world = torch.distributed.get_world_size()
    rows = BATCH // world
    engine = zero_trial.initialize(model=nn.Sequential(*layers()), config=config(micro, rows // micro, zero, **more))[0]
    losses = []
    for step in range(STEPS):
        tokens, labels = batch(step)
        sums = torch.zeros(2, dtype=torch.float64)
        for turn in range(rows // micro):
            # every rank takes every world-th sequence, so that ranks differ in their tokens
            part = slice(engine.global_rank + turn * micro * world, (turn + 1) * micro * world, world)
            x, y = tokens[part], labels[part]
            value, weight = loss_sum(engine(x), y), count(x, y)
            mean = engine.backward(value, weight=(weight if turn % 2 else int(weight)) if weighted else None)
            assert not weighted or mean.item() == pytest.approx(value.item() / int(weight), rel=1e-6)
            engine.step()
            sums += torch.tensor([value.item(), int(weight)], dtype=torch.float64)
        torch.distributed.all_reduce(sums)
        losses.append((sums[0] / sums[1]).item())
    gap = difference(engine, train_dense()[1])
    sent = {name: row["calls"] for name, row in engine.comms_summary().items()}
    engine.destroy()
    return losses, gap, sent


def train_pipe(micro: int, pipe: int, zero: dict[str, Any]) -> list[float]:
    data = torch.distributed.get_world_size() // pipe
    rows = BATCH // data
    module = PipelineModule(layers(), num_stages=pipe, loss_fn=loss_sum, loss_weight=count)
    made = config(micro, rows // micro, zero, mesh={"pipe": pipe}, pipeline={"schedule": "1f1b"})
    engine = zero_trial.initialize(model=module, config=made)[0]
    index, losses = engine.mpu.get_data_parallel_rank(), []
    for step in range(STEPS):
        tokens, labels = batch(step)
        parts = [slice(index + turn * micro * data, (turn + 1) * micro * data, data) for turn in range(rows // micro)]
        losses.append(engine.train_batch(iter([(tokens[part], labels[part]) for part in parts])).item())
    loss, logits = engine.eval_batch(iter([(tokens[part], labels[part]) for part in parts]), return_logits=True)
    assert math.isfinite(loss.item()) and (logits is None or len(logits) == len(parts))
    engine.destroy()
    return losses


CUTS = [(1, 1), (1, 12), (2, 2), (3, 4), (4, 1)]
PIPES = [(2, 2, 4), (3, 3, 1), (4, 2, 2)]


@pytest.mark.parametrize(("world", "micro"), CUTS)
def test_every_cut_has_one_trace(ranks: Pools, world: int, micro: int) -> None:
    expected = train_dense()[0]
    for losses, gap, _ in ranks(world).run(train_cut, micro, STAGES["zero1"], {}):
        assert losses == pytest.approx(expected, rel=1e-6, abs=0) and gap <= TOLERANCE


@pytest.mark.parametrize(("world", "pipe", "micro"), PIPES)
def test_every_cut_of_a_pipeline_has_one_trace(ranks: Pools, world: int, pipe: int, micro: int) -> None:
    expected = train_dense()[0]
    for losses in ranks(world).run(train_pipe, micro, pipe, {"stage": 1}):
        assert losses == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage(ranks: Pools, stage: str) -> None:
    """No collective comes on top of those of plain means. bf16 at every stage: tests/exactness."""
    expected, plain = train_dense()[0], ranks(2).run(train_cut, 3, STAGES[stage], {}, weighted=False)
    for (losses, gap, sent), (*_, without) in zip(ranks(2).run(train_cut, 3, STAGES[stage], {}), plain, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6, abs=0) and gap <= TOLERANCE and sent == without


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"prescale_gradients": True}, TOLERANCE),
        ({"gradient_allreduce_op": "sum"}, TOLERANCE),
        ({"fp16": {"enabled": True, "loss_scale": 64.0}}, 2e-2),
    ],
)
def test_other_precisions_and_whatever_plain_means_are_divided_by(
    ranks: Pools, options: dict[str, Any], limit: float
) -> None:
    for losses, gap, _ in ranks(2).run(train_cut, 3, STAGES["zero2"], options):
        assert losses == pytest.approx(train_dense()[0], rel=1e-2) and gap <= limit


def weights_of_rank_0() -> list[str]:
    """The error of each of two attempts, in which the other ranks give none."""
    found = []
    for _ in range(2):
        engine = build_engine(Case(lambda: nn.Linear(5, 1), lambda model, turn: model), {"stage": 1})
        x, before = Turn(0, 0, engine.global_rank).normal(4, 5), engine.module.weight.detach().clone()
        with pytest.raises(TrialError) as raised:
            for _ in range(2):
                engine.backward(engine(x).sum(), weight=4 if engine.global_rank == 0 else None)
                engine.step()
        assert torch.equal(engine.module.weight, before)
        found.append(raised.value.got)
    return found


def test_weights_on_some_ranks_are_refused_on_all(ranks: Pools) -> None:
    first, *others = ranks(3).run(weights_of_rank_0)
    assert all("1 of 3 ranks" in text and "rank 0 passes weights" in text for text in first)
    assert all("passes none" in text for texts in others for text in texts)


def one() -> zero_trial.Engine:
    return build_engine(Case(lambda: nn.Linear(5, 1), lambda model, turn: model, accumulation=2), {"stage": 1})


def test_losses_of_both_kinds_do_not_meet_in_a_step() -> None:
    x = Turn(0, 0, 0).normal(4, 5)
    for first, second in ((None, 2.0), (2.0, None)):
        engine = one()
        engine.backward(engine(x).sum(), weight=first)
        engine.step()
        with pytest.raises(TrialError, match="some losses of a step have weight="):
            engine.backward(engine(x).sum(), weight=second)
        with pytest.raises(TrialError, match="some losses of a step have weight="):
            engine.backward(engine(x).sum(), weight=second) if first is None else engine(x).sum().backward()
        engine.zero_grad()
        for _ in range(2):
            engine.backward(engine(x).sum(), weight=second)
            engine.step()
        assert engine.was_step_applied()


BLIND = {"bf16": {"enabled": True, "check_grad_overflow": False}}
SCALED = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}


@pytest.mark.parametrize(("weight", "precision"), [(0.0, {}), (-3.0, SCALED), (math.inf, BLIND), (math.nan, BLIND)])
def test_sums_of_weights_that_divide_nothing_are_refused(weight: float, precision: dict[str, Any]) -> None:
    """Nothing changes: weights, averages, schedule, loss scale. Training goes on afterwards."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.1, "warmup_num_steps": 10}}
    more = {"optimizer": ADAMW, "scheduler": scheduler, "ema": {"decay": 0.9}} | precision
    engine = zero_trial.initialize(model=nn.Linear(5, 1), config=config(4, 1, {"stage": 1}, **more))[0]
    x = Turn(0, 0, 0).normal(4, 5).to(next(engine.module.parameters()).dtype)

    def step(weight: float) -> list[Any]:
        engine.backward(engine(x).sum(), weight=weight)
        engine.step()
        engine.was_step_applied()
        return state()

    def state() -> list[Any]:
        with engine.ema_weights():
            averages = engine.module.weight.tolist()
        return [engine.module.weight.tolist(), averages, engine.get_lr(), engine.cur_scale]

    before = step(4.0)
    with pytest.raises(TrialError, match="must add up"):
        assert step(weight) == before
        assert not engine.was_step_applied() and not engine.outcome.overflow and not engine.skipped_steps
        engine.backward(engine(x).sum(), weight=4.0)
    engine.zero_grad()
    assert state() == before and step(4.0)[0] != before[0] and engine.was_step_applied()


def test_a_gradient_of_weighted_losses_cannot_be_asked_for_before_the_step() -> None:
    engine, x = one(), Turn(0, 0, 0).normal(4, 5)
    assert engine.backward(engine(x).sum() * 0, weight=0).item() == 0.0  # counts for nothing
    engine.step()
    engine.backward(engine(x).sum(), weight=3)
    for ask in (
        lambda: nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0),
        lambda: zero_trial.zero.safe_get_full_grad(engine.module.weight),
    ):
        with pytest.raises(TrialError, match="gradient_clipping"):
            ask()
    engine.step()
    assert engine.was_step_applied()


@pytest.mark.parametrize(("stage", "number"), [("zero0", 0), ("zero2", 1), ("zero3-free", 0)])
def test_gradients_of_weighted_losses_are_dropped_with_their_weights_or_not_at_all(stage: str, number: int) -> None:
    """After the micro-batch ``number`` of two: module.zero_grad() would leave the weights."""
    case = Case(lambda: nn.Linear(5, 4), loss=lambda m, t: m(t.normal(4, 5)).sum(), accumulation=2)
    engine = build_engine(case, STAGES[stage])

    def train(numbers: range) -> None:
        for each in numbers:
            engine.backward(case.loss(engine, Turn(0, each, 0)), weight=3)
            if each < number:
                engine.step()

    train(range(number + 1))
    engine.module.zero_grad()
    with pytest.raises(TrialError, match=r"engine\.zero_grad\(\)"):
        engine.step()
        engine.backward(case.loss(engine, Turn(0, 1, 0)), weight=3)
        engine.step()
    engine.zero_grad()
