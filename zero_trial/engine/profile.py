"""Stopwatches, the FLOPs profile of a model or of one engine step, and its report.

``get_model_profile`` profiles any module; ``flops_profiler`` in ds_config profiles one micro-batch
of a running engine.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_trial.device import is_accelerator, torch_module
from zero_trial.ds_config.keys_running import FlopsProfilerSection
from zero_trial.engine.accessors import EngineAccessors
from zero_trial.engine.flop_count import FlopCount, Flops, Peak, peak_of
from zero_trial.errors import ConfigError

log = logging.getLogger("zero_trial")

FORWARD, BACKWARD, REDUCE_WAIT, STEP = "forward", "backward", "reduce wait", "step"


# --- timers by name -------------------------------------------------------------------------------

# Pairs of events that may wait before those that the device has passed are added up.
_PAIRS_KEPT = 256


class Timers:
    """Milliseconds per name since the last :meth:`take`, by the host's clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun: dict[str, float] = {}
        self._sums: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        self._begun[phase] = self._clock()

    def end(self, phase: str) -> None:
        self._sums[phase] = self._sums.get(phase, 0.0) + (self._clock() - self._begun.pop(phase)) * 1e3

    def take(self) -> dict[str, float]:
        """Return the sums in the order in which the names first came; then they are zero again."""
        sums, self._sums = self._sums, {}
        return sums


class DeviceTimers(Timers):
    """Timers by events on the current stream: begin and end only enqueue, :meth:`take` waits for
    the last of them."""

    def __init__(self, make_event: Callable[[], Any]) -> None:
        super().__init__()
        self._make_event = make_event
        self._open: dict[str, Any] = {}
        self._pairs: list[tuple[str, Any, Any]] = []

    def begin(self, phase: str) -> None:
        event = self._make_event()
        event.record()
        self._open[phase] = event

    def end(self, phase: str) -> None:
        event = self._make_event()
        event.record()
        self._pairs.append((phase, self._open.pop(phase), event))
        if len(self._pairs) > _PAIRS_KEPT:
            self._add_up(wait=False)

    def take(self) -> dict[str, float]:
        self._add_up(wait=True)
        return super().take()

    def _add_up(self, *, wait: bool) -> None:
        if wait and self._pairs:
            self._pairs[-1][2].synchronize()
        done = 0
        for phase, first, last in self._pairs:
            if not wait and not last.query():
                break
            last.synchronize()
            self._sums[phase] = self._sums.get(phase, 0.0) + first.elapsed_time(last)
            done += 1
        del self._pairs[:done]


def make_timers(device: torch.device) -> Timers:
    """Return timers that measure work on ``device``."""
    return DeviceTimers(lambda: torch_module(device).Event(enable_timing=True)) if is_accelerator(device) else Timers()


# --- the profile of a model -----------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleRow:
    """One module; numbers contain those of its children. ``milliseconds`` is its forward, None
    where it was not called."""

    name: str
    kind: str
    parameters: int
    forward_flops: int
    backward_flops: int
    milliseconds: float | None

    @property
    def depth(self) -> int:
        return self.name.count(".") + 1 if self.name else 0


@dataclass(frozen=True)
class ModelProfile:
    """One micro-batch on one rank. ``backward_*`` are 0 where only forward was measured;
    milliseconds are of the whole phase."""

    rows: tuple[ModuleRow, ...]
    parameters: int
    forward_flops: int
    backward_flops: int
    forward_ms: float
    backward_ms: float
    peak: Peak

    def model_flops(self, recompute_fwd_factor: float = 0.0) -> float:
        """Return the operations that the mathematics needs: without the part of forward that
        backward does again (``recompute_fwd_factor`` of it)."""
        return self.forward_flops * (1.0 - recompute_fwd_factor) + self.backward_flops

    @property
    def achieved(self) -> float:
        """Return the operations done per second, recomputation included."""
        seconds = (self.forward_ms + self.backward_ms) / 1e3
        return (self.forward_flops + self.backward_flops) / seconds if seconds > 0 else 0.0

    def utilisation(self, recompute_fwd_factor: float = 0.0) -> float:
        """Return the MFU: model operations per second as a fraction of the peak (Chowdhery et al.
        2022, appendix B)."""
        done = self.forward_flops + self.backward_flops
        return self.achieved * self.model_flops(recompute_fwd_factor) / done / self.peak.per_second if done else 0.0


def build_profile(
    model: nn.Module,
    forward: Flops,
    both: Flops,
    milliseconds: Mapping[str, float],
    phases: tuple[float, float],
    peak: Peak,
    ignored: Sequence[type[nn.Module]] | None = None,
) -> ModelProfile:
    """Combine counts (of forward, and of forward and backward together) and times by module name;
    modules of the classes ``ignored`` have no row."""
    rows = [
        ModuleRow(
            name,
            type(module).__name__,
            sum(param.numel() for param in module.parameters()),
            forward.by_module.get(name, 0),
            both.by_module.get(name, 0) - forward.by_module.get(name, 0),
            milliseconds.get(name),
        )
        for name, module in model.named_modules()
        if not name or type(module) not in (ignored or ())
    ]
    return ModelProfile(tuple(rows), rows[0].parameters, forward.total, both.total - forward.total, *phases, peak)


@contextmanager
def timed_modules(model: nn.Module, timers: Timers) -> Iterator[None]:
    """Measure with ``timers`` the forward of every module under its name, inside the block."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: timers.begin(name), prepend=True))
        handles.append(module.register_forward_hook(lambda *_, name=name: timers.end(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | Path | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Return ``(flops, multiply-adds, parameters)`` of one forward (or ``generate``) of ``model``
    in eval mode without gradients, as numbers or text.

    ``input_shape`` makes one input of ones; otherwise ``args`` and ``kwargs`` are passed. The
    report goes to the standard output, or to ``output_file``, without rows for modules of the
    classes ``ignore_modules``. Raises ConfigError for an unknown mode.
    """
    if mode not in ("forward", "generate"):
        raise ConfigError(
            "no such mode", where="get_model_profile(mode)", got=repr(mode), expected="forward or generate"
        )
    first = next(model.parameters(), torch.empty(0))
    if input_shape is not None:
        args = (torch.ones(*input_shape, dtype=first.dtype, device=first.device), *args)
    call = model if mode == "forward" else model.generate
    timers, count = make_timers(first.device), FlopCount(model)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call(*args, **(kwargs or {}))  # type: ignore[operator]
            with timed_modules(model, timers):
                timers.begin("whole")
                call(*args, **(kwargs or {}))  # type: ignore[operator]
                timers.end("whole")
            count.resume()
            call(*args, **(kwargs or {}))  # type: ignore[operator]
            count.pause()
    finally:
        count.close()
        for module, training in modes:  # parts of a model in training may be frozen in eval mode
            module.training = training
    flops, sums = count.read(), timers.take()
    whole = (sums["whole"], 0.0)
    profile = build_profile(model, flops, flops, sums, whole, peak_of(first.device, first.dtype), ignore_modules)
    text = render(profile, title="FLOPs profile", detailed=detailed, module_depth=module_depth, top_modules=top_modules)
    if output_file is not None or print_profile:
        write_report(text, output_file)
    numbers = (flops.total, flops.total // 2, profile.parameters)
    if not as_string:
        return numbers
    return shorten(numbers[0], "FLOP"), shorten(numbers[1], "MAC"), shorten(numbers[2], "")


def write_report(text: str, output_file: str | Path | None) -> None:
    """Write a report to a file, or to the standard output."""
    if output_file is None:
        sys.stdout.write(text + "\n")
    else:
        Path(output_file).write_text(text + "\n", "utf-8")


# --- the profile as text --------------------------------------------------------------------------

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def render(
    profile: ModelProfile,
    *,
    title: str,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    recompute_fwd_factor: float = 0.0,
) -> str:
    """Render the profile as several lines. ``module_depth`` -1 means the deepest; 0 is the whole
    model only."""
    deepest = max(row.depth for row in profile.rows)
    depth = deepest if module_depth < 0 else min(module_depth, deepest)
    parts = [title, *_totals(profile, recompute_fwd_factor), *_heaviest(profile, depth, top_modules)]
    if detailed:
        parts += _tree(profile, depth)
    return "\n".join(parts)


def shorten(number: float, unit: str) -> str:
    """Return ``1.234 GFLOP``: four digits with the prefix of the unit."""
    for size, prefix in _PREFIXES:
        if abs(number) >= size:
            return f"{number / size:.4g} {prefix}{unit}".rstrip()
    return f"{number:.4g} {unit}".rstrip()


def _totals(profile: ModelProfile, factor: float) -> list[str]:
    lines = [f"  parameters   {profile.parameters:,}"]
    phases = [
        ("forward", profile.forward_flops, profile.forward_ms),
        ("backward", profile.backward_flops, profile.backward_ms),
    ]
    for name, flops, ms in phases:
        if flops or ms:
            rate = shorten(flops / (ms / 1e3), "FLOP/s") if ms else "-"
            lines.append(f"  {name:<11}  {shorten(flops, 'FLOP')} in {ms:.3f} ms: {rate}")
    lines.append(f"  achieved     {shorten(profile.achieved, 'FLOP/s')}")
    if factor:
        lines.append(
            f"  without recomputation ({factor:g} of forward)   {shorten(profile.model_flops(factor), 'FLOP')}"
        )
    peak = profile.peak
    lines.append(
        f"  MFU          {profile.utilisation(factor):.1%} of {shorten(peak.per_second, 'FLOP/s')} ({peak.source})"
    )
    lines.append("  Matrix products, convolutions and attention are counted, a multiply-add as two.")
    return lines


def _heaviest(profile: ModelProfile, depth: int, top: int) -> list[str]:
    """List at each depth the kinds of modules that do most operations."""
    lines = [
        f"  heaviest kinds of modules (top {top} per depth; operations of forward and backward, parameters, ms of forward):"
    ]
    for level in range(depth + 1):
        kinds: dict[str, list[ModuleRow]] = defaultdict(list)
        for row in profile.rows:
            if row.depth == level:
                kinds[row.kind].append(row)
        ordered = sorted(kinds.items(), key=lambda item: -sum(_flops(row) for row in item[1]))
        for kind, rows in ordered[:top]:
            flops, parameters = sum(map(_flops, rows)), sum(row.parameters for row in rows)
            ms = sum(row.milliseconds or 0.0 for row in rows)
            lines.append(
                f"    depth {level}: {kind} x {len(rows)}: {shorten(flops, 'FLOP')}, {parameters:,}, {ms:.3f} ms"
            )
    return lines


def _tree(profile: ModelProfile, depth: int) -> list[str]:
    cells = [("module", "parameters", "forward", "backward", "share", "ms")]
    total = profile.forward_flops + profile.backward_flops
    for row in profile.rows:
        if row.depth <= depth:
            label = "  " * row.depth + (row.name.rpartition(".")[2] + ": " if row.name else "") + row.kind
            share = f"{_flops(row) / total:.1%}" if total else "-"
            ms = f"{row.milliseconds:.3f}" if row.milliseconds is not None else "-"
            flops = (shorten(row.forward_flops, "FLOP"), shorten(row.backward_flops, "FLOP"))
            cells.append((label, f"{row.parameters:,}", *flops, share, ms))
    widths = [max(len(row[column]) for row in cells) for column in range(6)]
    return [
        f"    {row[0]:<{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in cells
    ]


def _flops(row: ModuleRow) -> int:
    return row.forward_flops + row.backward_flops


# --- flops_profiler: counts one micro-batch of rank 0, times another one, then reports once -------
#
#     step profile_step - 1   the first micro-batch is counted, which slows it down: it is not timed
#     step profile_step       the first micro-batch is timed by module; then the report follows
#
# Steps are numbered from 0 as ``engine.global_steps`` is, so that what is timed is warm. A run that
# is resumed behind profile_step is profiled in its first two steps.


class _Stage(Enum):
    WAITING = auto()
    COUNTING = auto()
    COUNTED = auto()
    TIMING = auto()
    DONE = auto()


class StepProfiler:
    """Follows the phases of an engine of ``module``; ``profile`` is the result once there is one.

    ``dtype``: of the matrix products, for the device's peak; ``samples``: in a micro-batch.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, dtype: torch.dtype, samples: int, section: FlopsProfilerSection
    ) -> None:
        self._module = module
        self._device = device
        self._dtype = dtype
        self._samples = samples
        self._section = section
        self._stage = _Stage.WAITING
        self._count = FlopCount(module)
        self._forward = Flops(0, {})
        self._counted_at = 0
        self._timers = make_timers(device)
        self._hooks = ExitStack()
        self.profile: ModelProfile | None = None

    def begin(self, phase: str, engine: EngineAccessors) -> None:
        if self._ignores(phase, engine):
            return
        if phase == FORWARD:
            self._start(engine.global_steps)
        if self._stage is _Stage.COUNTING:
            self._count.resume()
        elif self._stage is _Stage.TIMING:
            self._timers.begin(f"/{phase}")

    def end(self, phase: str, engine: EngineAccessors) -> None:
        if self._ignores(phase, engine):
            return
        if self._stage is _Stage.COUNTING:
            self._count.pause()
            if phase == FORWARD:
                self._forward = self._count.read()
            else:
                self._count.close()
                self._counted_at, self._stage = engine.global_steps, _Stage.COUNTED
        elif self._stage is _Stage.TIMING:
            self._timers.end(f"/{phase}")
            if phase == BACKWARD:
                self._finish(engine.global_steps)

    def _ignores(self, phase: str, engine: EngineAccessors) -> bool:
        """Return whether to ignore the phase: the profile is done, or this is an evaluation, or a
        phase that is not profiled."""
        if self._stage is _Stage.DONE or phase not in (FORWARD, BACKWARD):
            return True
        return phase == FORWARD and not engine.training

    def _start(self, steps: int) -> None:
        if self._stage is _Stage.WAITING and steps >= self._section.profile_step - 1:
            self._stage = _Stage.COUNTING
        elif self._stage is _Stage.COUNTED and steps > self._counted_at:
            self._stage = _Stage.TIMING
            self._hooks.enter_context(timed_modules(self._module, self._timers))

    def _finish(self, step: int) -> None:
        self._hooks.close()
        self._stage = _Stage.DONE
        sums = self._timers.take()
        phases = (sums.pop(f"/{FORWARD}"), sums.pop(f"/{BACKWARD}"))
        peak = peak_of(self._device, self._dtype)
        self.profile = build_profile(self._module, self._forward, self._count.read(), sums, phases, peak)
        self._report(self.profile, step)

    def _report(self, profile: ModelProfile, step: int) -> None:
        section = self._section
        text = render(
            profile,
            title=f"FLOPs profile of rank 0, step {step}, one micro-batch of {self._samples} samples",
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
