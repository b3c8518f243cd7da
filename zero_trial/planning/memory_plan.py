"""The memory of one rank, by kind, as a table and as a line. Pure.

    states        outlives a step: parameters (low precision and fp32 masters), gradients, optimizer
                  state
    activations   the maximum that autograd saves for backward at one time, storages counted once,
                  without parameters and the batch
    temporary     the rest of the peak: gradients in flight, receive buffers, gathered parameters,
                  workspace of operations, the batch
    peak          the maximum tensor bytes that live at one time in a training step
    snapshot      the copy from which a checkpoint is written in the background, if the rank
                  computes on the CPU; otherwise 0

Allocator caches and workspace of kernels are not tensors and not included. If ranks compute on the
CPU and the limit is this machine's memory, ``processes`` are added: the interpreter and libraries.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import psutil
import torch

from zero_trial.device import is_accelerator, torch_module
from zero_trial.util.memory import machine_memory
from zero_trial.util.text import format_bytes, format_count, table

ON_CPU = "fake tensors on the CPU"
# Measured with torch 2.13 (docs/guide/offload.md). In addition to imported code, a rank has kernel
# workspaces, holes in its heap and page tables; rank 0 loads sympy and torch's compiler when it
# plans its first step on fake tensors.
_COMMAND, _EACH_RANK, _COMPILER = 20 << 20, 32 << 20, 70 << 20


@dataclass(frozen=True)
class Figures:
    """Bytes on rank 0. ``activations`` and ``peak`` are None if no micro-batch was available.

    ``host`` and ``disk``: the maximum that a rank on a GPU keeps in host memory (including copies
    for checkpoints), and on NVMe.
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
        """Return what must fit: the peak (or the states) and the copy for checkpoints."""
        return (self.states if self.peak is None else self.peak) + self.snapshot

    def __add__(self, other: Figures) -> Figures:
        """Return the states of two engines."""
        names = ("parameters", "gradients", "optimizer", "host", "disk", "snapshot")
        return Figures(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON, including derived ones."""
        return {**asdict(self), "states": self.states, "temporary": self.temporary, "total": self.total}


class Plan:
    """A plan of a model or pipeline: bytes of the rank with the most, and whether they fit."""

    processes: int  # memory of a rank's processes in addition to tensors, if the limit includes them
    who = "rank 0"

    @property
    def most(self) -> Figures:
        raise NotImplementedError

    @property
    def needs(self) -> int:
        """Return the bytes to compare with a limit."""
        return self.most.total + self.processes

    def fits(self, limit: int | None) -> bool:
        return limit is None or self.needs <= limit

    def verdict(self, limit: int | None) -> str:
        """Return the end of a plan's line: memory of processes, the limit, and whether it fits."""
        text = f", processes {format_bytes(self.processes)}" if self.processes else ""
        if limit is None:
            return text
        return f"{text} (limit {format_bytes(limit)})  {'fits' if self.fits(limit) else 'does not fit'}"

    def processes_row(self) -> list[str]:
        """Return a table row with the memory of a rank's processes; none if it does not count."""
        size = f"  {'processes':<24}{format_bytes(self.processes):>12}"
        return [f"{size}  per rank, without its tensors: Python, torch, the command"] if self.processes else []


@dataclass(frozen=True)
class MemoryPlan(Plan):
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
    processes: int = 0  # memory of a rank's processes in addition to tensors, if the limit includes them

    @property
    def most(self) -> Figures:
        return self.figures

    @property
    def cells(self) -> dict[str, str]:
        """Return the cells of a comparison, by column name."""
        figures = self.figures
        sizes = {"states": figures.states, "activations": figures.activations, "temporary": figures.temporary}
        return {name: format_bytes(size) for name, size in (sizes | {"peak": figures.peak}).items()}

    def line(self, limit: int | None = None) -> str:
        """Return ``params 1.2M · per rank 14.1 MiB states + 22.0 MiB activations, peak 40.1 MiB
        (limit 11.5 GiB) fits``"""
        figures = self.figures
        text = f"params {format_count(self.parameter_count)} · per rank {format_bytes(figures.states)} states"
        if figures.activations is not None and figures.peak is not None:
            text += f" + {format_bytes(figures.activations)} activations, peak {format_bytes(figures.peak)}"
        return text + self.verdict(limit)

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
        lines += self.processes_row()
        if self.how == ON_CPU:
            lines.append("  activations and temporary memory were measured with the CPU's kernels")
        if limit is not None:
            lines.append(f"  {'limit':<24}{format_bytes(limit):>12}  {'fits' if self.fits(limit) else 'does not fit'}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        return {**asdict(self), "figures": self.figures.as_dict()}


@dataclass(frozen=True)
class StagePlan:
    """One pipeline rank: its layers, its maximum of micro-batches in flight, and bytes."""

    rank: int
    layers: str
    elements: int
    in_flight: float
    figures: Figures


@dataclass(frozen=True)
class PipelinePlan(Plan):
    """All pipeline ranks of one way to train; ``data_ranks`` ranks share each stage."""

    stages: tuple[StagePlan, ...]
    zero_stage: int
    precision: str
    data_ranks: int
    micro_batch: int
    accumulation: int
    parameter_count: int
    price: str  # schedule and policy in a line
    bubble: float = 0.0  # fraction of a step in which a rank waits for others, if all layers are equal
    processes: int = 0  # memory of a rank's processes in addition to tensors, if the limit includes them

    @property
    def largest(self) -> StagePlan:
        """Return the pipeline rank that needs the most memory."""
        return max(self.stages, key=lambda stage: stage.figures.total)

    @property
    def who(self) -> str:  # type: ignore[override]
        return f"pipeline stage {self.largest.rank}"

    @property
    def most(self) -> Figures:
        return self.largest.figures

    @property
    def stage(self) -> int:
        return self.zero_stage

    @property
    def cells(self) -> dict[str, str]:
        sizes = {"states": self.most.states, "activations": self.most.activations, "peak": self.most.peak}
        return {"stage": str(self.largest.rank)} | {name: format_bytes(size) for name, size in sizes.items()}

    def line(self, limit: int | None = None) -> str:
        """Return ``params 0.8M on 2 stages · stage 0 needs most: 9.6 MiB states + 8.0 MiB
        activations, peak 20.1 MiB (limit 5.7 GiB) fits``"""
        most, figures = self.largest, self.largest.figures
        text = (
            f"params {format_count(self.parameter_count)} on {len(self.stages)} stages · stage {most.rank} needs most: "
        )
        text += f"{format_bytes(figures.states)} states + {format_bytes(figures.activations)} activations, peak {format_bytes(figures.peak)}"
        return text + self.verdict(limit)

    def table(self, limit: int | None = None) -> str:
        """Return a row per pipeline rank, then the schedule and the policy with their cost."""
        rows = [["stage", "layers", "parameters", "in flight", "states", "activations", "peak", ""]]
        on_host = any(stage.figures.host >> 20 for stage in self.stages)
        rows[0][-1:] = ["host memory", ""] if on_host else [""]
        for stage in self.stages:
            figures = stage.figures
            sizes = (format_bytes(size) for size in (figures.states, figures.activations, figures.peak))
            large = "too much" if limit is not None and figures.total + self.processes > limit else ""
            count, in_flight = format_count(stage.elements), f"{stage.in_flight:.4g}"
            rows.append(
                [
                    str(stage.rank),
                    stage.layers,
                    count,
                    in_flight,
                    *sizes,
                    *([format_bytes(figures.host)] if on_host else []),
                    large,
                ]
            )
        title = (
            f"per rank: ZeRO-{self.zero_stage}, {self.precision}, {len(self.stages)} stages x {self.data_ranks} ranks, "
            f"micro batch {self.micro_batch}, accumulation {self.accumulation}"
        )
        lines = (f"  {line}" for line in table(rows, right=range(7 + on_host)).splitlines())
        return "\n".join([title, *lines, *self.processes_row(), self.price])

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        stages = [{**asdict(stage), "figures": stage.figures.as_dict()} for stage in self.stages]
        return {**asdict(self), "stages": stages}


P = TypeVar("P", MemoryPlan, PipelinePlan)


@dataclass(frozen=True)
class Candidate(Generic[P]):
    """One row of a comparison: a plan, or the reason why there is none."""

    name: str
    plan: P | None
    refusal: str = ""


def rank_limit(device: torch.device, ranks_here: int) -> int | None:
    """Return bytes for one of ``ranks_here`` ranks: the whole GPU, or an equal part of this
    machine's memory; None if unknown."""
    if is_accelerator(device):
        return int(torch_module(device).mem_get_info(device)[1])
    machine = machine_memory()
    return None if machine is None else machine // max(ranks_here, 1)


def rank_processes(own: int, ranks_here: int, command: int = _COMMAND) -> int:
    """Return the bytes of one of ``ranks_here`` CPU ranks in addition to its tensors: its process,
    and an equal part of the command that starts the ranks. Pure.

    Args:
        own: :func:`own_process` of a process that has imported torch, the engine and the trial's
            module, like each rank; memory that a rank loads or fragments later is about the same
            again.
        command: bytes of the process that starts the ranks.
    """
    return 2 * own + _EACH_RANK + (command + _COMPILER) // max(ranks_here, 1)


def own_process() -> int:
    """Return the bytes of this process that the kernel cannot drop, unlike pages of files."""
    found = psutil.Process().memory_info()
    return int(found.rss - getattr(found, "shared", 0))
