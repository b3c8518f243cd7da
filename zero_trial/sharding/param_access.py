"""Sharded parameters in user code: GatheredParameters, the safe_get_* and safe_set_* functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from zero_trial.comm import fail_together
from zero_trial.errors import TrialError
from zero_trial.sharding.full_params import FullParams, TrainedParams
from zero_trial.sharding.guards.freed import by_owner, owner_of_param, state_of_param
from zero_trial.sharding.guards.grad_access import ShownGradients
from zero_trial.sharding.layout import ParamSlot, widened
from zero_trial.sharding.optimizer_state import StateByTensor, TensorSlice, slices_of
from zero_trial.sharding.param_group import ParamGroup


class GatheredParameters:
    """Read and edit the full values of sharded parameters: ``with
    GatheredParameters(model.parameters()): ...``.

    Inside the block, the parameters hold their full values on every rank of the shard axis.
    Collective: every rank must enter the block.

    ``modifier_rank=None``: read-only; edits inside the block raise TrialError at its end.
    ``modifier_rank=r``: at the end, the values on data-parallel rank ``r`` become the values on all
    ranks at every ZeRO stage, including the fp32 masters (elements that were not edited keep their
    bits). If the block raises an error on any rank, all edits are reverted, and the other ranks
    raise TrialError. Ordinary parameters, and None instead of a parameter, are not changed.
    ``enabled=False``: a no-op. ``fwd_module`` is accepted for compatibility: uses outside a
    module's own forward need no registration here.
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
        with ExitStack() as stack:  # closes all, even if one raises
            for owner, params in reversed(self._owners):
                stack.callback(owner.close, params, self._modifier if failed is None else None, undo=undo)
        if failed is not value and failed is not None:
            raise failed


def _reraise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _other_failed(fault: str) -> TrialError:
    return TrialError(
        "another rank raised inside a block that edits parameters: the edits of all ranks were discarded",
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
    """Gather all parameters of an engine, or of its module, once for the block, and yield the
    module: calls of the model inside the block do not communicate. Collective over shard."""
    with GatheredParameters(model):
        yield model


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing; exists for compatibility with DeepSpeed.

    Weights outside the blocks are in memory for the whole step, and a block's own weights while it
    computes. If another module uses a block's weight, add the module that contains both to
    ``zero_optimization.leaf_module``.
    """


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: see :func:`register_external_parameter`."""


# --- masters, optimizer state and gradients -------------------------------------------------------
#
# Each of the three is in slices on the ranks of the shard axis, or as a whole on one rank. A full
# value is gathered from the slices, a local one is those of this rank.


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the full fp32 master weight, or None for a frozen parameter, which has none.
    Collective over shard: every rank must call it."""
    return _of_master(param, _gathered)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the fp32 master weight as a flat tensor: empty if this rank's
    shard contains none of it, None for a frozen parameter. Local."""
    return _of_master(param, _joined)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the master and the parameter to ``value`` (full shape, the same on all ranks). Collective
    over shard."""
    safe_set_local_fp32_param(param, _own_part(find_param(param), value))


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the fp32 master weight, as :func:`safe_get_local_fp32_param` returns
    it, and publish the parameter. Collective over shard: every rank sets its own part."""
    found = find_param(param)
    model, group, _ = found
    model.take_live_edits(group)  # of other parameters of the group: they are published, too
    group.wait_before_writing()  # a gather under way reads the shard, and so may peers
    with group.materialized():
        _write(found.slices("master", group.master), value)
    model.unsharder.publish([group])


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return the full state ``optim_state_key`` (``exp_avg``, ``exp_avg_sq`` ...), or None before
    the first step and for a frozen parameter. Collective over shard."""
    return _of_state(param, optim_state_key, _gathered)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's part of a state tensor as a flat tensor, or None before the first step and
    for a frozen parameter. Local.

    If one rank updates a whole tensor, that rank has all of its state, and the others have none.
    """
    found = _of_state(param, optim_state_key, _joined)
    return found if found is None or found.numel() or _state_of(param).has(optim_state_key) else None


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set the state ``optim_state_key`` to ``value`` (full shape). Raises TrialError before the
    first step, when no state exists. Collective over shard."""
    found = find_param(param)
    with _state_of(param).slices(found.group, found.slot, optim_state_key) as slices:
        shapes = found.group.comm.gather_json([list(each.shape) for each in slices[:1]], "shape of a state")
        shape = next((shape for shapes_there in shapes for shape in shapes_there), None)
        if shape is None:
            raise _no_state(optim_state_key)
        _require_shape(value, tuple(shape), optim_state_key)
        flat = value.detach().reshape(-1)
        _write(slices, torch.cat([flat[:0], *(flat[each.start : each.stop] for each in slices)]))


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's part of a state. Local; raises TrialError before the first step."""
    found, state = find_param(param), _state_of(param)
    with state.slices(found.group, found.slot, optim_state_key) as slices:
        if not slices and not state.has(optim_state_key):
            raise _no_state(optim_state_key)
        _write(slices, value)


# Gradients: between the last backward pass of a step and the step.


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the full averaged, unscaled gradient of this step, after backward at the boundary.
    Collective over shard.

    Before the reduction (inside ``no_sync`` or ``coalesce_grad_reduction``, and between
    micro-batches that are reduced together), return a copy of this rank's own sum, as in
    ``param.grad``: not averaged over ranks, and in fp16 multiplied by the loss scale. If there is
    no gradient, return None. Local in these cases.
    """
    found = _trained(param)
    shown = found.model.param_grads.of(found.group) if found is not None else None
    if found is None or shown is None:
        return None
    if not shown.grad_buffer.shard_filled:
        own = shown.grad_buffer.unreduced(found.number)
        return None if own is None else own.detach().clone()
    return _of_grad(found, shown, _gathered)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the averaged, unscaled gradient; None before the boundary."""
    found = _trained(param)
    shown = found.model.param_grads.of(found.group) if found is not None else None
    if found is None or shown is None or not shown.grad_buffer.shard_filled:
        return None
    return _of_grad(found, shown, _joined)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the averaged, unscaled gradient of this step (full shape, the same on all ranks). Local.

    The step's gradient norm is computed from the new values. Raises TrialError before the last
    backward pass of a step.
    """
    _set_grad(param, _own_part(find_param(param), value), "safe_set_full_grad")


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the averaged, unscaled gradient, as :func:`safe_get_local_grad`
    returns it. Local; raises TrialError as :func:`safe_set_full_grad` does."""
    _set_grad(param, value, "safe_set_local_grad")


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Set the gradient of each parameter to ``update_func(full gradient, parameter)``. Collective
    over shard; raises TrialError as :func:`safe_set_full_grad` does."""
    for param in [param for param in param_list if param.requires_grad]:
        found = find_param(param)
        full = _of_grad(found, _reduced_grad(found, "safe_update_full_grad_vectorized"), _gathered)
        safe_set_full_grad(param, update_func(full, param))


# --- slices of tensors ----------------------------------------------------------------------------


class TrainedParam(NamedTuple):
    """A parameter's model, its group, and the number of its slot there."""

    model: TrainedParams
    group: ParamGroup
    number: int

    @property
    def slot(self) -> ParamSlot:
        return self.group.layout.slots[self.number]

    def slices(self, kind: str, shard: torch.Tensor) -> list[TensorSlice]:
        """List the slices of the parameter in ``shard`` (shard_numel,): one, or none."""
        return list(slices_of(self.group, kind, shard, self.slot))


def find_param(param: torch.Tensor) -> TrainedParam:
    """Return the model, group and slot of ``param``."""
    owner = owner_of_param(param)
    model = owner.model() if isinstance(owner, FullParams) else None
    if model is None:
        raise TrialError(
            "this parameter belongs to no engine",
            got=tuple(param.shape),
            fix="Pass a parameter of a model given to initialize(), and keep a reference to the engine.",
        )
    return TrainedParam(model, *model.group_of(param))


def _trained(param: torch.Tensor) -> TrainedParam | None:
    """Return the result of :func:`find_param`; None for a frozen parameter."""
    if not param.requires_grad and owner_of_param(param) is None:
        return None
    found = find_param(param)
    return found if found.group.trainable else None


def _joined(found: TrainedParam, slices: Sequence[TensorSlice]) -> torch.Tensor:
    """Return a copy of this rank's ``slices``, flat. Local."""
    empty = found.group.shard.new_empty(0)
    return torch.cat([each.tensor.detach() for each in slices]) if slices else empty


def _gathered(found: TrainedParam, slices: Sequence[TensorSlice]) -> torch.Tensor | None:
    """Return the tensor of the ranks' ``slices``; None without any. Collective over shard."""
    comm = found.group.comm
    own = [(each.start, each.stop, each.shape, str(each.tensor.dtype).removeprefix("torch.")) for each in slices]
    held = comm.gather_json(own, "slices of a tensor")
    first = next((slice_ for there in held for slice_ in there), None)
    if first is None:
        return None
    *_, shape, dtype = first
    full = torch.empty(shape, dtype=getattr(torch, dtype), device=found.group.shard.device)
    for rank, there in enumerate(held):
        for number, (start, stop, *_) in enumerate(there):
            part = full.view(-1)[start:stop]
            if rank == comm.index:
                part.copy_(slices[number].tensor)
            comm.broadcast(part, f"full value from {found.group.name}", rank)
    return full


_Reader: TypeAlias = Callable[[TrainedParam, Sequence[TensorSlice]], torch.Tensor | None]


def _of_master(param: nn.Parameter, read: _Reader) -> torch.Tensor | None:
    if (found := _trained(param)) is None:
        return None
    found.model.take_live_edits(found.group)
    with found.group.materialized():
        values = read(found, found.slices("master", found.group.master))
    return widened(values if values is not None else found.group.shard.new_empty(found.slot.shape))


def _of_state(param: nn.Parameter, kind: str, read: _Reader) -> torch.Tensor | None:
    if (found := _trained(param)) is None:
        return None
    with _state_of(param).slices(found.group, found.slot, kind) as slices:
        values = read(found, slices)
    return values.float() if values is not None and values.dtype == torch.bfloat16 else values


def _of_grad(found: TrainedParam, shown: ShownGradients, read: _Reader) -> torch.Tensor:
    found.model.param_grads.take_edits()
    values = read(found, found.slices("gradient", shown.grad_buffer.reduced()))
    values = values if values is not None else found.group.shard.new_empty(found.slot.shape)
    return widened(values) * found.model.param_grads.multiplier()


def _set_grad(param: nn.Parameter, values: torch.Tensor, where: str) -> None:
    """Write this rank's elements (averaged, unscaled) of the gradient."""
    found = find_param(param)
    grads, buffer = found.model.param_grads, _reduced_grad(found, where).grad_buffer
    grads.take_edits()
    wide = widened(buffer.shard[:0])
    _write(found.slices("gradient", buffer.shard), values.detach().to(wide) / grads.multiplier())
    grads.changed(buffer)


def _reduced_grad(found: TrainedParam, where: str) -> ShownGradients:
    """Return the gradients of the parameter's group. Raises TrialError if there are none yet."""
    shown = found.model.param_grads.of(found.group)
    if shown is None or not shown.grad_buffer.shard_filled:
        raise TrialError(
            "no gradient can be set yet" if shown is not None else "this parameter is not trained",
            where=f"{where}({found.slot.name})",
            fix="Call it between the last engine.backward() of a step and engine.step().",
        )
    return shown


def _own_part(found: TrainedParam, value: torch.Tensor) -> torch.Tensor:
    """Return the elements of the full ``value`` that this rank's shard holds, flat."""
    _require_shape(value, found.slot.shape, found.slot.name)
    flat = value.detach().reshape(-1)
    return torch.cat([flat[each.start : each.stop] for each in found.slices("", found.group.shard)] or [flat[:0]])


def _write(slices: Sequence[TensorSlice], value: torch.Tensor) -> None:
    """Write ``value``, this rank's elements of a tensor, into its ``slices``."""
    sizes = [each.tensor.numel() for each in slices]
    if value.numel() != sum(sizes):
        raise TrialError(
            "the value does not have the size of this rank's part",
            where=slices[0].name if slices else None,
            got=value.numel(),
            expected=sum(sizes),
        )
    for each, part in zip(slices, value.detach().reshape(-1).split(sizes), strict=True):
        each.tensor.copy_(part)


def _require_shape(value: torch.Tensor, shape: tuple[int, ...], where: str) -> None:
    if tuple(value.shape) != shape:
        raise TrialError("the value has another shape", where=where, got=tuple(value.shape), expected=shape)


def _no_state(kind: str) -> TrialError:
    return TrialError("the optimizer does not have this state yet", where=kind, fix="Take a step first.")


def _state_of(param: torch.Tensor) -> StateByTensor:
    state: StateByTensor | None = state_of_param(param)
    if state is None:
        raise TrialError(
            "the optimizer of this parameter's engine is gone, or there is none",
            where="state of the optimizer",
            got=tuple(param.shape),
            expected="an engine with an optimizer, which the program still holds",
            fix="Keep a reference to the engine. If it has no optimizer, pass one to initialize(), or set one in ds_config.",
        )
    return state
