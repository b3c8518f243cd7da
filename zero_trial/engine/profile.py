"""Stopwatches, counted floating-point operations, the peak performance of devices, and the FLOPs
profile of a model or of one engine step with its report: ``flops_profiler`` in ds_config profiles
one micro-batch of a running engine."""

from __future__ import annotations

import logging
import re
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
from torch.utils.flop_counter import FlopCounterMode

from zero_trial.device import is_accelerator, torch_module
from zero_trial.ds_config.keys_running import FlopsProfilerSection
from zero_trial.engine.accessors import EngineAccessors
from zero_trial.util.text import table

log = logging.getLogger("zero_trial")


@dataclass(frozen=True)
class Flops:
    """Operations by module name as in ``named_modules()``; "" is the whole model. Operations
    outside its modules are only in the total."""

    total: int
    by_module: Mapping[str, int]


def flop_counter() -> FlopCounterMode:
    """Return torch's counter, extended to count attention on CPU."""
    aten, counter = torch.ops.aten, FlopCounterMode(display=False)
    for suffix in ("", "_backward"):
        formula = counter.flop_registry[getattr(aten, f"_scaled_dot_product_flash_attention{suffix}")]
        counter.flop_registry[getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{suffix}")] = formula
    return counter


def flops_of(counter: FlopCounterMode, model: nn.Module) -> Flops:
    """Return what ``counter`` counted while ``model`` ran forward.

    torch tracks modules in a backward pass by hooks on their inputs and outputs. It misses modules
    whose inputs need no gradient and modules that are recomputed, so only the total of a backward
    pass is reliable.
    """
    counted = {name: sum(kinds.values()) for name, kinds in counter.get_flop_counts().items()}
    by_module: dict[str, int] = {}

    def add(name: str, module: nn.Module) -> int:
        inner = sum(add(f"{name}.{child}".lstrip("."), part) for child, part in module.named_children())
        by_module[name] = counted.get(f"{type(model).__name__}.{name}".rstrip("."), inner)  # containers never run
        return by_module[name]

    add("", model)
    return Flops(counter.get_total_flops(), by_module)


# --- the peak of a device, which MFU is a fraction of ---------------------------------------------
#
# Dense peaks from the vendors' data sheets, in TFLOP/s. For a device that the table does not list,
# and for CPUs, the best of a few matrix products is measured, and the report says so.

# Parts of torch's device name -> TFLOP/s in fp16, bf16, tf32 and fp32. The first row whose words
# all occur is used; 0: not supported.
_TERA: dict[str, tuple[float, float, float, float]] = {
    "gb200": (2500.0, 2500.0, 1250.0, 80.0),
    "b200": (2250.0, 2250.0, 1125.0, 75.0),
    "h200 nvl": (835.5, 835.5, 417.5, 60.0),
    "h200": (989.5, 989.5, 494.7, 66.9),
    "gh200": (989.5, 989.5, 494.7, 66.9),
    "h100 pcie": (756.0, 756.0, 378.0, 51.2),
    "h100 nvl": (835.5, 835.5, 417.5, 60.0),
    "h100": (989.5, 989.5, 494.7, 66.9),
    "a100": (312.0, 312.0, 156.0, 19.5),
    "v100 pcie": (112.0, 0.0, 0.0, 14.0),
    "v100": (125.0, 0.0, 0.0, 15.7),
    "l40s": (362.0, 362.0, 183.0, 91.6),
    "l40": (181.0, 181.0, 90.5, 90.5),
    "l4": (121.0, 121.0, 60.0, 30.3),
    "a10": (125.0, 125.0, 62.5, 31.2),
    "t4": (65.0, 0.0, 0.0, 8.1),
    "rtx 4090": (165.2, 165.2, 82.6, 82.6),
    "rtx 3090": (71.0, 71.0, 35.6, 35.6),
    "mi300x": (1307.4, 1307.4, 653.7, 163.4),
    "mi250x": (383.0, 383.0, 0.0, 47.9),
}

# A slice of a GPU, or a slower GPU of the same name: the data sheet's number would be wrong.
_OTHERS = frozenset({"mig", "laptop", "mobile", "max", "d", "ti"})

_SIDE, _ROUNDS = 512, 5


@dataclass(frozen=True)
class Peak:
    """``per_second`` operations, and where the number comes from."""

    per_second: float
    source: str


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the peak of matrix products in ``dtype`` on ``device``; may measure it."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
        known = data_sheet(name, dtype, tf32=tf32)
        if known is not None:
            return known
    return measure(device, dtype)


def data_sheet(name: str, dtype: torch.dtype, *, tf32: bool = False) -> Peak | None:
    """Return the dense peak of the GPU called ``name``; None if it is not in the table."""
    column = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2 if tf32 else 3}.get(dtype)
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    row = next((tera for key, tera in _TERA.items() if words.issuperset(key.split())), None)
    if row is None or column is None or not row[column] or words & _OTHERS:
        return None
    what = "tf32" if tf32 else str(dtype).removeprefix("torch.")
    return Peak(row[column] * 1e12, f"data sheet of {name}, dense {what}")


def measure(device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the best of a few square matrix products, with torch's current number of threads."""
    side = _SIDE if device.type == "cpu" else 16 * _SIDE
    # Random numbers: products of ones use less power, so a GPU would run them at a higher clock
    # than real data.
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(_ROUNDS):
        torch_module(device).synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b)
        torch_module(device).synchronize(device)
        best = min(best, time.perf_counter() - start)
    threads = f" with {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    what = str(dtype).removeprefix("torch.")
    return Peak(
        2 * side**3 / best, f"measured here: a {side} x {side} matrix product in {what} on the {device.type}{threads}"
    )


FORWARD, BACKWARD, REDUCE_WAIT, STEP = "forward", "backward", "reduce wait", "step"


# --- timers by name -------------------------------------------------------------------------------

# Measured phases that may be pending before they are added up: on an accelerator, an event each.
_PAIRS_KEPT = 1024


class _HostEvent:
    """The host's clock, with the methods of an accelerator's event."""

    def record(self) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Return immediately: the host is never behind."""

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
        """Return the sums in the order of the names' first appearance, and reset them."""
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
    """One module with its children. ``milliseconds``: of its forward, None if not called."""

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
    """One micro-batch on one rank. ``backward_*`` are 0 if only forward was measured."""

    rows: tuple[ModuleRow, ...]
    parameters: int
    forward_flops: int
    backward_flops: int
    forward_ms: float
    backward_ms: float
    peak: Peak

    def model_flops(self, recompute_fwd_factor: float = 0.0) -> float:
        """Return the operations that the computation requires: without the part of forward that
        backward recomputes (``recompute_fwd_factor`` of it)."""
        return self.forward_flops * (1.0 - recompute_fwd_factor) + self.backward_flops

    @property
    def achieved(self) -> float:
        """Return the operations per second, including recomputation."""
        seconds = (self.forward_ms + self.backward_ms) / 1e3
        return (self.forward_flops + self.backward_flops) / seconds if seconds > 0 else 0.0

    def utilisation(self, recompute_fwd_factor: float = 0.0) -> float:
        """Return the MFU, a fraction of the peak (Chowdhery et al. 2022, appendix B)."""
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
    """Combine forward's counts and times by module; skip modules of ``ignored`` classes."""
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
    """Measure the forward of every module with ``timers``, under its name, inside the block."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: timers.begin(name), prepend=True))
        handles.append(module.register_forward_hook(lambda *_, name=name: timers.end(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def write_report(text: str, output_file: str | Path | None) -> None:
    """Write a report to a file, creating its folder, or to standard output."""
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
    """Render the profile. ``module_depth``: -1 is the deepest, 0 the whole model only."""
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
    """List, for each depth, the kinds of modules with the most operations."""
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
# Steps are numbered from 0 like ``engine.global_steps``, so the timed micro-batch is warm. A run
# that is resumed after profile_step is profiled in its first two steps.


class StepProfiler:
    """Profiles the phases of an engine of ``module``; ``profile`` is None until it is complete.

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
        self._first_step = section.profile_step - 1  # step whose micro-batch is measured next
        self._forward: Flops | None = None  # what was counted
        self._backward: int | None = None
        self._timers = make_timers(device)
        self._timed = False  # whether the current micro-batch's forward was timed
        self._open = ExitStack()  # the counter, or the hooks on modules, of the current phase
        self.profile: ModelProfile | None = None

    def mfu(self, samples_per_second: float) -> float | None:
        """Return the MFU of a rank that trains this many samples per second; None before there is a
        profile."""
        if self.profile is None:
            return None
        flops = self.profile.model_flops(self._section.recompute_fwd_factor)
        return samples_per_second / self._samples * flops / self.profile.peak.per_second

    def begin(self, phase: str, engine: EngineAccessors) -> None:
        if not self._measures(phase, engine):
            return
        self._open.close()  # from a phase that raised
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
        """Return whether to measure the phase: no evaluation, no backward without its forward."""
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
