"""Finding out whether all ranks of an axis can map each other's memory: tried, not guessed from host names."""

from __future__ import annotations

import os
import secrets
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zero_trial.mesh.comm import AxisComm
from zero_trial.mesh.shared_memory import SharedMemory, Ticket

# One SharedMemory per process and world, and what the ranks of each axis found out: the answer costs two exchanges.
_MEMORIES: WeakKeyDictionary[Any, SharedMemory] = WeakKeyDictionary()
_ANSWERS: WeakKeyDictionary[Any, dict[tuple[int, ...], bool]] = WeakKeyDictionary()


def share_if_possible(comm: AxisComm) -> bool:
    """Lets ``comm`` use shared memory if every rank can read every other's. Collective over the axis the first time that it is asked.

    Each rank writes a random number into a segment; a peer that reads another number, or nothing, is on another host or in another container.
    """
    if comm.size == 1 or not comm.on_cpu:
        return False
    world = dist.group.WORLD
    memory = _MEMORIES.setdefault(world, SharedMemory())
    answers = _ANSWERS.setdefault(world, {})
    if comm.ranks not in answers:
        answers[comm.ranks] = _try(comm, memory)
    if answers[comm.ranks]:
        comm.share_memory(memory)
    return answers[comm.ranks]


def _try(comm: AxisComm, memory: SharedMemory) -> bool:
    secret = secrets.randbits(62)
    try:
        segment = memory.acquire(8, [])
        segment.payload(torch.int64, 1)[0] = secret
        mine = [os.getpid(), segment.descriptor, segment.generation, 0, secret]
    except (OSError, AttributeError):  # no memfd here
        mine = []
    everyone = comm.gather_json(mine, "can memory be shared?")
    readable = all(row and _reads(memory, row) for row in everyone)
    return all(comm.gather_json(readable, "can all share memory?"))


def _reads(memory: SharedMemory, row: list[int]) -> bool:
    try:
        return int(memory.read(Ticket(*row[:4]), torch.int64, 1)[0]) == row[4]
    except (OSError, ValueError, RuntimeError):
        return False
