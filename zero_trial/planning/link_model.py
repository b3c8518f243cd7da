"""The time of a step's collectives by a stated model of the links between ranks. Pure.

A collective over N ranks, I of each node on A nodes (the last may have fewer), goes in two rings,
one inside the nodes and one between them, in which each rank sends to one other at the full rate of
its link. With n bytes in the whole buffer, rates B and latencies L:

    all_gather, reduce_scatter   n (I-1)/I / B_intra + log2(I) L_intra
                                 + (n/I) (A-1)/A / B_inter + log2(A) L_inter
    all_reduce                   twice that
    others                       what this rank sends / B + L, by the slowest link on its way

The volumes are those of :mod:`zero_trial.planning.step_peak`. Collectives are taken one after the
other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, log2, prod

from zero_trial.comm import MeshShape
from zero_trial.comm.mesh import AXES
from zero_trial.planning.memory_plan import Figures, Moved
from zero_trial.util.text import format_bytes, format_duration


@dataclass(frozen=True)
class LinkModel:
    """Rates of one rank's links in gigabits per second and direction, and seconds per message.

    The defaults are those of a node of eight H100: NVLink of the fourth generation, and a network
    card of 400 Gb/s per GPU.
    """

    intra_gbps: float = 3600.0
    inter_gbps: float = 400.0
    ranks_per_node: int = 8
    intra_latency: float = 3e-6
    inter_latency: float = 12e-6

    def seconds(self, moved: Moved, shape: MeshShape) -> float:
        """Return the time of these collectives on a mesh of ``shape``."""
        inside, across = self.spread(moved.axis, shape)
        ranks = prod(_sizes(moved.axis, shape).values())
        if ranks == 1:
            return 0.0
        intra, inter = self.intra_gbps * 1e9 / 8, self.inter_gbps * 1e9 / 8
        rings = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}.get(moved.kind)
        if rings is None:
            rate, latency = (inter, self.inter_latency) if across > 1 else (intra, self.intra_latency)
            return moved.bytes / rate + moved.calls * latency
        whole = moved.bytes * ranks / (ranks - 1) / rings
        once = whole * (inside - 1) / inside / intra + whole / inside * (across - 1) / across / inter
        latency = ceil(log2(inside)) * self.intra_latency + ceil(log2(across)) * self.inter_latency
        return rings * (once + moved.calls * latency)

    def spread(self, axis: str, shape: MeshShape) -> tuple[int, int]:
        """Return how many ranks of an axis are on each node, and on how many nodes. Neighbors on
        the last axis of the mesh are neighbors on the node."""
        of_axis = _sizes(axis, shape)
        size = prod(of_axis.values())
        sizes = dict(zip(AXES, shape.sizes, strict=True))
        stride = prod(sizes[name] for name in AXES[AXES.index(list(of_axis)[-1]) + 1 :])
        inside = min(size, max(1, self.ranks_per_node // stride))
        return inside, ceil(size / inside)

    def describe(self) -> str:
        return (
            f"{self.ranks_per_node} ranks per node, {self.intra_gbps:g} Gb/s per rank inside a node and {self.inter_gbps:g} "
            f"between nodes, {self.intra_latency * 1e6:g} and {self.inter_latency * 1e6:g} µs per message"
        )


def _sizes(axis: str, shape: MeshShape) -> dict[str, int]:
    """Return the ranks along each axis of the mesh that ``axis`` is made of."""
    of_axis = {"data": ("replica", "shard"), "world": AXES}.get(axis, (axis,))
    sizes = dict(zip(AXES, shape.sizes, strict=True))
    return {name: sizes[name] for name in of_axis}


def of_step(figures: Figures, accumulation: int) -> list[Moved]:
    """Return the collectives of one optimizer step of ``accumulation`` micro-batches."""
    total = {(each.kind, each.axis): each for each in figures.last}
    for each in figures.further:
        last = total.get((each.kind, each.axis), Moved(each.kind, each.axis, 0, 0))
        total[each.kind, each.axis] = Moved(
            each.kind,
            each.axis,
            last.calls + each.calls * (accumulation - 1),
            last.bytes + each.bytes * (accumulation - 1),
        )
    return sorted(total.values(), key=lambda each: -each.bytes)


def estimate_lines(
    moved: Iterable[Moved], shape: MeshShape, links: LinkModel, flops: float | None, tflops: float | None
) -> list[str]:
    """Return what a plan prints of a step's time: the collectives, and beside them the computation
    where a rate is given.

    Args:
        flops: of one step of a rank.
        tflops: what a rank sustains, in 10^12 operations per second.
    """
    moved = list(moved)
    seconds = [links.seconds(each, shape) for each in moved]
    parts = [
        f"{each.kind}/{each.axis} {format_duration(time)} ({format_bytes(each.bytes)} sent)"
        for each, time in zip(moved, seconds, strict=True)
        if time >= 0.01 * sum(seconds)
    ]
    lines = [f"estimate of a step's collectives, nothing overlapped: {format_duration(sum(seconds))}"]
    lines += [f"  {part}" for part in parts]
    if flops is not None and tflops is not None:
        compute = flops / (tflops * 1e12)
        lines.append(
            f"estimate of its computation: {format_duration(compute)} at {tflops:g} TFLOP/s; "
            f"so a step takes {format_duration(max(compute, sum(seconds)))} to {format_duration(compute + sum(seconds))}"
        )
    lines.append(f"  assumed: {links.describe()}; rings inside the nodes and between them, at the links' full rate")
    return lines
