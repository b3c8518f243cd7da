"""Find out whether all ranks of an axis can map each other's memory: tried, not guessed from host
names."""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zero_trial.comm.collective import AxisComm
from zero_trial.comm.shm.peers import PeerProcesses, close_all, shared_waits_supported
from zero_trial.comm.shm.segments import SegmentHandle, SharedMemory, SharedTensorPool, map_file, open_descriptor
from zero_trial.comm.shm.transport import (
    CONTROL_BLOCK_BYTES,
    HANDLE_BLOCK_BYTES,
    SharedControlBlock,
    SharedHandleExchange,
)

log = logging.getLogger("zero_trial")


@dataclass(frozen=True)
class _Blocks:
    """The blocks that the ranks of one axis share, for control values and for handles; None where
    this machine cannot have them.
    """

    control: SharedControlBlock | None = None
    exchange: SharedHandleExchange | None = None


# One SharedMemory per process and world, its shared tensors, and what the ranks of each axis found
# out (None: they cannot read each other's memory). The answer costs two exchanges.
_MEMORIES: WeakKeyDictionary[Any, SharedMemory] = WeakKeyDictionary()
_TENSORS: WeakKeyDictionary[Any, SharedTensorPool] = WeakKeyDictionary()
_ANSWERS: WeakKeyDictionary[Any, dict[tuple[int, ...], _Blocks | None]] = WeakKeyDictionary()


def share_memory_if_possible(comm: AxisComm) -> bool:
    """Let ``comm`` use shared memory if every rank can read every other's.

    Collective over the axis the first time that it is asked.

    Each rank writes a random number into a segment; a peer that reads another number, or nothing,
    is on another host or in another container.
    """
    if comm.size == 1 or not comm.takes_host_tensors:
        return False
    world = dist.group.WORLD
    memory = _MEMORIES.setdefault(world, SharedMemory())
    tensors = _TENSORS.setdefault(world, SharedTensorPool(memory.mappings))
    answers = _ANSWERS.setdefault(world, {})
    if comm.ranks not in answers:
        answers[comm.ranks] = _probe(comm, memory)
    blocks = answers[comm.ranks]
    if blocks is None:
        return False
    tensors.share_with(comm.size)
    comm.share_memory(memory, blocks.control, blocks.exchange, tensors)
    return True


def _probe(comm: AxisComm, memory: SharedMemory) -> _Blocks | None:
    secret = secrets.randbits(62)
    try:
        segment = memory.acquire(8, [])
        segment.payload(torch.int64, 1)[0] = secret
        blocks = [_block(CONTROL_BLOCK_BYTES), _block(HANDLE_BLOCK_BYTES)]
        mine = [os.getpid(), segment.descriptor, segment.generation, 0, secret, *blocks]
    except (OSError, AttributeError):  # no memfd on this machine
        mine, blocks = [], []
    rows = comm.gather_json(mine, "can memory be shared?")
    readable = all(row and _reads(memory, row[:5]) for row in rows)
    opened = _open_blocks(comm, memory, rows) if readable else _Blocks()
    answers = comm.gather_json([readable, opened.exchange is not None], "can all share memory?")
    close_all(*blocks)  # every rank has opened them
    if not all(can_read for can_read, _ in answers):
        blind = [comm.ranks[index] for index, (can_read, _) in enumerate(answers) if not can_read]
        log.debug("tensors on the host over %s: gloo; ranks %s cannot read the others' memory", comm.name, blind)
        return None
    complete = all(has for _, has in answers)
    log.debug(
        "tensors on the host over %s: shared memory; handles and control values: %s",
        comm.name,
        "shared memory" if complete else "messages, since a rank cannot wait in shared memory",
    )
    return opened if complete else _Blocks()


def _block(nbytes: int) -> int:
    """Make an anonymous file of ``nbytes`` zeros; peers open it by its descriptor's number."""
    descriptor = os.memfd_create("zero_trial", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    return descriptor


def _open_blocks(comm: AxisComm, memory: SharedMemory, rows: list[list[int]]) -> _Blocks:
    """Open the blocks of all ranks; there are none where a process cannot be reached or watched."""
    if not shared_waits_supported():
        return _Blocks()
    others = {at: row for at, row in enumerate(rows) if at != comm.index}
    own = rows[comm.index]
    try:
        peers = PeerProcesses({at: row[0] for at, row in others.items()}, comm.heartbeat.is_crossed)
        control, handles = (
            {at: map_file(open_descriptor(row[0], row[k])) for at, row in others.items()} for k in (5, 6)
        )
        return _Blocks(
            SharedControlBlock(map_file(os.dup(own[5])), control, peers),
            SharedHandleExchange(
                map_file(os.dup(own[6])), handles, peers, comm.timeout, partial(memory.drop, reader=comm.index)
            ),
        )
    except OSError:
        return _Blocks()


def _reads(memory: SharedMemory, row: list[int]) -> bool:
    try:
        return int(memory.read(SegmentHandle(*row[:4]), torch.int64, 1)[0]) == row[4]
    except (OSError, ValueError, RuntimeError):
        return False
