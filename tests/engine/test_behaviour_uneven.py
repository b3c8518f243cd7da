"""Ranks that use different modules, or the model more often than others, at ZeRO stage 3: what is
right, and the error of what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import strict_backend
from tests.support.dense import STAGES, TOLERANCE, Case, Turn, build_engine, compare
from tests.support.late import make_late
from tests.support.models import ADAMW, adamw
from tests.support.pool import Pools, RankPool
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
    [
        ("zero3", True, True, {}),
        ("zero3", False, False, {"zero": {"overlap_comm": True}}),
        ("zero3-free", True, False, {"comm_transport": "gloo"}),
        ("zero3-free", False, True, {}),
        ("zero2", False, True, {}),
    ],
)
def test_a_mixture_that_is_a_leaf_trains_as_plain_torch(
    ranks: Pools, stage: str, by_config: bool, calls_all: bool, options: dict[str, Any]
) -> None:
    ranks(2).run(check_mixture, stage, by_config, calls_all, options)


# --- errors ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def doomed() -> Iterator[Callable[[bool], RankPool]]:
    """Ranks that will disagree: their connections may hold messages that nobody takes."""
    pools: dict[bool, RankPool] = {}

    def get(strict: bool) -> RankPool:
        if strict not in pools:
            pools[strict] = RankPool(2, strict=strict)
        return pools[strict]

    yield get
    for pool in pools.values():
        pool.close()


def disagree(zero: dict[str, Any], config: dict[str, Any], steps: int, deferred: bool = False) -> tuple[str, bool]:
    """``steps`` with the same experts on all ranks, then others: the error, and whether the weights
    are what they were."""
    case = Case(lambda: Mixture(calls_all=False), loss, config=config)
    engine = build_engine(case, STAGES["zero3-free"] | zero)
    if deferred:
        make_late(engine)
    weights: list[torch.Tensor] = []
    text = ""
    try:
        for step in range(steps + 3):
            if step == steps:
                engine.outcome.settle()
                weights = [group.master.clone() for group in engine.sharded.groups]
            route = [dist.get_rank(), 2] if step >= steps else [0, 2]
            out = engine(torch.ones(2, WIDTH), route)
            engine.backward(out.square().mean())
            engine.step()
    except MeshError as error:
        text = str(error)
    same = all(torch.equal(group.master, old) for group, old in zip(engine.sharded.groups, weights, strict=True))
    return text, same


def check_error(answers: list[tuple[str, bool]]) -> None:
    for text, same in answers:
        assert "rank 0 gathers moe.experts." in text
        assert "rank 1 gathers moe.experts.1" in text
        assert "zero_optimization.leaf_module" in text
        assert same  # nothing of what was mixed has been learned


@pytest.mark.parametrize(("transport", "steps"), [("auto", 0), ("auto", 2), ("gloo", 2)])
def test_ranks_that_use_different_experts(doomed: Callable[[bool], RankPool], transport: str, steps: int) -> None:
    """After two steps the order of uses is known, and blocks are fetched ahead: a rank may then
    learn of the disagreement only by waiting in vain."""
    config = {"comm_transport": transport, "comm_timeout_seconds": 2.0 if steps else 30.0}
    check_error(doomed(False).run(disagree, {"overlap_comm": True}, config, steps))


def disagree_on_device(*args: Any) -> tuple[str, bool]:
    with strict_backend.pretended_device():
        return disagree(*args)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_backend_that_compares_nothing(doomed: Callable[[bool], RankPool], deferred: bool) -> None:
    """Like NCCL: both ranks get a tensor of the right size, which is half another expert's. No step
    is taken with it."""
    config = {"comm_transport": "gloo", "comm_timeout_seconds": 30.0}
    check_error(doomed(True).run(disagree_on_device, {"overlap_comm": True}, config, 0, deferred))
