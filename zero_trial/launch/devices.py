"""What this host has to run ranks on: processors and NVIDIA GPUs, counted without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zero_trial.errors import ConfigError

_GPU_FILES = Path("/dev")


@dataclass(frozen=True)
class Devices:
    """Processor cores that this process may use, and GPUs that it may see."""

    cores: int
    gpus: int


def count_devices(env: Mapping[str, str], device_files: Path = _GPU_FILES) -> Devices:
    """Count what is there, after CUDA_VISIBLE_DEVICES has hidden some of it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    present = len(list(device_files.glob("nvidia[0-9]*")))
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        chosen = [item for item in visible.split(",") if item.strip() not in ("", "-1", "NoDevFiles")]
        present = min(present, len(chosen))
    return Devices(cores, present)


def check_slots(slots: int, devices: Devices, where: str = "slots") -> None:
    """Raises ConfigError for more ranks than GPUs on a host with GPUs; on a host without, ranks share the cores."""
    if slots < 1:
        raise ConfigError("a run needs at least one rank", where=where, got=slots, expected="a positive integer")
    if devices.gpus and slots > devices.gpus:
        raise ConfigError(
            "more ranks than GPUs",
            where=where,
            got=slots,
            expected=f"at most {devices.gpus} (this host's GPUs)",
            fix=f"Use --slots {devices.gpus}, or CUDA_VISIBLE_DEVICES= to train on the CPU.",
        )


def threads_per_rank(slots: int, devices: Devices) -> int:
    """Threads of each rank, so that all ranks together use the cores once."""
    return max(1, devices.cores // slots)
