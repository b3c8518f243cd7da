"""Masters and state of the optimizer over shards by logical tensor, as checkpoints see them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.sharding.parts import Small, add_optimizer, build_small, mesh_for, run_update, train_small
from tests.support.pool import Pools


def coverage(stage: int, shard: int | None, precision: str) -> dict[str, Any]:
    """Which elements of which state this rank's views show, after two steps."""
    model = build_small(stage, mesh=mesh_for(stage, shard), precision=precision)
    state = add_optimizer(model, torch.optim.AdamW, lr=1e-3).state_by_tensor
    train_small(model, 2)
    seen: dict[str, list[tuple[int, int]]] = {}
    shapes = {}
    for view in state.views():
        assert view.tensor.shape == (view.stop - view.start,)
        assert view.tensor.dtype == torch.float32
        seen.setdefault(f"{view.kind}/{view.name}", []).append((view.start, view.stop))
        shapes[view.name] = view.shape
    return {"seen": seen, "shapes": shapes, "shard": model.mesh.shard.index, "scalars": state.scalars()}


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
    model = build_small(stage)
    state = add_optimizer(model, torch.optim.AdamW, lr=1e-3).state_by_tensor
    train_small(model, 2)
    kept = {(v.kind, v.name, v.start): v.tensor.clone() for v in state.views()}
    scalars = state.scalars()
    shapes = {slot.name: slot.shape for group in model.groups for slot in group.layout.slots}
    train_small(model, 1)
    expected = {(v.kind, v.name, v.start): v.tensor.clone() for v in state.views()}

    other = build_small(stage)
    optimizer = add_optimizer(other, torch.optim.AdamW, lr=1e-3)
    fresh = optimizer.state_by_tensor
    assert [v.kind for v in fresh.views() if v.kind != "master"] == []
    fresh.make_state(["exp_avg", "exp_avg_sq"], scalars, lambda kind, name: shapes.get(name))
    for view in fresh.views():
        view.tensor.copy_(kept[view.kind, view.name, view.start])
    for group in other.groups:
        pending = group.publish()
        if pending is not None:
            pending.wait()
    loss = other.module(torch.linspace(-1, 1, 33).view(3, 11))
    other.begin_backward(reduce=True, last=True)
    loss.backward()
    other.end_backward()
    other.wait_before_writing()
    run_update(optimizer, 1.0 / other.mesh.data.size)
    found = {(v.kind, v.name, v.start): v.tensor for v in fresh.views()}
    return [found.keys() == expected.keys(), all(torch.equal(found[key], expected[key]) for key in expected)]


@pytest.mark.parametrize("stage", [1, 3])
def test_made_state_takes_a_checkpoint_in(ranks: Pools, stage: int) -> None:
    assert ranks(2).run(state_travels, stage) == [[True, True]] * 2


def shards_of_state() -> list[bool]:
    model = build_small(2)
    state = add_optimizer(model, torch.optim.AdamW, lr=1e-3).state_by_tensor
    group = model.groups[0]
    out = [state.state_shard(group, "exp_avg") is None]
    train_small(model, 1)
    shard = state.state_shard(group, "exp_avg")
    assert shard is not None
    out.append(shard.numel() == group.layout.shard_numel)
    state.set_state_shard(group, "exp_avg", torch.full_like(shard, 3.0))
    again = state.state_shard(group, "exp_avg")
    assert again is not None
    out.append(bool(again.eq(3).all()))
    others = [state.state_shard(other, "exp_avg") for other in model.groups[1:]]
    out.append(not any(bool(value.eq(3).any()) for value in others if value is not None))
    out.append(state.state_shard(group, "step") is None)
    out.append(state.state_shard(group, "nothing") is None)
    return out


def test_the_state_of_a_group_as_one_shard(ranks: Pools) -> None:
    assert ranks(2).run(shards_of_state) == [[True] * 6] * 2


def sizes(stage: int) -> tuple[int, int]:
    model = build_small(stage)
    state = add_optimizer(model, torch.optim.AdamW, lr=1e-3).state_by_tensor
    assert state.persistent_bytes() == 0
    train_small(model, 1)
    return state.persistent_bytes(), sum(group.layout.shard_numel for group in model.groups)


def test_adam_keeps_eight_bytes_per_element_of_the_shard(ranks: Pools) -> None:
    for stage in (0, 3):
        for found, numel in ranks(2).run(sizes, stage):
            assert found == 8 * numel
