"""Tests for zero_trial/zero/optimizer.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.pool import Pools
from tests.zero.parts import add_optimizer, address, make_model, mesh_for
from zero_trial.errors import ConfigError
from zero_trial.ops.optimizers import FusedLamb
from zero_trial.zero.model import ShardedModel, ShardingSettings
from zero_trial.zero.optimizer import ShardedOptimizer, cut_pieces, rebind
from zero_trial.zero.partition import Limits


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(11, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: torch.Tensor = (self.scale * x).square().mean()
        return out


def by_decay(module: nn.Module) -> list[list[nn.Parameter]]:
    """Matrices in one optimizer group, the rest in another."""
    params = list(module.parameters())
    return [[p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]]


def build(stage: int, **kwargs: Any) -> ShardedModel:
    torch.manual_seed(0)
    module = Small()
    return make_model(
        module,
        stage,
        groups=by_decay(module),
        settings=ShardingSettings(limits=Limits(bucket=100, persistence=10)),
        **kwargs,
    )


def train(model: ShardedModel, steps: int) -> None:
    assert model.optimizer is not None
    for step in range(steps):
        loss = model.module(torch.linspace(-1, 1, 33).view(3, 11).to(model.policy.param) * (step + 1))
        model.begin_backward(reduce=True, last=True)
        loss.backward()
        model.end_backward()
        model.settle()
        model.optimizer.step(1.0 / model.mesh.data.size)
        model.reducer.reset()
        model.publish()
        model.wait()


def test_the_base_optimizer_steps_on_flat_pieces_of_the_masters() -> None:
    model = build(1)
    optimizer = add_optimizer(model, torch.optim.SGD, lr=1.0)
    piece = optimizer.pieces[0]
    assert address(piece.weight) == address(piece.unit.master)
    before = piece.weight.detach().clone()
    for landing in model.landings:
        landing.shard.fill_(2.0)
    optimizer.step(multiplier=0.25)
    assert torch.allclose(piece.weight, before - 0.5)
    assert piece.weight.grad is None


def coverage(stage: int, shard: int | None, precision: str) -> dict[str, Any]:
    """Which elements of which state this rank's views show, after two steps."""
    model = build(stage, mesh=mesh_for(stage, shard), precision=precision)
    optimizer = add_optimizer(model, torch.optim.AdamW, lr=1e-3)
    train(model, 2)
    seen: dict[str, list[tuple[int, int]]] = {}
    shapes = {}
    for view in optimizer.views():
        assert view.tensor.shape == (view.stop - view.start,)
        assert view.tensor.dtype == torch.float32
        seen.setdefault(f"{view.kind}/{view.name}", []).append((view.start, view.stop))
        shapes[view.name] = view.shape
    return {"seen": seen, "shapes": shapes, "shard": model.mesh.shard.index, "scalars": optimizer.scalars()}


@pytest.mark.parametrize(("stage", "shard"), [(0, None), (1, None), (2, 2), (3, None)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_views_cover_every_element_of_every_state_exactly_once(
    ranks: Pools, stage: int, shard: int | None, precision: str
) -> None:
    answers = ranks(4).run(coverage, stage, shard, precision)
    shapes = {name: tuple(param.shape) for name, param in Small().named_parameters()}
    lines: dict[int, dict[str, Any]] = {}
    for answer in answers:  # replicas show the same
        known = lines.setdefault(answer["shard"], answer)
        assert known["seen"] == answer["seen"]
    for name, shape in shapes.items():
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            covered = sorted(span for answer in lines.values() for span in answer["seen"].get(f"{kind}/{name}", []))
            end = 0
            for start, stop in covered:
                assert start == end, (kind, name, covered)
                end = stop
            assert end == torch.Size(shape).numel(), (kind, name, covered)
    for answer in answers:
        assert answer["shapes"].items() <= shapes.items()
        assert all(numbers == {"step": 2.0} for numbers in answer["scalars"].values())
    assert set().union(*(answer["scalars"] for answer in answers)) == {"0", "1"}


def state_travels(stage: int) -> list[bool]:
    """State written into freshly made tensors continues as if it had always been there."""
    model = build(stage)
    optimizer = add_optimizer(model, torch.optim.AdamW, lr=1e-3)
    train(model, 2)
    kept = {(v.kind, v.name, v.start): v.tensor.clone() for v in optimizer.views()}
    scalars = optimizer.scalars()
    shapes = {slot.name: slot.shape for unit in model.units for slot in unit.layout.slots}
    train(model, 1)
    expected = {(v.kind, v.name, v.start): v.tensor.clone() for v in optimizer.views()}

    other = build(stage)
    fresh = add_optimizer(other, torch.optim.AdamW, lr=1e-3)
    assert [v.kind for v in fresh.views() if v.kind != "master"] == []
    fresh.make_state(["exp_avg", "exp_avg_sq"], scalars, lambda kind, name: shapes.get(name))
    for view in fresh.views():
        view.tensor.copy_(kept[view.kind, view.name, view.start])
    for unit in other.units:
        pending = unit.publish()
        if pending is not None:
            pending.wait()
    loss = other.module(torch.linspace(-1, 1, 33).view(3, 11))
    other.begin_backward(reduce=True, last=True)
    loss.backward()
    other.end_backward()
    other.settle()
    fresh.step(1.0 / other.mesh.data.size)
    found = {(v.kind, v.name, v.start): v.tensor for v in fresh.views()}
    return [found.keys() == expected.keys(), all(torch.equal(found[key], expected[key]) for key in expected)]


@pytest.mark.parametrize("stage", [1, 3])
def test_made_state_takes_a_checkpoint_in(ranks: Pools, stage: int) -> None:
    assert ranks(2).run(state_travels, stage) == [[True, True]] * 2


def shards_of_state() -> list[bool]:
    model = build(2)
    optimizer = add_optimizer(model, torch.optim.AdamW, lr=1e-3)
    unit = model.units[0]
    out = [optimizer.state_shard(unit, "exp_avg") is None]
    train(model, 1)
    shard = optimizer.state_shard(unit, "exp_avg")
    assert shard is not None
    out.append(shard.numel() == unit.layout.shard_numel)
    optimizer.set_state_shard(unit, "exp_avg", torch.full_like(shard, 3.0))
    again = optimizer.state_shard(unit, "exp_avg")
    assert again is not None
    out.append(bool(again.eq(3).all()))
    others = [optimizer.state_shard(other, "exp_avg") for other in model.units[1:]]
    out.append(not any(bool(value.eq(3).any()) for value in others if value is not None))
    out.append(optimizer.state_shard(unit, "step") is None)
    out.append(optimizer.state_shard(unit, "nothing") is None)
    return out


def test_the_state_of_a_unit_as_one_shard(ranks: Pools) -> None:
    assert ranks(2).run(shards_of_state) == [[True] * 6] * 2


def test_pieces_are_runs_of_one_optimizer_group() -> None:
    model = build(1)
    pieces = cut_pieces(model.landings, whole_tensors=False)
    assert {piece.group for piece in pieces} == {0, 1}
    for landing in model.landings:
        spans = sorted((piece.low, piece.high) for piece in pieces if piece.landing is landing)
        assert spans[0][0] == 0
        assert spans[-1][1] == landing.unit.layout.shard_numel
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))  # noqa: RUF007


def test_whole_tensors_where_nothing_is_sharded() -> None:
    """Muon, Shampoo, Adafactor: an optimizer that looks at rows and columns gets real shapes."""
    model = build(0)
    pieces = cut_pieces(model.landings, whole_tensors=True)
    shapes = sorted(tuple(param.shape) or (1,) for param in Small().parameters())
    assert sorted(tuple(piece.weight.shape) for piece in pieces) == shapes
    assert {tuple(piece.weight.shape): piece.group for piece in pieces}[(7, 11)] == 0
    assert {tuple(piece.weight.shape): piece.group for piece in pieces}[(7,)] == 1


def refuses_whole_tensors() -> str:
    try:
        cut_pieces(build(1).landings, whole_tensors=True)
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_whole_tensors_of_shards_are_refused(ranks: Pools) -> None:
    assert all("needs whole tensors, and sharding cuts them" in text for text in ranks(2).run(refuses_whole_tensors))


def test_a_clients_optimizer_steps_on_pieces_with_its_own_groups() -> None:
    torch.manual_seed(0)
    module = Small()
    groups = by_decay(module)
    base = torch.optim.AdamW([{"params": groups[0], "lr": 0.5}, {"params": groups[1], "lr": 0.25, "weight_decay": 0.0}])
    model = make_model(module, 1, groups=groups)
    pieces = cut_pieces(model.landings, whole_tensors=False)
    rebind(base, pieces)
    assert [group["lr"] for group in base.param_groups] == [0.5, 0.25]
    for index, group in enumerate(base.param_groups):
        assert [id(p) for p in group["params"]] == [id(piece.weight) for piece in pieces if piece.group == index]
    optimizer = ShardedOptimizer(base, pieces, scale=lambda: 8.0)
    base.param_groups[0]["lr"] = 0.125  # a scheduler holds the base
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert (optimizer.loss_scale, optimizer.cur_scale) == (8.0, 8.0)


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
        pieces = cut_pieces(model.landings, whole_tensors=False)
        if stepped:
            with pytest.raises(ConfigError, match="has stepped before"):
                rebind(base, pieces)
        else:
            rebind(base, pieces)
            for piece in pieces:
                piece.weight.grad = torch.ones_like(piece.weight)
            base.step()


def sizes(stage: int) -> tuple[int, int]:
    model = build(stage)
    optimizer = add_optimizer(model, torch.optim.AdamW, lr=1e-3)
    assert optimizer.persistent_bytes() == 0
    train(model, 1)
    return optimizer.persistent_bytes(), sum(unit.layout.shard_numel for unit in model.units)


def test_adam_keeps_eight_bytes_per_element_of_the_shard(ranks: Pools) -> None:
    for stage in (0, 3):
        for found, numel in ranks(2).run(sizes, stage):
            assert found == 8 * numel


def test_tensors_are_numbered_over_all_units_also_where_a_rank_has_no_piece() -> None:
    """Otherwise a rank whose part of a unit is padding would add its squares to other tensors than its peers."""
    model = build(0)
    landings = model.landings
    pieces = cut_pieces(landings[-1:], whole_tensors=False)
    groups = [{"params": [piece.weight for piece in pieces if piece.group == index]} for index in (0, 1)]
    optimizer = ShardedOptimizer(FusedLamb(groups), pieces, scale=lambda: 1.0)
    names = {slot.name for landing in landings for slot in landing.unit.layout.slots}
    asked: list[tuple[int, ...]] = []
    optimizer.bind_tensors([landing.unit for landing in landings], lambda sums: asked.append(tuple(sums.shape)))
    optimizer.step()
    assert asked == [(2, len(names))] and len(names) > len(pieces[0].unit.layout.slots)
    nothing = ShardedOptimizer(FusedLamb([{"params": []}]), [], scale=lambda: 1.0)
    nothing.bind_tensors([landing.unit for landing in landings], lambda sums: asked.append(tuple(sums.shape)))
    nothing.step()
    assert asked == [(2, len(names))] * 2  # also a rank without any piece takes part
