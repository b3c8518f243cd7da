"""The param groups of a model, with first values from its parameters or from files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import nn

from zero_trial.comm import Mesh
from zero_trial.sharding.grouping import (
    GroupSpec,
    ManualGroups,
    ShardingSettings,
    collect_params,
    find_blocks,
    into_blocks,
    into_buckets,
    merge_small,
    persistent_members,
    saved_buffers,
)
from zero_trial.sharding.guards.freed import FreedParameter, forget_owner, is_absent, owner_of_param, revive
from zero_trial.sharding.init import PreSharded, read_first_values
from zero_trial.sharding.layout import Layout, lay_out
from zero_trial.sharding.living_dtypes import LivingDtypes
from zero_trial.sharding.param_group import ParamGroup
from zero_trial.sharding.plan import Home, Lifetime, ZeroPlan
from zero_trial.sharding.precision import DtypePolicy
from zero_trial.sharding.quantized import opaque_buffers

FirstValues: TypeAlias = Callable[[str, int, int, torch.Tensor], None]
"""Fills a tensor with elements [start, stop) of a named parameter or buffer, flattened and
first rounded to the dtype of :meth:`LivingDtypes.of_stored`. Local."""


def read_shard(
    values: FirstValues,
    layout: Layout,
    mesh: Mesh,
    out: torch.Tensor,
    *,
    owned: bool = True,
) -> None:
    """Fill ``out`` with this rank's shard (n/N,) of a group.

    The replicas of a shard read equal parts of it and gather the rest from each other, so that the
    ranks together read each byte once. Collective over replica. ``owned=False``: another pipeline
    stage reads, and the result is zeros.
    """
    shard, replica = mesh.shard, mesh.replica
    size = layout.shard_numel // replica.size
    own = out[replica.index * size :][:size]
    base = layout.shard_range(shard.index)[0] + replica.index * size
    for start, stop in layout.gaps():
        if max(start, base) < min(stop, base + size):
            own[max(start, base) - base : stop - base].zero_()
    for slot in layout.slots:
        low, high = max(slot.offset, base), min(slot.offset + slot.numel, base + size)
        if low < high:
            place = own[low - base : high - base]
            if owned:
                values(slot.name, low - slot.offset, high - slot.offset, place)
            else:
                place.zero_()
    if replica.size > 1:
        replica.all_gather(out, own, "first values").wait()


def fill_shard(
    layout: Layout,
    params: Sequence[nn.Parameter],
    agree: Callable[[torch.Tensor], None] | None,
    index: int,
    out: torch.Tensor,
) -> None:
    """Fill ``out`` with shard ``index`` (n/N,) of a group: only one parameter at a time has full
    values, in the dtype of ``out``. ``agree`` makes its values equal on all ranks. Collective."""
    base, end = layout.shard_range(index)
    out.zero_()
    for slot, param in zip(layout.slots, params, strict=True):
        values = out.new_empty(slot.numel).copy_(read_first_values(param).reshape(-1))
        if agree is not None:
            agree(values)
        low, high = max(slot.offset, base), min(slot.offset + slot.numel, end)
        if low < high:
            out[low - base : high - base].copy_(values[low - slot.offset : high - slot.offset])


def _take_from_init(params: Sequence[nn.Parameter]) -> None:
    """Drop the shards of ``params`` from zero.Init. If the build fails, a parameter without other
    values raises an error that says so, until an engine owns it."""
    for param in params:
        owner = owner_of_param(param)
        if isinstance(param, FreedParameter) and isinstance(owner, PreSharded):
            owner.spend()
        else:
            forget_owner([param])


@dataclass(frozen=True)
class FirstSource:
    """The source and the destination of a model's first values: see :class:`ShardedModel`."""

    mesh: Mesh
    manual_groups: ManualGroups
    device: torch.device | None = None
    values: FirstValues | None = None


@dataclass(frozen=True)
class PlannedGroups:
    """The groups of a model, before any of them has memory.

    Args:
        groups: members, layout and plan of each, in the model's order.
        params: the model's parameters that are in a group, by name.
        merged: by block, its modules if several small ones were merged.
    """

    groups: list[tuple[GroupSpec, Layout, ZeroPlan]]
    params: Mapping[str, nn.Parameter]
    merged: Mapping[str, tuple[str, ...]]


def plan_groups(
    module: nn.Module,
    opt_groups: Sequence[Sequence[nn.Parameter]],
    plan: ZeroPlan,
    living: LivingDtypes,
    settings: ShardingSettings,
    source: FirstSource,
) -> PlannedGroups:
    """Decide which parameters are gathered, freed and reduced together. Local; also used for memory
    plans of models without values."""
    mesh, manual_groups = source.mesh, source.manual_groups
    number = {id(param): index for index, opt_group in enumerate(opt_groups) for param in opt_group}
    if plan.frees_parameters and not manual_groups.all:
        settings.leaf.mark(module)
    blocks = find_blocks(module)
    members, params = collect_params(
        module,
        number,
        manual_groups,
        frozenset(blocks),
        living=living,
        with_frozen=plan.frees_parameters,
        with_parts=mesh.model.size > 1,
        device=source.device,
    )
    merged: Mapping[str, tuple[str, ...]] = {}
    if not manual_groups.all:
        merged = merge_small(blocks, persistent_members(members, settings.limits)[1], settings.limits.smallest_group)
        merged_into = {block: name for name, inside in merged.items() for block in inside}
        members = [replace(member, block=merged_into.get(member.block, member.block)) for member in members]
    divide = into_blocks if plan.frees_parameters else into_buckets
    groups: list[tuple[GroupSpec, Layout, ZeroPlan]] = []
    room = settings.limits.kept_on_host
    for spec in divide(members, settings.limits):
        layout = _layout_of(spec, params, source)
        own_plan = plan.persistent() if spec.always else plan
        size = layout.numel if plan.whole_home else layout.shard_numel
        if own_plan.home is Home.NVME and size <= room:
            room -= size
            own_plan = plan.at(Home.DEVICE)
        groups.append((spec, layout, own_plan))
    return PlannedGroups(groups, params, merged)


def build_param_groups(
    module: nn.Module,
    opt_groups: Sequence[Sequence[nn.Parameter]],
    plan: ZeroPlan,
    living: LivingDtypes,
    settings: ShardingSettings,
    source: FirstSource,
    on_group_built: Callable[[ParamGroup], None],
) -> tuple[list[ParamGroup], dict[str, list[ParamGroup]], dict[str, list[nn.Module]]]:
    """Build all groups of ``module``, the same on all ranks of data. Return them in the model's
    order; by block those whose parameters do not always live; and for each such block its modules,
    in order (none if a schedule decides when to gather).

    Collective over data; arguments as for :class:`ShardedModel`.
    """
    planned = plan_groups(module, opt_groups, plan, living, settings, source)
    manual_groups, params, merged = source.manual_groups, planned.params, planned.merged
    groups: list[ParamGroup] = []
    for spec, layout, own_plan in planned.groups:
        groups.append(_build(spec, layout, params, own_plan, source))
        _take_from_init(groups[-1].params)
        on_group_built(groups[-1])
    freed: dict[str, list[ParamGroup]] = {}
    for group in groups:
        if group.plan.params is not Lifetime.ALWAYS:
            freed.setdefault(group.block, []).append(group)
    modules = {
        name: [module.get_submodule(block) for block in merged.get(name, (name,))]
        for name in freed
        if not manual_groups.all  # else a schedule decides when to gather
    }
    return groups, freed, modules


def _layout_of(spec: GroupSpec, params: Mapping[str, nn.Parameter], source: FirstSource) -> Layout:
    manual_group = source.manual_groups.by_name.get(spec.kind.manual_group)
    return lay_out(
        [(m.name, tuple(params[m.name].shape)) for m in spec.members],
        source.mesh.shard.size,
        source.mesh.replica.size * (manual_group.holders if manual_group is not None else 1),
    )


def _build(
    spec: GroupSpec, layout: Layout, params: Mapping[str, nn.Parameter], plan: ZeroPlan, source: FirstSource
) -> ParamGroup:
    mesh, kind = source.mesh, spec.kind
    own = [params[m.name] for m in spec.members]
    manual_group = source.manual_groups.by_name.get(kind.manual_group)

    def agree(values: torch.Tensor) -> None:
        if manual_group is not None:
            manual_group.agree(values, f"first values of {manual_group.name}")
        mesh.data.broadcast(values, f"first values of {spec.name}")

    def fill(out: torch.Tensor) -> None:
        if source.values is None:
            fill_shard(layout, own, None if cut else agree, mesh.shard.index, out)
            return
        owned = manual_group is None or manual_group.owned
        read_shard(source.values, layout, mesh, out, owned=owned)
        if manual_group is not None:
            manual_group.agree(out, f"first values of {manual_group.name}")

    owners = [owner_of_param(param) for param in own]
    all_cut = all(isinstance(owner, PreSharded) and not owner.live for owner in owners)
    cut = plan.gathers_parameters and manual_group is None and all_cut
    return ParamGroup(
        spec.name,
        layout,
        own,
        plan=plan,
        dtype=kind.dtype,
        device=kind.device,
        comm=mesh.shard,
        runs=spec.runs(layout),
        block=spec.block,
        trainable=kind.trained,
        counts=mesh.model.index == 0 or kind.part,
        fill=fill,
    )


@torch.no_grad()
def sync_unmanaged(module: nn.Module, managed: Collection[int], living: LivingDtypes, source: FirstSource) -> None:
    """Give parameters whose ids are not in ``managed``, and all buffers, the policy's dtype and
    rank 0's values, on their device. Collective over ``data``."""
    data, exact = source.mesh.data, exact_buffers(module, living.policy)

    def stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape, with the values of the first rank of ``data``."""
        flat = torch.empty(tensor.numel(), dtype=living.of_stored(tensor), device=tensor.device)
        if source.values is not None and data.index == 0 and not source.manual_groups.is_copy(name):
            source.values(name, 0, tensor.numel(), flat)
        return flat.view(tensor.shape)

    for name, param in module.named_parameters():
        if id(param) not in managed:
            values = stored(name, param) if source.values is not None else read_first_values(param)
            if data.index == 0:
                values = values.contiguous() if is_absent(values) else values  # an expand() of one number
            elif is_absent(values):  # rank 0 has them
                values = torch.empty(values.shape, dtype=values.dtype, device=values.device)
            revive(param, values.to(device=source.device, dtype=living.of(param)))
            forget_owner([param])
            if (manual_group := source.manual_groups.of(param)) is not None:
                manual_group.agree(param.data, name)
            data.broadcast(param.data, name)
    saved = saved_buffers(module) if source.values is not None else ()
    for name, buffer in module.named_buffers():
        if name in saved:
            buffer.data = stored(name, buffer)
        dtype = buffer.dtype
        if buffer.is_floating_point() and name not in exact:
            dtype = living.of_buffer(buffer)
        buffer.data = buffer.data.to(device=source.device, dtype=dtype)
        data.broadcast(buffer.data, name)


def exact_buffers(module: nn.Module, policy: DtypePolicy) -> list[str]:
    """List the buffers that ``policy`` does not cast."""
    opaque = [name for prefix, part in module.named_modules() for name, _ in opaque_buffers(part, prefix)]
    return opaque + (fp32_buffers(module) if policy.keep_constants else [])


def fp32_buffers(module: nn.Module) -> list[str]:
    """List the fp32 buffers that are not saved, which stay fp32 in 16-bit training.

    They are constants of the model's arithmetic, such as the frequencies of rotary embeddings: in
    bf16 those are wrong by 0.73 rad at position 4096.
    """
    constants = {id(inner._buffers[name]) for inner in module.modules() for name in inner._non_persistent_buffers_set}
    return [
        name for name, buffer in module.named_buffers() if buffer.dtype == torch.float32 and id(buffer) in constants
    ]
