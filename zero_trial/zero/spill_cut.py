"""How what lies in a file is cut into what a buffer holds. Pure."""

from __future__ import annotations

from zero_trial.zero.spill_file import BLOCK

CUT = BLOCK  # elements: pieces are cut at multiples of it, so that for every dtype cuts lie between blocks of the disk
MOST = 1 << 22  # elements of a buffer: 16 MiB of fp32, where disks have long reached their best


def slot_elements(total: int, wanted: int, count: int, most: int = MOST) -> int:
    """Elements per buffer: at most ``wanted`` and ``most``, and so few that ``count`` buffers hold no more than a quarter of ``total``;
    CUT at least."""
    return max(min(wanted, most, total // (4 * count)) // CUT, 1) * CUT
