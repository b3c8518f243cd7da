"""``flops_profiler``: counts one micro-batch of rank 0 and times another one, then reports once.

    step profile_step - 1   the first micro-batch is counted: that slows it down, so it is not timed
    step profile_step       the first micro-batch is timed, module by module; the report follows its backward

Steps are numbered from 0 as ``engine.global_steps`` is, so that what is timed is warm. A run that is resumed behind profile_step is profiled
in its first two steps.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import ExitStack
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

from zero_trial.config.sections import FlopsProfilerSection
from zero_trial.engine.flop_count import FlopCount, Flops
from zero_trial.engine.flops import ModelProfile, build_profile, timed_modules
from zero_trial.engine.flops_report import render
from zero_trial.engine.peaks import peak_of
from zero_trial.engine.phases import BACKWARD, FORWARD, Phases
from zero_trial.engine.timers import make_timers

if TYPE_CHECKING:
    from zero_trial.engine.engine import Engine

log = logging.getLogger("zero_trial")


class _Stage(Enum):
    WAITING = auto()
    COUNTING = auto()
    COUNTED = auto()
    TIMING = auto()
    DONE = auto()


class StepProfiler(Phases):
    """Follows the phases of ``engine``; ``profile`` is the result once there is one."""

    def __init__(self, engine: Engine, section: FlopsProfilerSection) -> None:
        self._engine = weakref.proxy(engine)
        self._section = section
        self._stage = _Stage.WAITING
        self._count = FlopCount(engine.module)
        self._forward = Flops(0, {})
        self._counted_at = 0
        self._timers = make_timers(engine.device)
        self._hooks = ExitStack()
        self.profile: ModelProfile | None = None

    def begin(self, phase: str) -> None:
        if self._passes_by(phase):
            return
        if phase == FORWARD:
            self._start()
        if self._stage is _Stage.COUNTING:
            self._count.resume()
        elif self._stage is _Stage.TIMING:
            self._timers.begin(f"/{phase}")

    def end(self, phase: str) -> None:
        if self._passes_by(phase):
            return
        if self._stage is _Stage.COUNTING:
            self._count.pause()
            if phase == FORWARD:
                self._forward = self._count.read()
            else:
                self._count.close()
                self._counted_at, self._stage = self._engine.global_steps, _Stage.COUNTED
        elif self._stage is _Stage.TIMING:
            self._timers.end(f"/{phase}")
            if phase == BACKWARD:
                self._finish()

    def _passes_by(self, phase: str) -> bool:
        """Nothing to do: the profile is there, or this is an evaluation, or a phase that is not profiled."""
        if self._stage is _Stage.DONE or phase not in (FORWARD, BACKWARD):
            return True
        return phase == FORWARD and not self._engine.training

    def _start(self) -> None:
        steps = self._engine.global_steps
        if self._stage is _Stage.WAITING and steps >= self._section.profile_step - 1:
            self._stage = _Stage.COUNTING
        elif self._stage is _Stage.COUNTED and steps > self._counted_at:
            self._stage = _Stage.TIMING
            self._hooks.enter_context(timed_modules(self._engine.module, self._timers))

    def _finish(self) -> None:
        self._hooks.close()
        self._stage = _Stage.DONE
        engine, sums = self._engine, self._timers.take()
        phases = (sums.pop(f"/{FORWARD}"), sums.pop(f"/{BACKWARD}"))
        dtype = engine.wiring.autocast or engine.wiring.policy.param
        peak = peak_of(engine.device, dtype)
        self.profile = build_profile(engine.module, self._forward, self._count.read(), sums, phases, peak)
        self._report(self.profile)

    def _report(self, profile: ModelProfile) -> None:
        engine, section = self._engine, self._section
        samples = engine.train_micro_batch_size_per_gpu()
        text = render(
            profile,
            title=f"FLOPs profile of rank 0, step {engine.global_steps}, one micro-batch of {samples} samples",
            detailed=section.detailed,
            module_depth=section.module_depth,
            top_modules=section.top_modules,
            recompute_fwd_factor=section.recompute_fwd_factor,
        )
        if section.output_file is None:
            log.info("%s", text)
        else:
            path = Path(section.output_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", "utf-8")
