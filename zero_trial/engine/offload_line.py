"""What came of the wish to offload, as a line for the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_trial.zero.spill import SpillStore
from zero_trial.zero.spill_file import Shelf, SpillFile
from zero_trial.zero.spill_shards import SpilledShard
from zero_trial.zero.staging import StagedStore

if TYPE_CHECKING:
    from zero_trial.engine.engine import Engine


def offload_line(engine: Engine) -> str | None:
    """For rank 0; None where there was no such wish."""
    zero, store = engine.config.zero_optimization, engine.optimizer.store if engine.optimizer is not None else None
    lines = []
    if engine.device.type == "cpu":
        wishes = {"optimizer state": zero.offload_optimizer, "parameters": zero.offload_param}
        stays = [what for what, section in wishes.items() if section is not None and section.device == "cpu"]
        if stays:
            which = " and ".join(stays)
            lines.append(f"offload: {which} live in host memory already, because this rank computes there")
    staged = isinstance(store, StagedStore)
    if isinstance(store, StagedStore):
        size = sum(buffer.numel() for buffer in store.host_buffers) / 2**20
        lines.append(f"offload: updates run on the CPU; {size:.1f} MiB of buffers between it and {engine.device}")
        store = store.behind
    if isinstance(store, SpillStore) and (place := _place_of(store.shelf, "masters and optimizer state")):
        lines.append(f"{place}; {len(store.buffers)} buffers of {store.buffers[0].numel() / 2**20:.1f} MiB")
        if zero.offload_optimizer is not None and zero.offload_optimizer.ratio < 1 and not staged:
            lines[-1] += (
                f"; state of {store.staying:,} elements stays in memory (ratio {zero.offload_optimizer.ratio:g})"
            )
    if engine.device.type == "cpu" and zero.offload_param is not None and zero.offload_param.device == "nvme":
        lines.append(_of_parameters(engine))
    ratio = zero.offload_optimizer.ratio if zero.offload_optimizer is not None else 1.0
    if lines and ratio < 1 and staged:
        lines.append(f"offload: ratio {ratio:g} has no effect here: all of the state leaves {engine.device}")
    return "\n".join(lines) or None


def _of_parameters(engine: Engine) -> str:
    units = engine.sharded.units
    here = sum(unit.layout.shard_numel for unit in units if unit.away is None)
    away = [unit.away for unit in units if isinstance(unit.away, SpilledShard)]
    stay = f"{here:,} elements of this rank's shards stay in memory"
    if not away:
        return f"offload: all parameters stay in memory: max_in_cpu and stage3_param_persistence_threshold hold them; {stay}"
    return f"{_place_of(away[0].shelf.shelf, 'parameters')}; {stay}"


def _place_of(file: Shelf | None, what: str) -> str | None:
    if not isinstance(file, SpillFile):
        return None
    how = "past the page cache" if file.direct else "through the page cache: the file system has no O_DIRECT"
    return f"offload: {file.size / 2**20:.1f} MiB of {what} per rank in {file.folder} ({how})"
