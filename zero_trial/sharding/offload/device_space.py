"""Places of the host that a device swaps with: its pinned memory, or a file through pinned buffers.

    host memory    area ───────────────────copy───► buffer of the device ──► full parameters
    file           file ──read──► pinned buffer ──copy──► buffer of the device ──► ...

Both are a :class:`~zero_trial.sharding.offload.swap_space.SwapSpace`, so that parameters leave a
device by the same code as they leave the memory of a CPU rank. Copies run on streams of their own,
beside the device's work: what is read ahead orders nothing until it is waited for, and the host
waits for no copy to the device, only for those of new values to the host. What comes from a file is
read ahead as far as the pinned buffers; its copy to the device is started when it is waited for, or
when the buffer is needed, and comes after the work that the device had been given when its read
began: it goes on beside all that the device has got since.

Memory: of the device, the buffers of who uses a space. Of the host, the area (which torch's
allocator of pinned memory rounds up to a power of two), or the pinned buffers in front of a file.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from zero_trial.sharding.layout import round_up
from zero_trial.sharding.offload.copies import Copy, HostCopier
from zero_trial.sharding.offload.swap_space import BLOCK, OVER, SwapSpace, Transfer


class HostMemory:
    """A :class:`SwapSpace` in the host's memory: transfers are copies that the host makes."""

    def __init__(self, nbytes: int, copier: HostCopier) -> None:
        self._copier = copier
        self._end = 0
        self.area = copier.buffer(round_up(nbytes, BLOCK))

    def reserve(self, nbytes: int) -> int:
        """Reserve whole blocks; the area grows where it must."""
        offset, self._end = self._end, self._end + round_up(nbytes, BLOCK)
        if self._end > self.area.numel():
            self._copier.settle()
            grown = self._copier.buffer(self._end)
            grown[: self.area.numel()].copy_(self.area)
            self.area = grown
        return offset

    def in_memory(self, offset: int, nbytes: int) -> torch.Tensor:
        return self.area[offset : offset + nbytes]

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def read(self, offset: int, into: torch.Tensor) -> Transfer:
        into.view(torch.uint8).copy_(self.in_memory(offset, into.nbytes))
        return OVER

    def write(self, offset: int, source: torch.Tensor) -> Transfer:
        self.in_memory(offset, source.nbytes).copy_(source.view(torch.uint8))
        return OVER

    @contextmanager
    def mapped(self) -> Iterator[torch.Tensor]:
        yield self.area

    def close(self) -> None:
        """Free the memory. Copies must be over."""
        self.area = self.area[:0].clone()


class _DeviceTransfer:
    """A transfer of which each of ``steps`` starts what is left of a part, and orders the device's
    later work after what was read, or waits for what was written."""

    def __init__(self, *steps: Callable[[], None]) -> None:
        self._steps = deque(steps)

    def done(self) -> bool:
        return not self._steps

    def wait(self) -> None:
        while self._steps:
            self._steps[0]()
            self._steps.popleft()


@dataclass(eq=False)
class _Chunk:
    """A pinned buffer, and what waits on the host until it may be used again."""

    buffer: torch.Tensor
    wait: Callable[[], None]


class DeviceSpace:
    """``host`` as tensors of a device are read from it and written to it.

    Args:
        count, nbytes: pinned buffers in front of a file; what lies in :class:`HostMemory` needs
            none.
        kept: memory in place of a file for what is reserved first and fits into it. The file has
            room for it, too, which stays empty.
    """

    def __init__(
        self,
        host: SwapSpace,
        copier: HostCopier,
        device: torch.device,
        *,
        count: int = 0,
        nbytes: int = 0,
        kept: HostMemory | None = None,
    ) -> None:
        self.bytes_read = self.bytes_written = 0
        self._host = host
        self._copier = copier
        self._device = device
        self._size = round_up(nbytes, BLOCK)
        self._ring = deque(_Chunk(copier.buffer(self._size), _nothing) for _ in range(count))
        self._memory = kept
        self._kept: list[tuple[int, torch.Tensor]] = []  # (offset, the memory in its place)
        self._nowhere = torch.empty(0, dtype=torch.uint8)
        self.on_host = _HostSide(self)

    @property
    def pinned(self) -> list[torch.Tensor]:
        """The pinned buffers in front of a file."""
        return [chunk.buffer for chunk in self._ring]

    @property
    def host(self) -> SwapSpace:
        """Where it is on the host."""
        return self._host

    @property
    def kept_bytes(self) -> int:
        """Bytes that are in memory in place of a file."""
        return sum(memory.numel() for _, memory in self._kept)

    def reserve(self, nbytes: int) -> int:
        offset, size = self._host.reserve(nbytes), round_up(nbytes, BLOCK)
        if self._memory is not None and self.kept_bytes + size <= self._memory.area.numel():
            place = self._memory.reserve(size)
            self._kept.append((offset, self._memory.area[place : place + size]))
        return offset

    def in_memory(self, offset: int, nbytes: int) -> torch.Tensor | None:
        """Return a whole reservation or a part of one, where it is in memory."""
        if (memory := self._host.in_memory(offset, nbytes)) is not None:
            return memory
        found = bisect.bisect_right(self._kept, offset, key=lambda kept: kept[0]) - 1
        start, memory = self._kept[found] if found >= 0 else (0, self._nowhere)
        low = offset - start
        return memory[low : low + nbytes] if low < memory.numel() else None

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def read(self, offset: int, into: torch.Tensor) -> Transfer:
        target = into.view(torch.uint8)
        self.bytes_read += target.numel()
        if (memory := self.in_memory(offset, target.numel())) is not None:
            return _DeviceTransfer(self._copier.beside(memory, target).order)
        steps = [self._read_chunk(offset + low, target[low:high]) for low, high in self._spans(target.numel())]
        return _DeviceTransfer(*steps)

    def _read_chunk(self, offset: int, target: torch.Tensor) -> Callable[[], None]:
        """Start to read; what is returned copies to the device. It is called by then where the
        buffer is needed for another chunk."""
        chunk = self._take()
        source = chunk.buffer[: target.numel()]
        reading = self._host.read(offset, source)
        begun = self._copier.now()  # nothing later uses ``target`` before the copy is ordered
        copies: list[Copy] = []

        def copy() -> None:
            if not copies:
                reading.wait()
                copies.append(self._copier.beside(source, target, begun))

        def wait() -> None:
            copy()
            copies[0].wait()

        def order() -> None:
            copy()
            copies[0].order()

        chunk.wait = wait
        return order

    def write(self, offset: int, source: torch.Tensor) -> Transfer:
        """Start to write; where that is into a file, the host waits for the copy."""
        values = source.view(torch.uint8)
        self.bytes_written += values.numel()
        if (memory := self.in_memory(offset, values.numel())) is not None:
            return _DeviceTransfer(self._copier.beside(values, memory).wait)
        writes = [self._write_chunk(offset + low, values[low:high]) for low, high in self._spans(values.numel())]
        return _DeviceTransfer(*(write.wait for write in writes))

    def _write_chunk(self, offset: int, values: torch.Tensor) -> Transfer:
        chunk = self._take()
        target = chunk.buffer[: values.numel()]
        self._copier.beside(values, target).wait()
        writing = self._host.write(offset, target)
        chunk.wait = writing.wait
        return writing

    def _take(self) -> _Chunk:
        """Return the buffer that was taken longest ago, when its transfer is over. Raises
        StorageError, at every call, where that has failed."""
        chunk = self._ring[0]
        chunk.wait()
        chunk.wait = _nothing
        self._ring.rotate(-1)
        return chunk

    def _spans(self, nbytes: int) -> list[tuple[int, int]]:
        return [(low, min(low + self._size, nbytes)) for low in range(0, nbytes, self._size)]

    @contextmanager
    def mapped(self) -> Iterator[torch.Tensor]:
        """Map all but what is :meth:`in_memory`."""
        self._copier.settle()
        with self._host.mapped() as area:
            yield area

    def settle(self) -> None:
        """Return when all copies are done."""
        self._copier.settle()

    def close(self) -> None:
        self._copier.settle()
        self._host.close()
        self._kept.clear()
        if self._memory is not None:
            self._memory.close()


class _HostSide:
    """The same space for updates on the host: they come after what a device still copies."""

    def __init__(self, space: DeviceSpace) -> None:
        self._space = space

    def reserve(self, nbytes: int) -> int:
        return self._space.reserve(nbytes)

    def buffer(self, nbytes: int) -> torch.Tensor:
        return self._space.host.buffer(nbytes)

    def read(self, offset: int, into: torch.Tensor) -> Transfer:
        if (memory := self.in_memory(offset, into.nbytes)) is None:  # a device has only copies of a file
            return self._space.host.read(offset, into)
        self._space.settle()
        into.view(torch.uint8).copy_(memory)
        return OVER

    def write(self, offset: int, source: torch.Tensor) -> Transfer:
        if (memory := self.in_memory(offset, source.nbytes)) is None:
            return self._space.host.write(offset, source)
        self._space.settle()
        memory.copy_(source.view(torch.uint8))
        return OVER

    def mapped(self) -> AbstractContextManager[torch.Tensor]:
        return self._space.mapped()

    def in_memory(self, offset: int, nbytes: int) -> torch.Tensor | None:
        return self._space.in_memory(offset, nbytes)

    def close(self) -> None:
        self._space.close()


def _nothing() -> None:
    return None
