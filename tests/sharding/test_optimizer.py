"""The optimizer over shards: its pieces, their state by tensor, and the publication of what it
updates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.sharding.parts import (
    Small,
    add_optimizer,
    address,
    build_small,
    make_grad_buffer,
    make_group,
    make_model,
    optimizer_of,
    parameters,
    run_update,
)
from zero_trial.errors import ConfigError, TrialError
from zero_trial.ops.optimizers.fused import FusedAdam
from zero_trial.ops.optimizers.lamb import FusedLamb
from zero_trial.sharding.grouping import GroupingLimits, ShardingSettings
from zero_trial.sharding.model import ShardedModel
from zero_trial.sharding.optimizer import ShardedOptimizer
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.pieces import ShardPiece, StateStore, cut_pieces, rebind
from zero_trial.sharding.whole_tensors import own_tensors


def test_a_step_past_the_engine_is_refused() -> None:
    """As in a loop of plain torch: masters would change, and no parameter."""
    with pytest.raises(TrialError, match=r"optimizer\.step: the engine steps this optimizer.*Call engine\.step\(\)"):
        ShardedOptimizer(FusedLamb([{"params": []}]), []).step()
    with pytest.raises(TrialError, match=r"optimizer\.step"):
        ShardedOptimizer(FusedLamb([{"params": []}]), []).step(lambda: 1.0)  # type: ignore[arg-type]


def test_tensors_are_numbered_over_all_groups_also_where_a_rank_has_no_piece() -> None:
    """Otherwise a rank whose part of a group is padding would add its squares to other tensors than
    its peers."""
    model = build_small(0)
    grad_buffers = model.grad_buffers
    pieces = cut_pieces(grad_buffers[-1:])
    opt_groups = [{"params": [piece.weight for piece in pieces if piece.opt_group == index]} for index in (0, 1)]
    optimizer = ShardedOptimizer(FusedLamb(opt_groups), pieces)
    names = {slot.name for grad_buffer in grad_buffers for slot in grad_buffer.group.layout.slots}
    asked: list[tuple[int, ...]] = []
    optimizer.bind_tensors(
        [grad_buffer.group for grad_buffer in grad_buffers], lambda sums: asked.append(tuple(sums.shape))
    )
    run_update(optimizer, 1.0)
    assert asked == [(2, len(names))] and len(names) > len(pieces[0].group.layout.slots)
    nothing = ShardedOptimizer(FusedLamb([{"params": []}]), [])
    nothing.bind_tensors(
        [grad_buffer.group for grad_buffer in grad_buffers], lambda sums: asked.append(tuple(sums.shape))
    )
    run_update(nothing, 1.0)
    assert asked == [(2, len(names))] * 2  # also a rank without any piece takes part


def test_pieces_are_runs_of_one_optimizer_group() -> None:
    model = build_small(1)
    pieces = cut_pieces(model.grad_buffers)
    assert {piece.opt_group for piece in pieces} == {0, 1}
    for grad_buffer in model.grad_buffers:
        spans = sorted((piece.low, piece.high) for piece in pieces if piece.grad_buffer is grad_buffer)
        assert spans[0][0] == 0 and spans[-1][1] == grad_buffer.group.layout.shard_numel
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))  # noqa: RUF007
    small = cut_pieces(model.grad_buffers, most=32)  # at multiples counted from the shard's start
    assert all(piece.low // 32 == (piece.high - 1) // 32 for piece in small)
    assert sum(piece.numel for piece in small) == sum(piece.numel for piece in pieces)


def test_whole_tensors_where_nothing_is_sharded_are_views_of_what_the_rank_has() -> None:
    """Muon, Shampoo, Adafactor: an optimizer that looks at rows and columns gets real shapes."""
    model = build_small(0)
    names = [name for name, _ in model.module.named_parameters()]
    whole = own_tensors(model.grad_buffers, (0, 1), names, model.mesh.shard, math.prod)
    assert whole is not None and cut_pieces(model.grad_buffers, whole=(0, 1)) == []
    own = whole.own
    groups = {tuple(tensor.weight.shape): tensor.opt_group for tensor in own}
    assert sorted(tensor.weight.shape for tensor in own) == sorted(param.shape for param in Small().parameters())
    assert groups[(7, 11)] == 0 and groups[(7,)] == 1
    for tensor in own:
        assert address(tensor.weight) == address(tensor.group.master[tensor.slot.offset :])


def by_group(base: torch.optim.Optimizer, pieces: list[ShardPiece]) -> list[list[nn.Parameter]]:
    groups = range(len(base.param_groups))
    return [[piece.weight for piece in pieces if piece.opt_group == index] for index in groups]


def piece(numel: int = 64, dtype: torch.dtype = torch.float32) -> ShardPiece:
    group = make_group(parameters([(numel,)]), dtype=dtype)
    grad_buffer, _ = make_grad_buffer(group)
    return ShardPiece(group, grad_buffer, 0, 0, numel, nn.Parameter(group.master[:numel]))


def test_gradients_need_no_copy_where_dtypes_agree() -> None:
    own = piece()
    own.grad_buffer.reduced().fill_(2.0)
    assert address(own.gradient()) == address(own.grad_buffer.shard)
    other = piece(dtype=torch.bfloat16)
    other.grad_buffer.reduced().fill_(2.0)
    gradient = other.gradient()
    assert gradient.dtype == torch.float32 and gradient.eq(2).all()


@pytest.mark.parametrize(("cast_numel", "sizes"), [(1000, [4]), (128, [2, 2]), (127, [1, 1, 1, 1]), (1, [1, 1, 1, 1])])
def test_casts_are_bounded_by_batches(cast_numel: int, sizes: list[int]) -> None:
    pieces = [piece(dtype=torch.bfloat16) for _ in range(4)]
    assert [len(batch) for batch in StateStore(pieces, cast_numel=cast_numel).batches()] == sizes
    assert [len(batch) for batch in StateStore([piece() for _ in range(4)], cast_numel=cast_numel).batches()] == [4]


STEPPED = [
    (torch.optim.AdamW, {}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (torch.optim.RMSprop, {}),
]


@pytest.mark.parametrize(("kind", "options"), STEPPED)
def test_a_client_optimizer_must_be_fresh(kind: Any, options: dict[str, Any]) -> None:
    for stepped in (False, True):
        module = Small()
        base = kind(module.parameters(), **options)
        if stepped:
            module(torch.ones(2, 11)).backward()
            base.step()
        model = make_model(module, 0)
        pieces = cut_pieces(model.grad_buffers)
        if stepped:
            with pytest.raises(ConfigError, match="has stepped before"):
                rebind(base, by_group(base, pieces))
        else:
            rebind(base, by_group(base, pieces))
            for piece in pieces:
                piece.weight.grad = torch.ones_like(piece.weight)
            base.step()


class NoFusion(FusedAdam):
    """The same arithmetic in three passes: gradients are widened first, weights are rounded
    afterwards."""

    fuses = False


def test_groups_go_in_the_models_order_as_soon_as_they_are_done() -> None:
    model = build_small(1)
    optimizer = add_optimizer(model, FusedAdam, lr=0.1)
    published: list[str] = []
    for group in model.groups:
        group.publish = lambda rounded=False, group=group: published.append(group.name)  # type: ignore[method-assign]
    names = [group.name for group in model.groups]
    assert len(names) > 2
    of_first = [group for group in optimizer.updated if group is model.groups[0]]
    rest = [group for group in optimizer.updated if group is not model.groups[0]]

    def updates() -> Iterator[tuple[list[ParamGroup], bool]]:
        yield rest, True
        assert published == [], "the first group is not done, so none may go: another rank's order is the same"
        yield of_first[:1], True
        yield of_first[1:], True
        assert published == names

    model.unsharder.publish(model.groups, optimizer.updated, updates())
    assert published == names


def train(model: ShardedModel, dtype: torch.dtype, steps: int = 4) -> list[torch.Tensor]:
    for step in range(steps):
        x = torch.linspace(-1, 1, 33).view(3, 11).to(dtype) * (step + 1)
        loss = model.module(x)
        model.begin_backward(reduce=True, last=True)
        loss.backward()
        model.end_backward()
        model.wait_before_writing()
        optimizer = optimizer_of(model)
        updates = optimizer.update(0.5 / model.mesh.data.size)
        model.unsharder.publish(model.groups, optimizer.updated, updates)
        model.unsharder.end_step()
        model.reducer.reset()
    return [group.master.clone() for group in model.groups] + [group.shard.clone() for group in model.groups]


def run_both(stage: int, precision: str, fused: type, plain: type) -> tuple[bool, int]:
    """Whether the one-pass step and the three-pass step left the same bits, and how many different
    values there were to differ in."""
    results = []
    for base in (fused, plain):
        torch.manual_seed(0)
        module = Small()
        model = make_model(
            module,
            stage,
            precision=precision,
            settings=ShardingSettings(limits=GroupingLimits(bucket=100, persistence=0)),
        )
        add_optimizer(model, base, lr=0.05, weight_decay=0.1)
        results.append(train(model, model.policy.param))
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return same, torch.cat(results[0]).unique().numel()


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp16"), (1, "fp32"), (2, "bf16"), (3, "bf16")])
def test_one_pass_has_the_bits_of_three(stage: int, precision: str) -> None:
    same, values = run_both(stage, precision, FusedAdam, NoFusion)
    assert same and values > 200
