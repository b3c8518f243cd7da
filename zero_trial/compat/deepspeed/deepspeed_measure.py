"""What DeepSpeed measures and estimates for scripts: named timers, samples per second, the memory
of model states at ZeRO stages 2 and 3, operations of a model, numbers as text, and its monitors.

Steps of an engine are measured by ds_config (``wall_clock_breakdown``, ``flops_profiler``,
monitors), and ``zero-trial plan`` says what a whole step of a model needs.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_trial.comm import rank_and_size
from zero_trial.compat.deepspeed.accelerator import get_accelerator
from zero_trial.compat.deepspeed.deepspeed_utils import logger, print_dist
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.flop_count import Flops, flop_counter, flops_of, peak_of
from zero_trial.engine.monitors import Monitor, build_writers
from zero_trial.engine.profile import build_profile, make_timers, render, shorten, timed_modules, write_report
from zero_trial.errors import TrialError

TIME_EPSILON = 1e-6

# --- timers ---------------------------------------------------------------------------------------


class _Timer:
    """Milliseconds between :meth:`start` and :meth:`stop`: of the host, or on CUDA of the current
    stream, without waiting for it until they are read."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._first: Any = None
        self._records: list[Any] = []  # milliseconds, or pairs of events

    def start(self) -> None:
        """Begin a record. Raises TrialError if one has begun."""
        self._require(started=False)
        self._first, self.started_ = _now(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End the record. Raises TrialError if none has begun; the arguments change nothing, as in
        DeepSpeed."""
        self._require(started=True)
        self._records.append((self._first, _now()))
        self.started_ = False

    def reset(self) -> None:
        """Forget all records."""
        self.started_ = False
        self._records.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Return the sum of all records, with that which has begun; then begin again, if ``reset``
        without the old ones."""
        running = self.started_
        if running:
            self.stop()
        total = sum(self._milliseconds())
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """Return the mean record, without the tenth of them at either end."""
        self.elapsed(reset=False)
        return trim_mean(self._milliseconds(), 0.1)

    def _milliseconds(self) -> list[float]:
        self._records = [_between(*record) if isinstance(record, tuple) else record for record in self._records]
        return self._records

    def _require(self, *, started: bool) -> None:
        if self.started_ is not started:
            raise TrialError(
                "the timer has not been started" if started else "the timer has been started already",
                where=f"SynchronizedWallClockTimer({self.name_!r})",
            )


def _now() -> Any:
    """Return the host's time, or an event on the current stream."""
    if get_accelerator().use_host_timers():
        return time.perf_counter()
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, last: Any) -> float:
    """Return the milliseconds between two results of :func:`_now`."""
    if isinstance(first, float):
        return float(last - first) * 1e3
    last.synchronize()
    return float(first.elapsed_time(last))


class SynchronizedWallClockTimer:
    """Timers by name: ``timers("fwd").start()``."""

    Timer = _Timer

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def get_timers(self) -> dict[str, _Timer]:
        """Return the timers that were used."""
        return self.timers

    def __call__(self, name: str) -> _Timer:
        return self.timers.setdefault(name, _Timer(name))

    @staticmethod
    def memory_usage() -> str:
        """Return allocated and cached memory of the device and their peaks, in GiB."""
        device = get_accelerator()
        sizes = {
            "mem_allocated": device.memory_allocated(),
            "max_mem_allocated": device.max_memory_allocated(),
            "cache_allocated": device.memory_cached(),
            "max_cache_allocated": device.max_memory_cached(),
        }
        return "".join(f" | {name}: {size / 2**30:.4f} GB" for name, size in sizes.items())

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print the milliseconds of the timers that were used, divided by ``normalizer``."""
        used = [(name, self.timers[name].elapsed(reset=reset) / normalizer) for name in names if name in self.timers]
        text = "".join(["time (ms)", *(f" | {name}: {milliseconds:.2f}" for name, milliseconds in used)])
        print_dist(text + (self.memory_usage() if memory_breakdown else ""), ranks=ranks or [0])

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean records in microseconds, divided by ``normalizer``."""
        return {name: self.timers[name].mean() * 1e3 / normalizer for name in names if name in self.timers}


class ThroughputTimer:
    """Samples per second between ``start()`` and ``stop(global_step=True)``, without the first
    ``start_step`` steps.

    Args:
        config: with ``enabled`` and ``synchronized`` (wait for the device at both ends).
        batch_size: samples of all ranks per step.
        steps_per_output: log at every so many steps; None: never.
        logging_fn: takes the line; default: ``deepspeed.utils.logger.info``.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        self.config = config
        self.batch_size = batch_size or 1
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or logger.info
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self.started = False
        self._began: float | None = None

    def update_epoch_count(self) -> None:
        """Begin another epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begin a micro-step."""
        if self.config.enabled:
            self.started = True
            self._began = self._clock() if self.global_step_count >= self.start_step else None

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-step; ``global_step``: and a step."""
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += int(global_step)
        if self._began is None:
            return
        seconds = self._clock() - self._began
        self.total_elapsed_time += seconds
        self.step_elapsed_time += seconds
        if global_step:
            if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
                self._report()
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Return the samples per second of all measured steps; -inf before the first."""
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / self.total_elapsed_time if steps > 0 else float("-inf")

    def _clock(self) -> float:
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.perf_counter()

    def _report(self) -> None:
        now = self.batch_size / (self.step_elapsed_time + TIME_EPSILON)
        self.logging(
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={now}"
            + (SynchronizedWallClockTimer.memory_usage() if self.monitor_memory else "")
        )


class NoopTimer:
    """Timers that measure nothing."""

    class Timer:
        """One of them."""

        def start(self, **_: Any) -> None:
            """Do nothing."""

        stop = reset = start

        def elapsed(self, **_: Any) -> float:
            return 0

        def mean(self) -> float:
            return 0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> NoopTimer.Timer:
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        return {}

    def log(self, names: Sequence[str], *_: Any, **__: Any) -> None:
        """Do nothing."""

    get_mean = log


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean of ``data`` without that part (0 to 1) of it at either end; 0 of nothing."""
    cut = round(len(data) * trim_percent)
    kept = sorted(data)[cut : len(data) - cut]
    return sum(kept) / len(kept) if kept else 0


# --- where states are -----------------------------------------------------------------------------


def get_state_devices(model: Any, state: Any) -> set[torch.device]:
    """Return the devices on which an engine's states of a kind (a member of OffloadStateTypeEnum)
    are now."""
    found: set[torch.device] = model.optimizer.devices_of(state)
    return found


# --- memory of model states: 16-bit parameters, fp32 masters and Adam's moments -------------------


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return the bytes of a host and of a device at ZeRO stage 2, between steps, for Ψ parameters
    on N devices: 2 Ψ + 14 Ψ/N on a device, of which ``cpu_offload`` moves 12 Ψ/N to its host. Every
    rank builds the model in its host's memory first, 4 Ψ each."""
    ranks = num_gpus_per_node * num_nodes
    states = 12 * total_params * num_gpus_per_node // ranks if cpu_offload else 0
    host = max(4 * total_params * num_gpus_per_node, states)
    return int(host * additional_buffer_factor), 2 * total_params + (2 if cpu_offload else 14) * total_params // ranks


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return the bytes of a host and of a device at ZeRO stage 3, and those of the largest layer,
    which is gathered in 16 bits with its gradients: 16 Ψ/N on a device, of which ``cpu_offload``
    moves 12 Ψ/N and ``cpu_offload_params`` 2 Ψ/N to its host.

    Without ``zero_init`` every rank builds the model in its host's memory first, 4 Ψ each; with it
    the largest layer alone."""
    ranks = num_gpus_per_node * num_nodes
    moved = 12 * cpu_offload + 2 * (cpu_offload and cpu_offload_params)
    building = 4 * (largest_layer_params if zero_init else total_params) * num_gpus_per_node
    host = max(building, moved * total_params * num_gpus_per_node // ranks)
    layer = 4 * largest_layer_params
    return int(host * additional_buffer_factor), layer + (16 - moved) * total_params // ranks, layer


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print :func:`estimate_zero2_model_states_mem_needs` with and without offloading."""
    rows = [
        (
            {"offload_optimizer": "cpu" if offload else "none"},
            estimate_zero2_model_states_mem_needs(
                total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
            ),
        )
        for offload in (True, False)
    ]
    _print_table(f"{total_params:,} parameters", num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print :func:`estimate_zero3_model_states_mem_needs` with and without offloading and
    zero.Init."""
    sizes = (total_params, largest_layer_params, num_gpus_per_node, num_nodes)
    rows = []
    for states, params in ((True, True), (True, False), (False, False)):
        for early in (True, False):
            options = {
                "offload_param": "cpu" if params else "none",
                "offload_optimizer": "cpu" if states else "none",
                "zero_init": int(early),
            }
            found = estimate_zero3_model_states_mem_needs(*sizes, states, params, early, additional_buffer_factor)
            rows.append((options, found[:2]))
    title = f"{total_params:,} parameters, {largest_layer_params:,} in the largest layer"
    _print_table(title, num_gpus_per_node, num_nodes, rows)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates for the parameters of ``model``."""
    total = sum(param.numel() for param in model.parameters())
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates for the parameters of ``model``; a layer is a module with parameters of
    its own."""
    total = sum(param.numel() for param in model.parameters())
    largest = max(sum(param.numel() for param in part.parameters(recurse=False)) for part in model.modules())
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def _print_table(model: str, gpus: int, nodes: int, rows: Sequence[tuple[Mapping[str, Any], tuple[int, int]]]) -> None:
    lines = [
        f"Estimated memory of model states: {model}, {nodes} hosts with {gpus} devices each",
        "  per host | per device | options",
    ]
    for options, (host, device) in rows:
        settings = ", ".join(f"{name}={value}" for name, value in options.items())
        lines.append(f"{host / 2**30:9.2f}GB | {device / 2**30:8.2f}GB | {settings}")
    sys.stdout.write("\n".join(lines) + "\n")


# --- operations of a model ------------------------------------------------------------------------


class FlopsProfiler:
    """Counts and times the forwards of ``model`` between ``start_profile()`` and
    ``stop_profile()``, backward passes between them too; DeepSpeed's names.

    It counts while it times, so that small modules seem slower than they are:
    :func:`get_model_profile` and ds_config's ``flops_profiler`` do one after the other.

    Args:
        ds_engine: accepted; it changes nothing.
        recompute_fwd_factor: the part of forward that backward does again.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._first = next(model.parameters(), torch.empty(0))
        self._hooks = ExitStack()
        self._ignored: Sequence[type[nn.Module]] | None = None
        self.reset_profile()

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Begin, or go on after ``stop_profile()``. The report has no rows for modules of the
        classes ``ignore_list``."""
        if not self.started:
            self.started, self._ignored = True, ignore_list
            self._hooks.enter_context(timed_modules(self.model, self._timers))
            self._counter = self._hooks.enter_context(flop_counter())

    def stop_profile(self) -> None:
        """Pause; the numbers can be read."""
        if self.started:
            self.started = False
            self._hooks.close()
            for name, milliseconds in self._timers.take().items():
                self._milliseconds[name] += milliseconds
            flops = flops_of(self._counter, self.model)
            self._total += flops.total
            self._by_module.update(flops.by_module)

    def reset_profile(self) -> None:
        """Forget all numbers."""
        self._timers, self._milliseconds = make_timers(self._first.device), defaultdict[str, float](float)
        self._total, self._by_module = 0, Counter[str]()

    def end_profile(self) -> None:
        """Stop, and take all hooks off. The numbers stay."""
        self.stop_profile()

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return the operations, a multiply-add as two."""
        return shorten(self._total, "FLOP") if as_string else self._total

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the multiply-adds."""
        return shorten(self._total // 2, "MAC") if as_string else self._total // 2

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return the seconds of the model's forwards."""
        seconds = self._milliseconds.get("", 0.0) / 1e3
        return f"{seconds:.4g} s" if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Return the number of parameters."""
        total = sum(param.numel() for param in self.model.parameters())
        return shorten(total, "") if as_string else total

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | Path | None = None,
    ) -> None:
        """Write the report to the standard output, or to ``output_file``."""
        self.stop_profile()
        flops, ms = Flops(self._total, self._by_module), self._milliseconds
        peak = peak_of(self._first.device, self._first.dtype)
        profile = build_profile(self.model, flops, 0, ms, (ms.get("", 0.0), 0.0), peak, self._ignored)
        text = render(
            profile,
            title=f"FLOPs profile, step {profile_step}",
            detailed=detailed,
            module_depth=module_depth,
            top_modules=top_modules,
            recompute_fwd_factor=self.recompute_fwd_factor,
        )
        write_report(text, output_file)


# --- numbers as text ------------------------------------------------------------------------------


_MAGNITUDES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Return ``num`` with the largest prefix that it reaches, or with ``units``."""
    if units is None:
        units = "" if num == 0 else next((name for name, size in _MAGNITUDES.items() if num >= size), "u")
    return f"{round(num / _MAGNITUDES.get(units, 1.0), precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number of operations as :func:`number_to_string`, with FLOPS."""
    return number_to_string(flops, units, precision) + "FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number of multiply-adds as :func:`number_to_string`, with MACs."""
    return number_to_string(macs, units, precision) + "MACs"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """Return a size as :func:`number_to_string`, with B."""
    return number_to_string(b, units, precision) + "B"


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Return seconds as :func:`number_to_string`, with s."""
    return number_to_string(duration, units, precision) + "s"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Return a count with K, M or B."""
    return number_to_string(params_num, units.replace("B", "G") if units else None, precision).replace("G", "B").strip()


# --- monitors -------------------------------------------------------------------------------------


def get_monitor_config(param_dict: Mapping[str, Any]) -> DsConfig:
    """Return the sections of a ds_config (dict) that switch monitors on, for
    :class:`MonitorMaster`."""
    sections = ("tensorboard", "wandb", "csv_monitor", "comet")
    return read_ds_config({name: param_dict[name] for name in sections if name in param_dict})


class MonitorMaster(Monitor):
    """Writes ``(name, value, step)`` to all monitors that a ds_config switches on; on rank 0, and
    nowhere else."""

    def __init__(self, monitor_config: DsConfig) -> None:
        super().__init__(build_writers(monitor_config, rank_and_size()[0]))
        self.monitor_config = monitor_config
