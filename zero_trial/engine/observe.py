"""What rank 0 observes of an engine: phases, monitor events, periodic lines, and the state it
starts with.

The engine calls one :class:`Observer` with itself as an argument, so that neither has to keep the
other alive. An observer with nothing switched on returns at once from every call.
"""

from __future__ import annotations

import gc
import logging
import resource
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from zero_trial.comm import Mesh
from zero_trial.device import is_accelerator, torch_module
from zero_trial.ds_config.config_report import render_report
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.accessors import EngineAccessors
from zero_trial.engine.monitors import Monitor, build_writers
from zero_trial.engine.profile import BACKWARD, FORWARD, REDUCE_WAIT, STEP, StepProfiler, Timers, make_timers
from zero_trial.engine.resolved_config import ResolvedConfig
from zero_trial.sharding.param_group import ParamGroup, trace_range
from zero_trial.util.text import table

log = logging.getLogger("zero_trial")

__all__ = ["BACKWARD", "FORWARD", "REDUCE_WAIT", "STEP", "Observer", "build_observer", "describe_state", "trace_range"]

# Steps between periodic lines where steps_per_print is not set: its default in older DeepSpeed.
DETAILS_EVERY = 10


@dataclass(eq=False)
class Observer:
    """Timers, FLOPs profile, monitor events and periodic lines of one engine; each is None where
    ds_config does not ask for it."""

    monitor: Monitor = field(default_factory=Monitor)
    timers: Timers | None = None
    profiler: StepProfiler | None = None
    events: StepEvents | None = None
    lines: PeriodicLines | None = None

    def phase(self, name: str, engine: EngineAccessors) -> AbstractContextManager[Any]:
        """Measure a phase of a micro-batch: FORWARD, BACKWARD, REDUCE_WAIT or STEP. A phase that
        raises is not counted."""
        if self.timers is None and self.profiler is None:
            return trace_range(name)
        return self._measure(name, engine)

    @contextmanager
    def _measure(self, name: str, engine: EngineAccessors) -> Iterator[None]:
        with trace_range(name):
            self.begin(name, engine)
            yield
            self.end(name, engine)

    def begin(self, name: str, engine: EngineAccessors) -> None:
        """Begin a phase. The profiler begins last and ends first, so that it measures the least of
        the timers."""
        if self.timers is not None:
            self.timers.begin(name)
        if self.profiler is not None:
            self.profiler.begin(name, engine)

    def end(self, name: str, engine: EngineAccessors) -> None:
        """End a phase that has been begun."""
        if self.profiler is not None:
            self.profiler.end(name, engine)
        if self.timers is not None:
            self.timers.end(name)

    def after_step(self, engine: EngineAccessors) -> None:
        """Record that an optimizer step is over, applied or skipped."""
        if self.events is not None:
            self.events.after_step(engine)
        if self.lines is not None:
            self.lines.after_step(engine)

    def close(self) -> None:
        """Write what is left and close the monitors."""
        if self.events is not None:
            self.events.close()
        self.monitor.close()


def build_observer(
    config: DsConfig, resolved: ResolvedConfig, module: nn.Module, mesh: Mesh, device: torch.device
) -> Observer:
    """Build what ds_config asks for; on other ranks than 0 nothing. Raises ConfigError on every
    rank for a monitor whose package is missing."""
    monitor = Monitor(build_writers(config, mesh.rank))
    if mesh.rank != 0:
        return Observer(monitor)
    events = None
    if monitor.enabled:
        events = StepEvents(monitor, scaled=config.fp16.enabled or resolved.autocast is torch.float16)
    timers = make_timers(device) if config.wall_clock_breakdown else None
    lines = None
    if config.steps_per_print or timers is not None or config.memory_breakdown or config.comms_logger.enabled:
        lines = PeriodicLines(config, device, timers)
    profiler = None
    if config.flops_profiler.enabled:
        dtype = resolved.autocast or resolved.policy.param
        profiler = StepProfiler(module, device, dtype, resolved.batch.micro_batch_size, config.flops_profiler)
    return Observer(monitor, timers=timers, profiler=profiler, events=events, lines=lines)


# --- lines ----------------------------------------------------------------------------------------


class PeriodicLines:
    """Every ``steps_per_print`` steps: progress, timers, memory, communication, each where
    ds_config asks for it."""

    def __init__(self, config: DsConfig, device: torch.device, timers: Timers | None) -> None:
        self._config = config
        self._device = device
        self._timers = timers
        self._every = config.steps_per_print or DETAILS_EVERY
        self._steps = self._samples = 0  # since the last lines
        self._time = time.perf_counter()
        self._samples_before: int | None = None

    def after_step(self, engine: EngineAccessors) -> None:
        """Count the step, and log the lines where it is time."""
        before, self._samples_before = self._samples_before, engine.global_samples
        self._samples += engine.global_samples - before if before is not None else engine.train_batch_size()
        self._steps += 1
        if engine.global_steps % self._every:
            return
        throughput = self._config.timers.throughput
        if is_accelerator(self._device) and throughput.enabled and throughput.synchronized:
            torch_module(self._device).synchronize(self._device)
        now = time.perf_counter()
        for line in self._lines(engine, self._steps, now - self._time):
            log.info("%s", line)
        self._steps, self._samples, self._time = 0, 0, now

    def _lines(self, engine: EngineAccessors, steps: int, seconds: float) -> list[str]:
        config, lines = self._config, []
        if config.steps_per_print:
            rate = self._samples / seconds if seconds > 0 else None
            lines.append(progress_line(engine, rate if config.timers.throughput.enabled else None))
        if self._timers is not None:
            lines.append(timer_line(self._timers, steps, seconds))
        if config.memory_breakdown:
            lines.append(memory_line(engine, self._device))
        if config.comms_logger.enabled:
            lines.append(comms_table(engine.comms_summary()))
        return lines


def progress_line(engine: EngineAccessors, samples_per_second: float | None) -> str:
    """Return ``step=20 skipped=0 lr=[0.001] grad_norm=1.3 samples/s=512.0``; the rate counts the
    samples of all ranks since the last line."""
    norm = engine.get_global_grad_norm()
    text = f"step={engine.global_steps} skipped={engine.skipped_steps} lr={engine.get_lr()} "
    text += f"grad_norm={norm:.4g}" if norm is not None else "grad_norm=-"
    return text if samples_per_second is None else f"{text} samples/s={samples_per_second:.1f}"


def timer_line(timers: Timers, steps: int, seconds: float) -> str:
    """Return ``ms per step: forward 1.20 | backward 2.41 | reduce wait 0.32 | step 0.90 | other
    0.11``; the micro-batches of a step are summed.

    "other" is the host's time outside of these phases: data, loss outside of the engine, printing.
    """
    sums = {phase: total / max(steps, 1) for phase, total in timers.take().items()}
    sums["other"] = max(seconds * 1e3 / max(steps, 1) - sum(sums.values()), 0.0)
    return "ms per step: " + " | ".join(f"{phase} {value:.2f}" for phase, value in sums.items())


def memory_line(engine: EngineAccessors, device: torch.device) -> str:
    """Return ``memory: parameters 1.2 MiB, gradients ..., optimizer ...; process ... resident at
    most`` (on CUDA: allocated, at most, reserved)."""
    states = ", ".join(f"{kind} {mib(size)}" for kind, size in engine.persistent_bytes().items())
    return f"memory: {states}; {device_memory(device)}"


def device_memory(device: torch.device) -> str:
    """Describe the memory of the process on ``device``; on a CPU its resident set."""
    if is_accelerator(device):
        torch_s = torch_module(device)
        now, peak = torch_s.memory_allocated(device), torch_s.max_memory_allocated(device)
        return f"{device} {mib(now)} allocated, {mib(peak)} at most, {mib(torch_s.memory_reserved(device))} reserved"
    unit = 1 if sys.platform == "darwin" else 1024  # what ru_maxrss counts in
    return f"process {mib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)} resident at most"


def comms_table(summary: Mapping[str, Mapping[str, int]]) -> str:
    """Return the collectives since the engine was built, one row per kind and axis: calls, elements
    and bytes that this rank had to send."""
    if not summary:
        return "communication: nothing was sent"
    keys = ("calls", "elements", "bytes")
    rows = [
        ("collective/axis", *keys),
        *((name, *(f"{entry[key]:,}" for key in keys)) for name, entry in summary.items()),
    ]
    return "\n".join(["communication (sent by rank 0):", table(rows, right=(1, 2, 3))])


def mib(size: int) -> str:
    """Format ``size`` bytes in MiB."""
    return f"{size / 2**20:.1f} MiB"


# --- monitor events -------------------------------------------------------------------------------


class StepEvents:
    """``Train/Samples/{train_loss, lr, loss_scale, eval_loss}`` against global samples.

    ``train_loss`` is this rank's loss averaged over the micro-batches of the step, as in DeepSpeed;
    ``loss_scale`` is written where there is one. ``eval_loss`` is the mean of what ``engine(...)``
    returned in eval mode while that was a scalar; it is written when training continues, and at
    the end.
    """

    def __init__(self, monitor: Monitor, *, scaled: bool) -> None:
        self._monitor = monitor
        self._scaled = scaled
        self._sum: torch.Tensor | None = None
        self._count = 0
        self._evaluated: list[torch.Tensor] = []
        self._evaluated_at = 0

    def saw_loss(self, engine: EngineAccessors, loss: torch.Tensor) -> None:
        self._write_evaluation()  # training goes on
        value = loss.detach().float().reshape(())
        self._sum = value.clone() if self._sum is None else self._sum + value
        self._count += 1

    def saw_output(self, engine: EngineAccessors, output: Any) -> None:
        if engine.training:
            self._write_evaluation()
        elif isinstance(output, torch.Tensor) and output.numel() == 1 and output.is_floating_point():
            self.saw_evaluation(engine, output)

    def saw_evaluation(self, engine: EngineAccessors, loss: torch.Tensor) -> None:
        self._evaluated.append(loss.detach().float().reshape(()))
        self._evaluated_at = engine.global_samples

    def after_step(self, engine: EngineAccessors) -> None:
        samples, events = engine.global_samples, []
        if self._sum is not None:
            events.append(("Train/Samples/train_loss", self._sum.item() / self._count, samples))
        if rates := engine.get_lr():
            events.append(("Train/Samples/lr", rates[0], samples))
        if self._scaled:
            events.append(("Train/Samples/loss_scale", engine.loss_scale, samples))
        self._sum, self._count = None, 0
        self._monitor.write_events(events)

    def close(self) -> None:
        """Write the evaluation that training has not followed, also when the interpreter ends."""
        self._write_evaluation()

    def _write_evaluation(self) -> None:
        if self._evaluated:
            mean = torch.stack(self._evaluated).mean().item()
            self._evaluated.clear()
            self._monitor.write_events([("Train/Samples/eval_loss", mean, self._evaluated_at)])


# --- dump_state -----------------------------------------------------------------------------------


def describe_state(config: DsConfig, resolved: ResolvedConfig, mesh: Mesh, groups: Sequence[ParamGroup]) -> str:
    """Describe what an engine starts with in several lines: its whole configuration, its mesh, and
    its parameter groups."""
    batch, policy = resolved.batch, resolved.policy
    names = {"parameters": "param", "gradients": "grad", "wire": "comm", "masters": "master", "buffers": "buffer"}
    kinds = {word: str(getattr(policy, name) or "as they are") for word, name in names.items()}
    dtypes = ", ".join(f"{word} {kind.removeprefix('torch.')}" for word, kind in kinds.items())
    return "\n".join(
        [
            "configuration:",
            render_report(_without_secrets(config), everything=True),
            f"mesh: {mesh.shape}",
            f"batch: {batch.train_batch_size} = {batch.micro_batch_size} x {batch.accumulation} x {mesh.data.size} ranks",
            f"plan: {resolved.plan.describe()}",
            f"dtypes: {dtypes}",
            groups_table(groups),
        ]
    )


def _without_secrets(config: DsConfig) -> DsConfig:
    if config.comet.api_key is None:
        return config
    return replace(config, comet=replace(config.comet, api_key="(not shown)"))


def groups_table(groups: Sequence[ParamGroup]) -> str:
    """Return one row per parameter group: parameters, elements, elements of this rank's shard,
    dtype, lifetime of its full parameters."""
    rows = [("group", "parameters", "elements", "shard", "dtype", "lives")]
    for group in groups:
        layout = group.layout
        dtype = str(group.dtype).removeprefix("torch.")
        counts = (f"{len(group.params):,}", f"{layout.numel:,}", f"{layout.shard_numel:,}")
        rows.append((group.name, *counts, dtype, group.plan.params.value))
    return table(rows)


# --- disable_python_gc ----------------------------------------------------------------------------


class CollectorPause:
    """``disable_python_gc``: Python's cycle collector is off while an engine that asked for it
    lives.

    The collector belongs to the process, so this is the process's state: the collector is enabled
    again when the last such engine is destroyed or garbage. Reference counting continues; only
    garbage in cycles waits until ``gc.collect()`` is called.
    """

    def __init__(self) -> None:
        self._holders: dict[int, weakref.finalize[..., Any]] = {}
        self._was_on = False

    def hold(self, owner: object) -> None:
        """Disable the collector while ``owner`` lives and until :meth:`release`."""
        if not self._holders:
            self._was_on = gc.isenabled()
            gc.disable()
        self._holders[id(owner)] = weakref.finalize(owner, self._drop, id(owner))

    def release(self, owner: object) -> None:
        """Withdraw the request of ``owner``, if there is one."""
        self._holders.get(id(owner), lambda: None)()

    def _drop(self, key: int) -> None:
        del self._holders[key]
        if not self._holders and self._was_on:
            gc.enable()


COLLECTOR_PAUSE = CollectorPause()
