"""The named axes of ranks, and the only package that communicates through torch."""

from __future__ import annotations

from zero_trial.comm.backends import CommCounters, Sum, sum_in_order
from zero_trial.comm.collective import AxisComm
from zero_trial.comm.mesh import AXES, Mesh, MeshShape, build_mesh, open_direction_groups, part_of_pipe
from zero_trial.comm.rendezvous import (
    RankEnv,
    agree_on,
    destroy_distributed,
    expects_ranks,
    fail_together,
    init_distributed,
    is_distributed,
    raise_together,
    rank_and_size,
    read_rank_env,
    world_size,
)
from zero_trial.comm.waits import Message, Pending

__all__ = [
    "AXES",
    "AxisComm",
    "CommCounters",
    "Mesh",
    "MeshShape",
    "Message",
    "Pending",
    "RankEnv",
    "Sum",
    "agree_on",
    "build_mesh",
    "destroy_distributed",
    "expects_ranks",
    "fail_together",
    "init_distributed",
    "is_distributed",
    "open_direction_groups",
    "part_of_pipe",
    "raise_together",
    "rank_and_size",
    "read_rank_env",
    "sum_in_order",
    "world_size",
]
