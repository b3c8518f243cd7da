"""Finding out whether all ranks of an axis can map each other's memory: tried, not guessed from host names."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zero_trial.mesh.comm import AxisComm
from zero_trial.mesh.lanes import open_lanes
from zero_trial.mesh.peers import Peers, offered
from zero_trial.mesh.shared_control import BLOCK_BYTES as CONTROL_BYTES
from zero_trial.mesh.shared_control import SharedControl
from zero_trial.mesh.shared_homes import Homes
from zero_trial.mesh.shared_mail import BLOCK_BYTES as MAIL_BYTES
from zero_trial.mesh.shared_mail import SharedMail
from zero_trial.mesh.shared_memory import SharedMemory, Ticket, map_file, open_descriptor


@dataclass(frozen=True)
class Shared:
    """What the ranks of one axis share: segments for tensors; and blocks for small values and for tickets where this machine can have them."""

    memory: SharedMemory
    homes: Homes
    control: SharedControl | None
    mail: SharedMail | None


# One SharedMemory per process and world, its homes, and what the ranks of each axis found out: the answer costs two exchanges.
_MEMORIES: WeakKeyDictionary[Any, SharedMemory] = WeakKeyDictionary()
_HOMES: WeakKeyDictionary[Any, Homes] = WeakKeyDictionary()
_ANSWERS: WeakKeyDictionary[Any, dict[tuple[int, ...], Shared | None]] = WeakKeyDictionary()


def share_if_possible(comm: AxisComm) -> bool:
    """Lets ``comm`` use shared memory if every rank can read every other's. Collective over the axis the first time that it is asked.

    Each rank writes a random number into a segment; a peer that reads another number, or nothing, is on another host or in another container.
    """
    if comm.size == 1 or not comm.takes_host_tensors:
        return False
    world = dist.group.WORLD
    memory = _MEMORIES.setdefault(world, SharedMemory())
    homes = _HOMES.setdefault(world, Homes(memory.mappings))
    answers = _ANSWERS.setdefault(world, {})
    if comm.ranks not in answers:
        answers[comm.ranks] = _try(comm, memory, homes)
    shared = answers[comm.ranks]
    if shared is not None:
        homes.ranks = max(homes.ranks, comm.size)
        comm.share_memory(shared.memory, shared.control, shared.mail, shared.homes)
    return shared is not None


def lanes_if_possible(comm: AxisComm) -> bool:
    """Lets messages between two ranks of ``comm`` go through shared memory, if all of them share it. Collective over the axis, each time."""
    if comm.transport != "shared memory":
        return False
    lanes = open_lanes(comm, _MEMORIES.setdefault(dist.group.WORLD, SharedMemory()))
    if lanes is not None:
        comm.use_lanes(lanes)
    return lanes is not None


def _try(comm: AxisComm, memory: SharedMemory, homes: Homes) -> Shared | None:
    secret = secrets.randbits(62)
    try:
        segment = memory.acquire(8, [])
        segment.payload(torch.int64, 1)[0] = secret
        blocks = [_block(CONTROL_BYTES), _block(MAIL_BYTES)]
        mine = [os.getpid(), segment.descriptor, segment.generation, 0, secret, *blocks]
    except (OSError, AttributeError):  # no memfd here
        mine = []
    everyone = comm.gather_json(mine, "can memory be shared?")
    readable = all(row and _reads(memory, row[:5]) for row in everyone)
    shared = _open(memory, homes, comm, everyone) if readable else Shared(memory, homes, None, None)
    answers = comm.gather_json([readable, shared.mail is not None], "can all share memory?")
    if not all(readable for readable, _ in answers):
        return None
    return shared if all(has for _, has in answers) else Shared(memory, homes, None, None)


def _block(nbytes: int) -> int:
    """A new anonymous file of ``nbytes`` zeros. It stays open: peers reach it by its number."""
    descriptor = os.memfd_create("zero_trial", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    return descriptor


def _open(memory: SharedMemory, homes: Homes, comm: AxisComm, everyone: list[list[int]]) -> Shared:
    """The blocks for small values and tickets, opened; None where a process cannot be reached or watched."""
    others = {at: row for at, row in enumerate(everyone) if at != comm.index}
    own = everyone[comm.index]
    try:
        watched = Peers({at: row[0] for at, row in others.items()}) if offered() else None
        small, tickets = ({at: map_file(open_descriptor(row[0], row[k])) for at, row in others.items()} for k in (5, 6))
        if watched is None:
            return Shared(memory, homes, None, None)
        control = SharedControl(map_file(os.dup(own[5])), small, watched)
        return Shared(memory, homes, control, SharedMail(map_file(os.dup(own[6])), tickets, watched, comm.timeout))
    except OSError:
        return Shared(memory, homes, None, None)


def _reads(memory: SharedMemory, row: list[int]) -> bool:
    try:
        return int(memory.read(Ticket(*row[:4]), torch.int64, 1)[0]) == row[4]
    except (OSError, ValueError, RuntimeError):
        return False
