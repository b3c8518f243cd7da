"""Where ds_config wants optimizer state to live, and the store for it: where the rank computes, in host memory, or in a file on an NVMe disk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from zero_trial.config import DsConfig
from zero_trial.config.sections import AioSection, OffloadOptimizerSection
from zero_trial.errors import ConfigError, StorageError, ZeroTrialError
from zero_trial.mesh import Mesh
from zero_trial.zero.dtypes import has_own_master, living_dtype
from zero_trial.zero.layout import ALIGN, round_up
from zero_trial.zero.mover import Mover, mover_for
from zero_trial.zero.spill import MasterShelf, SpillStore, slot_elements
from zero_trial.zero.spill_file import Shelf, SpillFile
from zero_trial.zero.staging import Desk, StagedPiece, StagedStore, master_to_host
from zero_trial.zero.state_columns import state_columns
from zero_trial.zero.store import ShardPiece, StateStore
from zero_trial.zero.unit import Unit

if TYPE_CHECKING:
    from zero_trial.engine.engine import Engine

_Z = "zero_optimization"
T = TypeVar("T")


def open_shelf(folder: Path, nbytes: int, aio: AioSection) -> Shelf:
    """A file of this rank's own. Raises ConfigError, DoesNotFit."""
    return SpillFile(folder, nbytes, block_size=aio.block_size, depth=aio.queue_depth)


@dataclass(frozen=True)
class Places:
    """``shelf`` makes the place for that many bytes of state below a folder; ``mover`` the way between a device and the host."""

    shelf: Callable[[Path, int, AioSection], Shelf]
    mover: Callable[[torch.device, bool], Mover]


REAL = Places(open_shelf, mover_for)


class Offload:
    """What construction asks: who takes masters away, how long pieces may be, and which store they get. As it is, all stays where it is."""

    most: int | None = None  # elements of a piece
    piece: Callable[..., ShardPiece] = ShardPiece

    def house(self, unit: Unit) -> None:
        """Hears of every trainable unit as soon as it is built."""

    def store(self, base: torch.optim.Optimizer, pieces: Sequence[ShardPiece], elementwise: bool) -> StateStore | None:
        """The store for ``base`` over ``pieces``; None for the usual one. Collective over the world."""
        return None


class StateElsewhere(Offload):
    """Masters and moments live on a ``shelf`` or, without one, in the host's memory; a ``mover`` where parameters are on another device."""

    def __init__(
        self,
        section: OffloadOptimizerSection,
        mesh: Mesh,
        slot_numel: int,
        shelf: Shelf | None,
        mover: Mover | None,
    ) -> None:
        self.most: int = slot_numel
        self._section = section
        self._mesh = mesh
        self._masters = MasterShelf(shelf) if shelf is not None else None
        self._desk = Desk(mover) if mover is not None else None
        if self._desk is not None:
            self.piece = functools.partial(StagedPiece, desk=self._desk)

    def house(self, unit: Unit) -> None:
        if self._desk is not None:
            master_to_host(unit)
        if self._masters is not None:
            self._masters.take(unit)

    def store(self, base: torch.optim.Optimizer, pieces: Sequence[ShardPiece], elementwise: bool) -> StateStore | None:
        if not elementwise:
            raise ConfigError(
                "this optimizer needs whole tensors or their norms, and offloaded state comes in pieces",
                where=f"{_Z}.offload_optimizer.device",
                got=f'"{self._section.device}" with {type(base).__name__}',
                fix="Use an elementwise optimizer (Adam, AdamW, SGD, Lion, Adagrad ...), or remove offload_optimizer.",
            )
        store: StateStore | None = None
        if (masters := self._masters) is not None:
            store = _together(self._mesh, lambda: self._spilled(masters, base, pieces), "room for optimizer state")
        if self._desk is not None:
            staged = [piece for piece in pieces if isinstance(piece, StagedPiece)]
            store = StagedStore(staged, self._desk, store, buffers=self._section.buffer_count)
        return store

    def _spilled(self, masters: MasterShelf, base: torch.optim.Optimizer, pieces: Sequence[ShardPiece]) -> SpillStore:
        columns = {dtype: state_columns(base, dtype) for dtype in {piece.weight.dtype for piece in pieces}}
        count = self._section.buffer_count
        return SpillStore(masters, pieces, base.state, columns, slot_numel=self.most, slots=count)


def offloads(config: DsConfig) -> bool:
    """Whether optimizer state is to be updated on the CPU."""
    section = config.zero_optimization.offload_optimizer
    return section is not None and section.device != "none"


def plan_offload(
    config: DsConfig,
    mesh: Mesh,
    device: torch.device,
    params: Sequence[torch.Tensor],
    dtype: torch.dtype,
    places: Places = REAL,
) -> Offload:
    """What ``config`` wants for the training of ``params`` on ``device``, with ``dtype`` asked for. Makes this rank's file where there is to be one.

    Collective over the world. Raises ConfigError, and on every rank DoesNotFit or StorageError if any rank's disk cannot be used.
    """
    zero = config.zero_optimization
    section, shards = zero.offload_optimizer, zero.offload_param
    if shards is not None and shards.device != "none" and device.type != "cpu":
        raise ConfigError(
            f"parameters stay on {device.type} here; optimizer state can leave it",
            where=f"{_Z}.offload_param.device",
            got=f'"{shards.device}"',
            fix="Remove it; offload_optimizer frees 12 of 16 bytes per parameter, and ZeRO stage 3 shards the rest.",
        )
    if section is None or section.device == "none" or not params or (section.device == "cpu" == device.type):
        return Offload()
    mover = places.mover(device, section.pin_memory) if device.type != "cpu" else None
    elements = sum(round_up(param.numel(), ALIGN) for param in params) // mesh.shard.size
    shelf: Shelf | None = None
    if section.device == "nvme":
        lacking = [param for param in params if mover or not has_own_master(living_dtype(param.dtype, dtype))]
        masters = 4 * sum(round_up(param.numel(), ALIGN) for param in lacking) // mesh.shard.size
        folder = Path(section.nvme_path or "").absolute()  # as the log and errors name it
        wanted = masters + (1 << 16)
        shelf = _together(mesh, lambda: places.shelf(folder, wanted, config.aio), "file for optimizer state")
    slot_numel = slot_elements(elements, zero.sub_group_size, section.buffer_count)
    return StateElsewhere(section, mesh, slot_numel, shelf, mover)


def offload_line(engine: Engine) -> str | None:
    """What came of the wish to offload, for the log of rank 0; None where there was none."""
    zero, store = engine.config.zero_optimization, engine.optimizer.store if engine.optimizer is not None else None
    lines = []
    if engine.device.type == "cpu":
        wishes = {"optimizer state": zero.offload_optimizer, "parameters": zero.offload_param}
        stays = [what for what, section in wishes.items() if section is not None and section.device == "cpu"]
        if stays:
            which = " and ".join(stays)
            lines.append(f"offload: {which} live in host memory already, because this rank computes there")
    if isinstance(store, StagedStore):
        size = sum(buffer.numel() for buffer in store.host_buffers) / 2**20
        lines.append(f"offload: updates run on the CPU; {size:.1f} MiB of buffers between it and {engine.device}")
        store = store.behind
    if isinstance(store, SpillStore) and isinstance(store.shelf, SpillFile):
        file = store.shelf
        how = "past the page cache" if file.direct else "through the page cache: the file system has no O_DIRECT"
        lines.append(
            f"offload: {file.size / 2**20:.1f} MiB of masters and optimizer state per rank in {file.folder} ({how}); "
            f"{len(store.buffers)} buffers of {store.buffers[0].numel() / 2**20:.1f} MiB"
        )
    ratio = zero.offload_optimizer.ratio if zero.offload_optimizer is not None else 1.0
    if lines and ratio < 1:
        lines.append(f"offload: ratio {ratio:g} has no effect yet: all of the state is offloaded")
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
