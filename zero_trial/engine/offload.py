"""Where ds_config wants optimizer state to live, and the store for it: the memory that the rank computes in, or a file on an NVMe disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from zero_trial.config import DsConfig
from zero_trial.config.sections import AioSection, OffloadOptimizerSection
from zero_trial.errors import ConfigError, StorageError, ZeroTrialError
from zero_trial.mesh import Mesh
from zero_trial.zero.dtypes import has_own_master, living_dtype
from zero_trial.zero.layout import ALIGN, round_up
from zero_trial.zero.optimizer import ShardedOptimizer
from zero_trial.zero.spill import MasterShelf, SpillStore, slot_elements
from zero_trial.zero.spill_file import Shelf, SpillFile
from zero_trial.zero.state_columns import state_columns
from zero_trial.zero.store import ShardPiece
from zero_trial.zero.unit import Unit

_Z = "zero_optimization"
T = TypeVar("T")

# Makes the place for that many bytes of state below a folder.
OpenShelf = Callable[[Path, int, AioSection], Shelf]


def open_shelf(folder: Path, nbytes: int, aio: AioSection) -> Shelf:
    """A file of this rank's own. Raises ConfigError, DoesNotFit."""
    return SpillFile(folder, nbytes, block_size=aio.block_size, depth=aio.queue_depth)


class Offload:
    """What construction asks: who takes masters away, how long pieces may be, and which store they get. As it is, all stays in memory."""

    most: int | None = None  # elements of a piece

    def house(self, unit: Unit) -> None:
        """Hears of every trainable unit as soon as it is built."""

    def store(self, base: torch.optim.Optimizer, pieces: Sequence[ShardPiece], elementwise: bool) -> SpillStore | None:
        """The store for ``base`` over ``pieces``; None for the usual one. Collective over the world."""
        return None


class NvmeOffload(Offload):
    """Masters (of 16-bit parameters) and moments live in a file; ``elements`` is about what this rank's shards hold."""

    def __init__(
        self, section: OffloadOptimizerSection, sub_group: int, shelf: Shelf, mesh: Mesh, elements: int
    ) -> None:
        self.most: int = slot_elements(elements, sub_group, section.buffer_count)
        self._slots = section.buffer_count
        self._masters = MasterShelf(shelf)
        self._mesh = mesh

    def house(self, unit: Unit) -> None:
        self._masters.take(unit)

    def store(self, base: torch.optim.Optimizer, pieces: Sequence[ShardPiece], elementwise: bool) -> SpillStore | None:
        if not elementwise:
            raise ConfigError(
                "this optimizer needs whole tensors or their norms, and offloaded state comes in pieces",
                where=f"{_Z}.offload_optimizer.device",
                got=f'"nvme" with {type(base).__name__}',
                fix="Use an elementwise optimizer (Adam, AdamW, SGD, Lion, Adagrad ...), or remove offload_optimizer.",
            )

        def build() -> SpillStore:
            columns = {dtype: state_columns(base, dtype) for dtype in {piece.weight.dtype for piece in pieces}}
            return SpillStore(self._masters, pieces, base.state, columns, slot_numel=self.most, slots=self._slots)

        return _together(self._mesh, build, "room for optimizer state")


def plan_offload(
    config: DsConfig,
    mesh: Mesh,
    device: torch.device,
    params: Sequence[torch.Tensor],
    dtype: torch.dtype,
    shelf: OpenShelf = open_shelf,
) -> Offload:
    """What ``config`` wants for the training of ``params``, with ``dtype`` asked for. Makes this rank's file where it is to be one.

    Collective over the world. Raises ConfigError, and on every rank DoesNotFit or StorageError if any rank's disk cannot be used.
    """
    zero = config.zero_optimization
    section = zero.offload_optimizer
    for name, wanted in (("offload_optimizer", section), ("offload_param", zero.offload_param)):
        if wanted is not None and wanted.device != "none" and device.type != "cpu":
            raise ConfigError(
                f"offload from {device.type} does not exist here yet; it does for ranks that compute on the CPU",
                where=f"{_Z}.{name}.device",
                got=f'"{wanted.device}"',
                fix="Remove it, or use a higher ZeRO stage or more ranks to save device memory.",
            )
    if section is None or section.device != "nvme" or not params:
        return Offload()
    elements = sum(round_up(param.numel(), ALIGN) for param in params) // mesh.shard.size
    lacking = [param for param in params if not has_own_master(living_dtype(param.dtype, dtype))]
    masters = 4 * sum(round_up(param.numel(), ALIGN) for param in lacking) // mesh.shard.size
    folder = Path(section.nvme_path or "")
    opened = _together(mesh, lambda: shelf(folder, masters + (1 << 16), config.aio), "file for optimizer state")
    return NvmeOffload(section, zero.sub_group_size, opened, mesh, elements)


def offload_line(config: DsConfig, optimizer: ShardedOptimizer | None) -> str | None:
    """What came of the wish to offload, for the log of rank 0; None where there was none."""
    zero = config.zero_optimization
    wishes = {"optimizer state": zero.offload_optimizer, "parameters": zero.offload_param}
    stays = [what for what, section in wishes.items() if section is not None and section.device == "cpu"]
    lines = []
    if stays:
        lines.append(f"offload: {' and '.join(stays)} live in host memory already, because this rank computes there")
    store = optimizer.store if optimizer is not None else None
    if isinstance(store, SpillStore) and isinstance(store.shelf, SpillFile):
        file = store.shelf
        how = "past the page cache" if file.direct else "through the page cache: the file system has no O_DIRECT"
        lines.append(
            f"offload: {file.size / 2**20:.1f} MiB of masters and optimizer state per rank in {file.folder} ({how}); "
            f"{len(store.buffers)} buffers of {store.buffers[0].numel() / 2**20:.1f} MiB"
        )
    return "\n".join(lines) or None


def _together(mesh: Mesh, act: Callable[[], T], label: str) -> T:
    """Every rank acts; if any fails, all raise, so that none waits for the next collective."""
    fault: ZeroTrialError | None = None
    try:
        result = act()
    except ZeroTrialError as found:
        fault = found
    faults = [text for text in mesh.world.gather_json(fault and str(fault), label) if text is not None]
    if fault is not None:
        raise fault
    if faults:
        raise StorageError("another rank has no place for its state", where=label, got=faults[0])
    return result
