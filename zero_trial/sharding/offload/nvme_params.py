"""Parameter shards in a file between uses: read through a few buffers, ahead of the blocks that come next, and written by the update.

    buffer 0   read h3 .... | into full | read h0 ...
    buffer 1        read h2 ......  | into full |
    full                     h3 gathered, computes    h2 gathered, computes

Traffic per gather of a shard of n elements: n elements read, in whole blocks of the disk. An update writes n.
Memory: the buffers. The shard is read into this rank's part of the full buffer, and gathered from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from zero_trial.sharding.layout import round_up
from zero_trial.sharding.offload.swap_file import (
    BLOCK,
    CUT,
    DiskFailure,
    DiskTransfer,
    MappedAccess,
    SwapSpace,
    slot_elements,
)
from zero_trial.sharding.param_group import ParamGroup, absent, give_freed_memory_back
from zero_trial.sharding.plan import Lifetime


@dataclass(eq=False)
class _Part:
    """Elements [low, high) of a shard on their way into a buffer."""

    low: int
    high: int
    buffer: torch.Tensor
    ticket: DiskTransfer | None = None  # None before it is read, and where it is to be read again


@dataclass(eq=False)
class SwappedShard:
    """One group's shard in the file, from ``offset`` bytes on. See :class:`zero_trial.sharding.param_group.OffloadedShard`."""

    shelf: ParamSwapper
    group: ParamGroup
    offset: int
    parts: deque[_Part] = field(default_factory=deque)  # that are read ahead
    written: list[DiskTransfer] = field(default_factory=list)  # writes that may be under way

    def expect(self) -> bool:
        return self.shelf.expect(self)

    def fetch(self, into: torch.Tensor) -> None:
        self.shelf.fetch(self, into)

    def forget(self) -> None:
        self.shelf.forget(self)

    def close(self) -> None:
        self.shelf.close()

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        return self.shelf.buffers

    @property
    def numel(self) -> int:
        return self.group.layout.shard_numel

    @property
    def itemsize(self) -> int:
        return self.group.dtype.itemsize

    def put(self, values: torch.Tensor) -> None:
        """The group's shard is ``values``, and so is its master where that is the same."""
        if self.group.master is self.group.shard:
            self.group.master = values
        self.group.shard = values

    def put_away(self) -> None:
        self.put(absent((self.numel,), self.group.dtype, self.group.shard.device))


class ParamSwapper:
    """The shards of a rank's groups on ``shelf``, but for ``keep`` elements that stay in memory.

    ``count`` buffers of at most ``most`` elements, and none larger than the largest shard; together at most a quarter of what is in the file.
    Uses must come in the same order on all ranks of a group's axis.
    """

    def __init__(self, shelf: SwapSpace, *, most: int, count: int, keep: int = 0) -> None:
        self.shelf = shelf
        self.trouble = DiskFailure()
        self.kept = 0  # elements that stay in memory
        self._most = most
        self._count = count
        self._keep = keep
        self._shards: dict[int, SwappedShard] = {}  # by id of the group
        self._expected: list[SwappedShard] = []  # those with parts, in the order in which they were expected
        self._free: deque[torch.Tensor] | None = None  # None until all shards are known
        self._slot = 0  # elements of a buffer
        self._area: torch.Tensor | None = None
        self._opening = MappedAccess(self.shelf.mapped, self.trouble, self._settle, self._lay_open, self._put_away)

    def take(self, group: ParamGroup) -> None:
        """The group's shard goes to the file and reads as NaN; so does its master where that is the same. Groups that always live stay."""
        if group.plan.params is Lifetime.ALWAYS:
            return
        if self.kept + group.layout.shard_numel <= self._keep:
            self.kept += group.layout.shard_numel
            return
        offset = self.shelf.reserve(group.shard.numel() * group.shard.element_size())
        self.shelf.write(offset, group.shard).wait()
        shard = self._shards[id(group)] = SwappedShard(self, group, offset)
        group.offloaded, group.materialized = shard, self.lent
        shard.put_away()
        give_freed_memory_back()

    def offset_of(self, group: ParamGroup) -> int | None:
        """Where the group's shard begins in the file, in bytes; None if it is in memory."""
        shard = self._shards.get(id(group))
        return shard.offset if shard is not None else None

    def wrote(self, group: ParamGroup, tickets: Sequence[DiskTransfer]) -> None:
        """Writes to the group's shard are under way."""
        shard = self._shards[id(group)]
        shard.written = [ticket for ticket in shard.written if not ticket.done()] + list(tickets)

    @property
    def numel(self) -> int:
        """Elements in the file."""
        return sum(shard.numel for shard in self._shards.values())

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All of them; none before the first is needed."""
        return [*(self._free or ()), *(part.buffer for shard in self._shards.values() for part in shard.parts)]

    def lent(self) -> AbstractContextManager[None]:
        """Inside, all shards are whole, to read and to write, in pages that the kernel may drop; only between steps. May be nested."""
        return self._opening()

    @property
    def area(self) -> torch.Tensor | None:
        """The file's bytes, inside :meth:`lent`."""
        return self._area

    def close(self) -> None:
        """Gives the disk's space back; transfers under way come to their end first."""
        self.shelf.close()

    # --- one shard ------------------------------------------------------------------------------------------------

    def expect(self, shard: SwappedShard) -> bool:
        """It is needed soon: reads as much of it as there are free buffers. Whether it was expected before."""
        if self._opening.is_open or self.trouble.first is not None:
            return False
        before = bool(shard.parts)
        self._start(shard, 0)
        return before

    def fetch(self, shard: SwappedShard, into: torch.Tensor) -> None:
        """Its values are in ``into`` (n,) when this returns. Raises StorageError."""
        if self._opening.is_open:
            into.copy_(shard.group.shard)
            return
        self.trouble.require_none()
        if shard.parts and shard.parts[0].low:  # a fetch was broken off
            self.forget(shard)
        done = 0
        while done < shard.numel:
            self._start(shard, done)
            if not shard.parts:
                self._take_one_back()
                continue
            part = shard.parts[0]
            self._arrived([part])  # which may be interrupted
            into[part.low : part.high].copy_(_values(part, shard))
            done = part.high
            self._release(shard.parts.popleft())
        self._expected = [other for other in self._expected if other is not shard]

    def forget(self, shard: SwappedShard) -> None:
        """What was read ahead is not needed, or about to be out of date."""
        self._arrived(shard.parts)
        while shard.parts:
            self._release(shard.parts.popleft())
        self._expected = [other for other in self._expected if other is not shard]

    def _start(self, shard: SwappedShard, done: int) -> None:
        """Reads what follows the parts that there are, from element ``done`` on if there are none, as far as there are free buffers."""
        free = self._furnished()
        for part in shard.parts:
            if part.ticket is None:
                self._read(shard, part)
        low = shard.parts[-1].high if shard.parts else done
        if low < shard.numel and free and shard not in self._expected:
            self.trouble.wait(shard.written)
            shard.written.clear()
            self._expected.append(shard)
        while low < shard.numel and free:
            high = min(low + self._slot, shard.numel)
            shard.parts.append(_Part(low, high, free.popleft()))
            self._read(shard, shard.parts[-1])
            low = high

    def _read(self, shard: SwappedShard, part: _Part) -> None:
        # The file has whole blocks, and they come past the page cache.
        room = part.buffer[: round_up((part.high - part.low) * shard.itemsize, BLOCK)]
        part.ticket = self.shelf.read(shard.offset + part.low * shard.itemsize, room)

    def _arrived(self, parts: Iterable[_Part]) -> None:
        self.trouble.wait([part.ticket for part in parts if part.ticket is not None])

    def _take_one_back(self) -> None:
        """A buffer from the shard that is needed last. There is one: whoever asks has none, and none is free."""
        victim = next(shard for shard in reversed(self._expected) if shard.parts)
        self._arrived([victim.parts[-1]])
        self._release(victim.parts.pop())

    def _release(self, part: _Part) -> None:
        self._furnished().append(part.buffer)

    def _furnished(self) -> deque[torch.Tensor]:
        """The free buffers. They are made when the first of them is needed: then all shards are known."""
        if self._free is None:
            largest = max((shard.numel for shard in self._shards.values()), default=0)
            wanted = min(self._most, round_up(largest, CUT))
            self._slot = slot_elements(self.numel, wanted, self._count, wanted)
            self._free = deque(self.shelf.buffer(self._slot_bytes) for _ in range(self._count))
        return self._free

    @property
    def _slot_bytes(self) -> int:
        return self._slot * max((shard.itemsize for shard in self._shards.values()), default=0)

    # --- all of them ----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """What was read ahead is read again when it is needed. It keeps its buffers: a rank may look into its shards alone, and what
        :meth:`expect` answers must stay the same on all ranks."""
        for shard in self._shards.values():
            self._arrived(shard.parts)
            for part in shard.parts:
                part.ticket = None
            self.trouble.wait(shard.written)
            shard.written.clear()

    def _lay_open(self, area: torch.Tensor | None) -> None:
        self._area = area
        if area is None:
            return
        for shard in self._shards.values():
            shard.put(area[shard.offset : shard.offset + shard.numel * shard.itemsize].view(shard.group.dtype))

    def _put_away(self, area: torch.Tensor | None) -> None:
        for shard in self._shards.values():
            shard.put_away()
        self._area = None


def _values(part: _Part, shard: SwappedShard) -> torch.Tensor:
    return part.buffer[: (part.high - part.low) * shard.itemsize].view(shard.group.dtype)
