"""The named axes that ranks live on, and the only door to torch.distributed."""

from __future__ import annotations

from zero_trial.mesh.comm import AxisComm
from zero_trial.mesh.counters import CommCounters
from zero_trial.mesh.directions import open_directions
from zero_trial.mesh.env import RankEnv, read_rank_env
from zero_trial.mesh.mesh import Mesh, build_mesh, part_of_pipe
from zero_trial.mesh.messages import Message
from zero_trial.mesh.pending import Pending, wait_all
from zero_trial.mesh.sharing import lanes_if_possible
from zero_trial.mesh.sums import Sum, sum_in_order
from zero_trial.mesh.topology import AXES, MeshShape
from zero_trial.mesh.world import (
    agree_on,
    destroy_distributed,
    init_distributed,
    is_distributed,
    rank_and_size,
    world_size,
)

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
    "init_distributed",
    "is_distributed",
    "lanes_if_possible",
    "open_directions",
    "part_of_pipe",
    "rank_and_size",
    "read_rank_env",
    "sum_in_order",
    "wait_all",
    "world_size",
]
