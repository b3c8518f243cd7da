"""A fault of one rank is raised by all."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.support.pool import Pools
from zero_trial.comm import MeshShape, build_mesh, fail_together, raise_together
from zero_trial.errors import CheckpointError, ConfigError


def act(broken: int) -> Any:
    world = build_mesh(MeshShape(shard=2)).world

    def work() -> int:
        if dist.get_rank() == broken:
            raise ConfigError("it broke", where=f"rank {broken}")
        return dist.get_rank()

    try:
        return fail_together(world, work, "work")
    except CheckpointError as error:
        return str(error)


def test_all_get_their_result_or_the_first_fault(ranks: Pools) -> None:
    assert ranks(2).run(act, -1) == [0, 1]
    assert ranks(2).run(act, 1) == ["rank 1: it broke."] * 2


def test_a_mistake_in_the_program_is_not_dressed_up() -> None:
    world = build_mesh(MeshShape()).world
    raise_together(world, None, "nothing")
    with pytest.raises(ZeroDivisionError):
        fail_together(world, lambda: 1 // 0, "work")


def act_badly(broken: int) -> str:
    world = build_mesh(MeshShape(shard=2)).world

    def work() -> None:
        if dist.get_rank() == broken:
            {}["absent"]

    try:
        fail_together(world, work, "work")
    except (CheckpointError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def test_a_mistake_on_one_rank_ends_the_other_ranks_too(ranks: Pools) -> None:
    """Caught only as a ZeroTrialError or OSError it would leave them waiting for the next
    collective's timeout."""
    assert ranks(2).run(act_badly, 1) == ["CheckpointError: rank 1: KeyError: 'absent'.", "KeyError: 'absent'"]
