"""A module whose parameters, gradients and optimizer state follow a ZeroPlan: param groups,
gradient buffers, reducer, unsharder.

forward    unsharder.unshard(block)                              if parameters do not always live
backward   grad_buffer hook -> reducer.grad_ready(grad_buffer)   reduce-scatter of each ready group
step       optimizer.update -> unsharder.publish(groups)         all-gather of each updated group
                                                                 that always lives

The step is ``StepOutcome.apply`` in ``engine/step.py``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from zero_trial.comm import Mesh
from zero_trial.errors import TrialError
from zero_trial.sharding.build_groups import FirstSource, FirstValues, build_param_groups, sync_unmanaged
from zero_trial.sharding.full_params import FullParams, take_replaced
from zero_trial.sharding.grad_buffer import GradBuffer
from zero_trial.sharding.grouping import (
    ManualGroup,
    ManualGroups,
    ShardingSettings,
)
from zero_trial.sharding.guards.freed import (
    forget_owner,
    forget_replicated,
    mark_sharded,
    mark_watched,
    register_owner,
    register_replicated,
    revive,
)
from zero_trial.sharding.guards.grad_access import ParamGrads
from zero_trial.sharding.layout import column_sums
from zero_trial.sharding.living_dtypes import LivingDtypes
from zero_trial.sharding.offload.moved_states import GRADIENTS, MovedStates
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.plan import Lifetime, ReduceAt, ZeroPlan
from zero_trial.sharding.precision import DtypePolicy, StepStatus
from zero_trial.sharding.quantized import PackedWeights
from zero_trial.sharding.reduce import GradReducer
from zero_trial.sharding.unshard import Unsharder


class ShardedModel:
    """``module`` with its trainable parameters in groups. Construction copies rank 0's values to
    all ranks: collective over data.

    Args:
        opt_groups: for each optimizer group, its parameters.
        manual_groups: groups that a schedule gathers and reduces; empty if the module's own hooks
            do this.
        on_group_built: called with each group before the next one is built; it may offload master
            and shard.
        status: the state of the engine's steps.
        device: where parameters and buffers are moved, group by group; by default they are not
            moved.
        values: first values to use instead of the parameters' own values.
        packed: the 4-bit weights, which :meth:`remove_hooks` gives back to the caller.
    """

    def __init__(
        self,
        module: nn.Module,
        opt_groups: Sequence[Sequence[nn.Parameter]],
        plan: ZeroPlan,
        mesh: Mesh,
        policy: DtypePolicy,
        settings: ShardingSettings,
        manual_groups: Sequence[ManualGroup] = (),
        on_group_built: Callable[[ParamGroup], None] = lambda group: None,
        status: StepStatus | None = None,
        device: torch.device | None = None,
        values: FirstValues | None = None,
        packed: PackedWeights | None = None,
    ) -> None:
        self._packed = packed
        self.module = module
        self.plan = plan
        self._released = False  # remove_hooks has begun
        self._everywhere: bool | None = None  # None until it has finished; then: every rank has the full module
        # whether some parameters do not always live: their values are in the shards
        self.frees_parameters = plan.frees_parameters
        self.mesh = mesh
        self.policy = policy
        self.wire_scale = settings.wire_scale
        self._grads_to_none = settings.grads_to_none
        self.manual_groups = ManualGroups(manual_groups)
        source = FirstSource(mesh, self.manual_groups, device, values)
        living = LivingDtypes(module, policy)
        self._borders = living.cast_at_borders()
        built = build_param_groups(module, opt_groups, plan, living, settings, source, on_group_built)
        self.groups, freed, modules = built
        self._living = [group for group in self.groups if group.plan.params is Lifetime.ALWAYS]
        self._freed = [group for groups in freed.values() for group in groups]
        sync_unmanaged(module, {id(param) for param in self._params()}, living, source)
        self._trim()  # copies of first values
        self._edited = False  # user code has edited parameters since the last step, on this rank
        self.unsharder = Unsharder(modules, freed, plan.reshard, settings.live)
        self.grad_buffers = _gradient_buffers(self.groups, plan, mesh, policy, settings)
        self.reducer = GradReducer(
            self.grad_buffers,
            mesh.shard,
            mesh.replica,
            unsharder=self.unsharder if plan.frees_parameters else None,
            wire_dtype=lambda living: policy.wide(living, policy.comm),
            wire_scale=settings.wire_scale,
            in_flight=settings.in_flight + self._spare(settings),
        )
        # for each gradient buffer: whether this rank's pipeline stage counts it in the norm
        self._owned = [self.manual_groups.owns(grad_buffer.group) for grad_buffer in self.grad_buffers]
        self._in_place = [grad_buffer for grad_buffer in self.grad_buffers if grad_buffer.in_place]
        self._grad_buffers_of = self.manual_groups.grad_buffers(self.grad_buffers)
        self.moved = MovedStates(self.groups, self.grad_buffers, self._settle)
        status = status if status is not None else StepStatus()
        self.param_grads = ParamGrads(self.reducer, status.gradient_multiplier, self.moved)
        self.full_params = FullParams(self, module, self.groups, mesh.data, self.moved, self.unsharder)
        register_owner(self._params(), self.full_params)
        register_replicated(replicated := self._replicated(), self.full_params)
        mark_watched(replicated)
        (mark_sharded if plan.frees_parameters else mark_watched)(self._params())

    def _trim(self) -> None:
        """Return the pages of freed shared buffers to the system."""
        for axis in (self.mesh.shard, self.mesh.replica):  # with several hosts, only one axis may share memory
            axis.trim()

    def _spare(self, settings: ShardingSettings) -> int:
        """Return 1 if CPU ranks share memory and overlap: a peer reads a group's buffer one launch
        later than its own, so one more reduction in flight keeps ranks from waiting."""
        along = self.mesh.shard if self.mesh.shard.size > 1 else self.mesh.replica
        return int(settings.overlap and any(along.shares_memory(group.full.device) for group in self.groups))

    def _params(self) -> Iterator[nn.Parameter]:
        return (param for group in self.groups for param in group.params)

    def _replicated(self) -> list[nn.Parameter]:
        """List the parameters in no group: every rank has them in full, and nothing trains them."""
        in_groups = {id(param) for param in self._params()}
        return [param for param in self.module.parameters() if id(param) not in in_groups]

    # --- one step ---------------------------------------------------------------------------------

    def begin_backward(self, *, reduce: bool, last: bool) -> None:
        """Start a backward pass. ``reduce``: reduce its gradients; ``last``: the step follows."""
        if self.moved.kinds:
            self.moved.require_here("backward", ("lp_params", *GRADIENTS))
        self.unsharder.last_micro_batch = last
        self.param_grads.hide()
        self.reducer.begin_pass(reduce=reduce)

    def end_backward(self, *, show: bool = False) -> None:
        """End the backward pass. If its gradients are to be reduced, they are reduced when this
        method returns; then it is collective over shard and replica.

        ``show``: no more gradients follow before the step, so ``param.grad`` shows them if they are
            reduced.
        """
        reduced = self.reducer.active
        self.reducer.finish_pass()
        self.param_grads.show(partial=not (show and reduced))

    def on_foreign_gradient(self, call: Callable[[bool], None]) -> None:
        """See :meth:`ArrivalScaling.report`; does nothing if a schedule reduces the gradients."""
        for grad_buffer in () if self.manual_groups.all else self.grad_buffers:
            grad_buffer.scaling.report(call)

    def reset_gradients(self) -> None:
        """Drop all gradients and sums since the last step; waits for reductions in flight."""
        self.unsharder.drop_pass()
        self.reducer.reset()
        if self._grads_to_none:
            self._trim()
        self.param_grads.forget()

    def take_parameter_edits(self) -> bool:
        """Apply user code's edits of parameters since the last step to the masters (see
        :meth:`ParamGroup.take_edits`). Return whether this rank has edited parameters that always
        live, outside of blocks that send edits to all ranks."""
        self.full_params.end_names()
        self._take_edits(self.groups)
        edited, self._edited = self._edited, False
        return edited

    def _take_edits(self, groups: Sequence[ParamGroup]) -> None:
        edited = []
        for group in groups:
            if group.edits.edited(whole=group.live):
                edited.append(group)
        if edited:
            self._edited = True
            take_replaced(self._living)  # two groups may have swapped tensors
            for group in edited:
                group.take_edits()

    def require_same_parameters(self, where: str) -> None:
        """Raise TrialError, on every rank, if parameters that all data-parallel ranks have in full
        differ between ranks. Collective over the world; reads these parameters."""
        mesh = self.mesh
        if mesh.data.size == 1:
            return
        named = {
            slot.name: p for group in self._living for slot, p in zip(group.layout.slots, group.params, strict=True)
        }
        whole = {id(param) for param in self._replicated()}
        named |= {name: param for name, param in self.module.named_parameters() if id(param) in whole}
        sums = [column_sums(param) for param in named.values()]
        read = torch.cat(sums).cpu().split([len(each) for each in sums]) if sums else ()  # a single host sync
        own = [zlib.crc32(each.numpy().tobytes()) for each in read]
        part, parts = mesh.model_part  # a client's mpu may have several parts, too
        totals = mesh.world.gather_json([mesh.pipe.index, part, hash(tuple(own))], "parameters of all ranks")
        if len({tuple(each) for each in totals}) == mesh.pipe.size * parts:
            return
        rows = mesh.data.gather_json(own, "parameters that differ")
        names = [name for name, *found in zip(named, *rows, strict=True) if len(set(found)) > 1]
        names = sorted({name for each in mesh.world.gather_json(names, "names of them") for name in each})
        raise TrialError(
            "parameters were edited on some ranks only, or differently: the ranks would train different models",
            where=where,
            got=f"{len(names)} that differ, the first is {names[0]}",
            expected="the same values on every rank",
            fix="Edit them on every rank, or inside zero_trial.zero.GatheredParameters(params, modifier_rank=0).",
        )

    def take_live_edits(self, only: ParamGroup | None = None) -> None:
        """Apply edits of parameters that always live to the masters, before the masters are read or
        replaced between steps: of all groups, or of one. Local."""
        self.moved.require_here("between steps", ("hp_params", "lp_params"))
        self._take_edits(self._living if only is None else [only] if only in self._living else [])

    def wait_before_writing(self, *, copies: bool = True) -> None:
        """Wait until shards may be written: for gathers in flight (prefetched and never used), and
        with ``copies`` for a checkpoint that copies masters and state (an update waits for the
        checkpoint group by group).

        Every rank must call it at the same place, between a step's collectives and the next step's.
        """
        for group in self.groups:
            if copies:
                group.wait_for_copies()
            group.end_gather()

    def _settle(self, kinds: Collection[str]) -> None:
        """Stop all uses of the memory of ``kinds``, which is about to be moved."""
        self.wait_before_writing()
        take_replaced(self._living)  # only the buffers are moved
        if "lp_params" in kinds:
            self.unsharder.reshard_all()
        if not set(GRADIENTS).isdisjoint(kinds):
            self.param_grads.hide()

    def end_step(self) -> None:
        """End a step that has changed the parameters: graphs from before it can no longer run, and
        the order in which blocks were used becomes the prediction for the next step."""
        for group in self.groups:
            if group.trainable:
                group.edits.count_step()
        if self.frees_parameters:
            self.unsharder.end_step()

    def publish(self, *, frozen: bool = False) -> None:
        """Round masters that were changed outside of a step (by a checkpoint, averages of the
        weights) into parameters, and publish them; ``frozen``: also publish frozen parameters.
        Collective over shard."""
        self.full_params.end_names()
        self.unsharder.publish(self.groups, replaced=frozen)
        self.unsharder.end_step()

    # --- actions of a schedule --------------------------------------------------------------------

    def end_pass(self, manual_group: str) -> None:
        """End a backward pass through the manual group: its gradients are in their buffers."""
        for grad_buffer in self._grad_buffers_of[manual_group]:
            grad_buffer.end_pass()

    def reduce(self, manual_group: str) -> None:
        """Start to reduce the manual group's gradients. Collective over shard and replica."""
        self.reducer.reduce(self._grad_buffers_of[manual_group])

    def sum_copies(self, manual_group: str) -> None:
        """Sum the manual group's reduced gradients over all its copies. Collective over shard and
        replica, and over the copies."""
        copies = self.manual_groups.by_name[manual_group].copies
        self.reducer.wait()
        for grad_buffer in self._grad_buffers_of[manual_group]:
            if copies is not None:
                self.reducer.sum_copies(grad_buffer, copies)

    def owned_square_sums(self) -> list[torch.Tensor]:
        """Return the square sums of the reduced gradient shards that no other pipeline stage
        counts.

        A group that another rank of the model axis counts contributes zero here, or NaN if it is
        not finite, which concerns all ranks.
        """
        buffers, found = self.reducer.grad_buffers, []
        for index, total in self.reducer.square_sums.items():
            if self._owned[index]:
                found.append(total if buffers[index].group.counts else total * 0)
        return found

    # --- full parameters --------------------------------------------------------------------------

    @contextmanager
    def materialized(self) -> Iterator[None]:
        """Make masters and shards readable and writable inside the block, also if they are
        offloaded; only between steps. May be nested. Local."""
        with ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(group.materialized())
            yield

    def require_values(self) -> None:
        """Raise TrialError after :meth:`remove_hooks` if only some ranks have the parameters."""
        if self._released and self.frees_parameters and not self._everywhere:
            raise TrialError(
                "the engine was destroyed, and perhaps only rank 0 has the model",
                fix="Save before engine.destroy(), destroy with rank0_only=False, or use the module only on rank 0.",
            )

    def group_of(self, param: torch.Tensor) -> tuple[ParamGroup, int]:
        """Return the group that holds ``param``, and its slot's index there. Raises TrialError for
        a parameter that this model does not train."""
        for group in self.groups:
            for index, own in enumerate(group.params):
                if own is param:
                    return group, index
        raise TrialError("this parameter belongs to no group of this engine", got=tuple(param.shape))

    def persistent_bytes(self) -> dict[str, int]:
        """Count the bytes that outlive a step on this rank: parameters, masters, gradients."""
        return {
            "parameters": sum(group.persistent_bytes() for group in self.groups)
            + sum(buffer.nbytes for buffer in _swap_buffers(self.groups)),
            "gradients": sum(grad_buffer.persistent_bytes() for grad_buffer in self.grad_buffers),
        }

    def buffers(self) -> list[torch.Tensor]:
        """List the flat buffers whose memory is freed and reallocated, or not allocated by
        torch: parameters, shards, gradients in flight, buffers of offloaded shards."""
        of_groups = [buffer for group in self.groups for buffer in (group.full, group.shard)]
        of_grads = [buffer for grads in self.grad_buffers for buffer in (grads.full, grads.shard)]
        return [*of_groups, *of_grads, *_swap_buffers(self.groups)]

    def remove_hooks(self, *, rank0_only: bool = False) -> None:
        """Remove every hook from the module; its parameters become ordinary full parameters again.
        Collective over shard.

        If the plan frees parameters, the whole module (including parameters that always lived, and
        buffers) is in host memory afterwards: it is moved group by group, since the device may not
        hold it at once. Otherwise it stays on its device. ``rank0_only``: freed parameters stay
        freed on all data-parallel ranks but the first. A second call does nothing, unless the first
        call failed.
        """
        if self._everywhere is not None:
            return
        self._released = True
        self.moved.restore()
        to_host = self.frees_parameters and not all(on_host(group.full) for group in self.groups)
        keeps = self.mesh.data.index == 0 or not rank0_only
        for group in self.groups:
            group.unshard()
            if not keeps and group.plan.params is not Lifetime.ALWAYS:
                self.unsharder.free(group, stale=True)
            elif to_host:
                values = [param.detach().to("cpu", copy=True) for param in group.params]
                self.unsharder.free(group, stale=True)
                for param, value in zip(group.params, values, strict=True):
                    revive(param, value)
        for grad_buffer in self.grad_buffers:
            grad_buffer.remove_hooks()
        self._trim()
        self.unsharder.remove_hooks()
        self.full_params.remove_hooks()
        for border in self._borders:
            border.remove()
        for group in self.groups:
            group.wait_for_copies()  # and drop the reference
            if group.offloaded is not None:
                group.offloaded.close()
        forget_owner(self._params())
        forget_replicated(replicated := self._replicated(), self.full_params)
        if to_host:
            for tensor in (*replicated, *self.module.buffers()):
                if not on_host(tensor):
                    tensor.data = tensor.detach().to("cpu", copy=True)
        if self._packed is not None:
            self._packed.release()
        self._everywhere = not rank0_only or self.mesh.data.size == 1


def _gradient_buffers(
    groups: Sequence[ParamGroup], plan: ZeroPlan, mesh: Mesh, policy: DtypePolicy, settings: ShardingSettings
) -> list[GradBuffer]:
    """Build the gradient buffers of the trained groups, along shard, or replica if unsharded."""
    along = mesh.shard if mesh.shard.size > 1 else mesh.replica
    wide = policy.grad if plan.reduce_at is ReduceAt.BOUNDARY else policy.comm
    return [
        GradBuffer(
            group,
            dtype=policy.wide(group.dtype, wide),
            shard_dtype=policy.wide(group.dtype, policy.grad),
            comm=along,
            frees_shard=settings.grads_to_none,
        )
        for group in groups
        if group.trainable
    ]


def on_host(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is in the host's memory."""
    return tensor.device.type == "cpu"


def _swap_buffers(groups: Sequence[ParamGroup]) -> Sequence[torch.Tensor]:
    """List the buffers that offloaded shards are read through; all groups share them."""
    return next((group.offloaded.buffers for group in groups if group.offloaded is not None), ())
