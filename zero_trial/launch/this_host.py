"""This host: its cores and GPUs, its network interface, its names, and the environment of its
ranks. No torch."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zero_trial.errors import ConfigError
from zero_trial.util.memory import RANK_MALLOC

_GPU_FILES = Path("/dev")


@dataclass(frozen=True)
class HostDevices:
    """Processor cores that this process may use, and GPUs that it may see."""

    cores: int
    gpus: int


def count_devices(env: Mapping[str, str], device_files: Path = _GPU_FILES) -> HostDevices:
    """Count the devices that CUDA_VISIBLE_DEVICES leaves visible."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    present = len(list(device_files.glob("nvidia[0-9]*")))
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        chosen = [item for item in visible.split(",") if item.strip() not in ("", "-1", "NoDevFiles")]
        present = min(present, len(chosen))
    return HostDevices(cores, present)


def check_slots(slots: int, devices: HostDevices, where: str = "slots") -> None:
    """Raise ConfigError for more ranks than GPUs on a host with GPUs; without GPUs, ranks share the
    cores."""
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


def threads_per_rank(slots: int, devices: HostDevices) -> int:
    """Return the threads of each rank, so that all ranks together use each core once."""
    return max(1, devices.cores // slots)


_SIOCGIFADDR = 0x8915  # linux/sockios.h


def loopback() -> str:
    """Return the interface on which a host talks to itself."""
    return "lo0" if sys.platform == "darwin" else "lo"


def interface_towards(host: str) -> str | None:
    """Return the interface that packets to ``host`` leave by, or the one that has its address; None
    without a route, or where that cannot be known.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: it only asks for the route
            address = probe.getsockname()[0]
        return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)
    except OSError:
        return None


def _address_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface, or None (it has none, or this is not Linux)."""
    if sys.platform != "linux":
        return None
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def rank_environment(env: Mapping[str, str], *, threads: int, interface: str | None) -> dict[str, str]:
    """Return ``env`` with what ranks need: their share of threads, the interface for gloo, an
    allocator that keeps its pages, unbuffered output, a quiet torch.distributed.run.

    Variables that would place this process as a rank of an outer run are dropped: the agent sets
    its own.
    """
    inherited = {name: value for name, value in env.items() if name not in _OUTER_RUN}
    defaults = RANK_MALLOC | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if interface:
        defaults["GLOO_SOCKET_IFNAME"] = interface
    return {**defaults, **inherited}


_OUTER_RUN = frozenset(
    [
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
        *(
            "ROLE_WORLD_SIZE",
            "ROLE_NAME",
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_ERROR_FILE",
        ),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    ]
)


def host_names() -> list[str]:
    """Return the names by which a hostfile may mean this host."""
    return list(
        dict.fromkeys(
            [socket.gethostname(), socket.gethostname().partition(".")[0], socket.getfqdn(), "localhost", "127.0.0.1"]
        )
    )
