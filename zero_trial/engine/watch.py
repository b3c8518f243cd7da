"""Who watches an engine: monitors, progress, timers, memory, communication, the profile of FLOPs; built from ds_config, on rank 0 only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from zero_trial.engine.garbage import COLLECTOR
from zero_trial.engine.monitor import build_monitor
from zero_trial.engine.periodic_lines import Line, PeriodicLines, comms_line, memory_line, progress_line, timer_line
from zero_trial.engine.phases import Phases, watch_with
from zero_trial.engine.reporter import Reporter, report_to
from zero_trial.engine.state_dump import describe_state
from zero_trial.engine.step_events import StepEvents
from zero_trial.engine.step_profiler import StepProfiler
from zero_trial.engine.timers import make_timers

if TYPE_CHECKING:
    from zero_trial.engine.engine import Engine

log = logging.getLogger("zero_trial")

# How often details are printed when steps_per_print is not set: its default in older DeepSpeed.
DETAILS_EVERY = 10


def watch(engine: Engine) -> None:
    """Attaches what ``engine.config`` asks for. An engine that nobody watches keeps its null objects. Raises ConfigError."""
    config = engine.config
    engine.monitor = build_monitor(config, engine.mesh.rank)
    if config.disable_python_gc:
        COLLECTOR.hold(engine)
    if engine.mesh.rank != 0:
        return
    if config.dump_state:
        log.info("%s", describe_state(engine))
    reporters: list[Reporter] = []
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
