"""What DeepSpeed measures and estimates for scripts: the memory of model states at ZeRO stages 2
and 3, operations of a model, and its monitors.

Steps of an engine are measured by ds_config (``wall_clock_breakdown``, ``flops_profiler``,
monitors), and ``zero-trial plan`` says what a whole step of a model needs.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_trial.comm import rank_and_size
from zero_trial.ds_config.reader import read_ds_config
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.observe import Monitor, build_writers
from zero_trial.engine.profile import (
    Flops,
    build_profile,
    flop_counter,
    flops_of,
    make_timers,
    peak_of,
    render,
    shorten,
    timed_modules,
    write_report,
)


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
