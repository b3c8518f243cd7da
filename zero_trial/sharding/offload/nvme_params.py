"""Parameters in a file between uses, a rank's shards at stage 3 and full copies at stages 0 to 2:
read through a few buffers, ahead of the blocks that come next, and written by the update.

    buffer 0   read h3 .... | into full | read h0 ...
    buffer 1        read h2 ......  | into full |
    full                     h3 gathered, computes    h2 gathered, computes

Traffic per gather of a home of n elements: n elements read, in whole blocks of the disk. An update
writes n. Where the home has the full copy and N ranks update a part each, it writes n/N, reads them
again for the all-gather and writes the result, n elements. Memory: the buffers. A shard is read
into this rank's part of the full buffer, and gathered from there; a full copy into all of it.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from zero_trial.sharding.guards.freed import absent
from zero_trial.sharding.layout import round_up
from zero_trial.sharding.offload.swap_space import (
    BLOCK,
    CUT,
    DiskFailure,
    MappedAccess,
    SwapSpace,
    Transfer,
    buffer_elements,
)
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.pieces import ShardPiece
from zero_trial.sharding.plan import Home


@dataclass(eq=False)
class _Part:
    """Elements [low, high) of a shard on their way into a buffer."""

    low: int
    high: int
    buffer: torch.Tensor
    transfer: Transfer | None = None  # None before it is read, and where it is to be read again


@dataclass(eq=False)
class SwappedShard:
    """One group's home in the file, from ``offset`` bytes on. See
    :class:`zero_trial.sharding.param_group.OffloadedShard`."""

    swapper: ParamSwapper
    group: ParamGroup
    offset: int
    parts: deque[_Part] = field(default_factory=deque)  # that are read ahead
    expected: bool = False  # start_read was called since the last use
    written: list[Transfer] = field(default_factory=list)  # writes that may be under way

    def start_read(self) -> bool:
        return self.swapper.start_read(self)

    def read_ahead(self) -> bool:
        return self.swapper.read_ahead(self)

    def fetch(self, into: torch.Tensor) -> None:
        self.swapper.fetch(self, into)

    def fetch_part(self, into: torch.Tensor, low: int) -> None:
        self.swapper.fetch_part(self, into, low)

    def store(self, values: torch.Tensor) -> None:
        self.swapper.store(self, values)

    def forget(self) -> None:
        self.swapper.forget(self)

    def close(self) -> None:
        self.swapper.close()

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        return self.swapper.buffers

    @property
    def numel(self) -> int:
        layout = self.group.layout
        return layout.numel if self.group.plan.whole_home else layout.shard_numel

    @property
    def itemsize(self) -> int:
        return self.group.dtype.itemsize


class ParamSwapper:
    """Keeps the parameters of a rank's groups in a file.

    Uses must come in the same order on all ranks of a group's axis.

    Args:
        space: the file.
        most: elements of a buffer at most; none is larger than the largest shard.
        count: buffers; together they hold at most a quarter of what is in the file.
        update_space: the file as updates use it, where they run elsewhere than the model: on the
            host of a device.
        homes: the groups to take: those whose plan has one of these homes.
    """

    def __init__(
        self,
        space: SwapSpace,
        *,
        most: int,
        count: int,
        update_space: SwapSpace | None = None,
        homes: Collection[Home] = (Home.NVME,),
    ) -> None:
        self.space = space
        self.update_space = update_space if update_space is not None else space
        self._homes = homes
        self.failure = DiskFailure()
        self._most = most
        self._count = count
        self._shards: dict[int, SwappedShard] = {}  # by id of the group
        # those with parts, in the order in which their reads started
        self._reading: list[SwappedShard] = []
        self._free: deque[torch.Tensor] | None = None  # None until all shards are known
        self._writing: deque[tuple[torch.Tensor, Transfer]] = deque()
        self._buffer_numel = 0
        self._area: torch.Tensor | None = None
        self._access = MappedAccess(space.mapped, self.failure, self._wait_for_all, self._map, self._unmap)

    def swap_out(self, group: ParamGroup) -> None:
        """Write the group's home to the file; it reads as NaN afterwards, and so does its master
        where that is the same.

        Groups whose plan has another home stay in memory.
        """
        if group.plan.home not in self._homes:
            return
        offset = self.space.reserve(group.home.nbytes)
        self.space.write(offset, group.home).wait()
        shard = self._shards[id(group)] = SwappedShard(self, group, offset)
        self._remove_values(shard)
        group.lender = self
        group.set_offloaded(shard)

    def offset_of(self, group: ParamGroup) -> int | None:
        """Return where the group's shard begins in the file, in bytes; None if it is in memory."""
        shard = self._shards.get(id(group))
        if shard is None:
            return None
        low = group.layout.shard_range(group.comm.index)[0] if group.plan.whole_home else 0
        return shard.offset + low * shard.itemsize

    def add_writes(self, group: ParamGroup, transfers: Sequence[Transfer]) -> None:
        """Note writes to the group's shard that are under way."""
        shard = self._shards[id(group)]
        shard.written = [transfer for transfer in shard.written if not transfer.done()] + list(transfers)

    @property
    def numel(self) -> int:
        """Elements in the file."""
        return sum(shard.numel for shard in self._shards.values())

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All of them; none before the first is needed."""
        reading = (part.buffer for shard in self._shards.values() for part in shard.parts)
        return [*(self._free or ()), *reading, *(buffer for buffer, _ in self._writing)]

    def lent(self) -> AbstractContextManager[None]:
        """Make all shards readable and writable inside the block, in pages that the kernel may
        drop; only between steps. May be nested."""
        return self._access()

    def mapped_part(self, offset: int, nbytes: int) -> torch.Tensor | None:
        """Return bytes of a reservation inside :meth:`lent`, and None elsewhere: of the file, or of
        the memory that is in its place."""
        if self._area is None:
            return None
        memory = self.space.in_memory(offset, nbytes)
        return memory if memory is not None else self._area[offset : offset + nbytes]

    def close(self) -> None:
        """Give the disk's space back, when transfers under way are done."""
        self.space.close()

    # --- one shard --------------------------------------------------------------------------------

    def start_read(self, shard: SwappedShard) -> bool:
        """Start to read as much of a shard that is needed soon as there are free buffers; return
        whether an earlier call has started it."""
        if self._access.is_open or self.failure.first is not None:
            return False
        before, shard.expected = shard.expected and bool(shard.parts), True
        self._start(shard, 0)
        return before

    def read_ahead(self, shard: SwappedShard) -> bool:
        """Start to read as much of a shard that is needed later as there are free buffers; return
        whether there are more."""
        if self._access.is_open or self.failure.first is not None:
            return False
        self._start(shard, 0)
        return bool(self._free_buffers())

    def fetch(self, shard: SwappedShard, into: torch.Tensor) -> None:
        """Read the shard's values into ``into`` (n,) and wait for them. Raises StorageError."""
        if self._access.is_open:
            into.copy_(shard.group.home)
            return
        self.failure.require_none()
        if shard.parts and shard.parts[0].low:  # a fetch was broken off
            self.forget(shard)
        done = 0
        while done < shard.numel:
            self._start(shard, done)
            if not shard.parts:
                self._reclaim_buffer()
                continue
            part = shard.parts[0]
            self._wait_for([part])  # which may be interrupted
            into[part.low : part.high].copy_(_values(part, shard))
            done = part.high
            self._release(shard.parts.popleft())
        self._used(shard)

    def fetch_part(self, shard: SwappedShard, into: torch.Tensor, low: int) -> None:
        """Read the values from element ``low`` on into ``into``, which an update has just written.
        Raises StorageError."""
        if self._access.is_open:
            into.copy_(shard.group.home[low : low + into.numel()])
            return
        self.failure.require_none()
        self._wait_for_writes(shard)
        with self.failure.noted():
            self.space.read(shard.offset + low * shard.itemsize, into).wait()

    def store(self, shard: SwappedShard, values: torch.Tensor) -> None:
        """Replace all values by ``values`` (n,), through the buffers. Raises StorageError."""
        if self._access.is_open:
            shard.group.home.copy_(values)
            return
        self.failure.require_none()
        self._wait_for_writes(shard)
        free = self._free_buffers()
        step = self._buffer_numel
        for low in range(0, shard.numel, step):
            if not free:
                self._reclaim_buffer()
            part = _Part(low, min(low + step, shard.numel), free.popleft())
            _values(part, shard).copy_(values[part.low : part.high])
            self._write(shard, part)

    def forget(self, shard: SwappedShard) -> None:
        """Drop what was read ahead: it is not needed, or about to be out of date."""
        self._wait_for(shard.parts)
        while shard.parts:
            self._release(shard.parts.popleft())
        self._used(shard)

    def _used(self, shard: SwappedShard) -> None:
        shard.expected = False
        self._reading = [other for other in self._reading if other is not shard]

    def _start(self, shard: SwappedShard, done: int) -> None:
        """Read what follows the parts that there are, or follows element ``done`` if there are
        none, as far as there are free buffers."""
        free = self._free_buffers()
        for part in shard.parts:
            if part.transfer is None:
                self._read(shard, part)
        while self._writing and self._writing[0][1].done():
            self._reclaim_buffer()
        low, numel = shard.parts[-1].high if shard.parts else done, shard.numel
        if low >= numel or not free:
            return
        if shard not in self._reading:
            self._wait_for_writes(shard)
            self._reading.append(shard)
        # Parts of one size: pages pass from one to the next whole.
        count = -(-numel // self._buffer_numel)
        step = min(round_up(-(-numel // count), max(CUT, mmap.PAGESIZE)), self._buffer_numel)
        while low < numel and free:
            high = min(low + step, numel)
            shard.parts.append(_Part(low, high, free.popleft()))
            self._read(shard, shard.parts[-1])
            low = high

    def _read(self, shard: SwappedShard, part: _Part) -> None:
        # The file has whole blocks, and they come past the page cache.
        target = part.buffer[: round_up((part.high - part.low) * shard.itemsize, BLOCK)]
        with self.failure.noted():
            part.transfer = self.space.read(shard.offset + part.low * shard.itemsize, target)

    def _write(self, shard: SwappedShard, part: _Part) -> None:
        source = part.buffer[: round_up((part.high - part.low) * shard.itemsize, BLOCK)]
        with self.failure.noted():
            transfer = self.space.write(shard.offset + part.low * shard.itemsize, source)
        shard.written.append(transfer)
        self._writing.append((part.buffer, transfer))

    def _wait_for_writes(self, shard: SwappedShard) -> None:
        self.failure.wait(shard.written)
        shard.written.clear()

    def _wait_for(self, parts: Iterable[_Part]) -> None:
        self.failure.wait([part.transfer for part in parts if part.transfer is not None])

    def _reclaim_buffer(self) -> None:
        """Free a buffer that is being written, else one of the shard that is needed last. There is
        one: the caller has none, and none is free."""
        if self._writing:
            buffer, transfer = self._writing.popleft()
            self.failure.wait([transfer])
            self._free_buffers().append(buffer)
            return
        victim = next(shard for shard in reversed(self._reading) if shard.parts)
        self._wait_for([victim.parts[-1]])
        self._release(victim.parts.pop())

    def _release(self, part: _Part) -> None:
        self._free_buffers().append(part.buffer)

    def _free_buffers(self) -> deque[torch.Tensor]:
        """Return the free buffers. They are made when the first of them is needed: then all shards
        are known."""
        if self._free is None:
            shards = self._shards.values()
            wanted = min(self._most, round_up(max((shard.numel for shard in shards), default=0), CUT))
            self._buffer_numel = buffer_elements(self.numel, wanted, self._count, wanted)
            nbytes = self._buffer_numel * max((shard.itemsize for shard in shards), default=0)
            self._free = deque(self.space.buffer(nbytes) for _ in range(self._count))
        return self._free

    # --- all of them ------------------------------------------------------------------------------

    def _wait_for_all(self) -> None:
        """Wait for all transfers. What was read ahead is read again when it is needed.

        It keeps its buffers: a rank may look into its shards alone, and what :meth:`start_read`
        answers must stay the same on all ranks.
        """
        for shard in self._shards.values():
            self._wait_for(shard.parts)
            for part in shard.parts:
                part.transfer = None
            self._wait_for_writes(shard)

    def _map(self, area: torch.Tensor | None) -> None:
        self._area = area
        if area is None:
            return
        for shard in self._shards.values():
            values = self.mapped_part(shard.offset, shard.numel * shard.itemsize)
            if values is not None:
                shard.group.replace_home(values.view(shard.group.dtype))

    def _unmap(self, area: torch.Tensor | None) -> None:
        for shard in self._shards.values():
            self._remove_values(shard)
        self._area = None

    def _remove_values(self, shard: SwappedShard) -> None:
        # where updates find it
        device = shard.group.full.device if self.update_space is self.space else torch.device("cpu")
        shard.group.replace_home(absent((shard.numel,), shard.group.dtype, device))


def _values(part: _Part, shard: SwappedShard) -> torch.Tensor:
    return part.buffer[: (part.high - part.low) * shard.itemsize].view(shard.group.dtype)


class RoundedBuffers:
    """Where the new 16-bit values of each piece are while it is updated, until they are on their
    way to a file."""

    def __init__(self) -> None:
        self._of: dict[int, torch.Tensor] = {}

    def assign(self, piece: ShardPiece, buffer: torch.Tensor) -> None:
        """Let ``buffer`` (numel,) take the piece's new values from now on."""
        self._of[id(piece)] = buffer

    def release(self, piece: ShardPiece) -> torch.Tensor:
        """Return the piece's buffer and forget it."""
        return self._of.pop(id(piece))

    def clear(self) -> None:
        """Forget the buffers of a step that was broken off."""
        self._of.clear()

    def of(self, piece: ShardPiece) -> torch.Tensor | None:
        """Return the piece's buffer; None where its values are not rounded, or it is not being
        updated."""
        return self._of.get(id(piece))


@dataclass(frozen=True)
class SwappedPiece(ShardPiece):
    """A piece of a group whose shard may be in a file; then its new values go to
    ``rounded_buffers``."""

    rounded_buffers: RoundedBuffers

    @property
    def rounded(self) -> torch.Tensor | None:
        """The buffer for new 16-bit values during the piece's update, or the shard, where that is
        in memory."""
        return super().rounded if self.group.offloaded is None else self.rounded_buffers.of(self)
