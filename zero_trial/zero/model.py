"""A module whose parameters, gradients and optimizer state live by a ZeroPlan: units, landings, reducer and gatherer, wired."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from zero_trial.errors import TrialError
from zero_trial.mesh import Mesh, Pending
from zero_trial.ops.optimizers import Gate
from zero_trial.precision.policy import DtypePolicy
from zero_trial.zero import directory
from zero_trial.zero.arrivals import Arrivals
from zero_trial.zero.domain import Domain
from zero_trial.zero.domains import Domains
from zero_trial.zero.dtypes import wide_dtype
from zero_trial.zero.gatherer import Gatherer
from zero_trial.zero.gradient_memory import Rooms
from zero_trial.zero.heap import keep_freed_memory
from zero_trial.zero.landing import Landing
from zero_trial.zero.optimizer import ShardedOptimizer
from zero_trial.zero.outside import agree_outside
from zero_trial.zero.plan import Lifetime, ReduceAt, ZeroPlan
from zero_trial.zero.publication import Publication
from zero_trial.zero.reducer import Reducer
from zero_trial.zero.settings import ShardingSettings
from zero_trial.zero.unit import Unit, bytes_on_the_way
from zero_trial.zero.units import make_units
from zero_trial.zero.visits import Visits
from zero_trial.zero.whole_state import WholeState


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
        domains: Sequence[Domain] = (),
        house: Callable[[Unit], None] = lambda unit: None,
    ) -> None:
        self.module = module
        self.plan = plan
        self.mesh = mesh
        self.policy = policy
        self.wire_scale = settings.wire_scale
        self.domains = Domains(domains)
        if plan.frees_memory and any(param.device.type == "cpu" for param in module.parameters()):
            keep_freed_memory()  # changes the allocator of the whole process: not where only GPU memory is freed
        units = make_units(module, groups, plan, mesh, policy, settings, self.domains, house)
        self.units = units.all
        agree_outside(module, {id(param) for param in self._params()}, policy, self.domains, mesh.data)
        self.gatherer = Gatherer(units.modules, units.freed, plan.reshard, settings.live)
        self.rooms: Rooms | None = None
        self.landings = self._land(settings)
        self.reducer = Reducer(
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
        self.arrivals = Arrivals(module)
        self._visits = Visits(self.units, self.wait, mesh.data)
        directory.register(self._params(), self)
        self._whole_state = WholeState(module, self.units, self.arrive)

    def _params(self) -> Iterator[nn.Parameter]:
        return (param for unit in self.units for param in unit.params)

    def _land(self, settings: ShardingSettings) -> list[Landing]:
        """A landing for each unit that is trained, in rooms where peers can read those."""
        wide = self.policy.grad if self.plan.reduce_at is ReduceAt.BOUNDARY else self.policy.comm
        # Where peers sum up the full gradients: along shard, or along replica where nothing is sharded.
        along = self.mesh.shard if self.mesh.shard.size > 1 else self.mesh.replica
        if self.units and along.reads_in_place(self.units[0].full.device):
            self.rooms = Rooms(along, settings.in_flight + 2)
        return [
            Landing(
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

    def _complete(self, landing: Landing) -> None:
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
        Publication(self.units, (), self.arrivals.under_way).finish()
        self.gatherer.start_step()

    def update(self, multiplier: float, gate: Gate | None = None, *, defer: bool = False) -> None:
        """One optimizer step with ``multiplier`` times the reduced gradients, and :meth:`publish` of each unit as soon as it is done, while
        the next one is updated. What is said there holds here. ``gate``: see :meth:`ShardedOptimizer.step`; a step that the device skips
        publishes the values that were there. ``defer``: :meth:`wait_when_called` will follow. Collective over shard."""
        if self.optimizer is None:
            raise TrialError("there is no optimizer to step", where="ShardedModel.update")
        self.settle()
        publication = Publication(self.units, self.optimizer.pieces, self.arrivals.under_way, lend=not defer)
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
            "parameters": sum(unit.persistent_bytes() for unit in self.units) + bytes_on_the_way(self.units),
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
        directory.forget(self._params())
