"""A fault of one rank is raised by all."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.support.pool import Pools
from zero_trial.comm import AxisComm, MeshShape, build_mesh, fail_together, raise_together
from zero_trial.errors import ConfigError, DoesNotFit, MeshError, TrialError, ZeroTrialError


def test_a_mistake_in_the_program_is_not_dressed_up() -> None:
    world = build_mesh(MeshShape()).world
    raise_together(world, None, "nothing")
    with pytest.raises(ZeroDivisionError):
        fail_together(world, lambda: 1 // 0, "work")


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


def act(own: Exception | None, told: bool) -> tuple[str, int]:
    """The result of this rank, or its error with the exit code; rank 1 raises ``own``. ``told``:
    the others raise an error that names it."""
    world = build_mesh(MeshShape(shard=2)).world
    others = (lambda fault: TrialError("another rank could not", got=fault)) if told else None

    def work() -> int:
        if own is not None and dist.get_rank() == 1:
            raise own
        return dist.get_rank()

    try:
        return str(fail_together(world, work, "work", others)), 0
    except Exception as error:
        return f"{type(error).__name__}: {error}", getattr(error, "exit_code", 1)


def test_all_get_their_result_or_the_fault_of_one(ranks: Pools) -> None:
    """A mistake in the program is raised where it was made. Caught only as a ZeroTrialError or
    OSError it would leave the others waiting for the next collective's timeout."""
    assert ranks(2).run(act, None, False) == [("0", 0), ("1", 0)]
    assert [text for text, _ in ranks(2).run(act, ConfigError("it broke"), False)] == ["CheckpointError: it broke."] * 2
    first, second = ranks(2).run(act, KeyError("absent"), False)
    assert (first[0], second[0]) == ("CheckpointError: rank 1: KeyError: 'absent'.", "KeyError: 'absent'")


@pytest.mark.parametrize(
    ("own", "code"), [(DoesNotFit("it broke"), 3), (MemoryError("it broke"), 3), (OSError(5, "it broke"), 1)]
)
def test_the_others_hear_which_rank_failed_and_end_with_its_exit_code(ranks: Pools, own: Exception, code: int) -> None:
    first, second = ranks(2).run(act, own, True)
    assert second[0] == f"{type(own).__name__}: {own}" and first[1] == code
    assert first[0].startswith("TrialError: another rank could not: got rank 1: ")
