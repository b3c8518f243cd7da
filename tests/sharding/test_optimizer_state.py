"""Masters and state of the optimizer over shards by logical tensor, as checkpoints see them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.sharding.parts import Small, add_optimizer, build_small, mesh_for, train_small
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
        for kind in ("exp_avg", "exp_avg_sq"):
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
