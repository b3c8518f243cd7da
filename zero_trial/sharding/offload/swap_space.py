"""What users of a place for offloaded state see of it: room to reserve, transfers under way, the
first failure of a disk, and all of it mapped for a while.

A space is files on disks (:mod:`zero_trial.sharding.offload.region_file`), what a device swaps with
(:mod:`zero_trial.sharding.offload.device_space`), or nothing in a dry run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from zero_trial.errors import StorageError

# O_DIRECT takes offsets, lengths and addresses that are multiples of it, on every disk we know of
BLOCK = 4096
# elements: pieces are cut at multiples of it, so that for every dtype cuts are between blocks of
# the disk
CUT = BLOCK
MOST = 1 << 22  # elements of a buffer: 16 MiB of fp32; disks reach their best rate with less


class Transfer(Protocol):
    """A transfer under way. The tensor must be neither written nor read until :meth:`wait` has
    returned."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Wait until all of it is transferred. Raises StorageError if the disk failed, at every
        call: several may wait for one transfer."""
        ...


class _Over:
    """A transfer that is over."""

    def done(self) -> bool:
        return True

    def wait(self) -> None: ...


OVER: Transfer = _Over()


class SwapSpace(Protocol):
    """Where a store puts bytes. Offsets and sizes are bytes; tensors are contiguous."""

    def reserve(self, nbytes: int) -> int:
        """Reserve ``nbytes``, rounded up to what can be transferred, and return their offset."""
        ...

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return memory that transfers reach best: (nbytes,) uint8."""
        ...

    def read(self, offset: int, into: torch.Tensor) -> Transfer:
        """Start to fill ``into`` with the bytes from ``offset`` on."""
        ...

    def write(self, offset: int, source: torch.Tensor) -> Transfer:
        """Start to write ``source`` at ``offset``."""
        ...

    def mapped(self) -> AbstractContextManager[torch.Tensor]:
        """Map all of it on the host as (size,) uint8, to read and to write inside the block; no
        transfer may be under way."""
        ...

    def in_memory(self, offset: int, nbytes: int) -> torch.Tensor | None:
        """Return the bytes from ``offset`` on where memory of the host has them; else None."""
        ...

    def close(self) -> None:
        """Give the room back. Transfers must be waited for before."""
        ...


def buffer_elements(total: int, wanted: int, count: int, most: int = MOST) -> int:
    """Return the elements of a buffer: at least CUT, else at most ``wanted`` and ``most``, and a
    quarter of ``total`` in ``count`` buffers."""
    return max(min(wanted, most, total // (4 * count)) // CUT, 1) * CUT


class DiskFailure:
    """The first failure of a disk, after which nothing that lives there is used again.

    All stores of a rank share it: half a step in one of its files is half a step in all.
    """

    def __init__(self) -> None:
        self.first: StorageError | None = None

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Wait for all of them. Raises StorageError, and remembers it: values that did not reach
        the disk are lost."""
        fault: StorageError | None = None
        for transfer in transfers:
            try:
                transfer.wait()
            except StorageError as found:
                fault = fault or found
        if fault is not None:
            self.remember(fault)
            raise fault

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Remember a StorageError of the block: to start a transfer may wait for others."""
        try:
            yield
        except StorageError as fault:
            self.remember(fault)
            raise

    def remember(self, fault: StorageError) -> None:
        self.first = self.first or fault

    def require_none(self) -> None:
        """Raise StorageError after a failure: a checkpoint of half a step, or a step from it, would
        be silently wrong."""
        if self.first is not None:
            raise StorageError(
                "the disk has failed, and offloaded state is lost",
                where=self.first.where,
                got=self.first.got,
                fix="Fix the disk or name another one in nvme_path, and go on from the last checkpoint in a new engine.",
            ) from self.first


class MappedAccess:
    """Lets everything in a file be read and edited inside a block, in pages of a mapping; nested
    blocks share the outermost one.

    Args:
        mapped: gives the file's bytes inside a block; None where there is no file.
        failure: of the disk.
        drain: waits for all transfers.
        map_: puts tensors over the bytes.
        unmap: takes them away again.
    """

    def __init__(
        self,
        mapped: Callable[[], AbstractContextManager[torch.Tensor | None]],
        failure: DiskFailure,
        drain: Callable[[], None],
        map_: Callable[[torch.Tensor | None], None],
        unmap: Callable[[torch.Tensor | None], None],
    ) -> None:
        self._mapped = mapped
        self._failure = failure
        self._drain = drain
        self._map = map_
        self._unmap = unmap
        self._depth = 0

    @property
    def is_open(self) -> bool:
        return self._depth > 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter the block. Raises StorageError, also if the disk has failed before."""
        self._depth += 1
        try:
            if self._depth > 1:
                yield
                return
            edited = False
            try:
                self._failure.require_none()
                self._drain()
                with self._mapped() as area:
                    self._map(area)
                    try:
                        yield
                    finally:
                        self._unmap(area)
                        edited = True
            except StorageError as fault:
                if edited:  # what was edited may not have reached the disk
                    self._failure.remember(fault)
                raise
        finally:
            self._depth -= 1
