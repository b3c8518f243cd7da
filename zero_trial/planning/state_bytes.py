"""The memory of one rank between steps, by closed formulas over the layouts of the engine's groups.

For a group of n elements, padded for the N ranks of the shard axis, with p bytes per parameter, g
per gradient, and s of optimizer state per element:

    parameters   p n, or p n/N where they are freed between uses; 4 n/N more for an fp32 master of a
                 16-bit parameter
    gradients    g n where they are never freed, else g n/N
    optimizer    s n/N

The groups, their padding, and how long each of their buffers lives are taken from the engine
(:func:`zero_trial.sharding.build_groups.plan_groups`); s is measured in one step of the optimizer
on a few elements. Offloaded state is in host memory or on NVMe instead, and is streamed through
rings of buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from zero_trial.comm import Mesh, MeshShape
from zero_trial.ds_config.keys_zero import OffloadOptimizerSection, OffloadParamSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.engine.offload_config import resolve_home
from zero_trial.engine.optimizer_plan import OptimizerPlan, plan_optimizer
from zero_trial.engine.optimizers import parameter_groups
from zero_trial.engine.resolved_config import ResolvedConfig, mesh_shape, resolve_config
from zero_trial.ops.optimizers.shard_step import ShardOptimizer
from zero_trial.planning.blueprint import Blueprint, lone_mesh
from zero_trial.planning.live_bytes import LiveBytes
from zero_trial.planning.memory_plan import Figures
from zero_trial.sharding.build_groups import FirstSource, plan_groups
from zero_trial.sharding.grouping import GroupSpec, ManualGroups
from zero_trial.sharding.layout import ALIGN, Layout, ParamSlot, has_own_master, round_up
from zero_trial.sharding.living_dtypes import LivingDtypes
from zero_trial.sharding.offload.moved_states import tensors_inside
from zero_trial.sharding.offload.region_file import BLOCK
from zero_trial.sharding.offload.regions import buffer_elements, shard_buffer_bytes
from zero_trial.sharding.offload.update_store import state_columns
from zero_trial.sharding.plan import Home, Lifetime, ReduceAt, ZeroPlan
from zero_trial.sharding.whole_tensors import ROUND, opt_group_of, owners_of, parts_of

_PROBE = (48, 64)  # shape of the parameter in a step that measures an optimizer's state
_MASTER = 4  # bytes


@dataclass
class PlannedGroup:
    """Parameters that are gathered, freed and reduced together.

    Args:
        grad, grad_shard: dtypes of the full gradients and of this rank's part of the sum.
        flat: bytes of optimizer state for this rank's shard, except tensors updated whole.
        whole: bytes of each state tensor of this rank's tensors that are updated whole.
    """

    name: str
    block: str
    layout: Layout
    plan: ZeroPlan
    dtype: torch.dtype
    trainable: bool
    grad: torch.dtype
    grad_shard: torch.dtype
    flat: int
    whole: list[int]

    @property
    def state(self) -> int:
        return self.flat + sum(self.whole)

    @property
    def shard_numel(self) -> int:
        return self.layout.shard_numel

    @property
    def full_bytes(self) -> int:
        """Return the bytes of the full parameters."""
        return self.layout.numel * self.dtype.itemsize

    @property
    def home_bytes(self) -> int:
        """Return the bytes of parameters that are stored between uses, on any device."""
        whole = self.plan.params is Lifetime.ALWAYS or self.plan.whole_home
        return (self.layout.numel if whole else self.shard_numel) * self.dtype.itemsize

    @property
    def master_bytes(self) -> int:
        """Return the bytes of a separate master; 0 if the parameters are their own masters."""
        return 0 if has_own_master(self.dtype) or not self.trainable else _MASTER * self.shard_numel

    @property
    def in_place(self) -> bool:
        """Return whether the reduced gradients are part of the full gradients."""
        lives = self.plan.grads is Lifetime.ALWAYS and self.plan.reduce_at is ReduceAt.BOUNDARY
        return lives and self.grad == self.grad_shard

    @property
    def grad_bytes(self) -> int:
        return self.layout.numel * self.grad.itemsize

    @property
    def grad_shard_bytes(self) -> int:
        """Return the bytes of this rank's part of the sum, if it has its own memory."""
        return 0 if self.in_place else self.shard_numel * self.grad_shard.itemsize


class TrainedModel:
    """A model with the arguments of its engine, and the engine's optimizer."""

    def __init__(self, blueprint: Blueprint, settings: DsConfig) -> None:
        self.blueprint = blueprint
        self.settings = settings

    @property
    def model(self) -> nn.Module:
        return self.blueprint.given["model"]  # type: ignore[no-any-return]

    @cached_property
    def optimizer(self) -> OptimizerPlan | None:
        """Return the optimizer's plan; None if nothing is trained."""
        given = self.blueprint.copy()
        optimizer, settings = given.get("optimizer"), self.settings
        if optimizer is None and settings.optimizer is None:
            return None
        groups = parameter_groups(given["model"], optimizer, given.get("model_parameters"))
        found = plan_optimizer(optimizer, groups, given["model"], settings, lone_mesh(MeshShape()))
        own = dict(zip(map(id, given["model"].parameters()), self.model.parameters(), strict=True))
        for group in found.groups:
            group["params"] = [own[id(param)] for param in group["params"]]
        return found

    @cached_property
    def small(self) -> SmallStep:
        """Return the measurements of one optimizer step on a few elements."""
        return _small_step(self.optimizer) if self.optimizer is not None else SmallStep([], fuses=True)

    @cache  # noqa: B019
    def whole_state(self, number: int, shape: tuple[int, ...]) -> list[int]:
        """Return the bytes of each state tensor of a tensor of ``shape`` that optimizer group
        ``number`` updates whole: measured in a step without values if the class supports that, else
        scaled from a step on a small matrix."""
        if self.optimizer is None:
            return []
        with _disable_current_modes():
            try:
                with FakeTensorMode(), LiveBytes():  # LiveBytes returns substitutes for numbers that are read
                    return _state_of(self.optimizer, number, shape)
            except Exception:  # arbitrary user code runs here
                share = math.prod(shape) / math.prod(_PROBE)
                return [int(each * share) for each in _state_of(self.optimizer, number, _PROBE)]


def _state_of(plan: OptimizerPlan, number: int, shape: tuple[int, ...]) -> list[int]:
    weight = nn.Parameter(torch.zeros(shape))
    base = plan.make([{**plan.groups[number], "params": [weight]}])
    weight.grad = torch.zeros_like(weight)
    base.step()
    return [value.nbytes for value in tensors_inside(base.state.get(weight))]


@dataclass(frozen=True)
class SmallStep:
    """For each optimizer group the bytes per element of each kind of its state; whether the update
    reads 16-bit gradients without a cast (``fuses``)."""

    columns: list[list[float]]
    fuses: bool


def _small_step(plan: OptimizerPlan) -> SmallStep:
    flat = [number for number in range(len(plan.groups)) if number not in plan.whole]
    if not flat:
        return SmallStep([[] for _ in plan.groups], fuses=True)
    if plan.client is not None:
        found = [float(column.dtype.itemsize) for column in state_columns(plan.client, opt_groups=flat)]
        return SmallStep([found] * len(plan.groups), isinstance(plan.client, ShardOptimizer))
    with _disable_current_modes():
        weights = [nn.Parameter(torch.zeros(_PROBE)) for _ in flat]
        base = plan.make([{**plan.groups[i], "params": [weight]} for i, weight in zip(flat, weights, strict=True)])
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        base.step()
    columns: list[list[float]] = [[] for _ in plan.groups]
    for number, weight in zip(flat, weights, strict=True):
        columns[number] = [value.nbytes / weight.numel() for value in tensors_inside(base.state.get(weight))]
    return SmallStep(columns, isinstance(base, ShardOptimizer))


class PlannedStates:
    """Rank 0's memory between steps for the engine of ``trained``, with ``settings``."""

    def __init__(self, trained: TrainedModel, settings: DsConfig, ranks: int, device: torch.device) -> None:
        self.settings = settings
        self.blueprint = trained.blueprint
        self.device = device
        self.shape = mesh_shape(settings, ranks)
        self.mesh: Mesh = lone_mesh(self.shape)
        model, optimizer = trained.model, trained.optimizer
        resolved = resolve_config(settings, self.mesh.data.size, device.type)
        params = list(model.parameters())
        self.resolved: ResolvedConfig = resolve_home(settings, resolved, self.mesh, params, device, in_pipeline=False)
        opt_groups = optimizer.params if optimizer is not None else []
        trained_params = [param for opt_group in opt_groups for param in opt_group]
        self._elements = _elements(trained_params, self.shape.shard)
        self.fuses = trained.small.fuses
        whole = optimizer.whole if optimizer is not None else frozenset()
        source = FirstSource(self.mesh, ManualGroups(), device)
        plan, policy = self.resolved.plan, self.resolved.policy
        living = LivingDtypes(model, policy)
        living.require_matches()
        made = plan_groups(model, opt_groups, plan, living, self.resolved.sharding, source)
        self.merged = made.merged
        wide = policy.grad if plan.reduce_at is ReduceAt.BOUNDARY else policy.comm
        self.groups: list[PlannedGroup] = []
        rounds = [(0, 0)]  # elements and bytes of whole tensors that are updated together
        own = _own_tensors(made.groups, optimizer, [name for name, _ in model.named_parameters()], self.shape.shard)
        for spec, layout, own_plan in made.groups:
            dtype, trainable = spec.kind.dtype, spec.kind.trained
            average = _MASTER if settings.ema is not None else 0
            state, tensors = 0.0, list[int]()
            for number, (start, stop) in spec.runs(layout).items():
                if number not in whole:
                    here = max(min(stop, layout.shard_numel) - start, 0)
                    state += here * (sum(trained.small.columns[number]) + average)
            for slot, number in own.get(layout, ()):
                tensors += trained.whole_state(number, slot.shape) + [average * slot.numel] * bool(average)
                moved = [rank for rank, *_ in parts_of(layout, slot)] != [0]
                each = 2 * _MASTER if moved else _MASTER if policy.wide(dtype, policy.grad).itemsize < _MASTER else 0
                elements, nbytes = rounds[-1]
                if elements + slot.numel > ROUND and optimizer is not None and not optimizer.at_once:
                    elements, nbytes, rounds = 0, 0, [*rounds, (0, 0)]
                rounds[-1] = elements + slot.numel, nbytes + each * slot.numel
            self.groups.append(
                PlannedGroup(
                    spec.name,
                    spec.block,
                    layout,
                    own_plan,
                    dtype,
                    trainable,
                    policy.wide(dtype, wide),
                    policy.wide(dtype, policy.grad),
                    int(state),
                    tensors,
                )
            )
        self.whole_bytes = max(nbytes for _, nbytes in rounds)
        self._columns = trained.small.columns
        named = dict(model.named_parameters())
        managed = {slot.name for group in self.groups for slot in group.layout.slots}
        self.unmanaged = sum(
            param.numel() * living.of(param).itemsize for name, param in named.items() if name not in managed
        )

    @cached_property
    def figures(self) -> Figures:
        """Return the bytes between steps; a copy for checkpoints is in host memory."""
        trained = [group for group in self.groups if group.trainable]
        grads = sum((0 if group.plan.grads is Lifetime.USE else group.grad_bytes) for group in trained)
        if not self.resolved.sharding.grads_to_none:
            grads += sum(group.grad_shard_bytes for group in trained)
        held = _Places(self)
        snapshot = 0
        if self.settings.checkpoint.writer.decoupled:
            snapshot = sum(
                sum(piece.numel for piece in group.layout.pieces(0))
                * (_MASTER if group.master_bytes else group.dtype.itemsize)
                + group.state
                for group in self.groups
                if not held.on_disk(group)
            )
        host, copied = (held.host, snapshot) if self.device.type == "cpu" else (held.host + snapshot, 0)
        return Figures(held.parameters, grads, held.optimizer, host=host, disk=held.disk, snapshot=copied)


class _Places:
    """The location and bytes of parameters, masters and optimizer state between steps."""

    def __init__(self, states: PlannedStates) -> None:
        zero, device = states.settings.zero_optimization, states.device
        self._states = states
        self._on_cpu = device.type == "cpu"
        section = zero.offload_optimizer
        self._section = section if section is not None and section.device not in ("none", device.type) else None
        self._params = zero.offload_param if states.resolved.plan.home is not Home.DEVICE else None
        self._swapped = {group.name for group in self._state_in_file()}
        self.parameters = self.optimizer = self.host = self.disk = 0
        for group in states.groups:
            self._place_values(group)
            self._place_state(group)
        self._add_rings()

    def on_disk(self, group: PlannedGroup) -> bool:
        return group.name in self._swapped or group.plan.home is Home.NVME

    def _state_in_file(self) -> Iterator[PlannedGroup]:
        """Yield the groups with masters and state on NVMe; a CPU rank may keep some in memory."""
        section, states = self._section, self._states
        if section is None or section.device != "nvme":
            return
        budget = int(section.ratio * states._elements) if self._on_cpu and section.ratio < 1 else None
        for group in states.groups:
            if not group.trainable or (budget is not None and group.shard_numel > budget):
                continue
            budget = None if budget is None else budget - group.shard_numel
            yield group

    def _place_values(self, group: PlannedGroup) -> None:
        home = group.plan.home
        if home is Home.DEVICE:
            self.parameters += group.home_bytes
        elif home is Home.HOST:
            self.host += round_up(group.home_bytes, BLOCK)
        else:
            self.disk += round_up(group.home_bytes, BLOCK)

    def _place_state(self, group: PlannedGroup) -> None:
        """Place master and state. Host updates add a separate master to a device's fp32
        parameter."""
        master = group.master_bytes
        staged = self._section is not None and not self._on_cpu
        if staged and group.trainable and not master and group.plan.home is Home.DEVICE:
            master = group.shard_numel * group.dtype.itemsize
        if group.name in self._swapped:
            columns = [master, *(int(group.shard_numel * each) for each in self._columns_of(group)), *group.whole]
            self.disk += sum(round_up(size, BLOCK) for size in columns)
        elif staged:
            self.host += master + group.state
        else:
            self.parameters += master
            self.optimizer += group.state

    def _columns_of(self, group: PlannedGroup) -> list[float]:
        """Return the bytes per element of each kind of state, for the group with the most."""
        if not group.flat:
            return []
        found = max(self._states._columns, key=sum, default=[])
        return [*found, *([_MASTER] if self._states.settings.ema is not None else [])]

    def _add_rings(self) -> None:
        """Add the buffers that stream state and parameters."""
        states = self._states
        trained = [group for group in states.groups if group.trainable]
        section: OffloadOptimizerSection | OffloadParamSection | None = self._section or self._params
        away = [group for group in states.groups if group.plan.home is not Home.DEVICE]
        if section is None or (self._section is None and not away):
            return
        most = buffer_elements(states._elements, states.settings.zero_optimization.sub_group_size, section.buffer_count)
        ring = 0
        for group in trained if any(each.flat for each in trained) else ():
            sizes = [_MASTER] if group.master_bytes and group.name in self._swapped else []
            sizes += [group.dtype.itemsize] if group.plan.home is Home.NVME else []
            columns = self._columns_of(group) if group.name in self._swapped else []
            ring = max(ring, sum(round_up(int(most * each), BLOCK) + BLOCK for each in (*sizes, *columns)))
        if self._on_cpu:
            self.optimizer += section.buffer_count * ring
        else:
            self.host += section.buffer_count * ring
            piece = min(most, max((group.shard_numel for group in trained), default=0))
            down = max((group.grad_shard.itemsize for group in trained), default=0)
            up = max((group.dtype.itemsize for group in trained), default=0)
            if self._section is not None:
                self.host += section.buffer_count * piece * (down + up)
        if self._params is not None and away:
            shards = [(group.home_bytes // group.dtype.itemsize, group.dtype.itemsize) for group in away]
            count = self._params.buffer_count
            self.parameters += count * shard_buffer_bytes(shards, self._params.buffer_size, count)


def _own_tensors(
    groups: Sequence[tuple[GroupSpec, Layout, ZeroPlan]], plan: OptimizerPlan | None, names: Sequence[str], ranks: int
) -> dict[Layout, list[tuple[ParamSlot, int]]]:
    """Return the tensors of rank 0 that are updated whole, with their optimizer groups, by the
    layout of their group."""
    if plan is None or not plan.whole:
        return {}
    order, rows = {name: index for index, name in enumerate(names)}, []
    for spec, layout, _ in groups:
        slots = [(slot, opt_group_of(spec.runs(layout), slot)) for slot in layout.slots if spec.kind.trained]
        rows += [(layout, slot, number) for slot, number in slots if slot.numel and number in plan.whole]
    rows.sort(key=lambda row: (row[2], order[row[1].name]))
    found: dict[Layout, list[tuple[ParamSlot, int]]] = {}
    owners = owners_of(rows, ranks, plan.work, one_owner=plan.one_owner)
    for (layout, slot, number), owner in zip(rows, owners, strict=True):
        if owner == 0:
            found.setdefault(layout, []).append((slot, number))
    return found


def _elements(params: Sequence[torch.Tensor], ranks: int) -> int:
    return sum(round_up(param.numel(), ALIGN) for param in params) // ranks
