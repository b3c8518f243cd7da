"""Kernels on the devices of one process: compiled and loaded at first use, launched onto torch's current streams.

A kernel that cannot be had is said once and stays plain torch for the rest of the process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from zero_trial.errors import KernelUnavailable
from zero_trial.ops.cuda_driver import OTHER_IMAGE, OUT_OF_MEMORY, Driver, DriverError
from zero_trial.ops.cuda_kernels import Kernel

log = logging.getLogger("zero_trial")


@dataclass(frozen=True)
class Device:
    """What a launch must know of a device; ``arch`` is 90 for compute capability 9.0."""

    index: int
    arch: int
    multiprocessors: int


@dataclass(frozen=True)
class Loaded:
    """A kernel on a device: the driver's handle, the device's number, and how many blocks it holds at once."""

    function: int
    index: int
    most: int


@dataclass
class Cuda:
    """An opened driver with a compiler behind it. ``refused``: kernels that could not be had, and why.

    ``images`` of a kernel for an architecture, best first; the next one is tried where the driver refuses one. ``kind`` of devices
    whose memory kernels can reach. ``make_room`` gives memory back that torch keeps for later: the driver needs some for a kernel.
    """

    driver: Driver
    images: Callable[[Kernel, int], Iterator[bytes]]
    device: Callable[[torch.device], Device]
    stream: Callable[[torch.device], int]
    strict: bool = False
    description: str = "native"
    kind: str = "cuda"
    make_room: Callable[[], None] = torch.cuda.empty_cache
    refused: dict[Kernel, str] = field(default_factory=dict)
    _loaded: dict[tuple[Kernel, torch.device], Loaded] = field(default_factory=dict)
    _loading: AbstractContextManager[bool] = field(default_factory=threading.RLock)

    def has(self, kernel: Kernel, where: torch.device) -> bool:
        """Whether the kernel can be launched there; compiled and loaded if it was not. Raises KernelUnavailable where ``strict``."""
        if (kernel, where) in self._loaded:
            return True
        with self._loading:  # two threads that need the same kernel: the second waits for it
            if (kernel, where) in self._loaded:
                return True
            if kernel in self.refused:
                return False
            try:
                self._loaded[kernel, where] = self._load(kernel, where)
            except KernelUnavailable as trouble:
                if self.strict:
                    raise
                self.refused[kernel] = trouble.what
                log.warning("CUDA kernel %s runs as plain torch: %s", kernel.name, trouble.what)
                return False
            return True

    def launch(self, kernel: Kernel, where: torch.device, blocks: int, arguments: bytes) -> None:
        """Onto torch's current stream of that device. ``has`` must have said yes."""
        loaded = self._loaded[kernel, where]
        self.driver.launch(loaded.function, loaded.index, blocks, self.stream(where), arguments)

    def fill(self, kernel: Kernel, where: torch.device, tiles: int, arguments: bytes) -> None:
        """The same in as many blocks as the device holds at once, and no more than there is work for."""
        loaded = self._loaded[kernel, where]
        self.driver.launch(loaded.function, loaded.index, min(tiles, loaded.most), self.stream(where), arguments)

    def capturing(self, where: torch.device) -> bool:
        """Whether the current stream there is being captured into a CUDA graph, which replays copies from host memory that is
        somebody else's by then: launches that need such copies must do without."""
        return self.driver.capturing(self.stream(where), self.device(where).index)

    def _load(self, kernel: Kernel, where: torch.device) -> Loaded:
        """From the first image that the driver takes; where it takes none, what it said of the best one is raised."""
        first, device = None, self.device(where)
        for image in self.images(kernel, device.arch):
            try:
                function = self._function(image, kernel.entry, where, device.index)
                return Loaded(function, device.index, kernel.blocks * device.multiprocessors)
            except DriverError as trouble:
                if trouble.status not in OTHER_IMAGE:
                    raise
                first = first or trouble
        raise first or KernelUnavailable(f"{kernel.name}: nothing to load")

    def _function(self, image: bytes, entry: str, where: torch.device, index: int) -> int:
        try:
            return self.driver.function(image, entry, index)
        except DriverError as trouble:
            if trouble.status != OUT_OF_MEMORY or self.capturing(where):
                raise
        self.make_room()  # a first step comes when activations have filled the device once
        return self.driver.function(image, entry, index)
