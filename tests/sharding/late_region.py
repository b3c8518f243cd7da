"""A region that is as late as it may be: what is used before it was waited for is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from zero_trial.sharding.offload.region_file import RegionFile


class LateTransfer:
    """Done when it is waited for, and not before."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act

    def done(self) -> bool:
        return self._act is None

    def wait(self) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()


class LateRegion(RegionFile):
    """Reads see the file as it was when they began and arrive when they are waited for; writes take
    what is there when they are waited for."""

    def __init__(self, nbytes: int = 1 << 21) -> None:
        self.bytes_read = self.bytes_written = 0
        self._area = torch.zeros(nbytes, dtype=torch.uint8)
        self._end = 0

    def reserve(self, nbytes: int) -> int:
        offset, self._end = self._end, self._end + -(-nbytes // 4096) * 4096
        return offset

    def read(self, offset: int, into: torch.Tensor) -> LateTransfer:
        bits = into.view(torch.uint8)
        seen = self._area[offset : offset + bits.numel()].clone()
        bits.fill_(255)
        return LateTransfer(lambda: bits.copy_(seen))

    def write(self, offset: int, source: torch.Tensor) -> LateTransfer:
        bits = source.view(torch.uint8)
        return LateTransfer(lambda: self._area[offset : offset + bits.numel()].copy_(bits))

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        return self._area[offset : offset + nbytes]

    @contextmanager
    def mapped(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        pass
