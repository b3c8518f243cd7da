"""Choose where optimizer state and parameters live: on the device, in host memory, in files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from zero_trial.comm import Mesh, fail_together
from zero_trial.ds_config.keys_zero import AioSection, OffloadOptimizerSection, OffloadParamSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.resolved_config import ResolvedConfig
from zero_trial.errors import StorageError
from zero_trial.sharding.layout import ALIGN, has_own_master, round_up
from zero_trial.sharding.living_dtypes import LivingDtypes
from zero_trial.sharding.offload.copies import Copier
from zero_trial.sharding.offload.homes import Homes, OffloadedHome
from zero_trial.sharding.offload.region_file import BLOCK, DiskFailure, RegionFile
from zero_trial.sharding.offload.regions import HostRegion, Region, buffer_elements
from zero_trial.sharding.offload.update_store import OffloadedPiece, StateColumn, UpdateStore, state_columns
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.pieces import ShardPiece, StateStore
from zero_trial.sharding.plan import Home, ZeroPlan
from zero_trial.sharding.whole_tensors import WholeTensor
from zero_trial.util.files import IN_MEMORY, file_system_of

if TYPE_CHECKING:
    from zero_trial.engine.engine import Engine

_ROOM = "room for optimizer state"

Section = OffloadOptimizerSection | OffloadParamSection
T = TypeVar("T")


def open_region_file(section: Section, nbytes: int, aio: AioSection, name: str, failure: DiskFailure) -> RegionFile:
    """Open this rank's files in the folders of ``name``. Raises ConfigError, DoesNotFit."""
    folders = [Path(folder).absolute() for folder in section.nvme_path or ("",)]
    threads = aio.queue_depth * aio.intra_op_parallelism
    where = f"zero_optimization.{name}.nvme_path"
    return RegionFile(folders, nbytes, block=aio.block_size, threads=threads, where=where, failure=failure)


class OffloadPlan:
    """What construction asks: where masters go, how long pieces may be, and which store to use.

    Args:
        mesh: if something is offloaded on some rank; None if nothing is offloaded on any rank.
        homes: of parameters, masters or state in regions, or on a device whose updates run on the
            host; None: nothing is offloaded on this rank.
        section: sets the number of buffers for updates.
        most: maximum number of elements in a piece.
        copier: copies between the host, where updates run, and the device that has the parameters;
            None if updates run where the parameters are.
    """

    def __init__(
        self,
        mesh: Mesh | None = None,
        homes: Homes | None = None,
        section: Section | None = None,
        most: int | None = None,
        copier: Copier | None = None,
    ) -> None:
        self.most = most
        self.piece = ShardPiece if homes is None else OffloadedPiece
        self._mesh = mesh
        self._homes = homes
        self._section = section
        self.copier = copier

    def on_group_built(self, group: ParamGroup) -> None:
        """Move the offloaded parts of a group that has just been built."""
        if self._homes is not None:
            self._homes.swap_out(group)

    def lent(self) -> AbstractContextManager[None]:
        """Make masters and parameters readable inside the block, before there is a store."""
        return self._homes.lent() if self._homes is not None else nullcontext()

    def store(
        self,
        base: torch.optim.Optimizer,
        pieces: Sequence[ShardPiece],
        whole: Sequence[WholeTensor] = (),
        extra_kinds: Sequence[str] = (),
    ) -> StateStore | None:
        """Return the store for ``base`` over ``pieces`` and this rank's ``whole`` tensors; None for
        the default store. Collective over the world. ``extra_kinds``: kinds of state, in the
        weights' dtype, that ``base`` does not create.

        Space may run out on another pipeline stage only, so all ranks learn whether any has failed.
        """

        def made() -> StateStore | None:
            if self._homes is None or self._section is None or self.most is None:
                return None
            dtypes = {piece.weight.dtype for piece in pieces} if self._homes.masters is not None else ()
            flat = {piece.opt_group for piece in pieces}
            columns = {
                dtype: state_columns(base, dtype, flat) + [StateColumn(kind, dtype) for kind in extra_kinds]
                for dtype in dtypes
            }
            return UpdateStore(
                self._homes,
                cast(Sequence[OffloadedPiece], pieces),
                base.state,
                columns,
                buffer_numel=self.most,
                buffer_count=self._section.buffer_count,
                copier=self.copier,
                whole=whole,
            )

        return None if self._mesh is None else _all_or_none(self._mesh, made, _ROOM)


def offloads(config: DsConfig) -> bool:
    """Return whether anything may be updated on the CPU."""
    sections = config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param
    return any(section is not None and section.device != "none" for section in sections)


def plan_offload(
    config: DsConfig,
    plan: ZeroPlan,
    mesh: Mesh,
    device: torch.device,
    params: Sequence[torch.Tensor],
    living: LivingDtypes,
    everything: Sequence[torch.Tensor] = (),
) -> OffloadPlan:
    """Plan where state lives, and open this rank's files. Collective over the world.

    Args:
        plan: determines where parameters live.
        params: the trained parameters.
        living: the dtypes in which parameters are stored.
        everything: all parameters of the model.

    Raises ConfigError, and on every rank DoesNotFit or StorageError if any rank's disk cannot be
    used.
    """
    zero = config.zero_optimization
    of_state, of_params = zero.offload_optimizer, zero.offload_param if plan.home is not Home.DEVICE else None
    # All ranks take part in the same exchanges, even if a pipeline stage has nothing to train.
    leaves = of_state is not None and of_state.device not in ("none", device.type)
    away = leaves and bool(params)
    # Updates run where the master is; an offloaded fp32 parameter is its own master.
    leaving = _freed(config, params) if of_params is not None else []
    wide = [param for param in leaving if has_own_master(living.of(param))]
    failure = DiskFailure()
    copier = _copier(device, of_params)
    region, kept = None, None
    if of_params is not None:
        region, kept = _params_regions(config, of_params, plan, mesh, everything or params, living, copier, failure)
    elements = _elements(params, mesh.shard.size)
    masters: RegionFile | None = None
    if of_state is not None and leaves and of_state.device == "nvme":
        on_cpu = device.type == "cpu"
        own = [param for param in params if not (on_cpu and has_own_master(living.of(param)))]
        wanted = 4 * _elements(own, mesh.shard.size) + (1 << 16)

        def opened() -> RegionFile | None:
            return open_region_file(of_state, wanted, config.aio, "offload_optimizer", failure) if away else None

        masters = _all_or_none(mesh, opened, "file for optimizer state")
    section = of_state if away else of_params
    if section is None or (region is None and not away):
        return OffloadPlan(mesh if leaves or of_params is not None else None)
    to_update = _copier(device, section) if away or wide else None
    ratio = of_state.ratio if of_state is not None and masters is not None and to_update is None else 1.0
    homes = Homes(
        params=region,
        kept=kept,
        masters=masters,
        failure=failure,
        device=device,
        copier=copier if region is not None else None,
        buffer_size=of_params.buffer_size if of_params is not None else 0,
        buffer_count=of_params.buffer_count if of_params is not None else 0,
        on_host=away or bool(wide),
        budget=int(ratio * elements) if ratio < 1 else None,
    )
    most = buffer_elements(elements, zero.sub_group_size, section.buffer_count)
    return OffloadPlan(mesh, homes, section, most, to_update)


def leaves_parameters(config: DsConfig, plan: ZeroPlan, mesh: Mesh, params: Sequence[torch.Tensor]) -> bool:
    """Return whether the plan's home receives any of ``params`` (all of a model's): ``max_in_cpu``
    elements stay out of NVMe. Local."""
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
    """Return ``resolved`` with another home for parameters if the plan's home receives none."""
    if leaves_parameters(config, resolved.plan, mesh, params):
        return resolved
    if not in_pipeline or device.type != "cpu":
        return replace(resolved, plan=resolved.plan.at(Home.of(device.type, "cpu")))
    # A schedule gathers and frees in the same way on all stages, and other stages may have a file.
    limits = replace(resolved.sharding.limits, kept_on_host=sys.maxsize)
    return replace(resolved, sharding=replace(resolved.sharding, limits=limits))


def _params_regions(
    config: DsConfig,
    section: OffloadParamSection,
    plan: ZeroPlan,
    mesh: Mesh,
    params: Sequence[torch.Tensor],
    living: LivingDtypes,
    copier: Copier | None,
    failure: DiskFailure,
) -> tuple[Region | None, HostRegion | None]:
    """Open the region for parameters in the plan's home (None if there are none), and on a device
    the host memory for parameters that ``max_in_cpu`` keeps out of NVMe."""
    widths = [(param, living.of(param).itemsize) for param in _freed(config, params)]
    cut = _cut(plan, mesh)
    wanted = sum(round_up(_elements([param], cut) * width, BLOCK) for param, width in widths) + (1 << 16)
    leaves = leaves_parameters(config, plan, mesh, params)

    def opened() -> Region | None:
        if not leaves:
            return None
        if plan.home is Home.HOST and copier is not None:
            return HostRegion(wanted, copier)
        return open_region_file(section, wanted, config.aio, "offload_param", failure)

    region = _all_or_none(mesh, opened, "place for parameters")
    kept = 0
    if region is not None and copier is not None and plan.home is Home.NVME:
        kept = min(section.max_in_cpu * max((width for _, width in widths), default=0), wanted) // BLOCK * BLOCK
    return region, HostRegion(kept, copier) if copier is not None and kept else None


def _copier(device: torch.device, section: Section | None) -> Copier | None:
    """Return the copier between the host and ``device``; None if the device is the host."""
    return None if device.type == "cpu" or section is None else Copier(device, pinned=section.pin_memory)


def _freed(config: DsConfig, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters that are large enough to be freed between uses."""
    return [param for param in params if param.numel() >= config.zero_optimization.param_persistence_threshold]


def _cut(plan: ZeroPlan, mesh: Mesh) -> int:
    """Return how many ranks share a copy of the parameters between uses."""
    return 1 if plan.whole_home else mesh.shard.size


def _elements(params: Sequence[torch.Tensor], ranks: int) -> int:
    """Return the maximum number of elements, padded, of ``params`` on one of ``ranks`` ranks."""
    return sum(round_up(param.numel(), ALIGN) for param in params) // ranks


def _all_or_none(mesh: Mesh, act: Callable[[], T], label: str) -> T:
    """Return the result of ``act``; if it fails on one rank, the others raise StorageError."""
    sentence = "another rank could not allocate space for offloaded state"
    return fail_together(mesh.world, act, label, lambda fault: StorageError(sentence, where=label, got=fault))


def offload_line(engine: Engine) -> str | None:
    """Describe what is offloaded, for rank 0's log; None if nothing was requested."""
    zero, store = engine.config.zero_optimization, engine.optimizer.store if engine.optimizer is not None else None
    on_cpu, lines = engine.device.type == "cpu", []
    wishes = {"optimizer state": zero.offload_optimizer, "parameters": zero.offload_param}
    stays = [what for what, section in wishes.items() if section is not None and section.device == "cpu"]
    if stays and on_cpu:
        lines.append(f"{' and '.join(stays)} already in host memory, because this rank trains on the CPU")
    if isinstance(store, UpdateStore):
        masters = store.homes.masters
        mib = [buffer.near.nbytes / 2**20 for buffer in store.ring]
        if not (on_cpu or store.buffers):
            lines.append(f"updates run on the CPU; {sum(mib):.1f} MiB of buffers between the CPU and {engine.device}")
        if isinstance(masters, RegionFile):
            buffers = f"{len(mib)} buffers of {mib[0]:.1f} MiB" if mib else "mapped while whole tensors are updated"
            lines.append(f"{_describe(masters, 'masters and optimizer state')}; {buffers}")
            if resident := store.resident_elements:
                lines[-1] += f"; state of {resident:,} elements stays in memory (ratio)"
    if on_cpu and zero.offload_param is not None and zero.offload_param.device == "nvme":
        lines.append(_of_parameters(engine))
    return "\n".join(f"offload: {line}" for line in lines) or None


def _of_parameters(engine: Engine) -> str:
    here, file = 0, None
    for group in engine.sharded.groups:
        if isinstance(group.offloaded, OffloadedHome):
            file = group.offloaded.place.region
        else:
            here += group.layout.shard_numel if engine.sharded.plan.gathers_parameters else group.layout.numel
    why = "all parameters stay in memory because of max_in_cpu and stage3_param_persistence_threshold"
    return f"{_describe(file, 'parameters') if isinstance(file, RegionFile) else why}; {here:,} elements stay in memory"


def _describe(file: RegionFile, what: str) -> str:
    how = ["bypassing the page cache" if file.direct else "through the page cache: the file system has no O_DIRECT"]
    kinds = {file_system_of(folder) for folder in file.folders}
    how += [f"{kind} is in memory, so this saves none" for kind in sorted(kinds & IN_MEMORY)]
    where = ", ".join(map(str, file.folders))
    return f"{file.size / 2**20:.1f} MiB of {what} per rank in {where} ({', '.join(how)})"
