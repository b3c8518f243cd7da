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
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_trial.device import is_accelerator, torch_module
from zero_trial.ds_config.keys_running import FlopsProfilerSection
from zero_trial.engine.accessors import EngineAccessors
from zero_trial.engine.flop_count import Flops, Peak, flop_counter, flops_of, peak_of
from zero_trial.errors import ConfigError
from zero_trial.util.text import table

log = logging.getLogger("zero_trial")

FORWARD, BACKWARD, REDUCE_WAIT, STEP = "forward", "backward", "reduce wait", "step"


# --- timers by name -------------------------------------------------------------------------------

# Measured phases that may wait before they are added up: on an accelerator, an event each.
_PAIRS_KEPT = 1024


class _HostEvent:
    """The host's clock, with the methods of an accelerator's event."""

    def record(self) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once: the host is never behind."""

    def elapsed_time(self, end: _HostEvent) -> float:
        return (end._time - self._time) * 1e3


class Timers:
    """Milliseconds per name since the last :meth:`take`. On an accelerator, begin and end only
    enqueue events on the current stream, and :meth:`take` waits for the last of them."""

    def __init__(self, make_event: Callable[[], Any] = _HostEvent) -> None:
        self._make_event = make_event
        self._begun: dict[str, Any] = {}
        self._pairs: list[tuple[str, Any, Any]] = []
        self._sums: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        self._begun[phase] = self._make_event()
        self._begun[phase].record()

    def end(self, phase: str) -> None:
        event = self._make_event()
        event.record()
        self._pairs.append((phase, self._begun.pop(phase), event))
        if len(self._pairs) == _PAIRS_KEPT:
            self._add_up()

    def take(self) -> dict[str, float]:
        """Return the sums in the order in which the names first came; then they are zero again."""
        self._add_up()
        sums, self._sums = self._sums, {}
        return sums

    def _add_up(self) -> None:
        for phase, first, last in self._pairs:
            last.synchronize()
            self._sums[phase] = self._sums.get(phase, 0.0) + first.elapsed_time(last)
        self._pairs.clear()


def make_timers(device: torch.device) -> Timers:
    """Return timers that measure work on ``device``."""
    return Timers(lambda: torch_module(device).Event(enable_timing=True)) if is_accelerator(device) else Timers()


# --- the profile of a model -----------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleRow:
    """One module; numbers contain those of its children. ``milliseconds`` is its forward, or None
    if it was not called."""

    name: str
    kind: str
    parameters: int
    forward_flops: int
    milliseconds: float | None

    @property
    def depth(self) -> int:
        return self.name.count(".") + 1 if self.name else 0


@dataclass(frozen=True)
class ModelProfile:
    """One micro-batch on one rank. ``backward_*`` are 0 if only forward was measured; milliseconds
    are of the whole phase."""

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
    backward_flops: int,
    milliseconds: Mapping[str, float],
    phases: tuple[float, float],
    peak: Peak,
    ignored: Sequence[type[nn.Module]] | None = None,
) -> ModelProfile:
    """Combine counts and times of forward by module name; modules of the classes ``ignored`` have
    no row."""
    rows = [
        ModuleRow(
            name,
            type(module).__name__,
            sum(param.numel() for param in module.parameters()),
            forward.by_module.get(name, 0),
            milliseconds.get(name),
        )
        for name, module in model.named_modules()
        if not name or type(module) not in (ignored or ())
    ]
    return ModelProfile(tuple(rows), rows[0].parameters, forward.total, backward_flops, *phases, peak)


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
    timers, counter = make_timers(first.device), flop_counter()
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
            with counter:
                call(*args, **(kwargs or {}))  # type: ignore[operator]
    finally:
        for module, training in modes:  # parts of a model in training may be frozen in eval mode
            module.training = training
    flops, sums = flops_of(counter, model), timers.take()
    whole = (sums["whole"], 0.0)
    profile = build_profile(model, flops, 0, sums, whole, peak_of(first.device, first.dtype), ignore_modules)
    text = render(profile, title="FLOPs profile", detailed=detailed, module_depth=module_depth, top_modules=top_modules)
    if output_file is not None or print_profile:
        write_report(text, output_file)
    numbers = (flops.total, flops.total // 2, profile.parameters)
    if not as_string:
        return numbers
    return shorten(numbers[0], "FLOP"), shorten(numbers[1], "MAC"), shorten(numbers[2], "")


def write_report(text: str, output_file: str | Path | None) -> None:
    """Write a report to a file, whose folder is created, or to the standard output."""
    if output_file is None:
        sys.stdout.write(text + "\n")
    else:
        Path(output_file).parent.mkdir(parents=True, exist_ok=True)
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
    parts = [title, *_summary(profile, recompute_fwd_factor), *_heaviest(profile, depth, top_modules)]
    if detailed:
        parts += _tree(profile, depth)
    return "\n".join(parts)


def shorten(number: float, unit: str) -> str:
    """Return ``1.234 GFLOP``: four digits with the prefix of the unit."""
    for size, prefix in _PREFIXES:
        if abs(number) >= size:
            return f"{number / size:.4g} {prefix}{unit}".rstrip()
    return f"{number:.4g} {unit}".rstrip()


def _summary(profile: ModelProfile, factor: float) -> list[str]:
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
        needed = shorten(profile.model_flops(factor), "FLOP")
        lines.append(f"  without recomputation ({factor:g} of forward)   {needed}")
    peak = f"{shorten(profile.peak.per_second, 'FLOP/s')} ({profile.peak.source})"
    lines.append(f"  MFU          {profile.utilisation(factor):.1%} of {peak}")
    lines.append("  Matrix products, convolutions and attention are counted, a multiply-add as two.")
    return lines


def _heaviest(profile: ModelProfile, depth: int, top: int) -> list[str]:
    """List at each depth the kinds of modules that do most operations."""
    lines = [f"  heaviest kinds of modules (top {top} per depth; operations of forward, parameters, ms of forward):"]
    for level in range(depth + 1):
        kinds: dict[str, list[ModuleRow]] = defaultdict(list)
        for row in profile.rows:
            if row.depth == level:
                kinds[row.kind].append(row)
        for kind, rows in sorted(kinds.items(), key=lambda item: -sum(row.forward_flops for row in item[1]))[:top]:
            flops = shorten(sum(row.forward_flops for row in rows), "FLOP")
            parameters, ms = sum(row.parameters for row in rows), sum(row.milliseconds or 0.0 for row in rows)
            lines.append(f"    depth {level}: {kind} x {len(rows)}: {flops}, {parameters:,}, {ms:.3f} ms")
    return lines


def _tree(profile: ModelProfile, depth: int) -> list[str]:
    cells = [("module", "parameters", "forward", "share", "ms")]
    for row in profile.rows:
        if row.depth <= depth:
            label = "  " * row.depth + (row.name.rpartition(".")[2] + ": " if row.name else "") + row.kind
            share = f"{row.forward_flops / profile.forward_flops:.1%}" if profile.forward_flops else "-"
            ms = f"{row.milliseconds:.3f}" if row.milliseconds is not None else "-"
            cells.append((label, f"{row.parameters:,}", shorten(row.forward_flops, "FLOP"), share, ms))
    return [f"    {line}" for line in table(cells, right=(1, 2, 3, 4)).split("\n")]


# --- flops_profiler: counts one micro-batch of rank 0, times another one, then reports once -------
#
#     step profile_step - 1   the first micro-batch is counted, which slows it down: it is not timed
#     step profile_step       the first micro-batch is timed by module; then the report follows
#
# Steps are numbered from 0 as ``engine.global_steps`` is, so that the timed micro-batch is warm. A
# run that is resumed behind profile_step is profiled in its first two steps.


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
        self._first_step = section.profile_step - 1  # whose micro-batch is measured next
        self._forward: Flops | None = None  # what was counted
        self._backward: int | None = None
        self._timers = make_timers(device)
        self._timed = False  # whether the forward of the micro-batch under way was
        self._open = ExitStack()  # the counter, or the hooks on modules, of the phase under way
        self.profile: ModelProfile | None = None

    def begin(self, phase: str, engine: EngineAccessors) -> None:
        if not self._measures(phase, engine):
            return
        self._open.close()  # of a phase that raised
        if self._backward is None:
            self._counter = self._open.enter_context(flop_counter())
            return
        if phase == FORWARD:
            self._timers = make_timers(self._device)
            self._open.enter_context(timed_modules(self._module, self._timers))
        self._timers.begin(f"/{phase}")

    def end(self, phase: str, engine: EngineAccessors) -> None:
        if not self._measures(phase, engine):
            return
        self._open.close()
        if self._backward is not None and self._forward is not None:
            self._timers.end(f"/{phase}")
            self._timed = True
            if phase == BACKWARD:
                self._report(self._forward, self._backward, engine.global_steps)
        elif phase == FORWARD:
            self._forward = flops_of(self._counter, self._module)
        else:
            self._backward = self._counter.get_total_flops()
            self._first_step = engine.global_steps + 1

    def _measures(self, phase: str, engine: EngineAccessors) -> bool:
        """Return whether the phase is measured. Evaluations are not, nor is a backward pass without
        its forward."""
        if self.profile is not None or engine.global_steps < self._first_step:
            return False
        if phase == BACKWARD:
            return self._timed or (self._backward is None and self._forward is not None)
        return phase == FORWARD and engine.training

    def _report(self, forward: Flops, backward: int, step: int) -> None:
        peak, section, sums = peak_of(self._device, self._dtype), self._section, self._timers.take()
        phases = (sums.pop(f"/{FORWARD}"), sums.pop(f"/{BACKWARD}"))
        self.profile = build_profile(self._module, forward, backward, sums, phases, peak)
        text = render(
            self.profile,
            title=f"FLOPs profile of rank 0, step {step}, one micro-batch of {self._samples} samples",
            detailed=section.detailed,
            module_depth=section.module_depth,
            top_modules=section.top_modules,
            recompute_fwd_factor=section.recompute_fwd_factor,
        )
        if section.output_file is None:
            log.info("%s", text)
        else:
            write_report(text, section.output_file)
