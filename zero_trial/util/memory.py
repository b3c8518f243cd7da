"""The limits of processes on this machine: total and available memory, cores and GPUs, within
control groups and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

# glibc reads these when a process starts. A rank frees and allocates the same blocks in each step;
# without fixed thresholds their pages are returned to the kernel and zeroed again
# (docs/decisions/the-allocator-is-left-alone.md).
RANK_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}

# This process's control groups, and where they are mounted.
_MEMBERSHIP, _MOUNTS = Path("/proc/self/cgroup"), Path("/proc/self/mountinfo")
_MACHINE = Path("/proc/meminfo")


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus(env: Mapping[str, str], device_files: Path) -> tuple[str, ...]:
    """Return this machine's NVIDIA GPUs that are visible, as named in CUDA_VISIBLE_DEVICES."""
    present = len(list(device_files.glob("nvidia[0-9]*")))
    chosen = env.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(present)))).split(",")
    return tuple(item.strip() for item in chosen if item.strip() not in ("", "-1", "NoDevFiles"))[:present]


def machine_memory(membership: Path = _MEMBERSHIP, mounts: Path = _MOUNTS) -> int | None:
    """Return the bytes of memory of this machine, or of our control group (container, job, service)
    if that has less. Ignores limits that we may not read."""
    found = [limit for _, limit in _limits(membership, mounts)]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(found, default=None)


def available_memory(membership: Path = _MEMBERSHIP, mounts: Path = _MOUNTS, machine: Path = _MACHINE) -> int | None:
    """Return the bytes of memory that processes can still allocate: the available memory of this
    machine, or the remainder in our control group if that is less. Cached files count as free,
    because the kernel evicts them first.

    Args:
        machine: the file with the machine's MemAvailable.
    """
    lines = [line.split() for line in _readable_text(machine).splitlines()]
    found = [int(line[1]) << 10 for line in lines if line[:1] == ["MemAvailable:"]]
    for path, limit in _limits(membership, mounts):
        usage, prefix = ("memory.current", "") if path.name == "memory.max" else ("memory.usage_in_bytes", "total_")
        used, kinds = _readable_text(path.with_name(usage)), _readable_text(path.with_name("memory.stat"))
        if used.isdigit() and kinds:
            counted = dict(line.split(" ", 1) for line in kinds.splitlines())
            cached = sum(int(counted.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            found.append(limit - int(used) + cached)
    return min(found, default=None)


def oom_kills(counters: Path = Path("/proc/vmstat")) -> int:
    """Return the number of processes that the kernel's OOM killer has killed; 0 if unknown."""
    found = [line.split()[1] for line in _readable_text(counters).splitlines() if line.startswith("oom_kill ")]
    return int(found[0]) if found else 0


def _limits(membership: Path, mounts: Path) -> Iterator[tuple[Path, int]]:
    """Yield the limits of control groups in bytes, each with its file."""
    for path in limit_files(_readable_text(membership), _readable_text(mounts)):
        if (text := _readable_text(path)).isdigit():
            yield path, int(text)


def _readable_text(path: Path) -> str:
    """Return the text of a file; "" if the file is missing or unreadable."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def limit_files(membership: str, mounts: str) -> list[Path]:
    """Return the files that may limit a process's memory: of its control group and all parent
    groups, version 1 and 2. Pure; the files need not exist.

    Args:
        membership: text of /proc/PID/cgroup: ``4:memory:/jobs/7`` (version 1), ``0::/jobs/7``.
        mounts: text of /proc/PID/mountinfo.
    """
    groups = {}
    for line in membership.splitlines():
        number, names, path = line.split(":", 2)
        if number == "0" or "memory" in names.split(","):
            groups["cgroup2" if number == "0" else "cgroup"] = path
    found = []
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        root, point = fields.split(" ")[3:5]
        kind, _, options, *_ = [*rest.split(" "), "", ""]
        if kind not in groups or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        # In a container its own group is the mount's root, but the path may be the host's.
        group = PurePosixPath(groups[kind])
        below = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
        name = "memory.max" if kind == "cgroup2" else "memory.limit_in_bytes"
        found += [Path(point, folder, name) for folder in (below, *below.parents)]
    return list(dict.fromkeys(found))
