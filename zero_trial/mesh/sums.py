"""The sum of what the ranks have put in: one order, and one rounding of 16-bit values, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# ``out = parts[0] + parts[1] + ...`` from left to right; 16-bit parts are added in fp32 and rounded once. ``out`` may be one of them.
Sum = Callable[[Sequence[torch.Tensor], torch.Tensor], None]

CHUNK = 1 << 17  # elements: what torch adds in between stays in a core's cache, and costs no new pages


def sum_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """The :data:`Sum` of flat tensors in plain torch. Reads and writes what it has so far once for every part after the second."""
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)  # one rounding in any dtype
        return
    if out.numel() <= CHUNK:
        _add(parts, out)
        return
    for *chunks, target in zip(*(part.split(CHUNK) for part in (*parts, out)), strict=True):
        _add(chunks, target)


def _add(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    total = parts[0].float() if out.dtype.itemsize == 2 else parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    out.copy_(total)
