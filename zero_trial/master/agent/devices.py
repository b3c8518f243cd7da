"""The slots of this machine: its GPUs, or places for processes on its cores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zero_trial.errors import ConfigError


@dataclass(frozen=True)
class SlotDevices:
    """What slots stand for. ``gpus`` are the names that CUDA_VISIBLE_DEVICES takes, by slot; empty: slots are CPU processes."""

    count: int
    cores: int
    gpus: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "cuda" if self.gpus else "cpu"

    def visible(self, slots: tuple[int, ...]) -> str:
        """CUDA_VISIBLE_DEVICES for an allocation; empty hides all GPUs."""
        return ",".join(self.gpus[slot] for slot in slots) if self.gpus else ""

    @property
    def threads(self) -> int:
        """OMP_NUM_THREADS of each process, so that all slots together use the cores once."""
        return max(1, self.cores // max(1, self.count))


def find_devices(
    wanted: int | None, env: Mapping[str, str], *, cpu: bool = False, files: Path = Path("/dev")
) -> SlotDevices:
    """The GPUs that this process may see, else its cores; ``wanted`` slots of them. ``cpu``: do not look for GPUs.

    Raises ConfigError for more slots than GPUs. CPU slots may be more than the cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = () if cpu else _gpus(env, files)
    if wanted is not None and wanted < 1:
        raise ConfigError(
            "a master needs at least one slot", where="--slots", got=wanted, expected="a positive integer"
        )
    if gpus and wanted is not None and wanted > len(gpus):
        raise ConfigError(
            "more slots than GPUs",
            where="--slots",
            got=wanted,
            expected=f"at most {len(gpus)}",
            fix="Add --cpu for slots that are processes on the CPU.",
        )
    if gpus:
        gpus = gpus[:wanted]
        return SlotDevices(len(gpus), cores, gpus)
    return SlotDevices(wanted or cores, cores)


def _gpus(env: Mapping[str, str], files: Path) -> tuple[str, ...]:
    present = len(list(files.glob("nvidia[0-9]*")))
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(str(number) for number in range(present))
    chosen = [item.strip() for item in visible.split(",")]
    return tuple(item for item in chosen if item not in ("", "-1", "NoDevFiles"))[:present]
