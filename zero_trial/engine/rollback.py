"""A schedule and the settings that it writes, as they were before a step that may turn out to be skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch


def can_go_back(schedule: Any) -> bool:
    """Whether ``schedule`` can be put back to an earlier state: torch's and ours can, and whatever else a checkpoint holds."""
    return hasattr(schedule, "state_dict") and hasattr(schedule, "load_state_dict")


def advance(
    schedule: Any, groups: Sequence[dict[str, Any]], arguments: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[], None]:
    """Steps ``schedule``; returns what puts it and ``groups`` (an optimizer's, which it writes its values into) back to what they are now.

    What the caller has written into the groups since then stays: only values that are the step's go back.
    """
    state, before = _kept(schedule.state_dict()), _settings(groups)
    schedule.step(**arguments)
    after = _settings(groups)

    def go_back() -> None:
        schedule.load_state_dict(state)
        for group, old, new in zip(groups, before, after, strict=True):
            group.update({key: old[key] for key in old if key in group and _same(group[key], new.get(key))})

    return go_back


def _settings(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_kept({key: value for key, value in group.items() if key != "params"}) for group in groups]


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and value.shape == other.shape and bool((value == other).all())
    return bool(value == other)


def _kept(value: Any) -> Any:
    """A copy that later writes do not reach: of plain containers and tensors; what else a schedule may hold is kept as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _kept(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_kept(each) for each in value)
    return value
