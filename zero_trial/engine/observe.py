"""``disable_python_gc``: Python's cycle collector is off while an engine that asked for it lives.

The collector belongs to the process, so this is the process's state: it comes back when the last such engine is destroyed or gone.
Reference counting goes on; only garbage in cycles waits until somebody calls ``gc.collect()``.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import resource
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zero_trial.ds_config.report import render_report
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.monitors import Monitor, build_monitor
from zero_trial.engine.profile import Phases, StepProfiler, Timers, make_timers, watch_with
from zero_trial.sharding.param_group import ParamGroup

if TYPE_CHECKING:
    from zero_trial.engine.engine import Engine


class CollectorPause:
    """Counts who wants the collector off."""

    def __init__(self) -> None:
        self._holders: dict[int, weakref.finalize[[int], Any]] = {}
        self._was_on = False

    def hold(self, owner: object) -> None:
        """Off, as long as ``owner`` lives and until :meth:`release`."""
        if id(owner) in self._holders:
            return
        if not self._holders:
            self._was_on = gc.isenabled()
            gc.disable()
        self._holders[id(owner)] = weakref.finalize(owner, self._drop, id(owner))

    def release(self, owner: object) -> None:
        """``owner`` no longer asks for it."""
        holder = self._holders.get(id(owner))
        if holder is not None:
            holder()

    def _drop(self, key: int) -> None:
        if self._holders.pop(key, None) is not None and not self._holders and self._was_on:
            gc.enable()


COLLECTOR_PAUSE = CollectorPause()


# Who is told of losses and finished steps: the null object, and a group of several.


class StepReporter:
    """Tells nothing: the null object for ranks other than 0 and for runs that ask for nothing."""

    def saw_loss(self, loss: torch.Tensor) -> None:
        """A micro-batch's loss, before any scaling."""

    def saw_evaluation(self, loss: torch.Tensor) -> None:
        """The mean loss of an evaluation that did not call the engine itself: a pipeline's."""

    def after_step(self) -> None:
        """An optimizer step is over, applied or skipped."""

    def close(self) -> None:
        """Nothing more will come."""


class StepReporterGroup(StepReporter):
    """Several reporters, one after the other."""

    def __init__(self, members: Sequence[StepReporter]) -> None:
        self._members = tuple(members)

    def saw_loss(self, loss: torch.Tensor) -> None:
        for member in self._members:
            member.saw_loss(loss)

    def saw_evaluation(self, loss: torch.Tensor) -> None:
        for member in self._members:
            member.saw_evaluation(loss)

    def after_step(self) -> None:
        for member in self._members:
            member.after_step()

    def close(self) -> None:
        for member in self._members:
            member.close()


def report_to(members: Sequence[StepReporter]) -> StepReporter:
    """One object for all ``members``: the null object for none, the member itself for one."""
    if len(members) == 1:
        return members[0]
    return StepReporterGroup(members) if members else StepReporter()


# The lines that rank 0 prints every ``steps_per_print`` steps: progress, timers, memory, communication.


log = logging.getLogger("zero_trial")


# What is to be said after so many steps and seconds.
Line = Callable[[int, float], str]


class PeriodicLines(StepReporter):
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


# The events of training that rank 0 writes to the monitors after every optimizer step.


class StepEvents(StepReporter):
    """``Train/Samples/{train_loss, lr, loss_scale, eval_loss}`` against global samples.

    ``train_loss`` is this rank's loss averaged over the micro-batches of the step, as in DeepSpeed; ``loss_scale`` is written where
    there is one. ``eval_loss`` is the mean of what ``engine(...)`` returned in eval mode while that was a scalar; it is written when
    training goes on, and at the end. Where the device decides about a step (CUDA), its events are written with the next backward pass,
    when they are known, or at the end: nobody waits for them.
    """

    def __init__(self, engine: Engine, monitor: Monitor, *, scaled: bool) -> None:
        self._engine = weakref.proxy(engine)
        self._monitor = monitor
        self._scaled = scaled
        self._sum: torch.Tensor | None = None
        self._count = 0
        self._due: tuple[torch.Tensor | None, int, int] | None = (
            None  # sum and number of losses, and samples, of a step not yet written
        )
        self._evaluation = _Evaluation(monitor)
        engine.register_forward_hook(self._saw_output)
        weakref.finalize(engine, self._last_words)  # also when the interpreter ends

    def saw_evaluation(self, loss: torch.Tensor) -> None:
        self._write_step()
        self._evaluation.add(loss.detach().float().reshape(()), self._engine.global_samples)

    def saw_loss(self, loss: torch.Tensor) -> None:
        self._write_step()
        self._evaluation.write()  # training goes on
        value = loss.detach().float().reshape(())
        self._sum = value.clone() if self._sum is None else self._sum + value
        self._count += 1

    def after_step(self) -> None:
        self._due = (self._sum, self._count, self._engine.global_samples)
        self._sum, self._count = None, 0
        if not self._engine.verdict.open:
            self._write_step()

    def close(self) -> None:
        self._write_step()
        self._evaluation.write()

    def _write_step(self) -> None:
        """The events of the step that is due. Waits for it."""
        if self._due is None:
            return
        engine, samples, events = self._engine, self._due[2], self._losses()
        if engine.get_lr():
            events.append(("Train/Samples/lr", engine.get_lr()[0], samples))
        if self._scaled:
            events.append(("Train/Samples/loss_scale", engine.loss_scale, samples))
        self._due = None
        self._monitor.write_events(events)

    def _losses(self) -> list[tuple[str, float, int]]:
        total, count, samples = self._due or (None, 0, 0)
        return [("Train/Samples/train_loss", total.item() / count, samples)] if total is not None else []

    def _last_words(self) -> None:
        try:
            self._write_step()
        except ReferenceError:  # an engine that nobody destroyed is gone, and its rates with it
            self._monitor.write_events(self._losses())
        self._evaluation.write()

    def _saw_output(self, engine: Any, _inputs: Any, output: Any) -> None:
        if engine.training:
            self._evaluation.write()
            return
        self._write_step()
        if isinstance(output, torch.Tensor) and output.numel() == 1 and output.is_floating_point():
            self._evaluation.add(output.detach().float().reshape(()), engine.global_samples)


class _Evaluation:
    """The losses of an evaluation under way."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._values: list[torch.Tensor] = []
        self._samples = 0

    def add(self, value: torch.Tensor, samples: int) -> None:
        self._values.append(value)
        self._samples = samples

    def write(self) -> None:
        if self._values:
            mean = torch.stack(self._values).mean().item()
            self._values.clear()
            self._monitor.write_events([("Train/Samples/eval_loss", mean, self._samples)])


# ``dump_state``: what an engine starts with, as text: its whole configuration, its mesh, and how its parameters lie in units.


def describe_state(engine: Engine) -> str:
    """Several lines. Pure but for reading ``engine``."""
    shape, batch = engine.mesh.shape, engine.wiring.batch
    policy = engine.wiring.policy
    dtypes = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in _dtypes(policy).items())
    return "\n".join(
        [
            "configuration:",
            render_report(_without_secrets(engine.config), everything=True),
            f"mesh: {shape}",
            f"batch: {batch.train_batch_size} = {batch.micro_batch_size} x {batch.accumulation} x {engine.dp_world_size} ranks",
            f"plan: {engine.wiring.plan.describe()}",
            f"dtypes: {dtypes}",
            units_table(engine.sharded.groups),
        ]
    )


def _without_secrets(config: DsConfig) -> DsConfig:
    if config.comet.api_key is None:
        return config
    return dataclasses.replace(config, comet=dataclasses.replace(config.comet, api_key="(not shown)"))


def units_table(units: list[ParamGroup]) -> str:
    """One row per unit: parameters, elements, elements of this rank's shard, dtype, how long it lives."""
    rows = [("unit", "parameters", "elements", "shard", "dtype", "lives")]
    for unit in units:
        layout = unit.layout
        dtype = str(unit.dtype).removeprefix("torch.")
        rows.append(
            (
                unit.name,
                f"{len(unit.params):,}",
                f"{layout.numel:,}",
                f"{layout.shard_numel:,}",
                dtype,
                unit.plan.params.value,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _dtypes(policy: object) -> dict[str, object]:
    names = {"parameters": "param", "gradients": "grad", "wire": "comm", "masters": "master", "buffers": "buffer"}
    return {word: getattr(policy, name) or "as they are" for word, name in names.items()}


# Who watches an engine: monitors, progress, timers, memory, communication, the profile of FLOPs; built from ds_config, on rank 0 only.


log = logging.getLogger("zero_trial")


# How often details are printed when steps_per_print is not set: its default in older DeepSpeed.
DETAILS_EVERY = 10


def attach_observers(engine: Engine) -> None:
    """Attaches what ``engine.config`` asks for. An engine that nobody watches keeps its null objects. Raises ConfigError."""
    config = engine.config
    engine.monitor = build_monitor(config, engine.mesh.rank)
    if config.disable_python_gc:
        COLLECTOR_PAUSE.hold(engine)
    if engine.mesh.rank != 0:
        return
    if config.dump_state:
        log.info("%s", describe_state(engine))
    reporters: list[StepReporter] = []
    if engine.monitor.enabled:
        scaled = config.fp16.enabled or engine.wiring.autocast is torch.float16
        reporters.append(StepEvents(engine, engine.monitor, scaled=scaled))
    phases, lines = _details(engine)
    if config.steps_per_print:
        lines.insert(0, progress_line(engine, with_rate=config.timers.throughput.enabled))
    if lines:
        every = config.steps_per_print or DETAILS_EVERY
        reporters.append(PeriodicLines(engine, every, lines, _synchronizer(engine)))
    if config.flops_profiler.enabled:
        phases.append(StepProfiler(engine, config.flops_profiler))
    engine.phases, engine.reporter = watch_with(phases), report_to(reporters)


def _details(engine: Engine) -> tuple[list[Phases], list[Line]]:
    config = engine.config
    phases: list[Phases] = []
    lines: list[Line] = []
    if config.wall_clock_breakdown:
        timers = make_timers(engine.device)
        phases.append(timers)
        lines.append(timer_line(timers))
    if config.memory_breakdown:
        lines.append(memory_line(engine))
    if config.comms_logger.enabled:
        lines.append(comms_line(engine))
    return phases, lines


def _synchronizer(engine: Engine) -> Callable[[], None]:
    """Before the clock is read for samples/s: waits for the device if ``timers.throughput.synchronized`` says so."""
    throughput, device = engine.config.timers.throughput, engine.device
    if device.type == "cuda" and throughput.enabled and throughput.synchronized:
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
