"""Parts of DeepSpeed's other modules that only scripts for DeepSpeed need: enums of the
configuration, log, memory, tensors, groups of experts, monitors, model profiles."""

from __future__ import annotations

import gc
import logging
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zero_trial.comm import is_distributed, rank_and_size
from zero_trial.comm.rendezvous import DEFAULT_TIMEOUT_SECONDS
from zero_trial.compat.deepspeed.accelerator import get_accelerator
from zero_trial.compat.deepspeed.deepspeed_table import MOE
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
from zero_trial.errors import ConfigError

default_pg_timeout = timedelta(seconds=DEFAULT_TIMEOUT_SECONDS)
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"


# --- enums ---------------------------------------------------------------------------------------


class ZeroStageEnum(IntEnum):
    """ZeRO's stages by name."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, Enum):
    """Devices on which state can be stored."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """The kinds of state of an engine."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


# --- log ------------------------------------------------------------------------------------------


class ScriptLogger(logging.Logger):
    """``deepspeed.utils.logger``: logs warnings and above to standard output, optionally once."""

    def __init__(self, name: str, level: int = logging.WARNING) -> None:
        super().__init__(name, level)
        self.propagate = False
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d] %(message)s"))
        self.addHandler(handler)
        self._said: set[tuple[object, ...]] = set()

    def warning_once(self, msg: object, *args: object) -> None:
        """Log a warning the first time it is called with these arguments."""
        if (msg, *args) not in self._said:
            self._said.add((msg, *args))
            self.warning(msg, *args, stacklevel=2)


logger = ScriptLogger("DeepSpeed", logging.getLogger("DeepSpeed").level or logging.WARNING)
# Registered so that logging.getLogger returns this logger and setLevel() clears its cache.
logging.Logger.manager.loggerDict[logger.name] = logger


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` with this rank's number if it is in ``ranks`` (-1: all) or the only rank."""
    rank = rank_and_size()[0] if is_distributed() else -1
    chosen = list(ranks or [])
    if rank == -1 or chosen[:1] == [-1] or rank in chosen:
        logger.log(level, f"[Rank {rank}] {message}", stacklevel=2)


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Tensor], *_: Any, **__: Any) -> Callable[..., Tensor]:
    """Return ``fn``: zero.Init does not patch torch's tensor constructors."""
    return fn


# --- memory and devices ---------------------------------------------------------------------------


def see_memory_usage(message: str, force: bool = False) -> None:
    """If ``force``, print the memory of rank 0's device and host, and reset the peak."""
    if not force or rank_and_size()[0] != 0:
        return
    gc.collect()
    device, host, gib = get_accelerator(), psutil.virtual_memory(), 1024**3
    sys.stdout.write(
        f"{message}: rank 0 on {device.current_device_name()}: "
        f"allocated {device.memory_allocated() / gib:.2f} GiB (max {device.max_memory_allocated() / gib:.2f}), "
        f"reserved {device.memory_reserved() / gib:.2f} GiB (max {device.max_memory_reserved() / gib:.2f}), "
        f"host {(host.total - host.available) / gib:.2f} GiB used ({host.percent} %)\n"
    )
    device.reset_peak_memory_stats()


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return ``item`` with its tensors on ``device``. With ``criterion_func``, move only matching
    tensors, in place, so that every reference sees the move."""

    def move(tensor: Tensor) -> Tensor:
        if criterion_func is None:
            return tensor.to(device)
        if criterion_func(tensor):
            tensor.data = tensor.data.to(device)
        return tensor

    if isinstance(item, torch.nn.Module):
        return item.to(device)
    return tree_map_only(Tensor, move, item)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return ``item`` with every tensor copied to ``device``, so that torch.save does not write the
    flat buffers that contain the tensors."""
    where = torch.device(device)

    def clone(tensor: Tensor) -> Tensor:
        alone = tensor.detach()
        return alone.clone() if alone.device == where else alone.to(where)

    return tree_map_only(Tensor, clone, item)


def get_state_devices(model: Any, state: Any) -> set[torch.device]:
    """Return the devices of an engine's state of one kind (an OffloadStateTypeEnum)."""
    found: set[torch.device] = model.optimizer.devices_of(state)
    return found


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, torch and, if installed, numpy."""
    random.seed(seed)
    torch.manual_seed(seed % 2**63)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed % 2**32)


# --- deepspeed.moe.utils, for models without DeepSpeed's experts ----------------------------------


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return (False, 0): DeepSpeed's MoE layers are refused."""
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """Return whether a parameter belongs to one rank's experts (``param.allreduce`` is False)."""
    return not getattr(param, "allreduce", True)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: int | None = None
) -> list[dict[str, Any]]:
    """Return the parameter groups as a list. Raises ConfigError for parameters of experts."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any(is_moe_param(param) for group in groups for param in group["params"]):
        raise ConfigError(
            "a parameter of experts that only one rank has (allreduce is False)", where="deepspeed.moe", fix=MOE
        )
    return groups


# --- monitors -------------------------------------------------------------------------------------


def get_monitor_config(param_dict: Mapping[str, Any]) -> DsConfig:
    """Return a ds_config for :class:`MonitorMaster`, from its monitor sections."""
    sections = ("tensorboard", "wandb", "csv_monitor", "comet")
    return read_ds_config({name: param_dict[name] for name in sections if name in param_dict})


class MonitorMaster(Monitor):
    """Writes ``(name, value, step)`` to all monitors of a ds_config, on rank 0 only."""

    def __init__(self, monitor_config: DsConfig) -> None:
        super().__init__(build_writers(monitor_config, rank_and_size()[0]))
        self.monitor_config = monitor_config


# --- operations of a model ------------------------------------------------------------------------


class FlopsProfiler:
    """Counts and times the forwards of ``model`` between ``start_profile()`` and
    ``stop_profile()``, with DeepSpeed's names. Counting adds overhead, so small modules seem slower
    than they are.

    Args:
        ds_engine: accepted and ignored.
        recompute_fwd_factor: the fraction of forward that backward recomputes.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.recompute_fwd_factor = recompute_fwd_factor
        self._first = next(model.parameters(), torch.empty(0))
        self._open: ExitStack | None = None  # hooks and counter between start and stop
        self._ignored: Sequence[type[nn.Module]] | None = None
        self.reset_profile()

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Start or resume. The report has no rows for modules of classes in ``ignore_list``."""
        if self._open is None:
            self._open, self._ignored = ExitStack(), ignore_list
            self._open.enter_context(timed_modules(self.model, self._timers))
            self._counter = self._open.enter_context(flop_counter())

    def stop_profile(self) -> None:
        """Pause, and remove all hooks. The numbers remain available."""
        if self._open is None:
            return
        self._open.close()
        self._open = None
        for name, milliseconds in self._timers.take().items():
            self._milliseconds[name] += milliseconds
        flops = flops_of(self._counter, self.model)
        self._total += flops.total
        self._by_module.update(flops.by_module)

    end_profile = stop_profile

    def reset_profile(self) -> None:
        """Reset all numbers."""
        self._timers, self._milliseconds = make_timers(self._first.device), defaultdict[str, float](float)
        self._total, self._by_module = 0, Counter[str]()

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return the number of operations; a multiply-add counts as two."""
        return shorten(self._total, "FLOP") if as_string else self._total

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the number of multiply-adds."""
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
        """Write the report to standard output, or to ``output_file``."""
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

    ``input_shape`` creates one input of ones; otherwise ``args`` and ``kwargs`` are passed. Writes
    the report to standard output, or to ``output_file``, without rows for modules of the classes
    ``ignore_modules``. Raises ConfigError for an unknown mode.
    """
    if mode not in ("forward", "generate"):
        raise ConfigError(
            "no such mode", where="get_model_profile(mode)", got=repr(mode), expected="forward or generate"
        )
    profiler = FlopsProfiler(model)
    if input_shape is not None:
        first = profiler._first
        args = (torch.ones(*input_shape, dtype=first.dtype, device=first.device), *args)
    call = model if mode == "forward" else model.generate
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            for counted in (*[False] * warm_up, True):
                if counted:
                    profiler.start_profile(ignore_modules)
                call(*args, **(kwargs or {}))  # type: ignore[operator]
    finally:
        profiler.stop_profile()
        for module, training in modes:  # parts of a model in training mode may be in eval mode
            module.training = training
    if output_file is not None or print_profile:
        profiler.print_model_profile(1, module_depth, top_modules, detailed, output_file)
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
