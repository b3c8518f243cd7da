"""What one micro-batch costs: operations, parameters and milliseconds, per module; and :func:`get_model_profile` for a model alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_trial.engine.flop_count import FlopCount, Flops
from zero_trial.engine.peaks import Peak, peak_of
from zero_trial.engine.timers import Timers, make_timers
from zero_trial.errors import ConfigError


@dataclass(frozen=True)
class ModuleRow:
    """One module; numbers contain those of its children. ``milliseconds`` is its forward, None where it was not called."""

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
    """One micro-batch on one rank. ``backward_*`` are 0 where only forward was measured; milliseconds are of the whole phase."""

    rows: tuple[ModuleRow, ...]
    parameters: int
    forward_flops: int
    backward_flops: int
    forward_ms: float
    backward_ms: float
    peak: Peak

    def model_flops(self, recompute_fwd_factor: float = 0.0) -> float:
        """Operations that the mathematics needs: without the part of forward that backward does again (``recompute_fwd_factor`` of it)."""
        return self.forward_flops * (1.0 - recompute_fwd_factor) + self.backward_flops

    @property
    def achieved(self) -> float:
        """Operations done per second, recomputation included."""
        seconds = (self.forward_ms + self.backward_ms) / 1e3
        return (self.forward_flops + self.backward_flops) / seconds if seconds > 0 else 0.0

    def utilisation(self, recompute_fwd_factor: float = 0.0) -> float:
        """MFU: model operations per second as a fraction of the peak (Chowdhery et al. 2022, appendix B)."""
        done = self.forward_flops + self.backward_flops
        return self.achieved * self.model_flops(recompute_fwd_factor) / done / self.peak.per_second if done else 0.0


def build_profile(
    model: nn.Module,
    forward: Flops,
    both: Flops,
    milliseconds: Mapping[str, float],
    phases: tuple[float, float],
    peak: Peak,
) -> ModelProfile:
    """Brings counts (of forward, and of forward and backward together) and times by module name together."""
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
    ]
    return ModelProfile(tuple(rows), rows[0].parameters, forward.total, both.total - forward.total, *phases, peak)


@contextmanager
def timed_modules(model: nn.Module, timers: Timers) -> Iterator[None]:
    """Inside, ``timers`` measures the forward of every module under its name."""
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
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """``(flops, multiply-adds, parameters)`` of one forward (or ``generate``) of ``model`` in eval mode without gradients, as numbers or text.

    ``input_shape`` makes one input of ones; otherwise ``args`` and ``kwargs`` are passed. The report goes to the standard output, or to
    ``output_file``. Raises ConfigError for an unknown mode.
    """
    from zero_trial.engine.flops_report import render, shorten

    if mode not in ("forward", "generate"):
        raise ConfigError(
            "no such mode", where="get_model_profile(mode)", got=repr(mode), expected="forward or generate"
        )
    first = next(model.parameters(), torch.empty(0))
    if input_shape is not None:
        args = (torch.ones(*input_shape, dtype=first.dtype, device=first.device), *args)
    call = model if mode == "forward" else model.generate
    timers, count, training = make_timers(first.device), FlopCount(model), model.training
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
        model.train(training)
    flops, sums = count.read(), timers.take()
    profile = build_profile(model, flops, flops, sums, (sums["whole"], 0.0), peak_of(first.device, first.dtype))
    text = render(profile, title="FLOPs profile", detailed=detailed, module_depth=module_depth, top_modules=top_modules)
    if output_file is not None:
        Path(output_file).write_text(text + "\n", "utf-8")
    elif print_profile:
        sys.stdout.write(text + "\n")
    numbers = (flops.total, flops.total // 2, profile.parameters)
    if not as_string:
        return numbers
    return shorten(numbers[0], "FLOP"), shorten(numbers[1], "MAC"), shorten(numbers[2], "")
