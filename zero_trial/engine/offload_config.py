"""Choose where optimizer state and parameters live: where the rank computes, in host memory, or in
files."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from zero_trial.comm import Mesh, fail_together
from zero_trial.ds_config.keys_zero import AioSection, OffloadOptimizerSection, OffloadParamSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.resolved_config import ResolvedConfig
from zero_trial.errors import ConfigError, StorageError
from zero_trial.sharding.layout import ALIGN, has_own_master, living_dtype, round_up
from zero_trial.sharding.offload.copies import HostCopier, copier_for
from zero_trial.sharding.offload.homes import Homes, OffloadedHome, ParamRing
from zero_trial.sharding.offload.region_file import RegionFile
from zero_trial.sharding.offload.regions import BLOCK, DiskFailure, HostRegion, Region, buffer_elements
from zero_trial.sharding.offload.update_store import OffloadedPiece, StateColumn, UpdateStore, state_columns
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.pieces import ShardPiece, StateStore
from zero_trial.sharding.plan import Home, ZeroPlan
from zero_trial.util.files import IN_MEMORY, file_system_of

if TYPE_CHECKING:
    from zero_trial.engine.engine import Engine

_Z = "zero_optimization"
_CACHED = "through the page cache: the file system has no O_DIRECT"
_ROOM = "room for optimizer state"

T = TypeVar("T")


def open_region_file(
    folders: Sequence[Path], nbytes: int, aio: AioSection, where: str, failure: DiskFailure
) -> RegionFile:
    """Open the files of this rank in ``folders``, the value of the key ``where``. Raises
    ConfigError, DoesNotFit."""
    threads = aio.queue_depth * aio.intra_op_parallelism
    return RegionFile(folders, nbytes, block=aio.block_size, threads=threads, where=where, failure=failure)


class OffloadPlan:
    """What construction asks: where masters go, how long pieces may be, and which store they get.
    In this class, all stays in place.

    Args:
        mesh: where something is to leave its place on some rank; None where nothing is on any.
    """

    most: int | None = None  # elements of a piece
    piece: Callable[..., ShardPiece] = ShardPiece

    def __init__(self, mesh: Mesh | None = None) -> None:
        self._mesh = mesh

    def on_group_built(self, group: ParamGroup) -> None:
        """Move what is offloaded of a group that has just been built."""

    def store(
        self, base: torch.optim.Optimizer, pieces: Sequence[ShardPiece], elementwise: bool, beside: Sequence[str] = ()
    ) -> StateStore | None:
        """Return the store for ``base`` over ``pieces``; None for the usual one. Collective over
        the world. ``beside``: kinds of state in the weights' dtype that ``base`` does not make.

        Another pipeline stage may have to make room, or to refuse: all learn whether it can.
        """
        return _all_or_none(self._mesh, lambda: None, _ROOM) if self._mesh is not None else None


class OffloadedState(OffloadPlan):
    """Parameters, masters or state are in regions, or updates run on the host of a device.

    Args:
        buffer_numel: elements of a piece at most.
        copier: copies between the host, where updates run, and the device that has the parameters;
            None if updates run where the parameters are.
    """

    def __init__(
        self,
        section: OffloadOptimizerSection | OffloadParamSection,
        mesh: Mesh,
        buffer_numel: int,
        homes: Homes,
        copier: HostCopier | None,
    ) -> None:
        super().__init__(mesh)
        self.most: int = buffer_numel
        self._section = section
        self._world = mesh
        self._homes = homes
        self._copier = copier
        self._borrowed: dict[int, dict[str, torch.Tensor]] = {}
        self.piece = functools.partial(OffloadedPiece, borrowed=self._borrowed)

    def on_group_built(self, group: ParamGroup) -> None:
        self._homes.swap_out(group)

    def store(
        self, base: torch.optim.Optimizer, pieces: Sequence[ShardPiece], elementwise: bool, beside: Sequence[str] = ()
    ) -> StateStore | None:
        def made() -> UpdateStore:
            self._require_elementwise(base, elementwise)
            dtypes = {piece.weight.dtype for piece in pieces} if self._homes.masters is not None else ()
            return UpdateStore(
                self._homes,
                pieces,
                base.state,
                {dtype: state_columns(base, dtype) + [StateColumn(kind, dtype) for kind in beside] for dtype in dtypes},
                buffer_numel=self.most,
                buffer_count=self._section.buffer_count,
                copier=self._copier,
                borrowed=self._borrowed,
            )

        return _all_or_none(self._world, made, _ROOM)

    def _require_elementwise(self, base: torch.optim.Optimizer, elementwise: bool) -> None:
        if not elementwise:
            name = "offload_optimizer" if isinstance(self._section, OffloadOptimizerSection) else "offload_param"
            raise ConfigError(
                "this optimizer needs whole tensors or their norms, and offloaded state comes in pieces",
                where=f"{_Z}.{name}.device",
                got=f'"{self._section.device}" with {type(base).__name__}',
                fix=f"Use an elementwise optimizer (Adam, AdamW, SGD, Lion, Adagrad ...), or remove {name}.",
            )


def offloads(config: DsConfig) -> bool:
    """Return whether anything may be updated on the CPU."""
    sections = config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param
    return any(section is not None and section.device != "none" for section in sections)


def refuse_whole_tensors(config: DsConfig, device: torch.device) -> None:
    """Raise ConfigError where optimizer state is to leave ``device``, for an optimizer that updates
    whole tensors. Pure, so that it can be asked before the first collective."""
    section = config.zero_optimization.offload_optimizer
    if section is not None and section.device not in ("none", device.type):
        raise ConfigError(
            "this optimizer updates whole tensors, and offloaded state comes in pieces",
            where=f"{_Z}.offload_optimizer.device",
            got=f'"{section.device}"',
            fix="Use an elementwise optimizer (Adam, AdamW, SGD, Lion, Adagrad ...), or remove offload_optimizer. "
            "If yours works element by element, say so: zero_optimization.elementwise_optimizer true.",
        )


def plan_offload(
    config: DsConfig,
    plan: ZeroPlan,
    mesh: Mesh,
    device: torch.device,
    params: Sequence[torch.Tensor],
    dtype: torch.dtype,
    everything: Sequence[torch.Tensor] = (),
) -> OffloadPlan:
    """Plan where state lives, and open this rank's files. Collective over the world.

    Args:
        plan: says where parameters live.
        params: those that are trained.
        dtype: in which the model is to compute.
        everything: all parameters of the model.

    Raises ConfigError, and on every rank DoesNotFit or StorageError if any rank's disk cannot be
    used.
    """
    zero = config.zero_optimization
    section = zero.offload_optimizer
    # Exchanges are the same on all ranks, though a pipeline stage may have nothing to train.
    leaves = section is not None and section.device not in ("none", device.type)
    away = leaves and bool(params)
    # An update runs where the master is, and an fp32 parameter that leaves the device is its own.
    leaving = _freed(config, params) if plan.home is not Home.DEVICE else []
    on_host = away or any(has_own_master(living_dtype(param.dtype, dtype)) for param in leaving)
    everything = everything or params
    failure = DiskFailure()
    to_params = _copier(device, zero.offload_param)
    region, ring, kept = _params_region(config, plan, mesh, everything, dtype, to_params, failure)
    elements = _elements(params, mesh.shard.size)
    masters: Region | None = None
    if section is not None and leaves and section.device == "nvme":
        wide = [
            param for param in params if device.type != "cpu" or not has_own_master(living_dtype(param.dtype, dtype))
        ]
        wanted = 4 * _elements(wide, mesh.shard.size) + (1 << 16)
        where = f"{_Z}.offload_optimizer.nvme_path"
        opened = functools.partial(open_region_file, _folders(section), wanted, config.aio, where, failure)
        masters = _all_or_none(mesh, lambda: opened() if away else None, "file for optimizer state")
    given = section if section is not None and away else zero.offload_param
    if given is None or (region is None and not away):
        return OffloadPlan(mesh if leaves or plan.home is not Home.DEVICE else None)
    copier = _copier(device, given) if on_host else None
    ratio = section.ratio if section is not None and masters is not None and copier is None else 1.0
    homes = Homes(
        params=region,
        masters=masters,
        failure=failure,
        home=plan.home,
        ring=ring,
        device=device,
        copier=to_params if region is not None else None,
        kept=kept,
        on_host=on_host,
        budget=int(ratio * elements) if ratio < 1 else None,
    )
    return OffloadedState(
        given, mesh, buffer_elements(elements, zero.sub_group_size, given.buffer_count), homes, copier
    )


def leaves_parameters(config: DsConfig, plan: ZeroPlan, mesh: Mesh, params: Sequence[torch.Tensor]) -> bool:
    """Return whether the plan's home gets any of ``params``, all of a model's: of what would go to
    NVMe ``max_in_cpu`` elements do not. Local."""
    section = config.zero_optimization.offload_param
    if section is None or plan.home is not Home.NVME:
        return True
    return _elements(_freed(config, params), _cut(plan, mesh)) > section.max_in_cpu


def resolve_home(
    config: DsConfig,
    resolved: ResolvedConfig,
    mesh: Mesh,
    params: Sequence[torch.Tensor],
    device: torch.device,
    *,
    in_pipeline: bool,
) -> ResolvedConfig:
    """Return ``resolved`` with another home for parameters, all of a model's, where the plan's gets
    none of them."""
    if leaves_parameters(config, resolved.plan, mesh, params):
        return resolved
    if not in_pipeline or device.type != "cpu":
        return replace(resolved, plan=resolved.plan.at(Home.of(device.type, "cpu")))
    # A schedule gathers and frees alike on all stages, of which others may have a file.
    limits = replace(resolved.sharding.limits, kept_on_host=sys.maxsize)
    return replace(resolved, sharding=replace(resolved.sharding, limits=limits))


def _params_region(
    config: DsConfig,
    plan: ZeroPlan,
    mesh: Mesh,
    params: Sequence[torch.Tensor],
    dtype: torch.dtype,
    copier: HostCopier | None,
    failure: DiskFailure,
) -> tuple[Region | None, ParamRing | None, HostRegion | None]:
    """Open the region of parameters that the plan's home asks for, and host memory of a device for
    those that ``max_in_cpu`` keeps; return also how they are read. The region is None if nothing
    goes there."""
    section = config.zero_optimization.offload_param
    if section is None or plan.home is Home.DEVICE:
        return None, None, None
    widths = [(param, living_dtype(param.dtype, dtype).itemsize) for param in _freed(config, params)]
    cut = _cut(plan, mesh)
    wanted = sum(round_up(_elements([param], cut) * width, BLOCK) for param, width in widths) + (1 << 16)
    where = f"{_Z}.offload_param.nvme_path"
    leaves = leaves_parameters(config, plan, mesh, params)

    def opened() -> Region | None:
        if not leaves:
            return None
        if plan.home is Home.HOST and copier is not None:
            return HostRegion(wanted, copier)
        return open_region_file(_folders(section), wanted, config.aio, where, failure)

    region = _all_or_none(mesh, opened, "place for parameters")
    ring = ParamRing(section.buffer_size, section.buffer_count)
    kept = 0
    if region is not None and copier is not None and plan.home is Home.NVME:
        kept = min(section.max_in_cpu * max((width for _, width in widths), default=0), wanted) // BLOCK * BLOCK
    return region, ring, HostRegion(kept, copier) if copier is not None and kept else None


def _copier(device: torch.device, section: OffloadOptimizerSection | OffloadParamSection | None) -> HostCopier | None:
    """Return copies between the host and ``device``; None if the device is the host."""
    return None if device.type == "cpu" or section is None else copier_for(device, section.pin_memory)


def _freed(config: DsConfig, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters that are large enough to be freed between uses."""
    return [param for param in params if param.numel() >= config.zero_optimization.param_persistence_threshold]


def _folders(section: OffloadOptimizerSection | OffloadParamSection) -> list[Path]:
    """Return the folders of a section as the log and errors name them."""
    return [Path(folder).absolute() for folder in section.nvme_path or ("",)]


def _cut(plan: ZeroPlan, mesh: Mesh) -> int:
    """Return how many ranks share a copy of the parameters between uses."""
    return 1 if plan.whole_home else mesh.shard.size


def _elements(params: Sequence[torch.Tensor], ranks: int) -> int:
    """Return how many elements the parts of ``params`` on each of ``ranks`` have together at most,
    padding included."""
    return sum(round_up(param.numel(), ALIGN) for param in params) // ranks


def _all_or_none(mesh: Mesh, act: Callable[[], T], label: str) -> T:
    """Return what ``act`` returns; where it fails on one rank, the others raise StorageError."""
    sentence = "another rank has no place for its state"
    return fail_together(mesh.world, act, label, lambda fault: StorageError(sentence, where=label, got=fault))


# What came of the wish to offload, as a line for the log.


def offload_line(engine: Engine) -> str | None:
    """Describe for the log of rank 0 what is offloaded; None where nothing was asked for."""
    zero, store = engine.config.zero_optimization, engine.optimizer.store if engine.optimizer is not None else None
    lines = []
    if engine.device.type == "cpu":
        wishes = {"optimizer state": zero.offload_optimizer, "parameters": zero.offload_param}
        stays = [what for what, section in wishes.items() if section is not None and section.device == "cpu"]
        if stays:
            which = " and ".join(stays)
            lines.append(f"offload: {which} already in host memory, because this rank computes there")
    if isinstance(store, UpdateStore):
        mib = [buffer.numel() / 2**20 for buffer in store.memory]
        staged = engine.device.type != "cpu" and not store.buffers
        if staged:
            lines.append(
                f"offload: updates run on the CPU; {sum(mib):.1f} MiB of buffers between it and {engine.device}"
            )
        if place := _place_of(store.homes.masters, "masters and optimizer state"):
            lines.append(place if staged else f"{place}; {len(mib)} buffers of {mib[0]:.1f} MiB")
            if zero.offload_optimizer is not None and zero.offload_optimizer.ratio < 1 and not staged:
                lines[-1] += (
                    f"; state of {store.resident_elements:,} elements stays in memory (ratio {zero.offload_optimizer.ratio:g})"
                )
    if engine.device.type == "cpu" and zero.offload_param is not None and zero.offload_param.device == "nvme":
        lines.append(_of_parameters(engine))
    return "\n".join(lines) or None


def _of_parameters(engine: Engine) -> str:
    groups = engine.sharded.groups
    cut = engine.sharded.plan.gathers_parameters
    here = sum(group.layout.shard_numel if cut else group.layout.numel for group in groups if group.offloaded is None)
    away = [group.offloaded for group in groups if isinstance(group.offloaded, OffloadedHome)]
    stay = f"{here:,} elements of this rank's {'shards' if cut else 'copy'} stay in memory"
    if not away:
        return f"offload: all parameters stay in memory: max_in_cpu and stage3_param_persistence_threshold hold them; {stay}"
    return f"{_place_of(away[0].region, 'parameters')}; {stay}"


def _place_of(space: Region | None, what: str) -> str | None:
    if not isinstance(space, RegionFile):
        return None
    how = ["past the page cache" if space.direct else _CACHED]
    kinds = {file_system_of(folder) for folder in space.folders}
    how += [f"{kind} is memory: this saves none" for kind in sorted(kinds & IN_MEMORY)]
    where = ", ".join(map(str, space.folders))
    return f"offload: {space.size / 2**20:.1f} MiB of {what} per rank in {where} ({', '.join(how)})"
