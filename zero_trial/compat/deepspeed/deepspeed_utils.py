"""Functions of deepspeed.utils, deepspeed.runtime.utils and deepspeed.checkpoint.utils that mean
nothing outside of scripts for DeepSpeed."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from zero_trial.comm import is_distributed, rank_and_size
from zero_trial.comm.rendezvous import DEFAULT_TIMEOUT_SECONDS
from zero_trial.compat.deepspeed.accelerator import get_accelerator, say_memory
from zero_trial.compat.deepspeed.deepspeed_comm import all_reduced
from zero_trial.compat.deepspeed.deepspeed_refused import MOE
from zero_trial.errors import ConfigError
from zero_trial.pipeline.partition import balanced

# --- constants ------------------------------------------------------------------------------------

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(seconds=DEFAULT_TIMEOUT_SECONDS)
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"


# --- log ------------------------------------------------------------------------------------------

log_levels: dict[str, int] = {
    name: logging.getLevelName(name.upper()) for name in ("debug", "info", "warning", "error", "critical")
}


class ScriptLogger(logging.Logger):
    """``deepspeed.utils.logger``: warnings and above go to the standard output, once if asked."""

    def __init__(self, name: str, level: int = logging.WARNING) -> None:
        super().__init__(name, level)
        self.propagate = False
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d] %(message)s"))
        self.addHandler(handler)
        self._said: set[tuple[object, ...]] = set()

    def warning_once(self, msg: object, *args: object) -> None:
        """Log a warning the first time that it comes with these arguments."""
        if (msg, *args) not in self._said:
            self._said.add((msg, *args))
            self.warning(msg, *args, stacklevel=2)


logger = ScriptLogger("DeepSpeed", logging.getLogger("DeepSpeed").level or logging.WARNING)
# logging.getLogger gives this one by name, and setLevel() reaches its cache.
logging.Logger.manager.loggerDict[logger.name] = logger
warning_once = logger.warning_once


def get_dist_msg(message: str, ranks: Sequence[int] | None = None) -> str | None:
    """Return ``message`` with this rank's number if this rank is among ``ranks`` (-1: all) or runs
    alone; else None."""
    if not is_distributed():
        return f"[Rank -1] {message}"
    rank = rank_and_size()[0]
    chosen = list(ranks or [])
    return f"[Rank {rank}] {message}" if chosen[:1] == [-1] or rank in chosen else None


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on the ranks that :func:`get_dist_msg` chooses."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        logger.log(level, text, stacklevel=2)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print ``message`` on the ranks that :func:`get_dist_msg` chooses."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        sys.stdout.write(f"{text}\n")


def get_log_level_from_string(log_level_str: str) -> int:
    """Return logging's number of a level's name."""
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise ConfigError(
            "unknown log level", where="deepspeed.utils.logging", got=log_level_str, expected=", ".join(log_levels)
        )
    return level


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of ``logger`` (or another) and of its handlers."""
    chosen = logger if custom_logger is None else custom_logger
    chosen.setLevel(get_log_level_from_string(log_level_str))
    for handler in chosen.handlers:
        handler.setLevel(chosen.level)


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Tensor], *_: Any, **__: Any) -> Callable[..., Tensor]:
    """Return ``fn``: zero.Init leaves torch's constructors of tensors as they are."""
    return fn


# --- memory and devices ---------------------------------------------------------------------------


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the memory of rank 0's device and host if ``force``, and start a new peak."""
    if force and rank_and_size()[0] == 0:
        gc.collect()
        sys.stdout.write(say_memory(message))
        get_accelerator().reset_peak_memory_stats()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Print the memory of this rank, or of ``print_rank`` alone."""
    if print_rank not in (-1, rank_and_size()[0]):
        return
    get_accelerator().synchronize()
    if reset_max:
        get_accelerator().reset_peak_memory_stats()
    sys.stdout.write(say_memory(msg))


def map_tensors(item: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return ``item`` with every tensor in its lists, tuples and mappings changed; what is none of
    these stays."""
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, (list, tuple)):
        parts = [map_tensors(part, change) for part in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    if isinstance(item, dict):
        return type(item)({key: map_tensors(part, change) for key, part in item.items()})
    return item


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return ``item`` with its tensors on ``device``. Those that meet a criterion are changed in
    place, so that every reference sees the move; with a criterion, the others stay."""

    def move(tensor: Tensor) -> Tensor:
        if criterion_func is None:
            return tensor.to(device)
        if criterion_func(tensor):
            tensor.data = tensor.data.to(device)
        return tensor

    if isinstance(item, torch.nn.Module):
        return item.to(device)
    return map_tensors(item, move)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return ``item`` with every tensor copied to ``device``, so that torch.save does not write the
    flat buffers that the tensors are parts of."""
    where = torch.device(device)

    def clone(tensor: Tensor) -> Tensor:
        alone = tensor.detach()
        return alone.clone() if alone.device == where else alone.to(where)

    return map_tensors(item, clone)


# --- norms ----------------------------------------------------------------------------------------


def _norm(tensors: Iterable[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all elements as an fp32 scalar on the accelerator; 0 of nothing."""
    device = get_accelerator().current_device_name()
    each = [torch.linalg.vector_norm(t.detach().float(), norm_type).to(device) for t in tensors]
    return torch.linalg.vector_norm(torch.stack(each), norm_type) if each else torch.zeros((), device=device)


def _over_model_parallel(own: Tensor, norm_type: float, mpu: Any) -> Tensor:
    """Return the norm over the ranks of ``mpu``'s model-parallel group. Collective over it."""
    if mpu is None or mpu.get_model_parallel_world_size() == 1:
        return own
    group = mpu.get_model_parallel_group()
    if norm_type == float("inf"):
        return all_reduced(own, group, largest=True)
    return all_reduced(own**norm_type, group) ** (1.0 / norm_type)


def is_model_parallel_parameter(p: Any) -> bool:
    """Say whether Megatron has marked ``p`` as cut over the model-parallel ranks."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def _own_part(parameters: Iterable[Any], mpu: Any) -> list[Any]:
    """Return the parameters that this model-parallel rank counts, so that replicas count once."""
    counts_all = mpu is None or mpu.get_model_parallel_rank() == 0
    return [p for p in parameters if counts_all or is_model_parallel_parameter(p)]


def _listed(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Scale the gradients down to ``max_norm`` together if they are larger, and return their norm
    before that. Each rank must hold whole gradients: an engine clips by ``gradient_clipping``.

    Collective over ``mpu``'s model-parallel group.
    """
    with_grads = [p for p in _listed(parameters) if p.grad is not None]
    grads = [p.grad for p in _own_part(with_grads, mpu) if p.grad is not None]
    total = _over_model_parallel(_norm(grads, float(norm_type)), float(norm_type), mpu)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for p in with_grads:
        if p.grad is not None:
            p.grad.detach().mul_(factor.to(p.grad.device))
    return total


# --- small things ---------------------------------------------------------------------------------


def set_random_seed(seed: int) -> None:
    """Seed Python's, torch's and, where it is installed, numpy's generators alike."""
    random.seed(seed)
    torch.manual_seed(seed % 2**63)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed % 2**32)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return num_parts + 1 boundaries of equally many items; where there are fewer items than
    parts, the last parts are empty."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    size, more = divmod(num_items, num_parts)
    return [part * size + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return num_parts + 1 boundaries whose heaviest part is as light as can be."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return balanced(weights, num_parts)


# --- names of DeepSpeed's checkpoint files, which `zero-trial ckpt convert` reads -----------------


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Return where DeepSpeed writes the module of a model-parallel rank ("00")."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Return where DeepSpeed writes a rank's optimizer states."""
    return os.path.join(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """Return where DeepSpeed writes a layer of a pipeline."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt")


# --- deepspeed.moe.utils: of models without DeepSpeed's experts -----------------------------------


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return that there are no layers of experts, and 0 experts: DeepSpeed's MoE is refused."""
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """Return whether a parameter belongs to one rank's experts (``param.allreduce`` is False)."""
    return not getattr(param, "allreduce", True)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: int | None = None
) -> list[dict[str, Any]]:
    """Return the parameter groups as a list. Raises ConfigError where one has parameters of
    experts."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any(is_moe_param(param) for group in groups for param in group["params"]):
        raise ConfigError(
            "a parameter of experts that one rank has (allreduce is False)", where="deepspeed.moe", fix=MOE
        )
    return groups
