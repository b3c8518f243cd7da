"""How many pieces of memory a process may map, and how many of them are shared segments.

The kernel counts mappings (``vm.max_map_count``, 65530 unless somebody has raised it), not bytes. Each segment is one in its owner and one in every
rank that reads it. Segments leave a quarter of the limit to libraries, stacks and allocators; past it the kernel would refuse those, too.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

USUAL_LIMIT = 65530

Made = TypeVar("Made")


class MappingRefused(OSError):
    """No further segment is mapped; ``count`` are, and ``limit`` is the kernel's."""

    def __init__(self, count: int, limit: int) -> None:
        super().__init__(errno.ENOMEM, f"{count} shared segments are mapped, and vm.max_map_count is {limit}")
        self.count = count
        self.limit = limit


def kernel_limit(file: str = "/proc/sys/vm/max_map_count") -> int:
    """What the kernel allows a process."""
    try:
        return int(Path(file).read_text())
    except (OSError, ValueError):
        return USUAL_LIMIT


@dataclass
class Mappings:
    """The segments that this process has mapped: its own and its peers'."""

    limit: int = field(default_factory=kernel_limit)
    count: int = 0

    def take(self, make: Callable[[], Made]) -> Made:
        """Another one, that ``make`` maps; it counts if that succeeds. Raises MappingRefused where it would be too many."""
        if self.count >= self.limit * 3 // 4:
            raise MappingRefused(self.count, self.limit)
        made = make()
        self.count += 1
        return made

    def allow(self, own: int, ranks: int) -> bool:
        """Whether ``ranks`` that have ``own`` segments each, and map each other's, stay below half of the limit."""
        return own * ranks <= self.limit // 2
