"""The lines that rank 0 prints every ``steps_per_print`` steps: progress, timers, memory, communication."""

from __future__ import annotations

import logging
import resource
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from zero_trial.engine.reporter import Reporter
from zero_trial.engine.timers import Timers

if TYPE_CHECKING:
    from zero_trial.engine.engine import Engine

log = logging.getLogger("zero_trial")

# What is to be said after so many steps and seconds.
Line = Callable[[int, float], str]


class PeriodicLines(Reporter):
    """Every ``every`` steps, what each of ``lines`` has to say; each gets the steps and the seconds since the last time."""

    def __init__(
        self,
        engine: Engine,
        every: int,
        lines: Sequence[Line],
        synchronize: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = weakref.proxy(engine)
        self._every = every
        self._lines = tuple(lines)
        self._synchronize = synchronize
        self._clock = clock
        self._steps, self._time = engine.global_steps, clock()

    def after_step(self) -> None:
        steps = self._engine.global_steps
        if steps % self._every:
            return
        self._synchronize()
        now = self._clock()
        for line in self._lines:
            log.info("%s", line(steps - self._steps, now - self._time))
        self._steps, self._time = steps, now


def progress_line(engine: Engine, *, with_rate: bool) -> Line:
    """``step=20 skipped=0 lr=[0.001] grad_norm=1.3 samples/s=512.0``; the rate counts the samples of all ranks since the last line."""
    known = weakref.proxy(engine)
    samples = [engine.global_samples]

    def line(_steps: int, seconds: float) -> str:
        norm = known.get_global_grad_norm()
        text = f"step={known.global_steps} skipped={known.skipped_steps} lr={known.get_lr()} "
        text += f"grad_norm={norm:.4g}" if norm is not None else "grad_norm=-"
        if with_rate and seconds > 0:
            text += f" samples/s={(known.global_samples - samples[0]) / seconds:.1f}"
        samples[0] = known.global_samples
        return text

    return line


def timer_line(timers: Timers) -> Line:
    """``ms per step: forward 1.20 | backward 2.41 | reduce wait 0.32 | step 0.90 | other 0.11``; the micro-batches of a step are summed.

    "other" is the host's time outside of these phases: data, loss outside of the engine, printing.
    """

    def line(steps: int, seconds: float) -> str:
        sums = {phase: total / max(steps, 1) for phase, total in timers.take().items()}
        sums["other"] = max(seconds * 1e3 / max(steps, 1) - sum(sums.values()), 0.0)
        return "ms per step: " + " | ".join(f"{phase} {value:.2f}" for phase, value in sums.items())

    return line


def memory_line(engine: Engine) -> Line:
    """``memory: parameters 1.2 MiB, gradients ..., optimizer ...; process ... resident at most`` (on CUDA: allocated, at most, reserved)."""
    known = weakref.proxy(engine)

    def line(_steps: int, _seconds: float) -> str:
        states = ", ".join(f"{kind} {mib(size)}" for kind, size in known.persistent_bytes().items())
        return f"memory: {states}; {device_memory(known.device)}"

    return line


def device_memory(device: torch.device) -> str:
    """What the process holds on ``device``; on a CPU the process itself."""
    if device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return f"{device} {mib(now)} allocated, {mib(peak)} at most, {mib(torch.cuda.memory_reserved(device))} reserved"
    unit = 1 if sys.platform == "darwin" else 1024  # what ru_maxrss counts in
    return f"process {mib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)} resident at most"


def comms_line(engine: Engine) -> Line:
    """The table of collectives since the engine was built."""
    known = weakref.proxy(engine)

    def line(_steps: int, _seconds: float) -> str:
        return comms_table(known.comms_summary())

    return line


def comms_table(summary: Mapping[str, Mapping[str, int]]) -> str:
    """One row per kind and axis: calls, elements and bytes that this rank had to send."""
    if not summary:
        return "communication: nothing was sent"
    rows: list[tuple[str, ...]] = [("collective/axis", "calls", "elements", "bytes")]
    rows += [(name, *(f"{entry[key]:,}" for key in ("calls", "elements", "bytes"))) for name, entry in summary.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [f"{row[0]:<{widths[0]}}  " + "  ".join(f"{row[i]:>{widths[i]}}" for i in (1, 2, 3)) for row in rows]
    return "\n".join(["communication (sent by rank 0):", *lines])


def mib(size: int) -> str:
    """``size`` bytes in MiB."""
    return f"{size / 2**20:.1f} MiB"
