"""Rank 0's place in a mesh whose other ranks are absent: the engine of a check computes with it.

Collectives move nothing: a sum of tensors is this rank's part, and control values of other ranks
are equal to this rank's. An engine with values has all shards itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from zero_trial.comm import AxisComm, CommCounters, Mesh, MeshShape, Pending
from zero_trial.comm.backends import Look
from zero_trial.comm.mesh import AXES
from zero_trial.comm.waits import DONE, Heartbeat


class _LoneAxis(AxisComm):
    """One axis as its first rank sees it."""

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, label: str, look: Look | None = None) -> Pending:
        own = full.view(self.size, -1)[self.index]
        if own.data_ptr() != out.data_ptr():
            out.copy_(own)
        return DONE

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Pending:
        own = full.view(self.size, -1)[self.index]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return DONE

    def all_reduce(self, full: torch.Tensor, label: str, look: Look | None = None) -> Pending:
        return DONE

    def broadcast(self, tensor: torch.Tensor, label: str, source: int = 0) -> None:
        """Leave ``tensor`` as it is."""

    def all_reduce_small(self, values: torch.Tensor, label: str, op: str = "sum") -> None:
        if op == "sum":
            values.mul_(self.size)

    def gather_row(self, row: list[int], label: str) -> list[list[int]]:
        return [row] * self.size

    def gather_json(self, value: Any, label: str) -> list[Any]:
        return [value] * self.size


def lone_mesh(shape: MeshShape) -> Mesh:
    """Return rank 0's place in ``shape``; no process group is needed, and none is used."""
    counters, heartbeat = CommCounters(), Heartbeat(None, 0, 1)

    def axis(name: str, size: int) -> AxisComm:
        return _LoneAxis(name, tuple(range(size)), 0, None, counters, heartbeat, 0.0)

    sizes = dict(zip(AXES, shape.sizes, strict=True))
    sizes |= {"data": shape.data_parallel_size, "world": math.prod(shape.sizes)}
    return Mesh(shape, 0, {name: axis(name, size) for name, size in sizes.items()}, counters, heartbeat)
