"""Updates on the host for parameters on a device: gradients come down piece by piece, new values go
up, through a few buffers.

    buffer 0   gradient 0 down | update 0 on the CPU | values 0 up | gradient 2 down ...
    buffer 1        gradient 1 down    | wait        | update 1 on the CPU | values 1 up
                                                        time -->

Traffic per step of a shard of n elements: a gradient down (2 or 4 bytes each) and a parameter up (2
or 4 bytes each). Host memory: the buffers, never a second copy of the model; masters and moments
are where the store behind keeps them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from zero_trial.sharding.offload.copies import DONE, Copy, HostCopier
from zero_trial.sharding.offload.nvme_params import SwappedPiece
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.pieces import DeviceStore, ShardPiece, StateStore


def master_to_host(group: ParamGroup) -> None:
    """Move the group's master to the host's memory, beside the shard on the device, also where the
    shard has the same dtype."""
    group.master = group.master.detach().to("cpu", copy=True)


@dataclass
class _Buffer:
    """Host memory for one piece's gradient and its new values."""

    gradient: torch.Tensor
    out: torch.Tensor
    copy: Copy = DONE  # from or to it, the last one


class StagingBuffers:
    """The buffers, and which piece is in which."""

    def __init__(self, copier: HostCopier) -> None:
        self.copier = copier
        self.free: deque[_Buffer] = deque()
        self._of: dict[int, _Buffer] = {}

    def allocate(self, pieces: Sequence[ShardPiece], count: int) -> None:
        """Add ``count`` buffers, each large enough for any of ``pieces``."""
        down = max((piece.numel * piece.grad_buffer.shard.element_size() for piece in pieces), default=0)
        up = max((piece.numel * piece.group.shard.element_size() for piece in pieces), default=0)
        for _ in range(count if pieces else 0):
            self.free.append(_Buffer(self.copier.buffer(down), self.copier.buffer(up)))

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [area for buffer in (*self.free, *self._of.values()) for area in (buffer.gradient, buffer.out)]

    def fetch(self, piece: StagedPiece) -> None:
        """Start to copy the piece's gradient down."""
        self.free[0].copy.wait()  # its last values have gone up
        buffer = self.free.popleft()
        self._of[id(piece)] = buffer
        buffer.copy = self.copier.copy(piece.gradient_on_device, self.gradient(piece))

    def wait_for(self, piece: StagedPiece) -> None:
        """Wait until the piece's gradient is on the host."""
        self._of[id(piece)].copy.wait()

    def send(self, piece: StagedPiece) -> None:
        """Start to copy the piece's new values up, and free its buffer for the next piece. What the
        device is given afterwards, such as the gather of the new values, sees them."""
        out = self.out(piece)
        buffer = self._of.pop(id(piece))
        buffer.copy = self.copier.copy(out, piece.values_on_device)
        buffer.copy.order()
        self.free.append(buffer)

    def release(self, piece: StagedPiece) -> None:
        """Free the piece's buffer: its new values do not go up."""
        buffer = self._of.pop(id(piece))
        buffer.copy = DONE
        self.free.append(buffer)

    def clear(self) -> None:
        """Free all buffers, also those of a step that was broken off."""
        for buffer in self._of.values():
            buffer.copy.wait()
            buffer.copy = DONE
            self.free.append(buffer)
        self._of.clear()

    def gradient(self, piece: StagedPiece) -> torch.Tensor:
        return _view(self._of[id(piece)].gradient, piece.numel, piece.grad_buffer.shard.dtype)

    def out(self, piece: StagedPiece) -> torch.Tensor:
        return _view(self._of[id(piece)].out, piece.numel, piece.group.shard.dtype)


@dataclass(frozen=True)
class StagedPiece(SwappedPiece):
    """A piece whose weight is on the host and whose group is on a device; gradient and new values
    are in staging buffers during its update. New values of a group whose home is away go there, as
    a :class:`SwappedPiece`'s."""

    staging: StagingBuffers

    @property
    def reduced(self) -> torch.Tensor:
        return self.staging.gradient(self)

    @property
    def rounded(self) -> torch.Tensor | None:
        """None where nothing is rounded: updates make copies of 16 bits only."""
        if self.goes_home:
            return super().rounded
        return None if self.group.shard.dtype == self.weight.dtype else self.staging.out(self)

    @property
    def goes_home(self) -> bool:
        """Whether the new values go to another place than the device."""
        return self.group.offloaded is not None

    @property
    def gradient_on_device(self) -> torch.Tensor:
        return self.grad_buffer.reduced()[self.low : self.high]

    @property
    def values_on_device(self) -> torch.Tensor:
        return self.group.shard[self.low : self.high]


class StagedStore:
    """The :class:`StateStore` of staged ``pieces``. ``behind`` keeps masters and state, in the same
    order; None: host memory."""

    def __init__(
        self, pieces: Sequence[StagedPiece], staging: StagingBuffers, behind: StateStore | None, *, buffers: int
    ) -> None:
        self._pieces = list(pieces)
        self._staging = staging
        self.behind = behind if behind is not None else DeviceStore(self._pieces)
        self._in_memory = behind is None
        self._coming: deque[StagedPiece] = deque()
        staging.allocate(self._pieces, buffers)

    def prefetch(self) -> None:
        self.behind.prefetch()

    def batches(self) -> Iterator[Sequence[ShardPiece]]:
        self._staging.clear()
        self._staging.copier.begin()
        self._coming = deque(self._pieces)
        if self._in_memory:
            yield from ([piece] for piece in self._pieces)
        else:
            yield from self.behind.batches()

    def borrow(self, batch: Sequence[ShardPiece]) -> None:
        """Bring the batch's gradients to the host, and its weights and state to where the update
        runs."""
        while self._coming and self._staging.free:
            self._staging.fetch(self._coming.popleft())
        self.behind.borrow(batch)
        for piece in batch:
            if isinstance(piece, StagedPiece):
                self._staging.wait_for(piece)

    def give_back(self, batch: Sequence[ShardPiece], rounded: bool) -> bool:
        """Start to copy the new values to the device, which waits for them."""
        staged = [piece for piece in batch if isinstance(piece, StagedPiece)]
        going_up = [piece for piece in staged if not piece.goes_home]
        for piece in going_up:
            if not rounded or piece.rounded is None:
                self._staging.out(piece).copy_(piece.weight.detach())
        self.behind.give_back(batch, rounded or bool(going_up))
        for piece in staged:
            self._staging.release(piece) if piece.goes_home else self._staging.send(piece)
        return True

    def lent(self) -> AbstractContextManager[None]:
        return self.behind.lent()

    def zeros(self, piece: ShardPiece, kind: str) -> torch.Tensor | None:
        return self.behind.zeros(piece, kind)

    def resident_bytes(self, value: torch.Tensor, kind: str) -> int:
        """Return 0: only the device's memory is counted."""
        return 0

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        """No buffers on the device."""
        return ()

    def close(self) -> None:
        self._staging.clear()
        self.behind.close()

    @property
    def host_buffers(self) -> Sequence[torch.Tensor]:
        """The staging buffers, and those of the store behind."""
        return [*self._staging.buffers, *self.behind.buffers]


def _view(area: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return area[: numel * dtype.itemsize].view(dtype)
