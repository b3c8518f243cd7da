"""A fault of one rank is raised by all."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.support.pool import Pools
from zero_trial.comm import AxisComm, MeshShape, build_mesh, fail_together, raise_together
from zero_trial.errors import CheckpointError, ConfigError, DoesNotFit, MeshError, TrialError, ZeroTrialError


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
    assert ranks(2).run(act, -1) == [0, 1] and ranks(2).run(act, 1) == ["rank 1: it broke."] * 2


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


class Alone(AxisComm):
    """Rank 0 of two, whose peer is gone."""

    def __init__(self) -> None:
        self.ranks, self.index = (0, 1), 0

    def gather_json(self, value: Any, label: str) -> list[Any]:
        raise MeshError("rank 1 is gone")


@pytest.mark.parametrize(
    ("own", "others", "raised"),
    [
        (ConfigError("it broke", where="rank 0"), TrialError, "ConfigError: rank 0: it broke."),
        (KeyError("absent"), TrialError, "KeyError: 'absent'"),
        (ConfigError("it broke", where="rank 0"), None, "CheckpointError: rank 0: it broke."),
        (None, TrialError, "MeshError: rank 1 is gone."),
    ],
)
def test_a_rank_says_its_own_error_where_a_peer_is_gone(
    own: Exception | None, others: type[ZeroTrialError] | None, raised: str
) -> None:
    def work() -> None:
        if own is not None:
            raise own

    with pytest.raises(Exception) as found:
        fail_together(Alone(), work, "work", others)
    assert f"{type(found.value).__name__}: {found.value}" == raised


def act_for_others(own: Exception) -> tuple[str, int]:
    world = build_mesh(MeshShape(shard=2)).world

    def work() -> None:
        if dist.get_rank() == 1:
            raise own

    try:
        fail_together(world, work, "work", lambda fault: TrialError("another rank could not", got=fault))
    except Exception as error:
        return f"{type(error).__name__}: {error}", getattr(error, "exit_code", 1)
    return "went on", 0


@pytest.mark.parametrize(
    ("own", "code"), [(DoesNotFit("it broke"), 3), (MemoryError("it broke"), 3), (OSError(5, "it broke"), 1)]
)
def test_the_others_hear_which_rank_failed_and_end_with_its_exit_code(ranks: Pools, own: Exception, code: int) -> None:
    first, second = ranks(2).run(act_for_others, own)
    said = f"{type(own).__name__}: {own}"
    assert second[0] == said and first[0].startswith("TrialError: another rank could not: got rank 1: ")
    assert first[1] == code
