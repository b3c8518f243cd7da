"""Sharded parameters in user code: GatheredParameters, the safe_get_* and safe_set_* functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zero_trial.comm import fail_together
from zero_trial.errors import TrialError
from zero_trial.sharding.full_params import FullParams, TrainedParams, local_part
from zero_trial.sharding.guards.freed import by_owner, owner_of_param, state_of_param
from zero_trial.sharding.guards.grad_access import ShownGradients
from zero_trial.sharding.layout import SlotSlice, widened
from zero_trial.sharding.optimizer_state import StateByTensor
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.whole_tensors import WholeTensor


class GatheredParameters:
    """``with GatheredParameters(model.parameters()): ...`` reads and edits full parameters that are
    sharded.

    Inside the block the parameters hold their full values on every rank of the shard axis.
    Collective: every rank must enter.

    ``modifier_rank=None``: read only. Edits inside the block raise TrialError at its end.
    ``modifier_rank=r``: what data-parallel rank ``r`` wrote becomes the value of all ranks at every
    ZeRO stage, fp32 master weights included (elements that were not edited keep their bits). If the
    block raises on any rank, all edits are taken back; ranks on which it did not raise get
    TrialError.
    Ordinary parameters, and None in place of one, pass through untouched. ``enabled=False``:
    nothing happens. ``fwd_module`` is accepted for compatibility: uses outside a module's own
    forward need no registration here.
    """

    def __init__(
        self,
        params: torch.Tensor | nn.Module | Iterable[nn.Parameter | None],
        modifier_rank: int | None = None,
        fwd_module: Any = None,
        enabled: bool = True,
    ) -> None:
        self._owners = by_owner(_chosen(params)) if enabled else []
        self._modifier = modifier_rank

    def __enter__(self) -> None:
        for owner, params in self._owners:
            owner.open(params, reads=self._modifier is None)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = value
        if self._owners and self._modifier is not None and (value is None or isinstance(value, Exception)):
            try:
                fail_together(self._owners[0][0].comm, lambda: _reraise(value), "edited parameters", _other_failed)
            except Exception as error:
                failed = error
        undo = failed is not None and (self._modifier is not None or not isinstance(failed, Exception))
        with ExitStack() as stack:  # closes all, whatever one raises
            for owner, params in reversed(self._owners):
                stack.callback(owner.close, params, self._modifier if failed is None else None, undo=undo)
        if failed is not value and failed is not None:
            raise failed


def _reraise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _other_failed(fault: str) -> TrialError:
    return TrialError(
        "another rank raised inside a block that edits parameters: the edits of all ranks were taken back",
        where="GatheredParameters(modifier_rank=...)",
        got=fault,
        fix="Let the block raise on all ranks or on none, or fix the error of that rank.",
    )


def _chosen(params: torch.Tensor | nn.Module | Iterable[nn.Parameter | None]) -> list[nn.Parameter]:
    """List the parameters, each once."""
    if isinstance(params, nn.Module):
        return list(params.parameters())
    given = [params] if isinstance(params, torch.Tensor) else params
    return list({id(param): param for param in given if isinstance(param, nn.Parameter)}.values())


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Gather all parameters of an engine, or of its module, once for the block, and yield it: calls
    of the model in the block exchange nothing. Collective over shard."""
    with GatheredParameters(model):
        yield model


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing; exists for code that comes from DeepSpeed.

    Weights outside the blocks live for the whole step, and a block's own live while it computes. If
    another module uses a block's weight, name the module that holds both in
    ``zero_optimization.leaf_module``.
    """


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: see :func:`register_external_parameter`."""


# --- masters and optimizer state ------------------------------------------------------------------


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the full fp32 master weight; None for a frozen parameter, which has none. Collective
    over shard: every rank must call."""
    if (found := _trained(param)) is None:
        return None
    model, group, index = found
    model.take_live_edits(group)
    with group.materialized():
        return widened(full_of_shard(group, index, group.master))


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the fp32 master weight and the parameter to ``value`` (full shape, alike on all ranks).
    Collective over shard."""
    model, group, index = find_param(param)
    with _republished(model, group):
        _write_part(group, index, group.master, _own_part(group, index, value))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return the full state ``optim_state_key`` (``exp_avg``, ``exp_avg_sq`` ...); None before the
    first step, and for a frozen parameter. Collective over shard."""
    if (found := _trained(param)) is None:
        return None
    _, group, index = found
    if (tensor := _state_of(param).whole_tensor(group, index)) is not None:
        return _from_owner(param, tensor, optim_state_key)
    shard = _state_on_all(param, group, optim_state_key)
    return None if shard is None else full_of_shard(group, index, shard)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set state ``optim_state_key`` from ``value`` (full shape). Raises TrialError before the first
    step, when there is no state. Collective over shard."""
    _, group, index = find_param(param)
    if (tensor := _state_of(param).whole_tensor(group, index)) is not None:
        _to_owner(param, tensor, optim_state_key, value)
        return
    shard = _state_on_all(param, group, optim_state_key)
    _set_state(param, group, index, optim_state_key, shard, _own_part(group, index, value))


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the fp32 master weight, flat; empty if its shard holds none of it,
    None for a frozen parameter. Local."""
    if (found := _trained(param)) is None:
        return None
    model, group, index = found
    model.take_live_edits(group)
    with group.materialized():
        return widened(local_part(group, index, group.master))


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the fp32 master weight, as :func:`safe_get_local_fp32_param` returns
    it, and publish the parameter. Collective over shard: every rank sets its own part."""
    model, group, index = find_param(param)
    with _republished(model, group):
        _write_part(group, index, group.master, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's part of a state tensor, flat; None before the first step, and for a frozen
    parameter. Local.

    Of a tensor that one rank updates whole, that rank has all of it, and the others have nothing.
    """
    if (found := _trained(param)) is None:
        return None
    _, group, index = found
    if (tensor := _state_of(param).whole_tensor(group, index)) is not None:
        state = _state_of(param).own_state(tensor, optim_state_key)
        return state.detach().reshape(-1).clone() if state is not None else None
    shard = _state_of(param).state_shard(group, optim_state_key)
    return None if shard is None else local_part(group, index, shard)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's part of state ``optim_state_key``. Local; raises TrialError before the first
    step, when there is no state."""
    _, group, index = find_param(param)
    if (tensor := _state_of(param).whole_tensor(group, index)) is not None:
        state = _state_of(param).own_state(tensor, optim_state_key)
        if state is None or state.numel() != value.numel():
            got = "no such state here" if state is None else f"{value.numel()} elements"
            raise TrialError("not this rank's part of the optimizer state", where=optim_state_key, got=got)
        state.copy_(value.view(state.shape))
        return
    _set_state(param, group, index, optim_state_key, _state_of(param).state_shard(group, optim_state_key), value)


def _set_state(
    param: nn.Parameter, group: ParamGroup, index: int, kind: str, shard: torch.Tensor | None, part: torch.Tensor
) -> None:
    if shard is None:
        raise _no_state(kind)
    _write_part(group, index, shard, part)
    _state_of(param).set_state_shard(group, kind, shard)


# --- gradients, between the last backward pass of a step and the step -----------------------------


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the full averaged, unscaled gradient of this step after backward at the boundary.
    Collective over shard.

    Before the reduction (inside ``no_sync`` or ``coalesce_grad_reduction``, and between
    micro-batches that are reduced together) it returns a copy of this rank's own sum, as
    ``param.grad`` has it: not averaged over ranks, and in fp16 times the loss scale. Returns None
    if there is no gradient. Local in these cases.
    """
    found = _trained(param)
    shown = found[0].param_grads.of(found[1]) if found is not None else None
    if found is None or shown is None:
        return None
    model, group, index = found
    if not shown.grad_buffer.shard_filled:
        own = shown.grad_buffer.unreduced(index)
        return None if own is None else own.detach().clone()
    slot = group.layout.slots[index]
    return _full_grad(model, shown)[slot.offset : slot.offset + slot.numel].view(slot.shape).clone()


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the averaged, unscaled gradient, flat; None before the boundary.
    Local."""
    found = _trained(param)
    shown = found[0].param_grads.of(found[1]) if found is not None else None
    if found is None or shown is None or not shown.grad_buffer.shard_filled:
        return None
    model, group, index = found
    model.param_grads.take_edits()
    return widened(local_part(group, index, shown.grad_buffer.reduced())) * model.param_grads.multiplier()


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the averaged, unscaled gradient of this step (full shape, alike on all ranks). Local.

    The norm of the step is that of the new values. Raises TrialError before the last backward pass
    of a step.
    """
    model, group, index = find_param(param)
    own = _own_part(group, index, value)
    _set_local_grad(model, _reduced_grad(model, param, "safe_set_full_grad"), index, own)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the averaged, unscaled gradient, as :func:`safe_get_local_grad`
    returns it. Local; raises TrialError as :func:`safe_set_full_grad` does."""
    model, _, index = find_param(param)
    _set_local_grad(model, _reduced_grad(model, param, "safe_set_local_grad"), index, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Set the gradient of each parameter to ``update_func(its full gradient, it)``. Gathers each
    group once. Collective over shard; raises TrialError as :func:`safe_set_full_grad` does."""
    gathered: dict[int, torch.Tensor] = {}
    for param in [param for param in param_list if param.requires_grad]:
        model, group, index = find_param(param)
        shown, slot = _reduced_grad(model, param, "safe_update_full_grad_vectorized"), group.layout.slots[index]
        if id(group) not in gathered:
            gathered[id(group)] = _full_grad(model, shown)
        full = gathered[id(group)][slot.offset : slot.offset + slot.numel].view(slot.shape)
        safe_set_full_grad(param, update_func(full, param))


# --- parts of shards ------------------------------------------------------------------------------


def _pieces(group: ParamGroup, index: int) -> list[SlotSlice]:
    """List the parts of slot ``index`` that this rank's shard holds."""
    return [piece for piece in group.layout.pieces(group.comm.index) if piece.slot is group.layout.slots[index]]


def _own_part(group: ParamGroup, index: int, value: torch.Tensor) -> torch.Tensor:
    """Return the elements of the full ``value`` of slot ``index`` that this rank's shard holds,
    flat."""
    slot = group.layout.slots[index]
    if tuple(value.shape) != slot.shape:
        raise TrialError(
            "the value does not have the parameter's shape",
            where=slot.name,
            got=tuple(value.shape),
            expected=slot.shape,
        )
    flat = value.detach().reshape(-1)
    return torch.cat([flat[:0], *(flat[piece.start : piece.stop] for piece in _pieces(group, index))])


def _write_part(group: ParamGroup, index: int, shard: torch.Tensor, value: torch.Tensor, factor: float = 1.0) -> None:
    """Write ``value``, this rank's part of slot ``index``, divided by ``factor`` into ``shard``."""
    pieces, flat, start = _pieces(group, index), value.detach().reshape(-1), 0
    if flat.numel() != sum(piece.numel for piece in pieces):
        raise TrialError(
            "the value does not have the size of this rank's part",
            where=group.layout.slots[index].name,
            got=flat.numel(),
            expected=sum(piece.numel for piece in pieces),
        )
    for piece in pieces:
        own, part = shard[piece.offset : piece.offset + piece.numel], flat[start : start + piece.numel]
        own.copy_(part if factor == 1.0 else part.to(widened(own)) / factor)
        start += piece.numel


@contextmanager
def _republished(model: TrainedParams, group: ParamGroup) -> Iterator[None]:
    """Open ``group.master`` to be written, and publish it at the end. Collective over shard."""
    model.take_live_edits(group)  # of other parameters of the group: they are published, too
    group.wait_before_writing()  # a gather under way reads the shard, and so may peers
    with group.materialized():
        yield
    model.publisher.publish_now(group)


def _trained(param: torch.Tensor) -> tuple[TrainedParams, ParamGroup, int] | None:
    """Return what :func:`find_param` does; None for a parameter that was frozen at
    ``initialize()``."""
    if not param.requires_grad and owner_of_param(param) is None:
        return None
    found = find_param(param)
    return found if found[1].trainable else None


def find_param(param: torch.Tensor) -> tuple[TrainedParams, ParamGroup, int]:
    """Return the model that trains ``param``, its group, and its slot's index there."""
    owner = owner_of_param(param)
    model = owner.model() if isinstance(owner, FullParams) else None
    if model is None:
        raise TrialError(
            "this parameter belongs to no engine",
            got=tuple(param.shape),
            fix="Pass a parameter of a model given to initialize().",
        )
    return model, *model.group_of(param)


def _state_on_all(param: nn.Parameter, group: ParamGroup, kind: str) -> torch.Tensor | None:
    """Return this rank's shard of state ``kind``, without values where it has none because its
    shard is padding or holds tensors that are updated whole; None where no rank has such state.
    Collective over shard."""
    shard = _state_of(param).state_shard(group, kind)
    own = None if shard is None else str(shard.dtype).removeprefix("torch.")
    found = next(filter(None, group.comm.gather_json(own, "optimizer state")), None)
    if shard is None and found is not None:
        shard = group.shard.new_empty(group.layout.shard_numel, dtype=getattr(torch, found))
    return shard


def _reduced_grad(model: TrainedParams, param: nn.Parameter, where: str) -> ShownGradients:
    """Return the gradients of the parameter's group. Raises TrialError where there are none yet."""
    _, group, index = find_param(param)
    shown = model.param_grads.of(group)
    if shown is None or not shown.grad_buffer.shard_filled:
        raise TrialError(
            "there is no gradient to set yet" if shown is not None else "this parameter is not trained",
            where=f"{where}({group.layout.slots[index].name})",
            fix="Call it between the last engine.backward() of a step and engine.step().",
        )
    return shown


def _full_grad(model: TrainedParams, shown: ShownGradients) -> torch.Tensor:
    """Return the group's averaged gradient (n,). Collective over shard."""
    model.param_grads.take_edits()
    group = shown.grad_buffer.group
    shard = shown.grad_buffer.reduced().to(group.shard.device).contiguous()
    full = shard.new_empty(group.layout.numel)
    group.comm.all_gather(full, shard, f"gradient of {group.name}").wait()
    return widened(full) * model.param_grads.multiplier()


def _set_local_grad(model: TrainedParams, shown: ShownGradients, index: int, values: torch.Tensor) -> None:
    """Write this rank's elements (averaged, unscaled) of parameter ``index`` into its shard."""
    model.param_grads.take_edits()
    buffer = shown.grad_buffer
    _write_part(buffer.group, index, buffer.shard, values, model.param_grads.multiplier())
    model.param_grads.changed(buffer)


def _no_state(kind: str) -> TrialError:
    return TrialError("the optimizer has no such state yet", where=kind, fix="Take a step first.")


def _from_owner(param: nn.Parameter, tensor: WholeTensor, kind: str) -> torch.Tensor | None:
    """Return state ``kind`` of a tensor that is updated whole, in its own shape and dtype, on every
    rank. Collective over shard."""
    comm, value = tensor.group.comm, _state_of(param).own_state(tensor, kind)
    described = [list(value.shape), str(value.dtype).removeprefix("torch.")] if value is not None else None
    found = comm.gather_json(described, "optimizer state of a whole tensor")[tensor.owner]
    if found is None:
        return None
    shape, dtype = found
    device = tensor.group.shard.device
    if value is None or comm.index != tensor.owner:
        full = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    else:
        full = value.detach().to(device, copy=True)
    comm.broadcast(full, "optimizer state of a whole tensor", tensor.owner)
    return full


def _to_owner(param: nn.Parameter, tensor: WholeTensor, kind: str, value: torch.Tensor) -> None:
    """Set state ``kind`` of a tensor that is updated whole. Collective over shard."""
    comm, own = tensor.group.comm, _state_of(param).own_state(tensor, kind)
    found = comm.gather_json(list(own.shape) if own is not None else None, "optimizer state of a whole tensor")
    shape = found[tensor.owner]
    if shape is None:
        raise _no_state(kind)
    if shape != list(value.shape):
        raise TrialError(
            "the value does not have the state's shape", where=kind, got=tuple(value.shape), expected=shape
        )
    if own is not None and comm.index == tensor.owner:
        own.copy_(value)


def _state_of(param: torch.Tensor) -> StateByTensor:
    state: StateByTensor | None = state_of_param(param)
    if state is None:
        raise TrialError(
            "this engine has no optimizer", fix="Give initialize() an optimizer, or name one in ds_config."
        )
    return state


def full_of_shard(group: ParamGroup, index: int, shard: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of slot ``index`` from every rank's ``shard`` (shard_numel,).
    Collective over shard."""
    shard = shard.to(group.shard.device)  # where the ranks exchange
    full = torch.empty(group.layout.numel, dtype=shard.dtype, device=shard.device)
    group.comm.all_gather(full, shard.contiguous(), f"full value from {group.name}").wait()
    slot = group.layout.slots[index]
    return full[slot.offset : slot.offset + slot.numel].view(slot.shape).clone()
