"""Who owns a tensor that is updated whole, and which elements travel."""

from __future__ import annotations

import random

import pytest

from zero_trial.ops.optimizers.fused import orthogonalization_flops
from zero_trial.sharding.layout import lay_out
from zero_trial.sharding.whole_tensors import assign_owners, parts_of


@pytest.mark.parametrize(
    ("work", "ranks", "owners"),
    [
        ([], 2, []),
        ([3.0], 2, [0]),
        ([1.0, 1.0, 1.0, 1.0], 2, [0, 1, 0, 1]),
        ([1.0, 5.0, 2.0, 2.0], 2, [1, 0, 1, 1]),
        ([7.0, 7.0, 6.0, 6.0, 5.0, 5.0, 4.0, 4.0, 4.0], 4, [0, 1, 2, 3, 2, 3, 0, 1, 0]),
        ([9.0, 1.0], 4, [0, 1]),
    ],
)
def test_the_heaviest_goes_to_the_rank_with_least_to_do(work: list[float], ranks: int, owners: list[int]) -> None:
    assert assign_owners(work, ranks) == owners


def test_of_equally_heavy_tensors_a_rank_gets_what_it_holds() -> None:
    held = [{1: 10}, {0: 4, 1: 6}, {0: 10}, {0: 9, 1: 1}]
    assert assign_owners([1.0] * 4, 2, held) == [1, 1, 0, 0]
    assert assign_owners([1.0, 1.0, 2.0, 1.0], 2, held) == [1, 1, 0, 0]


def test_rank_0_steps_every_group() -> None:
    """What a group counts by itself (schedule-free's k) is saved by rank 0."""
    owners = assign_owners([8.0, 4.0, 4.0, 1.0], 4, kinds=[0, 0, 1, 1])
    assert owners[1] == 0 and owners[3] == 0 and assign_owners([8.0, 1.0], 2, kinds=[0, 1]) == [0, 0]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_transformer_is_balanced(ranks: int) -> None:
    """Blocks of four shapes, by Muon's flops: the busiest rank does at most a tenth more than the
    mean."""
    shapes = [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12
    work = [orthogonalization_flops(shape) for shape in shapes]
    owners = assign_owners(work, ranks)
    load = [sum(each for each, owner in zip(work, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert max(load) <= 1.1 * sum(load) / ranks


def test_flops_of_an_orthogonalization() -> None:
    assert orthogonalization_flops((3, 5)) == orthogonalization_flops((5, 3)) == 5 * (4 * 9 * 5 + 2 * 27)
    assert orthogonalization_flops((4, 3, 2, 2)) == orthogonalization_flops((4, 12))
    assert orthogonalization_flops((6, 3, 5)) == 6 * orthogonalization_flops((3, 5))
    assert orthogonalization_flops((7,)) == 7


def test_parts_are_those_of_the_layout() -> None:
    chance = random.Random(0)
    for _ in range(50):
        shards = chance.randint(1, 5)
        layout = lay_out([(f"t{n}", (chance.choice((0, 1, 31, 32, 33, 200)),)) for n in range(6)], shards)
        by_shard = {(i, p.slot.name): (p.start, p.stop, p.offset) for i in range(shards) for p in layout.pieces(i)}
        found = {(i, s.name): (a, b, o) for s in layout.slots for i, a, b, o in parts_of(layout, s)}
        assert found == by_shard
