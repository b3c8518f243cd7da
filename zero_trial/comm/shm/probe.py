"""Finding out whether all ranks of an axis can map each other's memory: tried, not guessed from host names."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zero_trial.comm.collective import AxisComm
from zero_trial.comm.shm.lending import BLOCK_BYTES as MAIL_BYTES
from zero_trial.comm.shm.lending import SharedHandleExchange, SharedTensorPool
from zero_trial.comm.shm.ring import BLOCK_BYTES as CONTROL_BYTES
from zero_trial.comm.shm.ring import RING_BYTES, Doorbell, RingBuffer, RingChannels, SharedControlBlock, _close
from zero_trial.comm.shm.segments import (
    PeerProcesses,
    SegmentHandle,
    SharedMemory,
    map_file,
    open_descriptor,
    shared_waits_supported,
)


@dataclass(frozen=True)
class SharedMemoryGroup:
    """What the ranks of one axis share: segments for tensors; and blocks for small values and for tickets where this machine can have them."""

    memory: SharedMemory
    homes: SharedTensorPool
    control: SharedControlBlock | None
    mail: SharedHandleExchange | None


# One SharedMemory per process and world, its homes, and what the ranks of each axis found out: the answer costs two exchanges.
_MEMORIES: WeakKeyDictionary[Any, SharedMemory] = WeakKeyDictionary()


_HOMES: WeakKeyDictionary[Any, SharedTensorPool] = WeakKeyDictionary()


_ANSWERS: WeakKeyDictionary[Any, dict[tuple[int, ...], SharedMemoryGroup | None]] = WeakKeyDictionary()


def share_memory_if_possible(comm: AxisComm) -> bool:
    """Lets ``comm`` use shared memory if every rank can read every other's. Collective over the axis the first time that it is asked.

    Each rank writes a random number into a segment; a peer that reads another number, or nothing, is on another host or in another container.
    """
    if comm.size == 1 or not comm.takes_host_tensors:
        return False
    world = dist.group.WORLD
    memory = _MEMORIES.setdefault(world, SharedMemory())
    homes = _HOMES.setdefault(world, SharedTensorPool(memory.mappings))
    answers = _ANSWERS.setdefault(world, {})
    if comm.ranks not in answers:
        answers[comm.ranks] = _try(comm, memory, homes)
    shared = answers[comm.ranks]
    if shared is not None:
        homes.ranks = max(homes.ranks, comm.size)
        comm.share_memory(shared.memory, shared.control, shared.mail, shared.homes)
    return shared is not None


def use_ring_channels_if_possible(comm: AxisComm) -> bool:
    """Lets messages between two ranks of ``comm`` go through shared memory, if all of them share it. Collective over the axis, each time."""
    if comm.transport != "shared memory":
        return False
    lanes = open_ring_channels(comm, _MEMORIES.setdefault(dist.group.WORLD, SharedMemory()))
    if lanes is not None:
        comm.use_ring_channels(lanes)
    return lanes is not None


def _try(comm: AxisComm, memory: SharedMemory, homes: SharedTensorPool) -> SharedMemoryGroup | None:
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
    shared = _open_sharing(memory, homes, comm, everyone) if readable else SharedMemoryGroup(memory, homes, None, None)
    answers = comm.gather_json([readable, shared.mail is not None], "can all share memory?")
    if not all(readable for readable, _ in answers):
        return None
    return shared if all(has for _, has in answers) else SharedMemoryGroup(memory, homes, None, None)


def _block(nbytes: int) -> int:
    """A new anonymous file of ``nbytes`` zeros. It stays open: peers reach it by its number."""
    descriptor = os.memfd_create("zero_trial", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    return descriptor


def _open_sharing(
    memory: SharedMemory, homes: SharedTensorPool, comm: AxisComm, everyone: list[list[int]]
) -> SharedMemoryGroup:
    """The blocks for small values and tickets, opened; None where a process cannot be reached or watched."""
    others = {at: row for at, row in enumerate(everyone) if at != comm.index}
    own = everyone[comm.index]
    try:
        watched = PeerProcesses({at: row[0] for at, row in others.items()}) if shared_waits_supported() else None
        small, tickets = ({at: map_file(open_descriptor(row[0], row[k])) for at, row in others.items()} for k in (5, 6))
        if watched is None:
            return SharedMemoryGroup(memory, homes, None, None)
        control = SharedControlBlock(map_file(os.dup(own[5])), small, watched)
        return SharedMemoryGroup(
            memory, homes, control, SharedHandleExchange(map_file(os.dup(own[6])), tickets, watched, comm.timeout)
        )
    except OSError:
        return SharedMemoryGroup(memory, homes, None, None)


def _reads(memory: SharedMemory, row: list[int]) -> bool:
    try:
        return int(memory.read(SegmentHandle(*row[:4]), torch.int64, 1)[0]) == row[4]
    except (OSError, ValueError, RuntimeError):
        return False


def open_ring_channels(comm: AxisComm, memory: SharedMemory) -> RingChannels | None:
    """Lanes along ``comm``, all of whose ranks can read each other's memory; None where this machine cannot have them. Collective over it.

    Nothing of them has a name in any folder; descriptors are closed once everyone has opened them.
    """
    others = [index for index in range(comm.size) if index != comm.index]
    bell = Doorbell()
    rings: dict[int, int] = {}
    try:
        for index in others if shared_waits_supported() else ():
            rings[index] = os.memfd_create("zero_trial", os.MFD_CLOEXEC)
            os.ftruncate(rings[index], RING_BYTES)
    except (OSError, AttributeError):
        rings = {}
    own = [os.getpid(), bell.descriptor, {str(index): descriptor for index, descriptor in rings.items()}]
    everyone = comm.gather_json(own, "lanes")
    lanes = _open(comm, memory, bell, rings, everyone) if all(row[2] for row in everyone) else None
    usable = all(comm.gather_json(lanes is not None, "lanes open"))
    _close(*rings.values())
    return lanes if usable else None


def _open(
    comm: AxisComm, memory: SharedMemory, bell: Doorbell, rings: Mapping[int, int], everyone: list[list[object]]
) -> RingChannels | None:
    try:
        into, bells, processes = {}, {}, {}
        for index in rings:
            process, ringer, theirs = everyone[index]
            into[index] = RingBuffer(map_file(open_descriptor(int(process), int(theirs[str(comm.index)]))))  # type: ignore[index, call-overload]
            bells[index] = os.open(f"/proc/{process}/fd/{ringer}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            processes[index] = os.pidfd_open(int(process))  # type: ignore[call-overload]
        out = {index: RingBuffer(map_file(os.dup(descriptor))) for index, descriptor in rings.items()}
        return RingChannels(comm.index, memory, bell, out, into, bells, processes, comm.timeout)
    except OSError:
        return None
