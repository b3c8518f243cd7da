"""One rank's swap file on several drives: what is reserved is cut into stripes, which go to the
drives in turn.

    drive 0   stripe 0   stripe 3   ...
    drive 1   stripe 1   stripe 4
    drive 2   stripe 2   stripe 5
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_trial.errors import StorageError
from zero_trial.ops.disk_io import DiskTuning
from zero_trial.sharding.offload.swap_file import SwapFile, addresses, whole_pages
from zero_trial.sharding.offload.swap_space import Transfer

STRIPE = 4 << 20  # bytes at least
# at most: the kernel limits the mappings of a process (vm.max_map_count, mostly 65530), which may
# have three such files
_STRIPES_AT_ONCE = 64  # of one reservation
_STRIPES_OF_ALL = 1 << 14


class _Joined:
    """Transfers on several drives."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._transfers = transfers

    def done(self) -> bool:
        return all(transfer.done() for transfer in self._transfers)

    def wait(self) -> None:
        first: StorageError | None = None
        for transfer in self._transfers:
            try:
                transfer.wait()
            except StorageError as fault:
                first = first or fault
        if first is not None:
            raise first


@dataclass(frozen=True)
class _Stripe:
    """``nbytes`` from ``start`` on of the whole are in ``file``, from ``offset`` on."""

    start: int
    nbytes: int
    file: SwapFile
    offset: int


class StripedFile:
    """A :class:`~zero_trial.sharding.offload.swap_space.SwapSpace` on one drive per folder, of at
    least ``nbytes`` together.

    Each drive has requests of its own under way, so that the bandwidths add up. Raises ConfigError
    and DoesNotFit, which name the drive, as SwapFile does.
    """

    def __init__(self, folders: Sequence[Path], nbytes: int, *, tuning: DiskTuning, where: str) -> None:
        self.bytes_read = self.bytes_written = 0
        self._stripes: list[_Stripe] = []
        self._end = 0
        self._step = max(STRIPE, whole_pages(nbytes // _STRIPES_OF_ALL))
        self.files = [
            SwapFile(folder, nbytes // len(folders), tuning=tuning, where=f"{where}[{number}]")
            for number, folder in enumerate(folders)
        ]

    @property
    def folders(self) -> list[Path]:
        return [file.folder for file in self.files]

    @property
    def size(self) -> int:
        """Bytes that are allocated on the drives."""
        return sum(file.size for file in self.files)

    def reserve(self, nbytes: int) -> int:
        """Reserve whole pages; the files grow where they must."""
        offset, left = self._end, whole_pages(nbytes)
        step = max(self._step, whole_pages(left // _STRIPES_AT_ONCE))
        while left:
            file = min(self.files, key=lambda each: each.reserved)  # in turn, but for short stripes
            length = min(step, left)
            self._stripes.append(_Stripe(self._end, length, file, file.reserve(length)))
            self._end, left = self._end + length, left - length
        return offset

    def buffer(self, nbytes: int) -> torch.Tensor:
        return self.files[0].buffer(nbytes)

    def read(self, offset: int, into: torch.Tensor) -> Transfer:
        self.bytes_read += into.nbytes
        return _Joined([file.read(place, part) for file, place, part in self._parts(offset, into)])

    def write(self, offset: int, source: torch.Tensor) -> Transfer:
        self.bytes_written += source.nbytes
        return _Joined([file.write(place, part) for file, place, part in self._parts(offset, source)])

    def _parts(self, offset: int, tensor: torch.Tensor) -> Iterator[tuple[SwapFile, int, torch.Tensor]]:
        """Yield (file, offset there, bytes of the tensor) of a transfer."""
        values = tensor.detach().view(-1).view(torch.uint8)
        for file, place, low, high in self._spans(offset, values.numel()):
            yield file, place, values[low:high]

    def _spans(self, offset: int, nbytes: int) -> Iterator[tuple[SwapFile, int, int, int]]:
        """Yield (file, offset there, low, high) of a range's parts."""
        low = 0
        index = bisect.bisect_right(self._stripes, offset, key=lambda stripe: stripe.start) - 1
        while low < nbytes:
            stripe = self._stripes[index]
            inside = offset + low - stripe.start
            high = min(low + stripe.nbytes - inside, nbytes)
            yield stripe.file, stripe.offset + inside, low, high
            low, index = high, index + 1

    @contextmanager
    def mapped(self) -> Iterator[torch.Tensor]:
        area = self.map_range(0, self._end)
        try:
            yield area
        finally:
            faults = [fault for stripe in self._stripes if (fault := _flush(area, stripe)) is not None]
            if faults:
                raise faults[0]

    def in_memory(self, offset: int, nbytes: int) -> torch.Tensor | None:
        return None

    def map_range(self, offset: int, nbytes: int) -> torch.Tensor:
        """Map a range that was reserved as (nbytes,) uint8 until the tensor is gone: one range of
        addresses, in which each stripe is a mapping of its file."""
        area = addresses(nbytes)
        for file, place, low, high in self._spans(offset, nbytes):
            file.map_at(area.data_ptr() + low, place, high - low)
        return area

    def close(self) -> None:
        for file in self.files:
            file.close()


def _flush(area: torch.Tensor, stripe: _Stripe) -> StorageError | None:
    return stripe.file.flush(area.data_ptr() + stripe.start, stripe.nbytes)
