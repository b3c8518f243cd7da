"""Find out whether all ranks of an axis can map each other's memory: tried, not guessed from host
names."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field
from itertools import accumulate
from mmap import mmap
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from zero_trial.comm.collective import AxisComm
from zero_trial.comm.shm.arena import Arena, map_peer
from zero_trial.comm.shm.peers import PeerProcesses, SharedControlBlock, shared_waits_supported
from zero_trial.comm.shm.transport import CallBoard, SharedTransport
from zero_trial.comm.waits import UnderWay

log = logging.getLogger("zero_trial")

_SECRET = 64  # bytes
_BLOCK = (_SECRET, SharedControlBlock.NBYTES, CallBoard.NBYTES)


@dataclass
class _SharedAxis:
    """What the ranks of one axis share."""

    others: dict[int, mmap]
    board: CallBoard
    control: SharedControlBlock


@dataclass
class _Host:
    """This process's arena (None where the system has no such memory) and its peers', and what the
    ranks of each axis found out (None: they cannot read each other's memory). The answer costs two
    exchanges."""

    arena: Arena | None
    peers: dict[int, mmap] = field(default_factory=dict)  # by process id
    axes: dict[tuple[int, ...], _SharedAxis | None] = field(default_factory=dict)
    under_way: UnderWay = field(default_factory=UnderWay)


_HOSTS: WeakKeyDictionary[Any, _Host] = WeakKeyDictionary()  # by world


def share_memory_if_possible(comm: AxisComm) -> bool:
    """Let ``comm`` use shared memory if every rank can read every other's.

    Collective over the axis the first time that it is asked.

    Each rank writes a random number into its arena; a peer that reads another number, or nothing,
    is on another host or in another container.
    """
    if comm.size == 1 or not comm.takes_host_tensors:
        return False
    world = dist.group.WORLD
    if world not in _HOSTS:
        _HOSTS[world] = _open_host()
    host = _HOSTS[world]
    if comm.ranks not in host.axes:
        host.axes[comm.ranks] = _probe(comm, host)
    axis = host.axes[comm.ranks]
    if axis is None or host.arena is None:
        return False
    transport = SharedTransport(comm.index, comm.size, host.arena, axis.others, axis.board, comm.add, host.under_way)
    comm.share_memory(transport, axis.control)
    return True


def _open_host() -> _Host:
    try:
        return _Host(Arena(dist.get_world_size()) if shared_waits_supported() else None)
    except (OSError, AttributeError):  # no memfd, or too few addresses (ulimit -v)
        return _Host(None)


def _probe(comm: AxisComm, host: _Host) -> _SharedAxis | None:
    row: list[int] = []
    if host.arena is not None:
        offset, block = host.arena.block(sum(_BLOCK))
        secret, control, calls = _cut(block)
        secret.cast("q")[0] = secrets.randbits(62)
        row = [host.arena.process, host.arena.descriptor, host.arena.size, offset, secret.cast("q")[0]]
    rows = comm.gather_json(row, "can memory be shared?")
    axis = _open_axis(comm, host, control, calls, rows) if all(rows) else None
    answers = comm.gather_json(axis is not None, "can all share memory?")
    if all(answers):
        log.debug("tensors on the host over %s: shared memory", comm.name)
        return axis
    blind = [comm.ranks[index] for index, can_read in enumerate(answers) if not can_read]
    log.debug("tensors on the host over %s: gloo; ranks %s cannot read the others' memory", comm.name, blind)
    return None


def _open_axis(
    comm: AxisComm, host: _Host, control: memoryview, calls: memoryview, rows: list[list[int]]
) -> _SharedAxis | None:
    """Map the arenas of all ranks of the axis; None where one cannot be reached or watched."""
    others, controls, boards, processes = {}, {}, {}, {}
    try:
        for index, (process, descriptor, size, offset, secret) in enumerate(rows):
            if index == comm.index:
                continue
            if process not in host.peers:
                host.peers[process] = map_peer(process, descriptor, size)
            others[index], processes[index] = host.peers[process], process
            found, controls[index], boards[index] = _cut(memoryview(others[index])[offset:])
            if found.cast("q")[0] != secret:
                return None
        peers = PeerProcesses(processes, comm.heartbeat.is_crossed, host.under_way.go_on)
    except (OSError, ValueError):
        return None
    return _SharedAxis(others, CallBoard(calls, boards, peers), SharedControlBlock(control, controls, peers))


def _cut(block: memoryview) -> tuple[memoryview, memoryview, memoryview]:
    """Cut ``block`` into the secret, the control block and the board of calls."""
    first, second, third = accumulate(_BLOCK)
    return block[:first], block[first:second], block[second:third]
