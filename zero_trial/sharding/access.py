"""Full values of sharded things by parameter: ``safe_get_full_fp32_param`` and its kin, as RLHF and EMA code uses them."""

from __future__ import annotations

import torch
from torch import nn

from zero_trial.errors import TrialError
from zero_trial.sharding.dtypes import wide_dtype
from zero_trial.sharding.full_params import optimizer_of_param, owner_of_param
from zero_trial.sharding.model import ShardedModel
from zero_trial.sharding.optimizer import ShardedOptimizer
from zero_trial.sharding.param_group import ParamGroup


def full_of_shard(group: ParamGroup, index: int, shard: torch.Tensor) -> torch.Tensor:
    """The full tensor of slot ``index`` from every rank's ``shard`` (shard_numel,). Collective over shard."""
    shard = shard.to(group.shard.device)  # where the ranks exchange
    full = torch.empty(group.layout.numel, dtype=shard.dtype, device=shard.device)
    group.comm.all_gather(full, shard.contiguous(), f"full value from {group.name}").wait()
    slot = group.layout.slots[index]
    return full[slot.offset : slot.offset + slot.numel].view(slot.shape).clone()


def write_to_shard(group: ParamGroup, index: int, shard: torch.Tensor, value: torch.Tensor) -> None:
    """Writes this rank's part of the full ``value`` of slot ``index`` into ``shard``. Local."""
    slot = group.layout.slots[index]
    if tuple(value.shape) != slot.shape:
        raise TrialError(
            "the value does not have the parameter's shape",
            where=slot.name,
            got=tuple(value.shape),
            expected=slot.shape,
        )
    flat = value.reshape(-1)
    for piece in group.layout.pieces(group.comm.index):
        if piece.slot is slot:
            shard[piece.offset : piece.offset + piece.numel].copy_(flat[piece.start : piece.stop])


def _find(param: torch.Tensor) -> tuple[ShardedModel, ParamGroup, int]:
    holder = owner_of_param(param)
    if not isinstance(holder, ShardedModel):
        raise TrialError(
            "this parameter belongs to no engine",
            got=tuple(param.shape),
            fix="Pass a parameter of a model given to initialize().",
        )
    return holder, *holder.group_of(param)


def _optimizer_of(param: torch.Tensor) -> ShardedOptimizer:
    optimizer = optimizer_of_param(param)
    if not isinstance(optimizer, ShardedOptimizer):
        raise TrialError(
            "this engine has no optimizer", fix="Give initialize() an optimizer, or name one in ds_config."
        )
    return optimizer


def _wide(values: torch.Tensor) -> torch.Tensor:
    """fp32, or float64 where the parameter is."""
    return values.to(wide_dtype(values.dtype, torch.float32))


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """The fp32 master weight, whole. Collective over shard: every rank must call."""
    _, group, index = _find(param)
    with group.lend():
        return _wide(full_of_shard(group, index, group.master))


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Sets the fp32 master weight and the parameter to ``value`` (full shape, alike on all ranks). Collective over shard."""
    _, group, index = _find(param)
    group.settle()  # a gather under way reads the shard, and so may peers
    with group.lend():
        write_to_shard(group, index, group.master, value)
    pending = group.publish()
    if pending is not None:
        pending.wait()


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The averaged, unscaled gradient of this step, whole, after backward at the boundary; None before. Collective over shard."""
    model, group, index = _find(param)
    grad_buffer = model.grad_buffer_of(group)
    if grad_buffer is None or not grad_buffer.shard_filled:
        return None
    return _wide(full_of_shard(group, index, grad_buffer.shard)) * model.gradient_multiplier()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """State ``optim_state_key`` (``exp_avg``, ``exp_avg_sq`` ...), whole; None before the first step. Collective over shard."""
    _, group, index = _find(param)
    shard = _optimizer_of(param).state_shard(group, optim_state_key)
    return None if shard is None else full_of_shard(group, index, shard)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets state ``optim_state_key`` from ``value`` (full shape). Raises TrialError before the first step, when there is no state."""
    _, group, index = _find(param)
    shard = _optimizer_of(param).state_shard(group, optim_state_key)
    if shard is None:
        raise TrialError("the optimizer has no such state yet", where=optim_state_key, fix="Take a step first.")
    write_to_shard(group, index, shard, value)
    _optimizer_of(param).set_state_shard(group, optim_state_key, shard)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """This rank's part of the fp32 master weight, flat; empty if its shard holds none of it. Local."""
    _, group, index = _find(param)
    with group.lend():
        return _wide(_local(group, index, group.master))


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the averaged, unscaled gradient, flat; None before the boundary. Local."""
    model, group, index = _find(param)
    grad_buffer = model.grad_buffer_of(group)
    if grad_buffer is None or not grad_buffer.shard_filled:
        return None
    return _wide(_local(group, index, grad_buffer.shard)) * model.gradient_multiplier()


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of a state tensor, flat; None before the first step. Local."""
    _, group, index = _find(param)
    shard = _optimizer_of(param).state_shard(group, optim_state_key)
    return None if shard is None else _local(group, index, shard)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Accepted for code that comes from DeepSpeed, and not needed: weights outside the blocks live for the whole step, and a block's own live
    while it computes. A block's weight that another module uses belongs into ``zero_optimization.leaf_module``."""


def _local(group: ParamGroup, index: int, shard: torch.Tensor) -> torch.Tensor:
    """The elements of slot ``index`` in ``shard``, a copy."""
    slot = group.layout.slots[index]
    parts = [shard[p.offset : p.offset + p.numel] for p in group.layout.pieces(group.comm.index) if p.slot is slot]
    return torch.cat(parts) if parts else shard.new_empty(0)
