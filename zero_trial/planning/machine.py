"""Check slots, precision and offload folders against this machine's GPUs, cores and disks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zero_trial.ds_config.table import DsConfig
from zero_trial.errors import ConfigError
from zero_trial.launch.this_host import HostDevices, check_slots
from zero_trial.planning.issues import Area, CheckIssue, Severity, issues_of, note
from zero_trial.schema.document import GIVEN
from zero_trial.sharding.plan import Home, plan_for_stage
from zero_trial.util.files import IN_MEMORY, file_system_of
from zero_trial.util.text import format_bytes


def check_machine(slots: int, where: str, devices: HostDevices, config: DsConfig | None) -> list[CheckIssue]:
    """Return issues of ``slots`` ranks (named at ``where``) of ``config`` on ``devices``. Pure.

    More ranks than GPUs is a fault, as ``zero-trial run`` would refuse it; more ranks than cores
    works, slowly.
    """
    found: list[CheckIssue] = []
    try:
        check_slots(slots, devices, where)
    except ConfigError as error:
        found += issues_of(Area.SLOTS, error)
    if not devices.gpus and slots > devices.cores:
        what = f"{slots} ranks share {devices.cores} cores of this machine, which has no GPU"
        fix = f"Use --slots {devices.cores} to try it here."
        found.append(note(Area.SLOTS, Severity.WARNING, what, where=where, fix=fix))
    if config is not None and config.fp16.enabled and not devices.gpus:
        what = "fp16 on a machine without a GPU: it is slow there, and its gradients need a loss scale"
        fix = 'Use "bf16": {"enabled": true} in its place; the processor supports it.'
        found.append(note(Area.DS_CONFIG, Severity.WARNING, what, where=_where(config, "fp16.enabled"), fix=fix))
    return found


# per element; others have two, and SGD one if it has momentum
_MOMENTS = {"lion": 1, "adagrad": 1, "rmsprop": 1}


@dataclass(frozen=True)
class DiskSpace:
    """A folder: whether it exists and can be written, its free bytes, and the type of its file
    system.
    """

    exists: bool
    writable: bool = False
    free: int = 0
    kind: str = ""


def disk_of(folder: Path) -> DiskSpace:
    """Ask the system about ``folder``."""
    if not os.path.isdir(folder):  # what may not be looked at is not there; Path.is_dir raises
        return DiskSpace(False)
    found = os.statvfs(folder)
    return DiskSpace(
        True, os.access(folder, os.W_OK | os.X_OK), found.f_bavail * found.f_frsize, file_system_of(folder)
    )


def check_nvme(
    config: DsConfig,
    slots: int,
    parameters: int | None,
    look: Callable[[Path], DiskSpace] = disk_of,
    base: Path = Path(),
) -> list[CheckIssue]:
    """Return issues of the folders that ``config`` offloads to.

    Args:
        slots: ranks on this machine.
        parameters: elements of the model; None if unknown.
        look: asks about a folder.
        base: where relative folders start.
    """
    wanted: dict[Path, list[_Use]] = {}
    for key, folders, size in _places(config, slots, parameters):
        where = _where(config, f"zero_optimization.{key}.nvme_path")
        for number, folder in enumerate(folders):
            own = where if len(folders) == 1 else f"{where}[{number}]"
            use = _Use(own, size // len(folders))
            wanted.setdefault((base / folder).absolute(), []).append(use)
    return [issue for folder, uses in wanted.items() for issue in _of_folder(folder, uses, look(folder))]


@dataclass(frozen=True)
class _Use:
    """What is offloaded to a folder under the key ``where``, in bytes; 0 if that is unknown."""

    where: str
    size: int


def _of_folder(folder: Path, uses: list[_Use], disk: DiskSpace) -> list[CheckIssue]:
    where, fault = uses[0].where, Severity.FAULT
    if not disk.exists:
        what, fix = "the folder does not exist on this machine", "Make it, or name another one."
        return [note(Area.DS_CONFIG, fault, what, where=where, got=str(folder), fix=fix)]
    if not disk.writable:
        what = "the folder is not writable"
        return [note(Area.DS_CONFIG, fault, what, where=where, got=str(folder), fix="Name another one.")]
    found = []
    if disk.kind in IN_MEMORY:
        what = f"this folder is memory ({disk.kind}): what is offloaded to it saves none"
        fix = "Name a folder on a disk."
        found.append(note(Area.DS_CONFIG, Severity.WARNING, what, where=where, got=str(folder), fix=fix))
    needs = sum(use.size for use in uses)
    if needs > disk.free:
        what, fix = "the disk has not enough room for what is offloaded", "Free some space, or name another disk."
        got, expected = f"{format_bytes(disk.free)} free", f"{format_bytes(needs)} for the ranks of this machine"
        found.append(note(Area.DS_CONFIG, fault, what, where=where, got=got, expected=expected, fix=fix))
    return found


def _places(config: DsConfig, slots: int, parameters: int | None) -> list[tuple[str, tuple[str, ...], int]]:
    """Return (key, folders, bytes) of what goes to disks; 0 where it is not known."""
    zero = config.zero_optimization
    found: list[tuple[str, tuple[str, ...], int]] = []
    state, params = zero.offload_optimizer, zero.offload_param
    narrow = config.bf16.enabled or config.fp16.enabled
    known = parameters or 0
    elements = known * _copies(config, slots)
    if state is not None and state.device == "nvme" and state.nvme_path:
        each = (4 if narrow else 0) + 4 * _moments(config) + (4 if config.ema is not None else 0)
        found.append(("offload_optimizer", state.nvme_path, int(each * elements * state.ratio)))
    if params is not None and params.device == "nvme" and params.nvme_path:
        whole = plan_for_stage(zero.stage, home=Home.NVME).whole_home
        copies = max(slots // config.mesh.pipe, 1) if whole else _copies(config, slots)
        held = known * copies
        if held <= slots * params.max_in_cpu:  # all of it stays; else the file has room for all
            held = 0
        found.append(("offload_param", params.nvme_path, (2 if narrow else 4) * held))
    return found


def _moments(config: DsConfig) -> int:
    optimizer = config.optimizer
    if optimizer is None:
        return 2
    name = optimizer.type.lower()
    return int(bool(optimizer.params.get("momentum"))) if name == "sgd" else _MOMENTS.get(name, 2)


def _copies(config: DsConfig, slots: int) -> int:
    """Return how many ranks have the same shard."""
    zero, ranks = config.zero_optimization, max(slots // config.mesh.pipe, 1)
    if not plan_for_stage(zero.stage).shard_optimizer:
        return ranks
    shard = config.mesh.shard if config.mesh.shard is not None else zero.mics_shard_size
    return max(ranks // shard, 1) if shard is not None and shard > 0 else 1


def _where(config: DsConfig, key: str) -> str:
    """Return a dotted key behind the place of its value, where it has one."""
    source = config.source(key)
    return key if source.is_default or source == GIVEN else f"{source} {key}"
