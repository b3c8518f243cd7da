"""Optimizer groups: what a client gave, over the model's parameters and then over pieces of their masters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zero_trial.errors import ConfigError
from zero_trial.zero.store import ShardPiece

Groups = list[dict[str, Any]]


def parameter_groups(model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None) -> Groups:
    """Optimizer groups over the model's trainable parameters, each parameter once."""
    if isinstance(optimizer, torch.optim.Optimizer):
        groups: Groups = [dict(group) for group in optimizer.param_groups]
    else:
        given = list(model_parameters) if model_parameters is not None else list(model.parameters())
        groups = [dict(group) for group in given] if given and isinstance(given[0], Mapping) else [{"params": given}]
    known = {id(param) for param in model.parameters()}
    strangers = 0
    for group in groups:
        params = group["params"]
        listed = (
            [params]
            if isinstance(params, torch.Tensor)
            else [entry[1] if isinstance(entry, tuple) else entry for entry in params]
        )
        trained = {id(param): param for param in listed if param.requires_grad}
        strangers += len(trained.keys() - known)
        group["params"] = list(trained.values())
    doubles = len(list(itertools.chain(*(g["params"] for g in groups)))) - len(
        {id(p) for g in groups for p in g["params"]}
    )
    if doubles:
        raise ConfigError(
            "a parameter is in two optimizer groups",
            where="model_parameters",
            got=f"{doubles} doubles",
            expected="none",
        )
    if strangers:
        where = "optimizer" if isinstance(optimizer, torch.optim.Optimizer) else "model_parameters"
        raise ConfigError(
            "these are not all parameters of the model",
            where=where,
            got=f"{strangers} trainable ones that it does not have",
            fix="Make their module a part of the model that is given to initialize(); it then trains with the model.",
        )
    return groups


def groups_over(pieces: Sequence[ShardPiece], groups: Groups) -> Groups:
    """The same groups with the same settings, over pieces of masters instead of parameters."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [p.weight for p in pieces if p.group == index]}
        for index, group in enumerate(groups)
    ]
