"""What one rank needs in memory, by kind, as a table and as a line. Pure.

    states        outlives a step: parameters (low precision and fp32 masters), gradients, optimizer
                  state
    activations   the most that autograd keeps for backward at one time, storages counted once,
                  without parameters and the batch
    temporary     the rest of the peak: gradients on their way, receive buffers, gathered
                  parameters, workspace of operations, the batch
    peak          the most tensor bytes that live at one time in a training step
    snapshot      the copy from which a checkpoint is written in the background, where the rank
                  computes on the CPU; 0 without one

Allocator caches and kernels' own workspace are no tensors and not in it. Where ranks compute on the
CPU and the limit is this machine's memory, ``processes`` are added: the interpreter and libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Protocol, TypeVar

import psutil
import torch

from zero_trial.device import is_accelerator, torch_module
from zero_trial.util.memory import machine_memory
from zero_trial.util.text import format_bytes, format_count

ON_CPU = "fake tensors on the CPU"
# Measured with torch 2.13 (docs/guide/offload.md). Beside what it has imported, a rank has
# workspaces of kernels, holes in its heap and page tables; rank 0 loads sympy and torch's compiler
# when it plans its first step on fake tensors.
_COMMAND, _EACH_RANK, _COMPILER = 20 << 20, 32 << 20, 70 << 20


@dataclass(frozen=True)
class Figures:
    """Bytes on rank 0. ``activations`` and ``peak`` are None where no micro-batch was at hand.

    ``host`` and ``disk``: what a rank that computes on a GPU keeps at most in the host's memory
    (copies for checkpoints, too), and on NVMe.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None = None
    peak: int | None = None
    host: int = 0
    disk: int = 0
    snapshot: int = 0

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
        """Return what must fit: the peak (the states if nothing else is known), and the copy for
        checkpoints."""
        return (self.states if self.peak is None else self.peak) + self.snapshot

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON, with those that follow from the others."""
        return {**asdict(self), "states": self.states, "temporary": self.temporary, "total": self.total}


class _Fits(Protocol):
    def fits(self, limit: int | None) -> bool: ...


Plan = TypeVar("Plan", bound=_Fits)


@dataclass(frozen=True)
class Candidate(Generic[Plan]):
    """One row of a comparison: a plan, or why there is none."""

    name: str
    plan: Plan | None
    refusal: str = ""


def side_by_side(
    rows: Sequence[Candidate[Plan]],
    columns: Mapping[str, int],
    cells: Callable[[Plan], Sequence[str]],
    limit: int | None,
) -> str:
    """Return the rows as a table: a plan's ``cells`` under ``columns`` (their widths), and whether
    it fits."""
    width = max(len(row.name) for row in rows)
    lines = [" " * width + "  " + "".join(f"{name:>{column}}" for name, column in columns.items())]
    for row in rows:
        if row.plan is None:
            lines.append(f"{row.name:<{width}}  {row.refusal}")
            continue
        shown = "".join(f"{cell:>{column}}" for cell, column in zip(cells(row.plan), columns.values(), strict=True))
        verdict = "" if limit is None else "  fits" if row.plan.fits(limit) else "  does not fit"
        lines.append(f"{row.name:<{width}}  {shown}{verdict}")
    return "\n".join(lines)


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
    # the tensors of the micro-batch: "fake tensors", ON_CPU, "real tensors", or "none" without one
    how: str
    processes: int = 0  # what a rank's processes take beside tensors, where the limit is theirs, too

    @property
    def needs(self) -> int:
        """Return what is compared with a limit."""
        return self.figures.total + self.processes

    def fits(self, limit: int | None) -> bool:
        return limit is None or self.needs <= limit

    def line(self, limit: int | None = None) -> str:
        """Return ``params 1.2M · per rank 14.1 MiB states + 22.0 MiB activations, peak 40.1 MiB
        (limit 11.5 GiB) fits``"""
        figures = self.figures
        text = f"params {format_count(self.parameter_count)} · per rank {format_bytes(figures.states)} states"
        if figures.activations is not None and figures.peak is not None:
            text += f" + {format_bytes(figures.activations)} activations, peak {format_bytes(figures.peak)}"
        return text + beside_limit(self.processes, limit, self.fits(limit))

    def table(self, limit: int | None = None) -> str:
        """Return one line per kind of memory, with bytes per parameter of the whole model."""
        figures = self.figures
        rows: list[tuple[str, int | None]] = [
            ("parameters and masters", figures.parameters),
            ("gradients", figures.gradients),
            ("optimizer state", figures.optimizer),
            ("states", figures.states),
            ("activations", figures.activations),
            ("temporary", figures.temporary),
            ("peak", figures.peak),
            *([("copy for checkpoints", figures.snapshot)] if figures.snapshot else []),
            *([("host memory", figures.host)] if figures.host >> 20 else []),
            *([("NVMe", figures.disk)] if figures.disk >> 20 else []),
        ]
        lines = [
            f"per rank: ZeRO-{self.stage}, {self.precision}, {self.ranks} rank{'s' if self.ranks != 1 else ''}, "
            f"micro batch {self.micro_batch}, accumulation {self.accumulation}"
        ]
        for name, value in rows:
            of_each = (value or 0) / max(self.parameter_count, 1)
            each = f"{of_each:8.2f}" if of_each >= 0.1 or not value else f"{of_each:8.2g}"
            each = f"{each} B/parameter" if value is not None else ""
            lines.append(f"  {name:<24}{format_bytes(value):>12}  {each}".rstrip())
        if self.processes:
            lines.append(processes_line(self.processes))
        if self.how == ON_CPU:
            lines.append("  activations and temporary memory are those of the CPU's kernels")
        if limit is not None:
            lines.append(f"  {'limit':<24}{format_bytes(limit):>12}  {'fits' if self.fits(limit) else 'does not fit'}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        return {**asdict(self), "figures": self.figures.as_dict()}


def rank_limit(device: torch.device, ranks_here: int) -> int | None:
    """Return bytes for one of ``ranks_here`` ranks: the whole GPU, or an equal part of this
    machine's memory; None where it cannot be known.
    """
    if is_accelerator(device):
        return int(torch_module(device).mem_get_info(device)[1])
    machine = machine_memory()
    return None if machine is None else machine // max(ranks_here, 1)


def rank_processes(own: int, ranks_here: int, command: int = _COMMAND) -> int:
    """Return the bytes of one of ``ranks_here`` ranks beside its tensors, on the CPU: its process,
    and an equal part of the command that starts the ranks. Pure.

    Args:
        own: :func:`own_process` of a process that has imported torch, the engine and the trial's
            module, as each rank has; what a rank loads and leaves in its heap later takes about as
            much again.
        command: of the process that starts the ranks.
    """
    return 2 * own + _EACH_RANK + (command + _COMPILER) // max(ranks_here, 1)


def own_process() -> int:
    """Return the bytes of this process that the kernel cannot drop, as it can pages of files."""
    found = psutil.Process().memory_info()
    return int(found.rss - getattr(found, "shared", 0))


def beside_limit(processes: int, limit: int | None, fits: bool) -> str:
    """Return the end of a plan's line: what processes take, the limit, and whether it fits."""
    text = f", processes {format_bytes(processes)}" if processes else ""
    return text if limit is None else f"{text} (limit {format_bytes(limit)})  {'fits' if fits else 'does not fit'}"


def processes_line(processes: int) -> str:
    """Return a table's row of what a rank's processes take."""
    return f"  {'processes':<24}{format_bytes(processes):>12}  of each rank, without its tensors: Python, torch, the command"
