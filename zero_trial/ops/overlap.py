"""Whether tensors of one call share memory that it writes, by address and length; the error says which two.

Kernels read and write each element once and in no order, so what they leave where tensors overlap would be chance. Verdicts are kept:
a step is mostly called with the tensors of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from zero_trial.errors import ConfigError
from zero_trial.ops.cuda_tables import PIECE

BYTES = {-1: 0, 0: 4, 1: 2, 2: 2}  # per element, by how a float is stored
_STEP = ("parameter", "gradient", "state", "second state", "rounded copy")
_COPY = ("target", "source", "", "", "")
Interval = tuple[int, int, bool, str]  # first byte, end, whether it is written, what it is


@lru_cache(maxsize=4096)
def check_step(starts: tuple[int, int, int, int, int], n: int, gradient: int, copy: int, uses: str = "wrwww") -> None:
    """Raises ConfigError where tensors of one optimizer step overlap.

    ``starts``: addresses of parameter, gradient, states and rounded copy, 0 for none, of ``n`` elements each; ``gradient`` and ``copy``
    say how these two are stored; ``uses``: ``w`` or ``r``, written or read, for each.
    """
    check(_intervals(starts, n, (0, gradient, 0, 0, copy), uses, _STEP, ""))


@lru_cache(maxsize=256)
def check_pieces(table: bytes, stored: tuple[int, int, int, int, int], uses: str) -> None:
    """The same over all tensors of a launch; ``table`` holds its pieces; ``stored`` and ``uses`` are of each of a piece's five."""
    found: list[Interval] = []
    for number, (*starts, n, _, _) in enumerate(PIECE.iter_unpack(table)):
        found += _intervals(starts, n, stored, uses, _STEP, f" number {number}")
    check(found)


@lru_cache(maxsize=256)
def check_copies(table: bytes, into: int, source: int) -> None:
    """The same for buffers that others are copied or added into; a buffer may be its own source."""
    found: list[Interval] = []
    for number, (*starts, n, _, _) in enumerate(PIECE.iter_unpack(table)):
        itself = starts[0] == starts[1] and into == source
        one = (starts[0], 0, 0, 0, 0) if itself else starts
        found += _intervals(one, n, (into, source, 0, 0, 0), "wrrrr", _COPY, f" number {number}")
    check(found)


def _intervals(
    starts: Sequence[int], n: int, stored: Sequence[int], uses: str, names: Sequence[str], of: str
) -> list[Interval]:
    rows = zip(starts, stored, uses, names, strict=True)
    return [(start, start + n * BYTES[code], use == "w", name + of) for start, code, use, name in rows if start and n]


def check(intervals: Sequence[Interval]) -> None:
    """Raises ConfigError where one that is written shares a byte with another."""
    none: Interval = (0, 0, False, "")
    furthest = written = none  # of those that begin before: which ends last, and which of the written ones
    for one in sorted(intervals):
        before = furthest if one[2] else written
        if one[0] < before[1]:
            raise ConfigError(
                f"the {before[3]} and the {one[3]} overlap",
                got=f"bytes {before[0]:#x} to {before[1]:#x} and {one[0]:#x} to {one[1]:#x}",
                expected="no memory in common, for one of them is written",
                fix="Give each its own memory, with .clone() for example.",
            )
        furthest = max(furthest, one, key=lambda each: each[1])
        written = max(written, one, key=lambda each: each[1]) if one[2] else written
