"""Ranks that use different modules, or the model more often than others, at ZeRO stage 3: what is
right, and the error of what is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.dense import STAGES, TOLERANCE, Case, Turn, build_engine, compare, difference
from tests.support.models import ADAMW, adamw
from tests.support.pool import Pools, RankFailed
from zero_trial.comm import MeshShape, build_mesh
from zero_trial.engine.uneven import evenly
from zero_trial.errors import MeshError
from zero_trial.zero import set_z3_leaf_modules

WIDTH, EXPERTS = 8, 4


class Experts(nn.Module):
    """Adds the outputs of the experts that the route names; ``calls_all``: the others see no rows,
    as in many mixtures, so that their gradients are zeros instead of None."""

    def __init__(self, calls_all: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.calls_all = calls_all

    def forward(self, x: torch.Tensor, route: list[int]) -> torch.Tensor:
        out = x
        for index, expert in enumerate(self.experts):
            if index in route:
                out = out + torch.tanh(expert(x))
            elif self.calls_all:
                out = out + expert(x[:0]).sum()
        return out


class Mixture(nn.Module):
    def __init__(self, calls_all: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.moe = Experts(calls_all)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, route: list[int]) -> torch.Tensor:
        out: torch.Tensor = self.head(self.moe(torch.tanh(self.stem(x)), route))
        return out


def marked(calls_all: bool) -> Mixture:
    model = Mixture(calls_all)
    assert set_z3_leaf_modules(model, [Experts]) == [model.moe]
    return model


def loss(model: Any, turn: Turn) -> torch.Tensor:
    """Expert 3 gets rows on no rank, the others on some; in one step rank 1 uses no expert."""
    route = [] if turn.rank == 1 and turn.step == 2 else [turn.rank % 2, 2 * (turn.step % 2)]
    return (model(turn.normal(4, WIDTH), route) - 1).square().mean()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def check_mixture(stage: str, by_config: bool, calls_all: bool, options: dict[str, Any]) -> None:
    """``calls_all=False`` with SGD: an expert without a gradient stays as it is, as in torch."""
    zero = STAGES[stage] | options.pop("zero", {})
    if by_config:
        zero["leaf_module"] = {"classes": ["Experts"]}
    case = Case(
        (lambda: Mixture(calls_all)) if by_config else (lambda: marked(calls_all)),
        loss,
        optimizer=ADAMW if calls_all else {"type": "SGD", "params": {"lr": 0.1}},
        dense_optimizer=adamw if calls_all else sgd,
        config=options,
        accumulation=2,
    )
    assert compare(case, zero) <= TOLERANCE


@pytest.mark.parametrize(
    ("stage", "by_config", "calls_all", "options"),
    [("zero3", True, True, {}), ("zero3-free", False, False, {"comm_transport": "gloo"}), ("zero2", False, True, {})],
)
def test_a_mixture_that_is_a_leaf_trains_as_plain_torch(
    ranks: Pools, stage: str, by_config: bool, calls_all: bool, options: dict[str, Any]
) -> None:
    ranks(2).run(check_mixture, stage, by_config, calls_all, options)


class Unsized:
    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def train_evenly(zero: dict[str, Any], numbers: list[int], sized: bool) -> float:
    """Rank r has ``numbers[r]`` batches; the distance of the weights from plain torch, which takes
    in step k the mean over the k-th batches that there are."""
    rank, most = dist.get_rank(), max(numbers)
    case = Case(lambda: Mixture(calls_all=True), lambda model, turn: torch.zeros(()))
    engine = build_engine(case, zero)
    own: Any = [Turn(step, 0, rank).normal(4, WIDTH) for step in range(numbers[rank])]

    def total(model: Any, x: torch.Tensor) -> torch.Tensor:
        return (model(x, [0]) - 1).square().sum()

    seen = []
    for batch, weight in engine.evenly(own if sized else Unsized(own)):
        seen.append(weight)
        engine.backward(total(engine, batch) * weight, weight=batch.numel() * weight)
        engine.step()
    assert seen == [1.0] * numbers[rank] + [0.0] * (most - numbers[rank])
    torch.manual_seed(1)
    dense = case.build()
    optimizer = case.dense_optimizer(dense.parameters())
    for step in range(most):
        batches = [Turn(step, 0, r).normal(4, WIDTH) for r, number in enumerate(numbers) if step < number]
        loss = torch.stack([total(dense, x) for x in batches]).sum() / sum(x.numel() for x in batches)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    gap = difference(engine, dense)
    engine.destroy()
    return gap


@pytest.mark.parametrize(("stage", "sized"), [("zero0", True), ("zero3-free", False)])
def test_ranks_with_unequal_numbers_of_batches_train_evenly(ranks: Pools, stage: str, sized: bool) -> None:
    assert max(ranks(2).run(train_evenly, STAGES[stage], [2, 4], sized)) <= TOLERANCE


def test_one_rank_alone_takes_its_batches() -> None:
    for batches in ([3, 4], Unsized([3, 4])):
        assert list(evenly(batches, build_mesh(MeshShape()))) == [(3, 1.0), (4, 1.0)]


def test_a_rank_without_a_batch_is_an_error_on_all(ranks: Pools) -> None:
    with pytest.raises(RankFailed, match=r"no batch on rank 0"):
        ranks(2).run(train_evenly, STAGES["zero3"], [0, 2], True)


@pytest.fixture(scope="module")
def doomed() -> Iterator[dict[str, Pools]]:
    """Ranks that will disagree: their connections may hold messages that no one takes."""
    pools = {world: Pools(world=world) for world in ("gloo", "standin")}
    yield pools
    for each in pools.values():
        each.close()


def disagree(zero: dict[str, Any], config: dict[str, Any], steps: int) -> tuple[str, bool]:
    """``steps`` with the same experts on all ranks, then others: the error, and whether the weights
    are what they were."""
    case = Case(lambda: Mixture(calls_all=False), loss, config=config)
    engine = build_engine(case, STAGES["zero3-free"] | zero)
    weights: list[torch.Tensor] = []
    text = ""
    try:
        for step in range(steps + 3):
            if step == steps:
                weights = [group.master.clone() for group in engine.sharded.groups]
            route = [dist.get_rank(), 2] if step >= steps else [0, 2]
            out = engine(torch.ones(2, WIDTH).to(engine.device), route)
            engine.backward(out.square().mean())
            engine.step()
    except MeshError as error:
        text = str(error)
    same = all(torch.equal(group.master, old) for group, old in zip(engine.sharded.groups, weights, strict=True))
    return text, same


def check_error(answers: list[tuple[str, bool]]) -> None:
    for text, same in answers:
        assert "rank 0 gathers moe.experts." in text and "rank 1 gathers moe.experts.1" in text
        assert "zero_optimization.leaf_module" in text
        assert same  # nothing of what was mixed has been learned


@pytest.mark.parametrize(("transport", "steps"), [("auto", 0), ("gloo", 2)])
def test_ranks_that_use_different_experts(doomed: dict[str, Pools], transport: str, steps: int) -> None:
    """After two steps the order of uses is known, and blocks are fetched ahead: a rank may then
    learn of the disagreement only by waiting in vain."""
    config = {"comm_transport": transport, "comm_timeout_seconds": 2.0 if steps else 30.0}
    check_error(doomed["gloo"](2).run(disagree, {}, config, steps))


def test_a_backend_that_compares_nothing(doomed: dict[str, Pools]) -> None:
    """Like NCCL: both ranks get a tensor of the right size, which is half another expert's. No step
    is taken with it."""
    config = {"comm_transport": "gloo", "comm_timeout_seconds": 30.0}
    check_error(doomed["standin"](2).run(disagree, {}, config, 0))


def save_after_evaluation(folder: str) -> str:
    engine = build_engine(Case(lambda: Mixture(calls_all=False), loss), STAGES["zero3-free"])
    with torch.no_grad():
        engine(torch.ones(2, WIDTH).to(engine.device), [dist.get_rank(), 2])
    try:
        engine.save_checkpoint(folder)
    except MeshError as error:
        return str(error)
    return ""


def test_no_checkpoint_where_ranks_have_got_each_others_data(doomed: dict[str, Pools], tmp_path: Path) -> None:
    for text in doomed["standin"](2).run(save_after_evaluation, str(tmp_path)):
        assert "rank 0 gathers moe.experts.0, rank 1 gathers moe.experts.1" in text
    assert list(tmp_path.iterdir()) == []
