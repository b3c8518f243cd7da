"""The units of one module: its parameters divided by the plan, and each unit built in its turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from zero_trial.mesh import Mesh
from zero_trial.precision.policy import DtypePolicy
from zero_trial.zero.domains import Domains
from zero_trial.zero.facts import by_domain, members_of
from zero_trial.zero.layout import lay_out
from zero_trial.zero.model_parallel import apart, is_part
from zero_trial.zero.partition import (
    Grouping,
    into_blocks,
    into_buckets,
    merge_small,
    persistent_members,
    runs_of_groups,
)
from zero_trial.zero.plan import Lifetime, ZeroPlan
from zero_trial.zero.presharded import read_first_values
from zero_trial.zero.settings import ShardingSettings
from zero_trial.zero.unit import Unit


@dataclass(frozen=True)
class Units:
    """``all``, in the model's order; ``freed``: by block, those whose parameters do not always live; ``modules``: for each such block the
    modules, in their order, that it stands for (none where a schedule says when to gather)."""

    all: list[Unit]
    freed: Mapping[str, list[Unit]]
    modules: Mapping[str, list[nn.Module]]


def make_units(
    module: nn.Module,
    groups: Sequence[Sequence[nn.Parameter]],
    plan: ZeroPlan,
    mesh: Mesh,
    policy: DtypePolicy,
    settings: ShardingSettings,
    domains: Domains,
    house: Callable[[Unit], None],
) -> Units:
    """All units of ``module``, with rank 0's values. ``groups``: for each optimizer group, its parameters.

    ``house(unit)`` hears of each unit as soon as it is built, before the next one is. Collective over data.
    """
    number = {id(param): index for index, group in enumerate(groups) for param in group}
    members, params, blocks = members_of(
        module, number, settings.leaf, dtype=policy.param, with_frozen=plan.frees_parameters
    )
    if mesh.model.size > 1:
        members = apart(members, params)
    merged: Mapping[str, tuple[str, ...]] = {}
    if domains.all:
        members = by_domain(members, params, domains.all)
    else:
        merged = merge_small(blocks, persistent_members(members, settings.limits)[1], settings.limits.smallest_unit)
        group_of = {block: group for group, inside in merged.items() for block in inside}
        members = [replace(member, block=group_of.get(member.block, member.block)) for member in members]
    divide = into_blocks if plan.frees_parameters else into_buckets
    units = []
    for grouping in divide(members, settings.limits):
        units.append(_build(grouping, params, plan, mesh, domains))
        house(units[-1])
    freed: dict[str, list[Unit]] = {}
    for unit in units:
        if unit.plan.params is not Lifetime.ALWAYS:
            freed.setdefault(unit.block, []).append(unit)
    told = bool(domains.all)
    modules = {
        group: [module.get_submodule(block) for block in merged.get(group, (group,))] for group in freed if not told
    }
    return Units(units, freed, modules)


def _build(
    grouping: Grouping, params: Mapping[str, nn.Parameter], plan: ZeroPlan, mesh: Mesh, domains: Domains
) -> Unit:
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
    return Unit(
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
        counts=mesh.model.index == 0 or is_part(first),
        read=read_first_values,
        agree=agree,
    )
