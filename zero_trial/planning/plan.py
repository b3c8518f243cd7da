"""What one rank needs in memory, by kind, as a table and as a line. Pure.

    states        outlives a step: parameters (low precision and fp32 masters), gradients, optimizer state
    activations   the most that autograd keeps for backward at one time, storages counted once, without parameters and the batch
    temporary     the rest of the peak: gradients on their way, receive buffers, gathered parameters, workspace of operations, the batch
    peak          the most tensor bytes that live at one time in a training step
    exchange      segments that ranks of one host share to exchange tensors; 0 for other ways to exchange

The interpreter, libraries, allocator caches and kernels' own workspace are no tensors and not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figures:
    """Bytes on rank 0. ``activations`` and ``peak`` are None where no micro-batch was at hand."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None = None
    peak: int | None = None
    exchange: int = 0

    @property
    def states(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def temporary(self) -> int | None:
        if self.peak is None or self.activations is None:
            return None
        return max(self.peak - self.states - self.activations, 0)

    @property
    def total(self) -> int:
        """What has to fit: the peak, or the states where that is all that is known, and the shared segments."""
        return (self.states if self.peak is None else self.peak) + self.exchange


@dataclass(frozen=True)
class MemoryPlan:
    """The figures of one way to train: ZeRO stage, micro-batch, ranks, precision."""

    figures: Figures
    stage: int
    precision: str
    ranks: int
    micro_batch: int
    accumulation: int
    parameter_count: int
    how: str  # how activations were had: "imagined" (no values computed), "traced" (a real micro-batch on the CPU), "none"

    def fits(self, limit: int | None) -> bool:
        return limit is None or self.figures.total <= limit

    def line(self, limit: int | None = None) -> str:
        """``params 1.2M · per rank 14.1 MiB states + 22.0 MiB activations, peak 40.1 MiB (limit 11.5 GiB)  fits``"""
        figures = self.figures
        text = f"params {count_text(self.parameter_count)} · per rank {size_text(figures.states)} states"
        if figures.activations is not None and figures.peak is not None:
            text += f" + {size_text(figures.activations)} activations, peak {size_text(figures.peak)}"
        if limit is not None:
            text += f" (limit {size_text(limit)})  {'fits' if self.fits(limit) else 'does not fit'}"
        return text

    def table(self, limit: int | None = None) -> str:
        """One line per kind of memory, with bytes per parameter of the whole model."""
        figures = self.figures
        rows: list[tuple[str, int | None]] = [
            ("parameters and masters", figures.parameters),
            ("gradients", figures.gradients),
            ("optimizer state", figures.optimizer),
            ("states", figures.states),
            ("activations", figures.activations),
            ("temporary", figures.temporary),
            ("peak", figures.peak),
            ("exchange segments", figures.exchange),
        ]
        lines = [
            f"per rank: ZeRO-{self.stage}, {self.precision}, {self.ranks} rank{'s' if self.ranks != 1 else ''}, "
            f"micro batch {self.micro_batch}, accumulation {self.accumulation}"
        ]
        for name, value in rows:
            each = f"{value / max(self.parameter_count, 1):8.2f} B/parameter" if value is not None else ""
            lines.append(f"  {name:<24}{size_text(value):>12}  {each}".rstrip())
        if limit is not None:
            lines.append(f"  {'limit':<24}{size_text(limit):>12}  {'fits' if self.fits(limit) else 'does not fit'}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        figures = self.figures
        derived: Mapping[str, int | None] = {
            "states": figures.states,
            "temporary": figures.temporary,
            "total": figures.total,
        }
        return {**asdict(self), "figures": {**asdict(figures), **derived}}


def size_text(count: float | None) -> str:
    """Bytes in binary units, ``14.1 MiB``; a dash for what is not known."""
    if count is None:
        return "-"
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count:.0f} B"


def count_text(count: int) -> str:
    """A count in about three digits: 1.2M."""
    for limit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= limit:
            return f"{count / limit:.1f}{letter}"
    return str(count)
