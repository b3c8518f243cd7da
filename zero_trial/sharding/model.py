"""All manual groups of one model: which of them a group, a gradient buffer or a name belongs to, and what is a copy of another pipeline stage's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from zero_trial.comm import AxisComm, Mesh, Pending
from zero_trial.errors import TrialError
from zero_trial.precision import DtypePolicy
from zero_trial.sharding import full_params
from zero_trial.sharding.dtypes import living_dtype, wide_dtype
from zero_trial.sharding.full_params import StateDictHooks, SummonedParams
from zero_trial.sharding.grad_buffer import BufferPool, GradBuffer
from zero_trial.sharding.grouping import (
    GroupSpec,
    ManualGroup,
    ShardingSettings,
    by_manual_group,
    collect_params,
    into_blocks,
    into_buckets,
    is_model_parallel,
    merge_small,
    persistent_members,
    runs_of_groups,
    split_parts_from_copies,
)
from zero_trial.sharding.init import read_first_values
from zero_trial.sharding.layout import lay_out
from zero_trial.sharding.optimizer import StepStatus
from zero_trial.sharding.param_group import ParamGroup, keep_freed_memory, swap_buffer_bytes
from zero_trial.sharding.plan import Lifetime, ReduceAt, ZeroPlan
from zero_trial.sharding.publish import DeferredGathers, ParamPublisher
from zero_trial.sharding.reduce import GradReducer
from zero_trial.sharding.unshard import Unsharder


class ManualGroups:
    """Empty for a model that gathers and reduces by itself; else every parameter is in one of them."""

    def __init__(self, manual_groups: Sequence[ManualGroup] = ()) -> None:
        self.all = tuple(manual_groups)
        self.by_name = {manual_group.name: manual_group for manual_group in manual_groups}
        self._holders: dict[int, list[ManualGroup]] = {}
        for manual_group in manual_groups:
            for param in manual_group.params:
                self._holders.setdefault(param, []).append(manual_group)

    def of(self, group: ParamGroup) -> ManualGroup | None:
        """No group spans two."""
        found = self._holders.get(id(group.params[0]), ()) if group.params else ()
        return found[0] if found else None

    def grad_buffers(self, grad_buffers: Sequence[GradBuffer]) -> dict[str, list[GradBuffer]]:
        """These by manual group, in their order."""
        found: dict[str, list[GradBuffer]] = {name: [] for name in self.by_name}
        for grad_buffer in grad_buffers:
            if (manual_group := self.of(grad_buffer.group)) is not None:
                found[manual_group.name].append(grad_buffer)
        return found

    def owns(self, group: ParamGroup) -> bool:
        """Whether this rank's pipeline stage is the one that counts the group's norm and saves it: all groups but copies."""
        manual_group = self.of(group)
        return manual_group is None or manual_group.owned

    def is_copy(self, name: str) -> bool:
        """Whether a parameter or buffer is a copy of another pipeline stage's, which saves it."""
        return any(name.startswith(f"{manual_group.module}.") for manual_group in self.all if not manual_group.owned)

    def agree(self, param: nn.Parameter, values: torch.Tensor, label: str) -> None:
        """``values`` of ``param`` become its owner's. Collective over the copies."""
        for manual_group in self._holders.get(id(param), ()):
            manual_group.agree(values, label)


# What of a module is in no group: parameters that nobody here trains or shards, and buffers, which all ranks have alike.


@torch.no_grad()
def sync_unmanaged(
    module: nn.Module, managed: Collection[int], policy: DtypePolicy, manual_groups: ManualGroups, data: AxisComm
) -> None:
    """Gives parameters whose ids are not in ``managed``, and all buffers, the policy's dtype and rank 0's values. Collective over ``data``."""
    for name, param in module.named_parameters():
        if id(param) not in managed:
            values = read_first_values(param)
            param.data = values.to(living_dtype(values.dtype, policy.param))
            full_params.forget_owner([param])
            manual_groups.agree(param, param.data, name)
            data.broadcast(param.data, name)
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(policy.buffer or living_dtype(buffer.dtype, policy.param))
        data.broadcast(buffer.data, name)


# The groups of one module: its parameters divided by the plan, and each group built in its turn.


@dataclass(frozen=True)
class ParamGroups:
    """``all``, in the model's order; ``freed``: by block, those whose parameters do not always live; ``modules``: for each such block the
    modules, in their order, that it stands for (none where a schedule says when to gather)."""

    all: list[ParamGroup]
    freed: Mapping[str, list[ParamGroup]]
    modules: Mapping[str, list[nn.Module]]


def build_param_groups(
    module: nn.Module,
    opt_groups: Sequence[Sequence[nn.Parameter]],
    plan: ZeroPlan,
    mesh: Mesh,
    policy: DtypePolicy,
    settings: ShardingSettings,
    manual_groups: ManualGroups,
    house: Callable[[ParamGroup], None],
) -> ParamGroups:
    """All groups of ``module``, with rank 0's values. ``groups``: for each optimizer group, its parameters.

    ``house(group)`` hears of each group as soon as it is built, before the next one is. Collective over data.
    """
    number = {id(param): index for index, opt_group in enumerate(opt_groups) for param in opt_group}
    members, params, blocks = collect_params(
        module, number, settings.leaf, dtype=policy.param, with_frozen=plan.frees_parameters
    )
    if mesh.model.size > 1:
        members = split_parts_from_copies(members, params)
    merged: Mapping[str, tuple[str, ...]] = {}
    if manual_groups.all:
        members = by_manual_group(members, params, manual_groups.all)
    else:
        merged = merge_small(blocks, persistent_members(members, settings.limits)[1], settings.limits.smallest_group)
        merged_into = {block: opt_group for opt_group, inside in merged.items() for block in inside}
        members = [replace(member, block=merged_into.get(member.block, member.block)) for member in members]
    divide = into_blocks if plan.frees_parameters else into_buckets
    groups = []
    for grouping in divide(members, settings.limits):
        groups.append(_build(grouping, params, plan, mesh, manual_groups))
        house(groups[-1])
    freed: dict[str, list[ParamGroup]] = {}
    for group in groups:
        if group.plan.params is not Lifetime.ALWAYS:
            freed.setdefault(group.block, []).append(group)
    told = bool(manual_groups.all)
    modules = {
        opt_group: [module.get_submodule(block) for block in merged.get(opt_group, (opt_group,))]
        for opt_group in freed
        if not told
    }
    return ParamGroups(groups, freed, modules)


def _build(
    grouping: GroupSpec, params: Mapping[str, nn.Parameter], plan: ZeroPlan, mesh: Mesh, manual_groups: ManualGroups
) -> ParamGroup:
    first = params[grouping.members[0].name]
    dtype = grouping.members[0].key[0]
    manual_group = manual_groups.by_name.get(str(grouping.members[0].key[-1]))
    layout = lay_out(
        [(m.name, tuple(params[m.name].shape)) for m in grouping.members],
        mesh.shard.size,
        mesh.replica.size * (manual_group.holders if manual_group is not None else 1),
    )

    def agree(values: torch.Tensor) -> None:
        if manual_group is not None:
            manual_group.agree(values, f"first values of {grouping.name}")
        mesh.data.broadcast(values, f"first values of {grouping.name}")

    offsets = [(slot.offset, member.opt_group) for slot, member in zip(layout.slots, grouping.members, strict=True)]
    trainable = grouping.members[0].opt_group >= 0
    return ParamGroup(
        grouping.name,
        layout,
        [params[m.name] for m in grouping.members],
        plan=plan.persistent() if grouping.always else plan,
        dtype=dtype if isinstance(dtype, torch.dtype) else first.dtype,
        device=first.device,
        comm=mesh.shard,
        runs=runs_of_groups(offsets, layout.numel) if trainable else {},
        block=grouping.block,
        trainable=trainable,
        counts=mesh.model.index == 0 or is_model_parallel(first),
        read=read_first_values,
        agree=agree,
    )


# A module whose parameters, gradients and optimizer state live by a ZeroPlan: groups, gradient buffers, reducer and unsharder, wired.


class ShardedModel:
    """``module`` with its trainable parameters in groups. ``groups``: for each optimizer group, its parameters.

    Construction makes all ranks start from rank 0's values. Collective over data. ``house(group)`` hears of each group as soon as it is built,
    before the next one is: it may take master and shard elsewhere.
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
        house: Callable[[ParamGroup], None] = lambda group: None,
        status: StepStatus | None = None,
    ) -> None:
        self.module = module
        self.plan = plan
        self.mesh = mesh
        self.policy = policy
        self.wire_scale = settings.wire_scale
        self.manual_groups = ManualGroups(manual_groups)
        if plan.frees_memory and any(param.device.type == "cpu" for param in module.parameters()):
            keep_freed_memory()  # changes the allocator of the whole process: not where only GPU memory is freed
        groups = build_param_groups(module, opt_groups, plan, mesh, policy, settings, self.manual_groups, house)
        self.groups = groups.all
        sync_unmanaged(module, {id(param) for param in self._params()}, policy, self.manual_groups, mesh.data)
        self.unsharder = Unsharder(groups.modules, groups.freed, plan.reshard, settings.live)
        self.rooms: BufferPool | None = None
        self.grad_buffers = self._land(settings)
        self.reducer = GradReducer(
            self.grad_buffers,
            mesh.shard,
            mesh.replica,
            wire_dtype=policy.comm,
            wire_scale=settings.wire_scale,
            in_flight=settings.in_flight,
        )
        self._grad_buffers_of = self.manual_groups.grad_buffers(self.grad_buffers)
        self._status = status if status is not None else StepStatus()
        self.arrivals = DeferredGathers(module)
        self._visits = SummonedParams(self.groups, self.wait, mesh.data)
        full_params.register_owner(self._params(), self)
        self._whole_state = StateDictHooks(module, self.groups, self.arrive)

    def _params(self) -> Iterator[nn.Parameter]:
        return (param for group in self.groups for param in group.params)

    def _land(self, settings: ShardingSettings) -> list[GradBuffer]:
        """A gradient buffer for each group that is trained, in rooms where peers can read those."""
        wide = self.policy.grad if self.plan.reduce_at is ReduceAt.BOUNDARY else self.policy.comm
        # Where peers sum up the full gradients: along shard, or along replica where nothing is sharded.
        along = self.mesh.shard if self.mesh.shard.size > 1 else self.mesh.replica
        if self.groups and along.reads_in_place(self.groups[0].full.device):
            self.rooms = BufferPool(along, settings.in_flight + 2)
        return [
            GradBuffer(
                group,
                dtype=wide_dtype(group.dtype, wide),
                shard_dtype=wide_dtype(group.dtype, self.policy.grad),
                on_complete=self._complete,
                comm=along,
                rooms=self.rooms,
            )
            for group in self.groups
            if group.trainable
        ]

    @property
    def frees_parameters(self) -> bool:
        """Some parameters do not always live: their values are in the shards."""
        return self.plan.frees_parameters

    def gradient_multiplier(self) -> float:
        """The factor from a reduced gradient shard to the averaged gradient."""
        return self._status.gradient_multiplier()

    # --- one step -------------------------------------------------------------------------------------------------

    def begin_backward(self, *, reduce: bool, last: bool) -> None:
        """A backward pass of this model's own loss starts; ``reduce``: its gradients cross the wire; ``last``: the step follows."""
        self.unsharder.last_micro_batch = last
        for grad_buffer in self.grad_buffers:
            grad_buffer.begin_pass()
        self.reducer.begin(reduce=reduce)

    def end_backward(self) -> None:
        """The backward pass has returned; afterwards the gradients that were to be reduced are. Collective over shard and replica if so."""
        for grad_buffer in self.grad_buffers:
            grad_buffer.end_pass()
        self.reducer.finish()

    def _complete(self, grad_buffer: GradBuffer) -> None:
        self.unsharder.after_gradients(grad_buffer.group)
        self.reducer.offer(grad_buffer)

    def settle(self) -> None:
        """Shards are about to be written: waits for gathers under way (fetched ahead and never used), and for peers that read parameters or
        gradients in place.

        Every rank must call it at the same place, between a step's collectives and the next step's.
        """
        self.arrive()
        for group in self.groups:
            group.finish_gather()
        for group in self.groups:
            group.settle()
        for grad_buffer in self.grad_buffers:
            grad_buffer.await_readers()

    def publish(self) -> None:
        """The masters are updated: rounds them into parameters and starts to give every rank the full copies that always live.

        :meth:`wait` or :meth:`wait_when_called` must follow. Collective over shard.
        """
        ParamPublisher(self.groups, (), self.arrivals.under_way).finish()
        self.unsharder.start_step()

    def publish_frozen(self) -> None:
        """Frozen values were replaced (a checkpoint was read): as :meth:`publish`, for those that no step changes. Collective over shard."""
        for group in self.groups:
            if not group.trainable and (pending := group.publish()) is not None:
                self.arrivals.under_way.append(pending)

    def wait(self) -> None:
        """See :meth:`Arrivals.wait`."""
        self.arrivals.wait()

    def arrive(self) -> list[Pending]:
        """See :meth:`Arrivals.arrive`."""
        return self.arrivals.arrive()

    def wait_when_called(self) -> None:
        """See :meth:`Arrivals.wait_when_called`."""
        self.arrivals.wait_when_called()

    # --- told by a schedule ---------------------------------------------------------------------------------------

    def landed(self, manual_group: str) -> None:
        """A backward pass through the manual group's modules is over: what has come is in its place."""
        for grad_buffer in self._grad_buffers_of[manual_group]:
            grad_buffer.end_pass()

    def reduce(self, manual_group: str) -> None:
        """Starts to reduce what the manual group has gathered up. Collective over shard and replica."""
        self.reducer.reduce(self._grad_buffers_of[manual_group])

    def sum_copies(self, manual_group: str) -> None:
        """The manual group's reduced gradients become the sum over all its copies. Collective over shard and replica, and over the copies."""
        copies = self.manual_groups.by_name[manual_group].copies
        self.reducer.land()
        for grad_buffer in self._grad_buffers_of[manual_group]:
            if copies is not None:
                self.reducer.sum_copies(grad_buffer, copies)

    def owned_square_sums(self) -> list[torch.Tensor]:
        """Of the reduced gradient shards, those that no other pipeline stage counts. What another rank of the model axis counts is nothing here,
        or NaN where it is not finite: that concerns everyone."""
        found = []
        for index, total in self.reducer.square_sums.items():
            group = self.reducer.grad_buffers[index].group
            if self.manual_groups.owns(group):
                found.append(total if group.counts else total * 0)
        return found

    # --- full parameters, for whoever asks ------------------------------------------------------------------------

    def open(self, params: list[nn.Parameter]) -> None:
        """See :class:`Visits`."""
        self._visits.open(params)

    def close(self, params: list[nn.Parameter], source: int | None) -> None:
        """See :class:`Visits`."""
        self._visits.close(params, source)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, masters and shards can be read and written wherever they live; only between steps. May be nested. Local."""
        with ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(group.lend())
            yield

    @contextmanager
    def opened(self) -> Iterator[None]:
        """All parameters whole inside the block. Collective over shard."""
        self.wait()
        self.unsharder.ensure_all()
        try:
            yield
        finally:
            self.unsharder.free_all()

    def group_of(self, param: torch.Tensor) -> tuple[ParamGroup, int]:
        """The group that holds ``param``, and its slot's index there. Raises TrialError for a parameter that this model does not train."""
        for group in self.groups:
            for index, own in enumerate(group.params):
                if own is param:
                    return group, index
        raise TrialError("this parameter is in no group of this engine", got=tuple(param.shape))

    def grad_buffer_of(self, group: ParamGroup) -> GradBuffer | None:
        return next((grad_buffer for grad_buffer in self.grad_buffers if grad_buffer.group is group), None)

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes that outlive a step on this rank: parameters with masters, and gradients."""
        return {
            "parameters": sum(group.persistent_bytes() for group in self.groups) + swap_buffer_bytes(self.groups),
            "gradients": sum(grad_buffer.persistent_bytes() for grad_buffer in self.grad_buffers),
        }

    def buffers(self) -> list[torch.Tensor]:
        """The flat buffers whose memory comes and goes, or is not of torch's making: parameters, shards, and gradients in flight."""
        rooms = self.rooms.buffers() if self.rooms is not None else []
        of_groups = [buffer for group in self.groups for buffer in (group.full, group.shard)]
        return [*of_groups, *(grad_buffer.full for grad_buffer in self.grad_buffers), *rooms]

    def remove_hooks(self) -> None:
        """Takes every hook off the module; its parameters become whole, ordinary parameters again. Collective over shard.

        Parameters that did not always live are in the host's memory then: group by group, for the device may not hold them all at once.
        """
        self.wait()
        for group in self.groups:
            group.start_gather()
            group.finish_gather()
            if group.plan.params is not Lifetime.ALWAYS and group.full.device.type != "cpu":
                values = [param.detach().to("cpu", copy=True) for param in group.params]
                group.free(stale=True)
                for param, value in zip(group.params, values, strict=True):
                    param.data = value
        for grad_buffer in self.grad_buffers:
            grad_buffer.remove_hooks()
        self.unsharder.remove_hooks()
        self._whole_state.remove_hooks()
        for group in self.groups:
            if group.away is not None:
                group.away.close()
        full_params.forget_owner(self._params())
