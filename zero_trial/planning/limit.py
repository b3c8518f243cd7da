"""How much memory one rank may use here: a number with a unit, or this machine's memory divided by its ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from zero_trial.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def parse_size(text: str, where: str = "--limit") -> int:
    """Bytes of ``16GiB``, ``16 GB``, ``500M``, ``1e9``. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([kKmMgGtT]?i?)[bB]?\s*", text)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None or not float(match[1]):
        raise ConfigError(
            "not an amount of memory",
            where=where,
            got=repr(text),
            expected="a number and a unit, such as 16GiB or 500MB",
        )
    return int(float(match[1]) * factor)


def rank_limit(device: torch.device, ranks_here: int) -> int | None:
    """Bytes for one of ``ranks_here`` ranks: the whole GPU, or an equal part of this machine's memory; None where it cannot be known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    machine = machine_memory()
    return None if machine is None else machine // max(ranks_here, 1)


def machine_memory(limits: tuple[Path, ...] = _CGROUP) -> int | None:
    """Bytes of memory of this machine, or of the container that we are in where that has less."""
    found = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in limits:
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():
            found.append(int(text))
    return min(found, default=None)
