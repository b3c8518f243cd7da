"""Tests for zero_trial/sharding/full_params.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import TinyLM, make_engine, tokens, train_engine
from tests.support.pool import Pools
from zero_trial.errors import TrialError
from zero_trial.zero import GatheredParameters

FREE: dict[str, Any] = {
    "stage": 3,
    "param_persistence_threshold": 0,
    "reshard_after": "forward",
    "module_granularity_threshold": 1,
}
STAGES: list[dict[str, Any]] = [{"stage": 0}, {"stage": 1}, {"stage": 2}, FREE]


def read() -> list[bool]:
    engine = make_engine(TinyLM, {"zero_optimization": FREE})
    torch.manual_seed(1)
    plain = TinyLM()
    weight, expected = engine.module.blocks[1].up.weight, plain.blocks[1].up.weight
    out = [bool(weight.isnan().all())]
    with GatheredParameters(weight):
        out.append(torch.equal(weight, expected))
    out.append(bool(weight.isnan().all()))
    with GatheredParameters(engine.module.blocks[1].parameters()):
        out += [
            torch.equal(p, q)
            for p, q in zip(engine.module.blocks[1].parameters(), plain.blocks[1].parameters(), strict=True)
        ]
    with GatheredParameters(engine.module):
        out.append(all(torch.equal(p, q) for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True)))
    with GatheredParameters(weight, enabled=False):
        out.append(bool(weight.isnan().all()))
    return out


def test_inside_the_block_parameters_are_whole(ranks: Pools) -> None:
    for answers in ranks(2).run(read):
        assert all(answers)


def edit(zero: dict[str, Any], bf16: bool, modifier: int | None) -> list[float]:
    engine = make_engine(TinyLM, {"zero_optimization": zero, "bf16": {"enabled": bf16}})
    weight, other = engine.module.blocks[0].up.weight, engine.module.blocks[0].down.weight
    with GatheredParameters(other):
        before = other.detach().clone()
    with GatheredParameters([weight, other], modifier_rank=modifier), torch.no_grad():
        weight.fill_(0.5 + engine.global_rank)
    with GatheredParameters([weight, other]):
        first, same = weight.float().unique().tolist(), torch.equal(other, before)
    group, index = engine.sharded.group_of(weight)
    name = group.layout.slots[index].name
    own = [
        group.master[p.offset : p.offset + p.numel]
        for p in group.layout.pieces(group.comm.index)
        if p.slot.name == name
    ]
    masters = torch.cat(own).unique().tolist() if own else first
    train_engine(engine, range(1))  # the edit is where training goes on from
    with GatheredParameters(weight):
        moved = (weight.float() - first[0]).abs().max().item() if len(first) == 1 else 0.0
    return [*first[:1], float(len(first)), *masters[:1], float(len(masters)), float(same), float(moved < 0.02)]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("modifier", [0, 1])
@pytest.mark.parametrize("zero", STAGES, ids=["zero0", "zero1", "zero2", "zero3"])
def test_what_the_modifier_wrote_is_everyones(ranks: Pools, zero: dict[str, Any], modifier: int, bf16: bool) -> None:
    value = 0.5 + modifier
    assert ranks(2).run(edit, zero, bf16, modifier) == [[value, 1.0, value, 1.0, 1.0, 1.0]] * 2


def read_only() -> list[bool]:
    engine = make_engine(TinyLM, {"zero_optimization": FREE})
    weight = engine.module.blocks[0].up.weight
    with GatheredParameters(weight), torch.no_grad():
        before = weight.clone()
        weight.fill_(9.0)
    with GatheredParameters(weight):
        return [torch.equal(weight, before)]


def test_without_a_modifier_edits_are_dropped(ranks: Pools) -> None:
    assert ranks(2).run(read_only) == [[True]] * 2


class LooksAtItself(nn.Module):
    """Gathers its own, live, weights in the middle of its forward, as weight normalisation or a penalty may."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyLM()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with GatheredParameters([self.inner.embed.weight, self.inner.blocks[0].up.weight]):
            self.seen = self.inner.embed.weight.detach().norm().item()
        out: torch.Tensor = self.inner(batch)
        with GatheredParameters(self.inner.parameters()):
            pass
        return out


def inside_forward() -> list[float]:
    engine = make_engine(LooksAtItself, {"zero_optimization": FREE})
    return train_engine(engine, range(2))


def plainly() -> list[float]:
    return train_engine(make_engine(TinyLM, {"zero_optimization": FREE}), range(2))


def test_in_the_middle_of_a_forward(ranks: Pools) -> None:
    """What was live before is live afterwards."""
    assert ranks(2).run(inside_forward) == ranks(2).run(plainly)


def nested() -> list[bool]:
    engine = make_engine(TinyLM, {"zero_optimization": FREE})
    weight = engine.module.blocks[0].up.weight
    out = []
    with GatheredParameters(weight):
        with GatheredParameters(weight):
            pass
        out.append(not weight.isnan().any())
        try:
            with GatheredParameters(engine.module.blocks[2].up.weight, modifier_rank=0):
                raise KeyError
        except KeyError:
            out.append(bool(engine.module.blocks[2].up.weight.isnan().all()))
        out.append(not weight.isnan().any())
    out.append(bool(weight.isnan().all()))
    with GatheredParameters(weight):
        out.append(not weight.isnan().any())
    engine(tokens(0, 2))
    return out


def test_blocks_in_blocks_and_exceptions(ranks: Pools) -> None:
    assert ranks(2).run(nested) == [[True] * 5] * 2


def test_ordinary_parameters_pass_through() -> None:
    layer = nn.Linear(2, 2)
    with GatheredParameters(layer, modifier_rank=0), torch.no_grad():
        layer.weight.fill_(3.0)
    assert layer.weight.eq(3).all()
    with GatheredParameters([]):
        pass


def around_a_step(zero: dict[str, Any]) -> list[float]:
    """A penalty on all weights, computed by user code outside any forward: the block spans forward and backward."""
    engine = make_engine(TinyLM, {"zero_optimization": zero})
    losses = []
    for step in range(3):
        with GatheredParameters(engine.module):
            loss = engine(tokens(step, 4)[2 * engine.global_rank :][:2])
            loss = loss + 1e-2 * sum(param.square().sum() for param in engine.module.parameters())
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_around_forward_and_backward(ranks: Pools) -> None:
    """What somebody holds open is not freed by the blocks' own coming and going."""
    assert ranks(2).run(around_a_step, FREE) == ranks(2).run(around_a_step, {"stage": 1})


def step_inside() -> list[Any]:
    engine = make_engine(TinyLM, {"zero_optimization": FREE})
    weight = engine.module.blocks[0].up.weight
    with GatheredParameters(weight):
        train_engine(engine, range(1))
        stale = bool(weight.isnan().all())
    try:
        with GatheredParameters(weight, modifier_rank=0):
            train_engine(engine, range(1))
        message = "accepted"
    except TrialError as error:
        message = str(error)
    train_engine(engine, range(1))
    return [stale, message]


def test_a_step_inside_leaves_no_stale_values(ranks: Pools) -> None:
    for stale, message in ranks(2).run(step_inside):
        assert stale
        assert "Leave the block before engine.step()" in message
