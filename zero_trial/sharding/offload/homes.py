"""Where a rank's offloaded parameters and masters live between uses: in regions
(:mod:`zero_trial.sharding.offload.regions`), from which parameters are read through a ring of
buffers, ahead of the blocks that need them.

    buffer 0   read h3 .... | into full | read h0 ...
    buffer 1        read h2 ......  | into full |
    full                     h3 gathered, computes    h2 gathered, computes

Traffic per gather of a home of n elements: n elements read, in whole blocks of the disk. An update
writes n. Where the home has the full copy and each of N ranks updates a part, an update writes n/N,
reads them again for the all-gather and writes the result, n elements. Memory: the buffers. A shard
is read into this rank's part of the full buffer and gathered from there; a full copy fills it all.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch

from zero_trial.sharding.guards.freed import absent
from zero_trial.sharding.layout import round_up
from zero_trial.sharding.offload.copies import Copier
from zero_trial.sharding.offload.region_file import BLOCK, DiskFailure, Transfer, transfer_buffer
from zero_trial.sharding.offload.regions import (
    CUT,
    MOST,
    Buffer,
    HostRegion,
    Region,
    Ring,
    shard_buffer_bytes,
    wait_for,
)
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.plan import Home

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Place:
    """Where values begin: a region, the byte there, and their dtype."""

    region: Region
    offset: int
    dtype: torch.dtype

    def view(self, numel: int) -> torch.Tensor:
        """Return the values; in a file only inside :meth:`Homes.lent`."""
        return self.region.view(self.offset, numel * self.dtype.itemsize).view(self.dtype)


class Homes:
    """The parameters and masters of a rank that are in regions.

    Between uses they read as NaN. Inside :meth:`lent` they can be read and written.

    Args:
        params: the region of groups that their plan offloads; None: they stay on the device.
        kept: host memory, used instead of ``params`` for the first groups that fit into it.
        masters: the region of masters and state; None: they stay where updates run.
        failure: records a failed disk of the regions.
        device: where the model computes.
        copier: between the host and that device; None if parameters are on the host or stay.
        buffer_size: elements of a buffer of parameters at most; none is larger than the largest
            shard.
        buffer_count: buffers of parameters; together they hold at most a quarter of the offloaded.
        on_host: updates run on the host.
        budget: elements whose state goes to ``masters``; None for all. Groups are not split, so
            more state than requested may stay in memory, never less.
    """

    def __init__(
        self,
        *,
        params: Region | None = None,
        kept: HostRegion | None = None,
        masters: Region | None = None,
        failure: DiskFailure,
        device: torch.device = _HOST,
        copier: Copier | None = None,
        buffer_size: int = CUT,
        buffer_count: int = 1,
        on_host: bool = True,
        budget: int | None = None,
    ) -> None:
        self.params, self.kept, self.masters = params, kept, masters
        self._regions = [region for region in (params, kept, masters) if region is not None]
        self._device = device
        self.failure = failure
        self.copier = copier
        self.on_host = on_host
        # makes optimizer state readable and writable on the host, too; see UpdateStore
        self.lend_state: Callable[[], AbstractContextManager[None]] | None = None
        self._buffer_size, self._buffer_count = buffer_size, buffer_count
        self._budget = budget
        self._shards: dict[int, OffloadedHome] = {}  # by id of the group
        self._masters: dict[int, tuple[ParamGroup, Place]] = {}
        self._with_state: set[int] = set()
        self.reading: list[OffloadedHome] = []  # with parts, in the order in which their reads started
        self.are_lent = False

    # --- leaving ----------------------------------------------------------------------------------

    def swap_out(self, group: ParamGroup) -> None:
        """Move the offloaded values of a group as soon as it is built, so that a model's parameters
        and masters are never all in memory at once."""
        if self.params is not None and group.plan.home is not Home.DEVICE:
            self._swap_out_params(group, self.params)
        if self.on_host and group.trainable and group.master.device.type != "cpu":
            group.master = group.master.detach().to("cpu", copy=True)  # even if the shard is the master
        if self.masters is None or not self._chooses_state_of(group):
            return
        self._with_state.add(id(group))
        if group.master is not group.shard:  # fp32 parameters are their own masters
            master = group.master
            place = Place(self.masters, self.masters.reserve(master.nbytes), master.dtype)
            self._masters[id(group)] = group, place
            self.masters.write(place.offset, master).wait()
            group.master = absent(master.shape, master.dtype, master.device)
            group.lender = self

    def _swap_out_params(self, group: ParamGroup, region: Region) -> None:
        values = group.home.view(-1).view(torch.uint8)
        if self.kept is not None and self.kept.end + round_up(values.numel(), BLOCK) <= self.kept.area.numel():
            region = self.kept
        shard = OffloadedHome(self, group, Place(region, region.reserve(values.numel()), group.dtype))
        host = None
        if self.copier is not None and not isinstance(region, HostRegion):
            host = self.copier.buffer(min(values.numel(), 4 * MOST))
        step = host.numel() if host is not None else values.numel()
        for low in range(0, values.numel(), step or 1):
            part = values[low : low + step]
            Buffer(part, host, self.copier).write(region, shard.place.offset + low, 0, part.numel()).wait()
        self._shards[id(group)] = shard
        shard.remove_values()
        group.lender = self
        group.set_offloaded(shard)

    def _chooses_state_of(self, group: ParamGroup) -> bool:
        if not group.trainable:
            return False
        if self._budget is not None:
            if group.layout.shard_numel > self._budget:
                return False
            self._budget -= group.layout.shard_numel
        return True

    # --- what is where ----------------------------------------------------------------------------

    def keeps_state_of(self, group: ParamGroup) -> bool:
        """Return whether the group's optimizer state lives in the region of masters."""
        return id(group) in self._with_state

    def master_of(self, group: ParamGroup) -> Place | None:
        """Return where the group's master begins; None if it is in memory."""
        if id(group) in self._masters:
            return self._masters[id(group)][1]
        return self.shard_of(group) if group.master is group.shard else None

    def shard_of(self, group: ParamGroup) -> Place | None:
        """Return where this rank's shard of the group begins; None if it is in memory."""
        shard = self._shards.get(id(group))
        if shard is None:
            return None
        low = group.layout.shard_range(group.comm.index)[0] if group.plan.whole_home else 0
        return Place(shard.place.region, shard.place.offset + low * shard.itemsize, group.dtype)

    def add_write(self, group: ParamGroup, writing: Transfer) -> None:
        """Note a write to the group's shard that is in flight."""
        shard = self._shards[id(group)]
        shard.written = [transfer for transfer in shard.written if not transfer.done()] + [writing]

    @property
    def shards(self) -> Collection[OffloadedHome]:
        return self._shards.values()

    @functools.cached_property
    def _buffer_bytes(self) -> int:
        shards = [(shard.numel, shard.itemsize) for shard in self.shards]
        return shard_buffer_bytes(shards, self._buffer_size, self._buffer_count)

    def buffer_numel(self, itemsize: int) -> int:
        """Return how many elements of a shard to read into a buffer."""
        return max(min(self._buffer_size, self._buffer_bytes // itemsize) // CUT, 1) * CUT

    @functools.cached_property
    def ring(self) -> Ring:
        """The buffers of parameters, allocated at first use, when all shards are known."""
        return Ring(self.buffer(self._buffer_bytes) for _ in range(self._buffer_count))

    def buffer(self, nbytes: int) -> Buffer:
        """Make a buffer where the model computes."""
        if self.copier is None:
            return Buffer(transfer_buffer(nbytes))
        host = None if isinstance(self.params, HostRegion) else self.copier.buffer(nbytes)
        return Buffer(torch.zeros(nbytes, dtype=torch.uint8, device=self._device), host, self.copier)

    @property
    def buffers(self) -> list[Buffer]:
        """All buffers of parameters; none before the first is needed."""
        reading = [part.buffer for shard in self.shards for part in shard.parts]
        return [*self.ring.buffers, *reading] if "ring" in vars(self) else []

    def take_buffer(self) -> Buffer:
        """Return a buffer: a free one, else the one written out first, else one of the shard that
        is needed last. At least one exists, because the caller holds none."""
        if (buffer := self.ring.take(wait=True)) is not None:
            return buffer
        victim = next(shard for shard in reversed(self.reading) if shard.parts)
        victim.wait_for_reads(victim.parts[-1])
        return victim.parts.pop().buffer

    # --- between steps ----------------------------------------------------------------------------

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Make parameters, masters and state readable and writable on the host inside the block, in
        pages that the kernel may reclaim; only between steps. May be nested.

        Raises StorageError, also if a disk failed earlier. Values that were read ahead are read
        again when needed, but keep their buffers: a rank may inspect its shards alone, and
        :meth:`OffloadedHome.start_read` must still return the same on all ranks.
        """
        if self.are_lent:
            yield
            return
        self.failure.require_none()
        with ExitStack() as stack:
            self.are_lent = True
            stack.callback(setattr, self, "are_lent", False)
            for region in self._regions:
                stack.enter_context(region.mapped())
            for shard in self.shards:
                shard.end_transfers()
            stack.callback(self._remove_values)
            for shard in self.shards:
                shard.group.replace_home(shard.place.view(shard.numel))
            for group, place in self._masters.values():
                group.master = place.view(group.layout.shard_numel)
            if self.lend_state is not None:
                stack.enter_context(self.lend_state())
            yield

    def _remove_values(self) -> None:
        for shard in self.shards:
            shard.remove_values()
        for group, _ in self._masters.values():
            group.master = absent((group.layout.shard_numel,), group.master.dtype, group.master.device)

    def close(self) -> None:
        """Free the space once transfers in flight are done. Nothing is read afterwards."""
        if self.copier is not None:
            self.copier.settle()
        for region in self._regions:
            region.close()


@dataclass(eq=False)
class _Part:
    """Elements [low, high) of a shard on their way into a buffer."""

    low: int
    high: int
    buffer: Buffer
    transfer: Transfer | None = None  # None before it is read, and if it must be read again


class OffloadedHome:
    """One group's home in a region, from ``place`` on: its shard, or its full copy. See
    :class:`zero_trial.sharding.plan.OffloadedShard`.

    Uses must come in the same order on all ranks of the group's axis.
    """

    def __init__(self, homes: Homes, group: ParamGroup, place: Place) -> None:
        self.homes, self.group, self.place = homes, group, place
        layout = group.layout
        self.numel = layout.numel if group.plan.whole_home else layout.shard_numel
        self.itemsize = group.dtype.itemsize
        self.parts: deque[_Part] = deque()  # that are read ahead
        self.written: list[Transfer] = []  # writes that may be in flight
        self._expected = False  # start_read was called since the last use

    def start_read(self) -> bool:
        """Start reading into the free buffers: the values are needed soon. Return whether an
        earlier call has already started."""
        if self.homes.are_lent or self.homes.failure.first is not None:
            return False
        before, self._expected = self._expected and bool(self.parts), True
        self._start(0)
        return before

    def read_ahead(self) -> bool:
        """Start reading ahead into all free buffers; return whether any are left."""
        if self.homes.are_lent or self.homes.failure.first is not None:
            return False
        self._start(0)
        if (buffer := self.homes.ring.take()) is None:
            return False
        self.homes.ring.give(buffer)
        return True

    def fetch(self, into: torch.Tensor) -> None:
        """Read all values into ``into`` (n,), and wait for them."""
        if self.homes.are_lent:
            into.copy_(self.group.home)
            return
        self.homes.failure.require_none()
        if self.parts and self.parts[0].low:  # a fetch was interrupted
            self.forget()
        done = 0
        while done < self.numel:
            self._start(done)
            if not self.parts:
                self._start(done, self.homes.take_buffer())
            part = self.parts[0]
            self.wait_for_reads(part)  # which may be interrupted
            into[part.low : part.high].copy_(self._values(part.buffer, part.high - part.low))
            done = part.high
            self.homes.ring.give(self.parts.popleft().buffer)
        self._used()

    def fetch_part(self, into: torch.Tensor, low: int) -> None:
        """Read the values from element ``low`` on, just written by an update, into ``into``."""
        if self.homes.are_lent:
            into.copy_(self.group.home[low : low + into.numel()])
            return
        self.homes.failure.require_none()
        self.wait_for_writes()
        for start, part, buffer in self._through_buffers(into):
            offset = self.place.offset + (low + start) * self.itemsize
            reading = buffer.read(self.place.region, offset, 0, part.nbytes)
            try:
                reading.wait()
                part.copy_(self._values(buffer, part.numel()))
            finally:
                self.homes.ring.give(buffer, [reading])

    def store(self, values: torch.Tensor) -> None:
        """Replace all values by ``values`` (n,), which may be overwritten when this returns."""
        if self.homes.are_lent:
            self.group.home.copy_(values)
            return
        self.homes.failure.require_none()
        self.wait_for_writes()
        for start, part, buffer in self._through_buffers(values):
            self._values(buffer, part.numel()).copy_(part)
            offset, nbytes = self.place.offset + start * self.itemsize, round_up(part.nbytes, BLOCK)
            self.written.append(buffer.write(self.place.region, offset, 0, nbytes))
            self.homes.ring.give(buffer, self.written[-1:])

    def forget(self) -> None:
        """Drop values that were read ahead: they are not needed, or will soon be out of date."""
        self.wait_for_reads(*self.parts)
        while self.parts:
            self.homes.ring.give(self.parts.popleft().buffer)
        self._used()

    def close(self) -> None:
        self.homes.close()

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        """The buffers of all shards, where the model computes."""
        return [buffer.near for buffer in self.homes.buffers]

    def wait_for_writes(self) -> None:
        wait_for(self.written)
        self.written.clear()

    def end_transfers(self) -> None:
        """Wait for transfers in flight, before the values are edited in place."""
        self.wait_for_reads(*self.parts)
        for part in self.parts:
            part.transfer = None
        self.wait_for_writes()

    def wait_for_reads(self, *parts: _Part) -> None:
        wait_for(part.transfer for part in parts if part.transfer is not None)

    def remove_values(self) -> None:
        """Make the values read as NaN where updates run."""
        device = _HOST if self.homes.on_host else self.group.full.device
        self.group.replace_home(absent((self.numel,), self.group.dtype, device))

    def _used(self) -> None:
        self._expected = False
        self.homes.reading = [other for other in self.homes.reading if other is not self]

    def _start(self, done: int, first: Buffer | None = None) -> None:
        """Read the values after the existing parts (from element ``done`` on if there are none)
        into ``first`` and into all free buffers."""
        for part in self.parts:
            if part.transfer is None:
                self._read(part)
        low = self.parts[-1].high if self.parts else done
        while low < self.numel and (buffer := first or self.homes.ring.take()) is not None:
            first = None
            part = _Part(low, min(low + self.homes.buffer_numel(self.itemsize), self.numel), buffer)
            self.parts.append(part)
            if self not in self.homes.reading:
                self.homes.reading.append(self)
                self.wait_for_writes()
            self._read(part)
            low = part.high

    def _read(self, part: _Part) -> None:
        # The region has whole blocks, and they come past the page cache.
        nbytes = round_up((part.high - part.low) * self.itemsize, BLOCK)
        part.transfer = part.buffer.read(self.place.region, self.place.offset + part.low * self.itemsize, 0, nbytes)

    def _through_buffers(self, values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, Buffer]]:
        """Yield (first element, part of ``values``, a buffer for it); the caller returns it."""
        step = self.homes.buffer_numel(self.itemsize)
        for low in range(0, values.numel(), step):
            yield low, values[low : low + step], self.homes.take_buffer()

    def _values(self, buffer: Buffer, numel: int) -> torch.Tensor:
        return buffer.near[: numel * self.itemsize].view(self.group.dtype)
