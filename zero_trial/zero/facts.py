"""What partitioning needs to know of a real module: its tree, its parameters under all their names, and their optimizer groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from zero_trial.errors import ConfigError
from zero_trial.zero.domain import Domain
from zero_trial.zero.dtypes import living_dtype
from zero_trial.zero.partition import LeafRules, Member, ModuleFacts, find_blocks, owner_of


def facts_of(module: nn.Module, name: str = "") -> ModuleFacts:
    """The tree of ``module``; parameters are counted where they are first met, each once per module."""
    children = tuple(facts_of(child, f"{name}.{key}" if name else key) for key, child in module.named_children())
    return ModuleFacts(
        name,
        type(module).__name__,
        sum(param.numel() for param in module.parameters()),
        isinstance(module, (nn.ModuleList, nn.ModuleDict)),
        isinstance(module, nn.Sequential),
        children,
    )


def parameter_names(module: nn.Module) -> dict[str, tuple[nn.Parameter, tuple[str, ...]]]:
    """Every parameter by its first name, with all names under which the module knows it (more than one when tied)."""
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    return {known[0]: (params[key], tuple(known)) for key, known in names.items()}


def members_of(
    module: nn.Module,
    groups: Mapping[int, int],
    rules: LeafRules,
    *,
    dtype: torch.dtype,
    with_frozen: bool,
) -> tuple[list[Member], dict[str, nn.Parameter], Sequence[str]]:
    """Members for partitioning, parameters by first name, and block names. ``groups``: id(parameter) -> optimizer group.

    A frozen parameter is left as it is, or only sharded (``with_frozen``); so is every parameter where nothing is trained. A trainable
    parameter in no group belongs to someone else's optimizer: it is left as it is.
    """
    blocks = find_blocks(facts_of(module), rules)
    members, params = [], {}
    for name, (param, names) in parameter_names(module).items():
        trained = param.requires_grad and id(param) in groups
        if not trained and (not with_frozen or (param.requires_grad and groups)):
            continue
        if trained and param.is_complex():
            raise ConfigError(
                "a complex parameter cannot be trained",
                where=name,
                got=param.dtype,
                fix="Keep torch.view_as_real of it as the parameter, and use torch.view_as_complex in the forward.",
            )
        params[name] = param
        members.append(
            Member(
                name,
                param.numel(),
                (living_dtype(param.dtype, dtype), param.device, trained),
                groups[id(param)] if trained else -1,
                owner_of(names, blocks),
            )
        )
    return members, params, blocks


def by_domain(members: Sequence[Member], params: Mapping[str, nn.Parameter], domains: Sequence[Domain]) -> list[Member]:
    """The same members with their domains as blocks; no unit spans two of them. Every parameter must be in one."""
    name_of = {param: domain.name for domain in domains for param in domain.params}
    found = []
    for member in members:
        name = name_of[id(params[member.name])]
        found.append(replace(member, block=name, key=(*member.key, name)))
    return found
