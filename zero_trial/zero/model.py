"""A module whose parameters, gradients and optimizer state live by a ZeroPlan: units, landings, reducer and gatherer, wired."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from zero_trial.errors import TrialError
from zero_trial.mesh import Mesh, Pending, wait_all
from zero_trial.ops.optimizers import Gate
from zero_trial.precision.policy import DtypePolicy
from zero_trial.zero import directory
from zero_trial.zero.domain import Domain
from zero_trial.zero.dtypes import living_dtype, wide_dtype
from zero_trial.zero.facts import by_domain, members_of
from zero_trial.zero.gatherer import Gatherer, LiveLimits
from zero_trial.zero.gradient_memory import Rooms
from zero_trial.zero.heap import keep_freed_memory
from zero_trial.zero.landing import Landing
from zero_trial.zero.layout import lay_out
from zero_trial.zero.optimizer import ShardedOptimizer
from zero_trial.zero.partition import (
    Grouping,
    LeafRules,
    Limits,
    into_blocks,
    into_buckets,
    merge_small,
    persistent_members,
    runs_of_groups,
)
from zero_trial.zero.plan import Lifetime, ReduceAt, ZeroPlan
from zero_trial.zero.presharded import read_first_values
from zero_trial.zero.publication import Publication
from zero_trial.zero.reducer import Reducer
from zero_trial.zero.unit import Unit
from zero_trial.zero.whole_state import WholeState


@dataclass(frozen=True)
class ShardingSettings:
    """What ds_config says about sizes and blocks."""

    limits: Limits = field(default_factory=Limits)
    live: LiveLimits = field(default_factory=LiveLimits)
    leaf: LeafRules = field(default_factory=LeafRules)
    wire_scale: float = 1.0
    overlap: bool = True


class ShardedModel:
    """``module`` with its trainable parameters in units. ``groups``: for each optimizer group, its parameters.

    Construction makes all ranks start from rank 0's values. Collective over data. ``house(unit)`` hears of each trainable unit as soon as it
    is built, before the next one is: it may take the master elsewhere.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[Sequence[nn.Parameter]],
        plan: ZeroPlan,
        mesh: Mesh,
        policy: DtypePolicy,
        settings: ShardingSettings = ShardingSettings(),
        domains: Sequence[Domain] = (),
        house: Callable[[Unit], None] = lambda unit: None,
    ) -> None:
        self.module = module
        self.plan = plan
        self.domains = {domain.name: domain for domain in domains}
        self.mesh = mesh
        self.policy = policy
        self.wire_scale = settings.wire_scale
        if plan.frees_memory:
            keep_freed_memory()
        number = {id(param): index for index, group in enumerate(groups) for param in group}
        per_unit = plan.params is not Lifetime.ALWAYS
        members, params, blocks = members_of(module, number, settings.leaf, dtype=policy.param, with_frozen=per_unit)
        merged: Mapping[str, tuple[str, ...]] = {}
        if domains:
            members = by_domain(members, params, domains)
        else:
            merged = merge_small(blocks, persistent_members(members, settings.limits)[1], settings.limits.smallest_unit)
            group_of = {block: group for group, inside in merged.items() for block in inside}
            members = [replace(member, block=group_of.get(member.block, member.block)) for member in members]
        groupings = into_blocks(members, settings.limits) if per_unit else into_buckets(members, settings.limits)
        self.units = [self._unit(grouping, params, house) for grouping in groupings]
        self._agree_on_the_rest({id(param) for unit in self.units for param in unit.params})
        freed: dict[str, list[Unit]] = {}
        for unit in self.units:
            if unit.plan.params is not Lifetime.ALWAYS:
                freed.setdefault(unit.block, []).append(unit)
        inside = {
            group: [module.get_submodule(block) for block in merged.get(group, (group,))]
            for group in freed
            if not domains
        }
        self.gatherer = Gatherer(inside, freed, plan.reshard, settings.live)
        wide = policy.grad if plan.reduce_at is ReduceAt.BOUNDARY else policy.comm
        in_flight = 2 if settings.overlap else 0
        # Where peers sum up the full gradients: along shard, or along replica where nothing is sharded.
        along = mesh.shard if mesh.shard.size > 1 else mesh.replica
        in_place = bool(self.units) and along.reads_in_place(self.units[0].full.device)
        self.rooms = Rooms(along, in_flight + 2) if in_place else None
        self.landings = [
            Landing(
                unit,
                dtype=wide_dtype(unit.dtype, wide),
                shard_dtype=wide_dtype(unit.dtype, policy.grad),
                on_complete=self._complete,
                comm=along,
                rooms=self.rooms,
            )
            for unit in self.units
            if unit.trainable
        ]
        self.reducer = Reducer(
            self.landings,
            mesh.shard,
            mesh.replica,
            wire_dtype=policy.comm,
            wire_scale=settings.wire_scale,
            in_flight=in_flight,
        )
        self._landings_of: dict[str, list[Landing]] = {domain.name: [] for domain in domains}
        for landing in self.landings:
            if (name := self._domain_of(landing.unit)) is not None:
                self._landings_of[name].append(landing)
        self._copied = {
            id(unit)
            for unit in self.units
            if (name := self._domain_of(unit)) is not None and not self.domains[name].owned
        }
        self.optimizer: ShardedOptimizer | None = None
        self.gradient_multiplier: Callable[[], float] = lambda: (
            1.0
        )  # from a reduced gradient shard to the averaged gradient
        self._publishing: list[Pending] = []
        self._visits: list[
            list[Unit]
        ] = []  # for each open() without its close(), innermost last: the units that it brought to life
        self._alarm: Any = None
        directory.register((param for unit in self.units for param in unit.params), self)
        self._whole_state = WholeState(module, self.units, self.arrive)

    def _unit(self, grouping: Grouping, params: Mapping[str, nn.Parameter], house: Callable[[Unit], None]) -> Unit:
        first = params[grouping.members[0].name]
        dtype = grouping.members[0].key[0]
        domain = self.domains.get(str(grouping.members[0].key[-1]))
        layout = lay_out(
            [(m.name, tuple(params[m.name].shape)) for m in grouping.members],
            self.mesh.shard.size,
            self.mesh.replica.size * (domain.holders if domain is not None else 1),
        )

        def agree(values: torch.Tensor) -> None:
            if domain is not None:
                domain.agree(values, f"first values of {grouping.name}")
            self.mesh.data.broadcast(values, f"first values of {grouping.name}")

        offsets = [(slot.offset, member.group) for slot, member in zip(layout.slots, grouping.members, strict=True)]
        trainable = grouping.members[0].group >= 0
        unit = Unit(
            grouping.name,
            layout,
            [params[m.name] for m in grouping.members],
            plan=self.plan.persistent() if grouping.always else self.plan,
            dtype=dtype if isinstance(dtype, torch.dtype) else first.dtype,
            device=first.device,
            comm=self.mesh.shard,
            runs=runs_of_groups(offsets, layout.numel) if trainable else {},
            block=grouping.block,
            trainable=trainable,
            read=read_first_values,
            agree=agree,
        )
        if trainable:
            house(unit)
        return unit

    def _domain_of(self, unit: Unit) -> str | None:
        found = (domain.name for domain in self.domains.values() if unit.params and id(unit.params[0]) in domain.params)
        return next(found, None)

    def _agree_on_the_rest(self, managed: set[int]) -> None:
        """Parameters outside the units, and buffers: policy dtype, rank 0's values."""
        with torch.no_grad():
            for name, param in self.module.named_parameters():
                if id(param) not in managed:
                    values = read_first_values(param)
                    param.data = values.to(living_dtype(values.dtype, self.policy.param))
                    directory.forget([param])
                    for domain in self.domains.values():
                        if id(param) in domain.params:
                            domain.agree(param.data, name)
                    self.mesh.data.broadcast(param.data, name)
            for name, buffer in self.module.named_buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(self.policy.buffer or living_dtype(buffer.dtype, self.policy.param))
                self.mesh.data.broadcast(buffer.data, name)

    @property
    def frees_parameters(self) -> bool:
        """Some parameters do not always live: their values are in the shards."""
        return self.plan.params is not Lifetime.ALWAYS

    # --- one step -------------------------------------------------------------------------------------------------

    def begin_backward(self, *, reduce: bool, last: bool) -> None:
        """A backward pass of this model's own loss starts; ``reduce``: its gradients cross the wire; ``last``: the step follows."""
        self.gatherer.last_micro_batch = last
        for landing in self.landings:
            landing.begin_pass()
        self.reducer.begin(reduce=reduce)

    def end_backward(self) -> None:
        """The backward pass has returned; afterwards the gradients that were to be reduced are. Collective over shard and replica if so."""
        for landing in self.landings:
            landing.end_pass()
        self.reducer.finish()

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
        Publication(self.units, (), self._publishing).finish()
        self.gatherer.start_step()

    def update(self, multiplier: float, gate: Gate | None = None, *, defer: bool = False) -> None:
        """One optimizer step with ``multiplier`` times the reduced gradients, and :meth:`publish` of each unit as soon as it is done, while
        the next one is updated. What is said there holds here. ``gate``: see :meth:`ShardedOptimizer.step`; a step that the device skips
        publishes the values that were there. ``defer``: :meth:`wait_when_called` will follow. Collective over shard."""
        if self.optimizer is None:
            raise TrialError("there is no optimizer to step", where="ShardedModel.update")
        self.settle()
        publication = Publication(self.units, self.optimizer.pieces, self._publishing, lend=not defer)
        self.optimizer.step(multiplier, publication.updated, gate)
        publication.finish()
        self.gatherer.start_step()

    def publish_frozen(self) -> None:
        """Frozen values were replaced (a checkpoint was read): as :meth:`publish`, for those that no step changes. Collective over shard."""
        for unit in self.units:
            if not unit.trainable and (pending := unit.publish()) is not None:
                self._publishing.append(pending)

    def wait(self) -> None:
        """Returns when every parameter that always lives is whole again, here and on the other ranks of the shard axis, which must come as far."""
        wait_all(self.arrive())

    def arrive(self) -> list[Pending]:
        """Returns when every parameter that always lives is whole again here; with what peers may still be reading."""
        if self._alarm is not None:
            self._alarm.remove()
            self._alarm = None
        pendings, self._publishing = self._publishing, []
        for pending in pendings:
            pending.arrive()
        return pendings

    def wait_when_called(self) -> None:
        """Whoever calls the module next, or any part of it, waits first until its parameters are whole here: that rank may be the only one that calls
        it. What was published with ``defer`` may then be edited. The hook is torch's global one and goes after that call."""
        if self._publishing and self._alarm is None:
            parts, this = {id(part) for part in self.module.modules()}, weakref.ref(self)

            def ring(module: nn.Module, _: object) -> None:
                if id(module) in parts and (model := this()) is not None:
                    model.arrive()

            self._alarm = register_module_forward_pre_hook(ring)

    def _complete(self, landing: Landing) -> None:
        self.gatherer.after_gradients(landing.unit)
        self.reducer.offer(landing)

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
        copies = self.domains[domain].copies
        self.reducer.land()
        for landing in self._landings_of[domain]:
            if copies is not None:
                self.reducer.sum_copies(landing, copies)

    def owns(self, unit: Unit) -> bool:
        """Whether this rank's pipeline stage is the one that counts the unit's norm and saves it: all units but copies."""
        return id(unit) not in self._copied

    def is_copy(self, name: str) -> bool:
        """Whether a parameter or buffer is a copy of another pipeline stage's, which saves it."""
        copied = (domain.module for domain in self.domains.values() if not domain.owned)
        return any(name.startswith(f"{module}.") for module in copied)

    def owned_square_sums(self) -> list[torch.Tensor]:
        """Of the reduced gradient shards, those that no other pipeline stage counts."""
        sums = self.reducer.square_sums.items()
        return [total for index, total in sums if self.owns(self.reducer.landings[index].unit)]

    # --- full parameters, for whoever asks ------------------------------------------------------------------------

    def open(self, params: list[nn.Parameter]) -> None:
        self.wait()
        visited = self._units_of(params)
        opened = [unit for unit in visited if not unit.live]
        for unit in opened:
            unit.start_gather()
        for unit in opened:
            unit.finish_gather()
        for unit in visited:
            unit.pins += 1
        self._visits.append(opened)

    def close(self, params: list[nn.Parameter], source: int | None) -> None:
        opened, visited = self._visits.pop(), self._units_of(params)
        for unit in visited:
            unit.pins -= 1
        for unit in visited:
            if source is not None:
                if not unit.live:
                    raise TrialError(
                        "the optimizer stepped inside a block that edits parameters",
                        where=f"GatheredParameters(modifier_rank={source})",
                        fix="Leave the block before engine.step().",
                    )
                self.mesh.data.broadcast(unit.full, f"edited {unit.name}", source)
                unit.take_edits()
            if unit in opened:
                unit.free()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """All parameters whole inside the block. Collective over shard."""
        self._open_all()
        try:
            yield
        finally:
            self.gatherer.free_all()

    def unit_of(self, param: torch.Tensor) -> tuple[Unit, int]:
        """The unit that holds ``param``, and its slot's index there. Raises TrialError for a parameter that this model does not train."""
        for unit in self.units:
            for index, own in enumerate(unit.params):
                if own is param:
                    return unit, index
        raise TrialError("this parameter is in no unit of this engine", got=tuple(param.shape))

    def landing_of(self, unit: Unit) -> Landing | None:
        return next((landing for landing in self.landings if landing.unit is unit), None)

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes that outlive a step on this rank: parameters with masters, and gradients."""
        return {
            "parameters": sum(unit.persistent_bytes() for unit in self.units),
            "gradients": sum(landing.persistent_bytes() for landing in self.landings),
        }

    def buffers(self) -> list[torch.Tensor]:
        """The flat buffers whose memory comes and goes, or is not of torch's making: parameters, shards, and gradients in flight."""
        rooms = self.rooms.buffers() if self.rooms is not None else []
        of_units = [buffer for unit in self.units for buffer in (unit.full, unit.shard)]
        return [*of_units, *(landing.full for landing in self.landings), *rooms]

    def remove_hooks(self) -> None:
        """Takes every hook off the module; its parameters become whole, ordinary parameters again. Collective over shard."""
        self._open_all()
        for landing in self.landings:
            landing.remove_hooks()
        self.gatherer.remove_hooks()
        self._whole_state.remove_hooks()
        directory.forget(param for unit in self.units for param in unit.params)

    def _units_of(self, params: list[nn.Parameter]) -> list[Unit]:
        wanted = {id(param) for param in params}
        return [unit for unit in self.units if any(id(param) in wanted for param in unit.params)]

    def _open_all(self) -> None:
        self.wait()
        self.gatherer.ensure_all()
