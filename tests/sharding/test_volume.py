"""Communication volume per optimizer step, through the engine, against the formulas of Rajbhandari
et al. 2020, section 7.

Psi is the padded number of parameters, N the ranks, g the micro-batches per step; a step is one of
the third, when orders are learned.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.models import TinyLM, make_engine, train_engine
from tests.support.pool import Pools
from zero_trial.comm.backends import Traffic


def volume(
    zero: dict[str, Any], accumulation: int, extra: dict[str, Any]
) -> tuple[int, dict[str, tuple[int, int, int]]]:
    """(Psi, what one optimizer step moved: calls, elements and bytes by kind and axis)."""
    config = {
        "zero_optimization": zero,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": 16,
        "gradient_clipping": 1.0,
    }
    engine = make_engine(TinyLM, config | extra)
    train_engine(engine, range(2), 16)
    engine.mesh.counters.reset()
    train_engine(engine, range(2, 3), 16)
    table = engine.mesh.counters.table()
    return sum(group.layout.numel for group in engine.sharded.groups), {
        name: (row["calls"], row["elements"], row["bytes"]) for name, row in table.items()
    }


def elements(table: dict[str, tuple[int, int, int]], *names: str) -> int:
    return sum(table.get(name, (0, 0, 0))[1] for name in names)


def check_scalars(table: dict[str, tuple[int, int, int]]) -> None:
    """One exchange of five float64 per step: the norm, which is also the overflow flag, the ranks
    with weights, the weights, the groups with late gradients, and the ranks with edits."""
    assert table["all_reduce/shard"] == (1, 5, 40), table
    assert set(table) <= {"all_reduce/shard", "reduce_scatter/shard", "all_gather/shard"}, table


FREE = {"stage": 3, "param_persistence_threshold": 0}
KEPT = FREE | {"reshard_after": "step"}
# Micro-batches, and how often all shards are reduced and gathered per step. The default limits keep
# a small model live from forward to backward.
MOVED: list[tuple[dict[str, Any], int, int, int]] = [
    *(({"stage": stage}, accumulation, 1, 1) for stage in (1, 2) for accumulation in (1, 4)),
    *(
        ({"stage": stage, "reduce_every": "micro"}, accumulation, accumulation, 1)
        for stage, accumulation in ((1, 4), (2, 4))
    ),
    (FREE, 1, 1, 1),
    (KEPT, 4, 4, 1),
    (KEPT | {"reduce_every": "boundary"}, 4, 1, 1),
]


@pytest.mark.parametrize(("zero", "accumulation", "reduced", "gathered"), MOVED)
def test_what_a_step_moves(ranks: Pools, zero: dict[str, Any], accumulation: int, reduced: int, gathered: int) -> None:
    world = 4 if accumulation == 1 else 2
    for psi, table in ranks(world).run(volume, zero, accumulation, {}):
        once = psi * (world - 1) // world
        assert elements(table, "reduce_scatter/shard") == reduced * once
        assert elements(table, "all_gather/shard") == gathered * once
        check_scalars(table)


@pytest.mark.parametrize(("world", "accumulation"), [(2, 1), (4, 4)])
def test_stage_0_moves_2_psi_and_five_scalars(ranks: Pools, world: int, accumulation: int) -> None:
    """Every rank has the whole gradient, but reads only the slice that it summed up for the
    norm."""
    for psi, table in ranks(world).run(volume, {"stage": 0}, accumulation, {}):
        assert set(table) == {"all_reduce/replica"}
        assert elements(table, "all_reduce/replica") == 2 * psi * (world - 1) // world + 5


@pytest.mark.parametrize("world", [4])
def test_stage_3_that_frees_after_forward_or_keeps_small_parameters(ranks: Pools, world: int) -> None:
    """At most 3 Psi, and 2 Psi."""
    for psi, table in ranks(world).run(
        volume, FREE | {"reshard_after": "forward", "module_granularity_threshold": 1}, 1, {}
    ):
        once = psi * (world - 1) // world
        assert elements(table, "reduce_scatter/shard") == once
        assert once < elements(table, "all_gather/shard") <= 2 * once
        check_scalars(table)
    for psi, table in ranks(world).run(volume, FREE | {"param_persistence_threshold": 1000}, 1, {}):
        assert elements(table, "all_gather/shard", "reduce_scatter/shard") == 2 * psi * (world - 1) // world
        check_scalars(table)


def test_hybrid_sharding_splits_the_volume_over_two_axes(ranks: Pools) -> None:
    """Within a shard group (1 + r) Psi (S-1)/S; between replicas an all-reduce of the shard: 2
    Psi/S (R-1)/R."""
    for psi, table in ranks(4).run(volume, {"stage": 2}, 1, {"mesh": {"shard": 2, "replica": 2}}):
        assert elements(table, "reduce_scatter/shard") == elements(table, "all_gather/shard") == psi // 2
        assert elements(table, "all_reduce/replica") == 2 * (psi // 2) // 2 + 5
        assert table["all_reduce/shard"] == (1, 5, 40)


def test_sixteen_bit_gradients_and_parameters_halve_the_bytes(ranks: Pools) -> None:
    for psi, table in ranks(2).run(volume, {"stage": 2}, 1, {"bf16": {"enabled": True}}):
        assert table["reduce_scatter/shard"][2] == table["all_gather/shard"][2] == 2 * psi // 2
    for psi, table in ranks(2).run(volume, {"stage": 2}, 4, {"bf16": {"enabled": True}}):
        assert table["reduce_scatter/shard"][2] == 4 * psi // 2, (
            "accumulated in fp32, and sent so unless asked otherwise"
        )
    as_asked = {"bf16": {"enabled": True}, "communication_data_type": "bf16"}
    for psi, table in ranks(2).run(volume, {"stage": 2}, 4, as_asked):
        assert table["reduce_scatter/shard"][2] == 2 * psi // 2


def test_one_rank_moves_nothing(ranks: Pools) -> None:
    for stage in (0, 1, 2, 3):
        assert ranks(1).run(volume, {"stage": stage}, 1, {})[0][1] == {}
    assert Traffic().elements == 0
