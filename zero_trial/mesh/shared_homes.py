"""Tensors that live in shared segments, so that peers read them where they lie instead of a copy.

    a home      one segment with one tensor in it, owned by this process as long as that tensor or a view of it is alive
    lend        a collective whose source lies in a home hands its peers a ticket to that place; from then on the home is lent
    settle      returns when all of them have read; only then may the source be overwritten

A home is lent to one collective at a time, because a reader has one mark in it: a source in a home that is still lent is copied out, as any
other tensor is. So nobody waits when a collective starts. When the tensor is gone the home's pages go back to the system at once, for all who
have mapped it, and the empty segment waits for the next tensor. Homes leave half of the process's descriptors to others, and half of the
mappings that the kernel allows (:mod:`zero_trial.mesh.mappings`).

Price: a home's bytes are those of its tensor, rounded up to 64 KiB, and 4 KiB; peers map the same pages. One descriptor per home.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zero_trial.mesh.mappings import Mappings
from zero_trial.mesh.peers import Peers
from zero_trial.mesh.shared_memory import HEADER, Segment, capacity_for, create_segment, many_open

log = logging.getLogger("zero_trial")

_KEEP_SIZE_AND_PUNCH_HOLE = 1 | 2  # of fallocate(2)


@dataclass
class Home:
    """A segment, the tensor that lives in it (by a weak reference to what its storage holds on to), and who reads it now."""

    segment: Segment
    start: int = 0  # address of the payload
    nbytes: int = 0
    owner: int = 0  # process: a forked child has the same objects, and must not give away its parent's pages
    lease: weakref.ref[memoryview] | None = None
    peers: Peers | None = None
    lent: tuple[int, int] = (0, 0)  # bytes [start, stop) of the payload

    @property
    def taken(self) -> bool:
        return self.lease is not None and self.lease() is not None

    @property
    def settled(self) -> bool:
        """Nobody reads it any more. Does not wait."""
        return self.segment.free

    def settle(self, timeout: float) -> None:
        """Returns when all that it was lent to have read. Raises RuntimeError where one has ended (``closed``) or does not read (``timed out``)."""
        segment, marks = self.segment, self.segment.window.marks
        for reader in () if self.peers is None else segment.readers:
            self.peers.await_(reader, lambda reader=reader: marks[reader] == segment.generation, timeout)  # type: ignore[misc, union-attr]


@dataclass
class Homes:
    """This process's homes by address. ``ranks``: how many map each other's, this one included."""

    mappings: Mappings = field(default_factory=Mappings)
    ranks: int = 2
    _homes: dict[int, Home] = field(default_factory=dict)
    _starts: list[int] = field(default_factory=list)
    _refused: bool = False

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of zeros in a home of its own; in ordinary memory where the system has no segment to give, which is said once."""
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.zeros(numel, dtype=dtype)
        try:
            home = self._vacant(nbytes)
            # The pages are there from now on: a machine that has none left says so here, and does not kill whoever writes first.
            os.posix_fallocate(home.segment.descriptor, 0, HEADER + nbytes)
        except OSError as trouble:
            if not self._refused:
                self._refused = True
                log.warning(
                    "tensors that peers could read in place lie in ordinary memory, which costs a copy each time: %s",
                    trouble,
                )
            return torch.zeros(numel, dtype=dtype)
        lease = home.segment.window.block[HEADER : HEADER + nbytes]
        home.nbytes, home.owner, home.peers = nbytes, os.getpid(), None
        home.lease = weakref.ref(lease, lambda _: _vacate(home))
        return torch.frombuffer(lease, dtype=dtype)

    def find(self, tensor: torch.Tensor) -> Home | None:
        """The home in which a contiguous tensor lies."""
        if not self._starts:
            return None
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        home = self._homes[self._starts[at]]
        inside = address + tensor.nbytes <= home.start + home.nbytes
        return home if inside and home.taken else None

    def lend(
        self, tensor: torch.Tensor, readers: Sequence[int], peers: Peers, *, again: bool = False
    ) -> tuple[Segment, int] | None:
        """Where ``readers`` (axis indices) may read ``tensor``: its home's segment under a new generation, and the offset in it in bytes.

        None where it lies in no home, or its home is lent. ``again``: even then, if it is lent to the same ``peers`` and ``tensor`` is part of
        that, for a collective that they read after the present one: an older generation must never be acknowledged after a newer one.
        """
        home = self.find(tensor)
        if home is None:
            return None
        start = tensor.data_ptr() - home.start
        stop = start + tensor.nbytes
        follows = again and home.peers is peers and home.lent[0] <= start and stop <= home.lent[1]
        if not (follows or home.settled):
            return None
        home.segment.lend(readers)
        home.peers, home.lent = peers, (start, stop)
        return home.segment, start

    @property
    def taken_bytes(self) -> int:
        """Bytes of the tensors that live here."""
        return sum(home.nbytes for home in self._homes.values() if home.taken)

    def _vacant(self, nbytes: int) -> Home:
        """The smallest empty home that is large enough (its size is only a range of addresses), or a new one."""
        fitting = [
            home for home in self._homes.values() if not home.taken and home.settled and home.segment.capacity >= nbytes
        ]
        if fitting:
            home = min(fitting, key=lambda home: home.segment.capacity)
            _vacate(home)  # again: readers may have been at it when its tensor went
            return home
        if not self.mappings.allow(len(self._homes) + 1, self.ranks):
            limit = self.mappings.limit
            raise OSError(
                errno.ENOMEM,
                f"{len(self._homes)} of them, on {self.ranks} ranks, are half of vm.max_map_count ({limit})",
            )
        segment = self.mappings.take(lambda: _new_segment(nbytes))
        home = Home(segment, segment.payload(torch.uint8, 1).data_ptr())
        self._homes[home.start] = home
        self._starts = sorted(self._homes)
        return home


def _new_segment(nbytes: int) -> Segment:
    """For ``nbytes``. Raises OSError where the system has none to give, or too few would be left for others."""
    segment = create_segment(capacity_for(nbytes))
    if many_open(segment.descriptor):
        os.close(segment.descriptor)
        raise OSError(errno.EMFILE, "half of the open files that `ulimit -Hn` allows are in use")
    return segment


def _vacate(home: Home) -> None:
    """The tensor is gone: its pages go back to the system, and read as zeros when they are used again. Not while peers read."""
    if home.owner == os.getpid() and home.settled:
        punch = ctypes.CDLL(None, use_errno=True).fallocate
        punch.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
        if punch(home.segment.descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, HEADER, home.segment.capacity):
            home.segment.payload(
                torch.uint8, home.segment.capacity
            ).zero_()  # a kernel that cannot: the pages stay, and must read as zeros
