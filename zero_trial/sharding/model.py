"""All domains of one model: which of them a unit, a landing or a name belongs to, and what is a copy of another pipeline stage's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from zero_trial.comm import AxisComm, Mesh, Pending
from zero_trial.errors import TrialError
from zero_trial.ops.optimizers import DeviceScalars
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
from zero_trial.sharding.optimizer import ShardedOptimizer
from zero_trial.sharding.param_group import ParamGroup, keep_freed_memory, swap_buffer_bytes
from zero_trial.sharding.plan import Lifetime, ReduceAt, ZeroPlan
from zero_trial.sharding.publish import DeferredGathers, ParamPublisher
from zero_trial.sharding.reduce import GradReducer
from zero_trial.sharding.unshard import Unsharder


class ManualGroups:
    """Empty for a model that gathers and reduces by itself; else every parameter is in one of them."""

    def __init__(self, domains: Sequence[ManualGroup] = ()) -> None:
        self.all = tuple(domains)
        self.by_name = {domain.name: domain for domain in domains}
        self._holders: dict[int, list[ManualGroup]] = {}
        for domain in domains:
            for param in domain.params:
                self._holders.setdefault(param, []).append(domain)

    def of(self, unit: ParamGroup) -> ManualGroup | None:
        """No unit spans two."""
        found = self._holders.get(id(unit.params[0]), ()) if unit.params else ()
        return found[0] if found else None

    def landings(self, landings: Sequence[GradBuffer]) -> dict[str, list[GradBuffer]]:
        """These by domain, in their order."""
        found: dict[str, list[GradBuffer]] = {name: [] for name in self.by_name}
        for landing in landings:
            if (domain := self.of(landing.unit)) is not None:
                found[domain.name].append(landing)
        return found

    def owns(self, unit: ParamGroup) -> bool:
        """Whether this rank's pipeline stage is the one that counts the unit's norm and saves it: all units but copies."""
        domain = self.of(unit)
        return domain is None or domain.owned

    def is_copy(self, name: str) -> bool:
        """Whether a parameter or buffer is a copy of another pipeline stage's, which saves it."""
        return any(name.startswith(f"{domain.module}.") for domain in self.all if not domain.owned)

    def agree(self, param: nn.Parameter, values: torch.Tensor, label: str) -> None:
        """``values`` of ``param`` become its owner's. Collective over the copies."""
        for domain in self._holders.get(id(param), ()):
            domain.agree(values, label)


# What of a module is in no unit: parameters that nobody here trains or shards, and buffers, which all ranks have alike.


@torch.no_grad()
def sync_unmanaged(
    module: nn.Module, managed: Collection[int], policy: DtypePolicy, domains: ManualGroups, data: AxisComm
) -> None:
    """Gives parameters whose ids are not in ``managed``, and all buffers, the policy's dtype and rank 0's values. Collective over ``data``."""
    for name, param in module.named_parameters():
        if id(param) not in managed:
            values = read_first_values(param)
            param.data = values.to(living_dtype(values.dtype, policy.param))
            full_params.forget_owner([param])
            domains.agree(param, param.data, name)
            data.broadcast(param.data, name)
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(policy.buffer or living_dtype(buffer.dtype, policy.param))
        data.broadcast(buffer.data, name)


# The units of one module: its parameters divided by the plan, and each unit built in its turn.


@dataclass(frozen=True)
class ParamGroups:
    """``all``, in the model's order; ``freed``: by block, those whose parameters do not always live; ``modules``: for each such block the
    modules, in their order, that it stands for (none where a schedule says when to gather)."""

    all: list[ParamGroup]
    freed: Mapping[str, list[ParamGroup]]
    modules: Mapping[str, list[nn.Module]]


def build_param_groups(
    module: nn.Module,
    groups: Sequence[Sequence[nn.Parameter]],
    plan: ZeroPlan,
    mesh: Mesh,
    policy: DtypePolicy,
    settings: ShardingSettings,
    domains: ManualGroups,
    house: Callable[[ParamGroup], None],
) -> ParamGroups:
    """All units of ``module``, with rank 0's values. ``groups``: for each optimizer group, its parameters.

    ``house(unit)`` hears of each unit as soon as it is built, before the next one is. Collective over data.
    """
    number = {id(param): index for index, group in enumerate(groups) for param in group}
    members, params, blocks = collect_params(
        module, number, settings.leaf, dtype=policy.param, with_frozen=plan.frees_parameters
    )
    if mesh.model.size > 1:
        members = split_parts_from_copies(members, params)
    merged: Mapping[str, tuple[str, ...]] = {}
    if domains.all:
        members = by_manual_group(members, params, domains.all)
    else:
        merged = merge_small(blocks, persistent_members(members, settings.limits)[1], settings.limits.smallest_unit)
        group_of = {block: group for group, inside in merged.items() for block in inside}
        members = [replace(member, block=group_of.get(member.block, member.block)) for member in members]
    divide = into_blocks if plan.frees_parameters else into_buckets
    units = []
    for grouping in divide(members, settings.limits):
        units.append(_build(grouping, params, plan, mesh, domains))
        house(units[-1])
    freed: dict[str, list[ParamGroup]] = {}
    for unit in units:
        if unit.plan.params is not Lifetime.ALWAYS:
            freed.setdefault(unit.block, []).append(unit)
    told = bool(domains.all)
    modules = {
        group: [module.get_submodule(block) for block in merged.get(group, (group,))] for group in freed if not told
    }
    return ParamGroups(units, freed, modules)


def _build(
    grouping: GroupSpec, params: Mapping[str, nn.Parameter], plan: ZeroPlan, mesh: Mesh, domains: ManualGroups
) -> ParamGroup:
    first = params[grouping.members[0].name]
    dtype = grouping.members[0].key[0]
    domain = domains.by_name.get(str(grouping.members[0].key[-1]))
    layout = lay_out(
        [(m.name, tuple(params[m.name].shape)) for m in grouping.members],
        mesh.shard.size,
        mesh.replica.size * (domain.holders if domain is not None else 1),
    )

    def agree(values: torch.Tensor) -> None:
        if domain is not None:
            domain.agree(values, f"first values of {grouping.name}")
        mesh.data.broadcast(values, f"first values of {grouping.name}")

    offsets = [(slot.offset, member.group) for slot, member in zip(layout.slots, grouping.members, strict=True)]
    trainable = grouping.members[0].group >= 0
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


# A module whose parameters, gradients and optimizer state live by a ZeroPlan: units, landings, reducer and gatherer, wired.


class ShardedModel:
    """``module`` with its trainable parameters in units. ``groups``: for each optimizer group, its parameters.

    Construction makes all ranks start from rank 0's values. Collective over data. ``house(unit)`` hears of each unit as soon as it is built,
    before the next one is: it may take master and shard elsewhere.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[Sequence[nn.Parameter]],
        plan: ZeroPlan,
        mesh: Mesh,
        policy: DtypePolicy,
        settings: ShardingSettings,
        domains: Sequence[ManualGroup] = (),
        house: Callable[[ParamGroup], None] = lambda unit: None,
    ) -> None:
        self.module = module
        self.plan = plan
        self.mesh = mesh
        self.policy = policy
        self.wire_scale = settings.wire_scale
        self.domains = ManualGroups(domains)
        if plan.frees_memory and any(param.device.type == "cpu" for param in module.parameters()):
            keep_freed_memory()  # changes the allocator of the whole process: not where only GPU memory is freed
        units = build_param_groups(module, groups, plan, mesh, policy, settings, self.domains, house)
        self.units = units.all
        sync_unmanaged(module, {id(param) for param in self._params()}, policy, self.domains, mesh.data)
        self.gatherer = Unsharder(units.modules, units.freed, plan.reshard, settings.live)
        self.rooms: BufferPool | None = None
        self.landings = self._land(settings)
        self.reducer = GradReducer(
            self.landings,
            mesh.shard,
            mesh.replica,
            wire_dtype=policy.comm,
            wire_scale=settings.wire_scale,
            in_flight=settings.in_flight,
        )
        self._landings_of = self.domains.landings(self.landings)
        self.optimizer: ShardedOptimizer | None = None
        # From a reduced gradient shard to the averaged gradient.
        self.gradient_multiplier: Callable[[], float] = lambda: 1.0
        self.arrivals = DeferredGathers(module)
        self._visits = SummonedParams(self.units, self.wait, mesh.data)
        full_params.register_owner(self._params(), self)
        self._whole_state = StateDictHooks(module, self.units, self.arrive)

    def _params(self) -> Iterator[nn.Parameter]:
        return (param for unit in self.units for param in unit.params)

    def _land(self, settings: ShardingSettings) -> list[GradBuffer]:
        """A landing for each unit that is trained, in rooms where peers can read those."""
        wide = self.policy.grad if self.plan.reduce_at is ReduceAt.BOUNDARY else self.policy.comm
        # Where peers sum up the full gradients: along shard, or along replica where nothing is sharded.
        along = self.mesh.shard if self.mesh.shard.size > 1 else self.mesh.replica
        if self.units and along.reads_in_place(self.units[0].full.device):
            self.rooms = BufferPool(along, settings.in_flight + 2)
        return [
            GradBuffer(
                unit,
                dtype=wide_dtype(unit.dtype, wide),
                shard_dtype=wide_dtype(unit.dtype, self.policy.grad),
                on_complete=self._complete,
                comm=along,
                rooms=self.rooms,
            )
            for unit in self.units
            if unit.trainable
        ]

    @property
    def frees_parameters(self) -> bool:
        """Some parameters do not always live: their values are in the shards."""
        return self.plan.frees_parameters

    # --- one step -------------------------------------------------------------------------------------------------

    def begin_backward(self, *, reduce: bool, last: bool) -> None:
        """A backward pass of this model's own loss starts; ``reduce``: its gradients cross the wire; ``last``: the step follows."""
        self.gatherer.last_micro_batch = last
        if last:
            self.expect_step()
        for landing in self.landings:
            landing.begin_pass()
        self.reducer.begin(reduce=reduce)

    def expect_step(self) -> None:
        """The step follows, unless it is skipped: optimizer state that lives elsewhere begins to come."""
        if self.optimizer is not None:
            self.optimizer.expect()

    def end_backward(self) -> None:
        """The backward pass has returned; afterwards the gradients that were to be reduced are. Collective over shard and replica if so."""
        for landing in self.landings:
            landing.end_pass()
        self.reducer.finish()

    def _complete(self, landing: GradBuffer) -> None:
        self.gatherer.after_gradients(landing.unit)
        self.reducer.offer(landing)

    def settle(self) -> None:
        """Shards are about to be written: waits for gathers under way (fetched ahead and never used), and for peers that read parameters or
        gradients in place.

        Every rank must call it at the same place, between a step's collectives and the next step's.
        """
        self.arrive()
        for unit in self.units:
            unit.finish_gather()
        for unit in self.units:
            unit.settle()
        for landing in self.landings:
            landing.await_readers()

    def publish(self) -> None:
        """The masters are updated: rounds them into parameters and starts to give every rank the full copies that always live.

        :meth:`wait` or :meth:`wait_when_called` must follow. Collective over shard.
        """
        ParamPublisher(self.units, (), self.arrivals.under_way).finish()
        self.gatherer.start_step()

    def update(self, multiplier: float, gate: DeviceScalars | None = None, *, defer: bool = False) -> None:
        """One optimizer step with ``multiplier`` times the reduced gradients, and :meth:`publish` of each unit as soon as it is done, while
        the next one is updated. What is said there holds here. ``gate``: see :meth:`ShardedOptimizer.step`; a step that the device skips
        publishes the values that were there. ``defer``: :meth:`wait_when_called` will follow. Collective over shard."""
        if self.optimizer is None:
            raise TrialError("there is no optimizer to step", where="ShardedModel.update")
        self.settle()
        publication = ParamPublisher(self.units, self.optimizer.pieces, self.arrivals.under_way, lend=not defer)
        self.optimizer.step(multiplier, publication.updated, gate)
        publication.finish()
        self.gatherer.start_step()

    def publish_frozen(self) -> None:
        """Frozen values were replaced (a checkpoint was read): as :meth:`publish`, for those that no step changes. Collective over shard."""
        for unit in self.units:
            if not unit.trainable and (pending := unit.publish()) is not None:
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

    def landed(self, domain: str) -> None:
        """A backward pass through the domain's modules is over: what has come is in its place."""
        for landing in self._landings_of[domain]:
            landing.end_pass()

    def reduce(self, domain: str) -> None:
        """Starts to reduce what the domain has gathered up. Collective over shard and replica."""
        self.reducer.reduce(self._landings_of[domain])

    def sum_copies(self, domain: str) -> None:
        """The domain's reduced gradients become the sum over all its copies. Collective over shard and replica, and over the copies."""
        copies = self.domains.by_name[domain].copies
        self.reducer.land()
        for landing in self._landings_of[domain]:
            if copies is not None:
                self.reducer.sum_copies(landing, copies)

    def owned_square_sums(self) -> list[torch.Tensor]:
        """Of the reduced gradient shards, those that no other pipeline stage counts. What another rank of the model axis counts is nothing here,
        or NaN where it is not finite: that concerns everyone."""
        found = []
        for index, total in self.reducer.square_sums.items():
            unit = self.reducer.landings[index].unit
            if self.domains.owns(unit):
                found.append(total if unit.counts else total * 0)
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
            for unit in self.units:
                stack.enter_context(unit.lend())
            yield

    @contextmanager
    def opened(self) -> Iterator[None]:
        """All parameters whole inside the block. Collective over shard."""
        self.wait()
        self.gatherer.ensure_all()
        try:
            yield
        finally:
            self.gatherer.free_all()

    def unit_of(self, param: torch.Tensor) -> tuple[ParamGroup, int]:
        """The unit that holds ``param``, and its slot's index there. Raises TrialError for a parameter that this model does not train."""
        for unit in self.units:
            for index, own in enumerate(unit.params):
                if own is param:
                    return unit, index
        raise TrialError("this parameter is in no unit of this engine", got=tuple(param.shape))

    def landing_of(self, unit: ParamGroup) -> GradBuffer | None:
        return next((landing for landing in self.landings if landing.unit is unit), None)

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes that outlive a step on this rank: parameters with masters, and gradients."""
        return {
            "parameters": sum(unit.persistent_bytes() for unit in self.units) + swap_buffer_bytes(self.units),
            "gradients": sum(landing.persistent_bytes() for landing in self.landings),
        }

    def buffers(self) -> list[torch.Tensor]:
        """The flat buffers whose memory comes and goes, or is not of torch's making: parameters, shards, and gradients in flight."""
        rooms = self.rooms.buffers() if self.rooms is not None else []
        of_units = [buffer for unit in self.units for buffer in (unit.full, unit.shard)]
        return [*of_units, *(landing.full for landing in self.landings), *rooms]

    def remove_hooks(self) -> None:
        """Takes every hook off the module; its parameters become whole, ordinary parameters again. Collective over shard.

        Parameters that did not always live are in the host's memory then: group by group, for the device may not hold them all at once.
        """
        self.wait()
        for unit in self.units:
            unit.start_gather()
            unit.finish_gather()
            if unit.plan.params is not Lifetime.ALWAYS and unit.full.device.type != "cpu":
                values = [param.detach().to("cpu", copy=True) for param in unit.params]
                unit.free(stale=True)
                for param, value in zip(unit.params, values, strict=True):
                    param.data = value
        for landing in self.landings:
            landing.remove_hooks()
        self.gatherer.remove_hooks()
        self._whole_state.remove_hooks()
        for unit in self.units:
            if unit.away is not None:
                unit.away.close()
        full_params.forget_owner(self._params())
